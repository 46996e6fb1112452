"""GPU Asynchronous SGD (Paine, Jin, Yang, Lin, Huang 2013). Its abstract and a review were read."""

from shoal.paper import Line, Mark, Missing, Number, Paper, Question, Rate, Replicas, Setting, Step

_STEP = Step("alexnet", 1, "data", each=128, cluster="k20-8")
_BANDWIDTHS = ("1Gbit/s", "10Gbit/s", "40Gbit/s")
_BEST = Number("3.2", Mark.SECOND_HAND, "a review page: the best speedup; that it was with 8 clients is recalled")
_OTHER = Missing("only its best speedup is in what we could read")


def _speedup(clients: int, every: int, bandwidth: str) -> Rate:
    return Rate((Replicas(_STEP, clients, bandwidth, every=every),), (_STEP,))


SPEED = Question(
    "Samples per second over 1 device, one server",
    ("reported", *(f"{bandwidth.removesuffix('Gbit/s')} Gbit/s" for bandwidth in _BANDWIDTHS)),
    tuple(
        Line(
            f"{clients} clients, every {every} step{'s' if every > 1 else ''}",
            (
                _BEST if (clients, every) == (8, 1) else _OTHER,
                *(_speedup(clients, every, bandwidth) for bandwidth in _BANDWIDTHS),
            ),
        )
        for clients in (2, 4, 8)
        for every in (1, 10, 300)
    ),
    (
        "reported: time to an error, which counts what stale weights cost; simulated: samples alone. Not the same.",
        "It stands beside 8 clients, every step; which period it is of, is not known here.",
    ),
)

PAPER = Paper(
    name="paine",
    title="GPU Asynchronous Stochastic Gradient Descent to Speed Up Neural Network Training",
    authors="Paine, Jin, Yang, Lin, Huang",
    year=2013,
    where="arXiv 1312.6186",
    read="its abstract, and a page of reviews",
    settings=(
        Setting(
            "clients", Number("several GPUs, one server, MPI", Mark.SECOND_HAND, "the abstract, and a review page")
        ),
        Setting("period", Number("300 steps in one figure", Mark.SECOND_HAND, "a review page")),
        Setting("network", Number("AlexNet's kind, batch 128", Mark.RECALLED, "from memory, not confirmed")),
        Setting("device", Number("K20", Mark.ASSUMED, "the paper's is in nothing we could read")),
    ),
    questions=(SPEED,),
)
