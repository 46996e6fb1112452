"""Poseidon (2015 and 2017). The first abstract, the project's documents and summaries were read."""

from shoal.cluster import Cluster, Level
from shoal.paper import Line, Mark, Missing, Number, Paper, Question, Rate, Setting, Step, Way

_UNREAD = "the paper's is in nothing we could read"
_ABSTRACT = "the abstract of 2015"
_SUMMARY = "summaries of the paper of 2017"


def _hosts(device: str, count: int, bandwidth: str, source: str) -> Cluster:
    """Hosts of one device each; the device of a preset."""
    level = Level.model_validate(
        {"name": "switch", "size": count, "bandwidth": bandwidth, "latency": "30us", "shared": False, "source": source}
    )
    return Cluster(name=f"{count} hosts at {bandwidth}", device=Cluster.load(device).device, levels=(level,))


_K20 = _hosts("k20-8", 8, "40Gbit/s", "8 nodes at 40 GbE, the project's documents; latency assumed")
_P100_10G = _hosts("p100-4x4", 32, "10Gbit/s", "10 GbE, summaries; the device and the latency are assumed")
_P100_40G = _hosts("p100-4x4", 32, "40Gbit/s", "a wider link, to compare; the device and the latency are assumed")


def _speedup(network: str, ranks: int, each: int, cluster: Cluster, *, overlap: bool) -> Rate:
    way = Way(overlap=overlap)
    return Rate(
        (Step(network, ranks, "data", each, cluster, way=way),), (Step(network, 1, "data", each, cluster, way=way),)
    )


def _pair(network: str, ranks: int, each: int, cluster: Cluster) -> tuple[Rate, Rate]:
    return _speedup(network, ranks, each, cluster, overlap=True), _speedup(network, ranks, each, cluster, overlap=False)


def _cells(reported: Number, why: str) -> tuple[Number, Missing, Missing]:
    return reported, Missing(why), Missing(why)


_NO_GOOGLENET = "not simulated: GoogLeNet and VGG-19 are not in the zoo"
_NO_STOCK = "not simulated: what stock TensorFlow of that year did with its servers"

SPEED = Question(
    "Speedup of data parallelism over 1 node",
    ("reported", "wait-free", "added up"),
    (
        Line("AlexNet, 8 nodes, 40 GbE", (Number("4.5", Mark.PAPER, _ABSTRACT), *_pair("alexnet", 8, 256, _K20))),
        Line("GoogLeNet, 8 nodes, 40 GbE", _cells(Number("4", Mark.PAPER, _ABSTRACT), _NO_GOOGLENET)),
        Line("VGG19-22K, 16 nodes, 10 GbE", _cells(Number("15.5", Mark.SECOND_HAND, _SUMMARY), _NO_GOOGLENET)),
        Line(
            "Inception-v3, 32 nodes, if 10 GbE",
            (Number("31.5", Mark.SECOND_HAND, _SUMMARY), *_pair("inception_v3", 32, 32, _P100_10G)),
        ),
        Line(
            "Inception-v3, 32 nodes, if 40 GbE",
            (
                Number("31.5", Mark.SECOND_HAND, _SUMMARY),
                *_pair("inception_v3", 32, 32, _P100_40G),
            ),
        ),
        Line("the same, stock TensorFlow", _cells(Number("20", Mark.SECOND_HAND, _SUMMARY), _NO_STOCK)),
    ),
    (
        "Which link the Inception-v3 of 2017 had is in nothing we could read.",
        "wait-free: gradients are sent while backward goes on. added up: after it.",
        "Every node serves an even part of the parameters: the bytes of a ring. Factor broadcasting is not simulated.",
    ),
)

PAPER = Paper(
    name="poseidon",
    title="Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU Clusters",
    authors="Zhang and others",
    year=2017,
    where="arXiv 1512.06216 (2015) and 1706.03292 (USENIX ATC 2017)",
    read="the abstract of 2015, the project's documents, and summaries",
    settings=(
        Setting("machine of 2015", Number("8 nodes with a K20 each", Mark.SECOND_HAND, "the project's documents")),
        Setting("AlexNet's batch", Number("256 per node", Mark.ASSUMED, _UNREAD)),
        Setting("Inception-v3's batch", Number("32 per node", Mark.ASSUMED, _UNREAD)),
        Setting("devices of 2017", Number("P100", Mark.ASSUMED, _UNREAD)),
    ),
    questions=(SPEED,),
)
