"""Campos, Sastre, Yagues, Bellver, Giro, Torres 2017. Abstracts of it, of a sister paper and of a thesis were read."""

from shoal.paper import Line, Mark, Missing, Number, Paper, Question, Rate, Replicas, Setting, Staleness, Step

_NODE = Step("resnet50", 4, "data", each=32, cluster="k80-minotauro-16x4")
_SISTER = "the abstract of a sister paper (CCGrid 2017)"
_ONLY_16 = Missing("only 16 nodes are in what we could read")


def _nodes(workers: int, servers: int, *, together: bool) -> Replicas:
    return Replicas(_NODE, workers, "54.5Gbit/s", servers, together=together)


def _speedup(workers: int, servers: int, *, together: bool) -> Rate:
    return Rate((_nodes(workers, servers, together=together),), (_NODE,))


SPEED = Question(
    "Samples per second over 1 node of 4 devices",
    ("reported", "sync 1", "sync 2", "sync 4", "mixed 1", "mixed 2", "mixed 4"),
    tuple(
        Line(
            f"{workers} nodes",
            (
                Number("10.3", Mark.SECOND_HAND, _SISTER) if workers == 16 else _ONLY_16,
                *(_speedup(workers, servers, together=together) for together in (True, False) for servers in (1, 2, 4)),
            ),
        )
        for workers in (2, 4, 8, 16)
    ),
    (
        "sync S: S servers wait for all nodes. mixed S: nodes push as they come; a node's devices keep together.",
        "Servers have a host each. Which mode, and how many servers, the reported number is of, is not known here.",
    ),
)
STALENESS = Question(
    "Updates by others that a push has not seen, mixed",
    ("1 server", "2 servers", "4 servers"),
    tuple(
        Line(f"{workers} nodes", tuple(Staleness(_nodes(workers, servers, together=False)) for servers in (1, 2, 4)))
        for workers in (4, 16)
    ),
)

PAPER = Paper(
    name="campos",
    title="Distributed training strategies for a computer vision deep learning algorithm on a distributed GPU cluster",
    authors="Campos, Sastre, Yagues, Bellver, Giro, Torres",
    year=2017,
    where="ICCS 2017, doi 10.1016/j.procs.2017.05.074",
    read="abstracts: its own, a sister paper's, a thesis's",
    settings=(
        Setting("machine", Number("16 hosts of 4 halves of a K80", Mark.SECOND_HAND, f"a thesis; {_SISTER}")),
        Setting("network", Number("ResNet-50, 32 per device", Mark.RECALLED, "from memory, not confirmed")),
        Setting("hours", Number("106, distributed 16 (mixed) and 12 (sync)", Mark.SECOND_HAND, "a thesis's abstract")),
    ),
    questions=(SPEED, STALENESS),
    notes=("The hours are of whole trainings and say neither base nor nodes: no ratio of them stands beside ours.",),
)
