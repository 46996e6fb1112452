"""OptCNN (Jia, Lin, Qi, Aiken 2018). The paper itself was read: its numbers are its own."""

from shoal.paper import (
    Cuts,
    Kernels,
    Line,
    Mark,
    Missing,
    Number,
    Paper,
    Question,
    Rate,
    SearchTime,
    Seconds,
    Sent,
    Setting,
    Step,
    Way,
)

_TEXT = "the paper's text"
_NETWORKS = (("AlexNet", "alexnet"), ("VGG-16", "vgg16"), ("Inception-v3", "inception_v3"))
_OTHERS = ("data", "model", "owt")
_PLAYED = Way()
_RINGS = Way(overlap=False)
_SERVERS = Way(overlap=False, servers=True)
_EQUAL = Way(overlap=False, servers=True, equal=True)
_PUBLISHED = Way(overlap=False, servers=True, equal=True, one_by_one=True)


def _paper(text: str, source: str = _TEXT) -> Number:
    return Number(text, Mark.PAPER, source)


def _step(network: str, plan: str, way: Way = _PLAYED, ranks: int = 16) -> Step:
    return Step(network, ranks, plan, each=32, cluster="p100-4x4", way=way)


def _speedup(network: str, plans: tuple[str, ...], way: Way) -> Rate:
    cases = tuple(_step(network, plan, way) for plan in plans)
    return Rate(cases, (_step(network, "data", way, ranks=1),))


def _over_best(network: str, way: Way) -> Rate:
    return Rate((_step(network, "layer-wise", way),), tuple(_step(network, plan, way) for plan in _OTHERS))


_WAYS = (_PLAYED, _RINGS, _EQUAL)
_NO_NUMBER = Missing("a bar chart in the paper, no number")


def _speed_lines(title: str, network: str, layer_wise: str, best: str, ratio: str) -> list[Line]:
    return [
        Line(
            f"{title}, layer-wise",
            (_paper(layer_wise), *(_speedup(network, ("layer-wise",), way) for way in _WAYS)),
        ),
        Line(f"{title}, best other", (_paper(best), *(_speedup(network, _OTHERS, way) for way in _WAYS))),
        *(
            Line(f"{title}, {plan}", (_NO_NUMBER, *(_speedup(network, (plan,), way) for way in _WAYS)))
            for plan in _OTHERS
        ),
        Line(
            f"{title}, first over second",
            (
                Number(ratio, Mark.DERIVED, f"{layer_wise} / {best}, our division"),
                *(_over_best(network, way) for way in _WAYS),
            ),
        ),
    ]


SPEED = Question(
    "Speedup from 1 to 16 devices",
    ("paper", "played", "added up", "its cost"),
    tuple(
        line
        for (title, network), numbers in zip(
            _NETWORKS, (("12.2", "6.1", "2.0"), ("14.8", "10.2", "1.45"), ("15.5", "11.2", "1.38")), strict=True
        )
        for line in _speed_lines(title, network, *numbers)
    ),
    (
        "played: as the engine works, gradients summed behind backward.",
        "added up: the same rings, nothing behind anything else.",
        "its cost: the paper's own: a server for each layer, no overlap, equal cuts along n, c, h, w.",
    ),
)

BYTES = Question(
    "Bytes of one step on 16 devices, all devices together",
    ("paper", "alexnet", "vgg16", "inception_v3"),
    (
        *(
            Line(plan, (_NO_NUMBER, *(Sent(_step(network, plan)) for _, network in _NETWORKS)))
            for plan in (*_OTHERS, "layer-wise")
        ),
        Line(
            "data / owt",
            (
                _paper("1.1-23.0", "the paper's text: against data and model, over its networks and devices"),
                *(Sent(_step(network, "owt"), _step(network, "data")) for _, network in _NETWORKS),
            ),
        ),
        Line(
            "model / owt",
            (
                _paper("1.1-23.0", "the paper's text: against data and model, over its networks and devices"),
                *(Sent(_step(network, "owt"), _step(network, "model")) for _, network in _NETWORKS),
            ),
        ),
        Line(
            "owt / layer-wise",
            (
                _paper("1.2-2.5"),
                *(Sent(_step(network, "layer-wise"), _step(network, "owt")) for _, network in _NETWORKS),
            ),
        ),
        Line(
            "the same, its cost",
            (
                _paper("1.2-2.5"),
                *(Sent(_step(network, "layer-wise", _EQUAL), _step(network, "owt")) for _, network in _NETWORKS),
            ),
        ),
    ),
    ("The plan that is played may send more than owt and be faster: it hides what it sends.",),
)

