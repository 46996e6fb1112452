"""Asynchronous training of acoustic networks (Chan & Lane 2014). Only its abstract was read."""

from shoal.paper import Line, Mark, Missing, Number, Paper, Question, Rate, Replicas, Setting, Step

_UNREAD = "the paper's is in nothing we could read"
_STEP = Step("acoustic", 1, "data", each=128, cluster="k20-8")
_UNKNOWN = Missing("only 5 workers are in what we could read")
_COLUMNS = (("1Gbit/s", 1.0), ("1Gbit/s", 0.1), ("10Gbit/s", 1.0), ("10Gbit/s", 0.1))


def _workers(workers: int, bandwidth: str, pushed: float) -> Replicas:
    return Replicas(_STEP, workers, bandwidth, pushed=pushed)


EFFICIENCY = Question(
    "Efficiency: samples per second of N workers, over N devices alone",
    ("reported", "1 Gbit/s", "1, sparse", "10 Gbit/s", "10, sparse"),
    tuple(
        Line(
            f"{workers} worker{'s' if workers > 1 else ''}",
            (
                Number("about 0.68", Mark.PAPER, "the abstract") if workers == 5 else _UNKNOWN,
                *(
                    Rate((_workers(workers, bandwidth, pushed),), (_STEP,), per=workers)
                    for bandwidth, pushed in _COLUMNS
                ),
            ),
        )
        for workers in range(1, 6)
    ),
    (
        "sparse: a push of the 5% largest elements and their places, a tenth of the bytes; weights come whole.",
        "One server; one worker pushes and fetches too, so that its own efficiency is below 1.",
        "The paper's machine and network are in nothing we could read: a K20 and the zoo's acoustic network stand in.",
    ),
)

PAPER = Paper(
    name="chan-lane",
    title="Distributed asynchronous optimization of convolutional neural networks",
    authors="Chan, Lane",
    year=2014,
    where="Interspeech 2014, pages 1073-1077",
    read="its abstract",
    settings=(
        Setting("workers", Number("5 devices, asynchronous, sparse gradients", Mark.PAPER, "the abstract")),
        Setting(
            "network",
            Number("acoustic, of the zoo, batch 128", Mark.ASSUMED, _UNREAD),
        ),
        Setting("device", Number("K20", Mark.ASSUMED, _UNREAD)),
    ),
    questions=(EFFICIENCY,),
)