_BLOCKS = (
    ("blocks 1-4", "n4", ("features.?", "features.1?", "features.20", "features.21", "features.22", "features.23")),
    ("block 5", "h2w2", ("features.24", "features.26", "features.28", "features.30")),
    ("FC6, FC7", "c4", ("classifier.0", "classifier.3")),
    ("FC8", "c2", ("classifier.6",)),
    ("softmax", "1", ("loss.*",)),
)
_BLOCK_5 = _BLOCKS[1][2]

STRATEGY = Question(
    "The strategy for VGG-16 on 4 devices of one host",
    ("paper", "played", "added up", "servers", "equal", "one by one"),
    tuple(
        Line(
            label,
            (
                _paper(cut, "the paper's table of one optimal strategy"),
                *(
                    Cuts(_step("vgg16", "layer-wise", way, ranks=4), layers)
                    for way in (_PLAYED, _RINGS, _SERVERS, _EQUAL, _PUBLISHED)
                ),
            ),
        )
        for label, cut, layers in _BLOCKS
    ),
    ("From left to right one assumption more: no overlap, servers, equal cuts, messages one by one.",),
)


def _block_5(cut: str, way: Way) -> Step:
    step = _step("vgg16", "layer-wise", way, ranks=4)
    return Step(step.network, 4, step.plan, 32, step.cluster, way=way, pins=tuple((layer, cut) for layer in _BLOCK_5))


HEIGHT_AND_WIDTH = Question(
    "What h2w2 of block 5 costs on 4 devices, all else free",
    ("equal", "one by one"),
    (
        Line("step, block 5 by n4", tuple(Seconds(_block_5("n4", way)) for way in (_EQUAL, _PUBLISHED))),
        Line("step, block 5 by h2w2", tuple(Seconds(_block_5("h2w2", way)) for way in (_EQUAL, _PUBLISHED))),
        Line(
            "of which kernels of block 5, by n4",
            tuple(Kernels(_block_5("n4", way), _BLOCK_5) for way in (_EQUAL, _PUBLISHED)),
        ),
        Line(
            "of which kernels of block 5, by h2w2",
            tuple(Kernels(_block_5("h2w2", way), _BLOCK_5) for way in (_EQUAL, _PUBLISHED)),
        ),
    ),
    ("By a data sheet no kernel is faster on 7x7 tiles of 128 images than on 14x14 of 32; the paper timed its own.",),
)

_ERRORS = (
    ("1 device", "1%", "0%", "1%"),
    ("2 devices", "4%", "3%", "5%"),
    ("4 devices", "-5%", "2%", "5%"),
    ("8 devices", "2%", "6%", "9%"),
    ("16 devices", "-1%", "7%", "6%"),
)
ERRORS = Question(
    "Estimated less real, as a part of the real step",
    ("AlexNet", "VGG-16", "Inception-v3", "here"),
    tuple(
        Line(label, (*(_paper(error, "the paper's table of errors") for error in errors), Missing(
            "not repeated: there is no such cluster here. On this machine: python -m benchmarks.prediction.bench"
        )))
        for label, *errors in _ERRORS
    ),
)  # fmt: skip

SEARCH = Question(
    "Search on 4 devices",
    ("paper, all", "paper, search", "here, all of it"),
    tuple(
        Line(
            title,
            (
                _paper(enumeration, "the paper's table of search times: depth-first enumeration"),
                _paper(elimination, "the paper's table of search times: elimination, tables not counted"),
                SearchTime(Step(network, 4, "layer-wise", each=32, cluster="p100-4x4")),
            ),
        )
        for title, network, enumeration, elimination in (
            ("LeNet-5", "lenet5", "5.6 s", "0.01 s"),
            ("AlexNet", "alexnet", "2.1 h", "0.02 s"),
            ("VGG-16", "vgg16", "> 24 h", "0.1 s"),
            ("Inception-v3", "inception_v3", "> 24 h", "0.4 s"),
        )
    ),
    ("here: tables, elimination and playing of candidates, by the clock of this machine.",),
)

PAPER = Paper(
    name="optcnn",
    title="Exploring Hidden Dimensions in Parallelizing Convolutional Neural Networks",
    authors="Jia, Lin, Qi, Aiken",
    year=2018,
    where="ICML 2018, arXiv 1802.04924",
    read="all of it",
    settings=(
        Setting("machine", _paper("4 hosts of 4 P100, NVLink inside, 100 Gb/s EDR between")),
        Setting("batch", _paper("32 per device, synchronous")),
    ),
    questions=(SPEED, BYTES, STRATEGY, HEIGHT_AND_WIDTH, ERRORS, SEARCH),
)
