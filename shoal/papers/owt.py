"""One weird trick (Krizhevsky 2014). Its text was not read: two numbers are quoted by others, the rest is recalled."""

from shoal.paper import Line, Mark, Number, Paper, Question, Rate, Setting, Step, Way

_QUOTED = "the documents of ccv, which quote it"
_MEMORY = "from memory, not confirmed"


def _step(plan: str, ranks: int, way: Way) -> Step:
    return Step("alexnet", ranks, plan, each=128, cluster="k20-8", way=way)


def _speedup(plan: str, ranks: int, *, overlap: bool = True) -> Rate:
    way = Way(overlap=overlap)
    return Rate((_step(plan, ranks, way),), (_step("data", 1, way),))


def _line(ranks: int, reported: Number) -> Line:
    return Line(
        f"{ranks} devices",
        (reported, *(_speedup(plan, ranks, overlap=overlap) for plan in ("owt", "data") for overlap in (True, False))),
    )


SPEED = Question(
    "Speedup of AlexNet, batch 128 per device",
    ("reported", "owt", "owt, added up", "data", "data, added up"),
    (
        _line(2, Number("1.95", Mark.RECALLED, _MEMORY)),
        _line(4, Number("3.74", Mark.SECOND_HAND, _QUOTED)),
        _line(8, Number("6.25", Mark.RECALLED, _MEMORY)),
    ),
    (
        "reported: its hybrid with one batch size, exact. added up: no overlap.",
        "owt is scheme (a), all activations at once; (b) and (c), which overlap that exchange, are not simulated.",
    ),
)

PAPER = Paper(
    name="owt",
    title="One weird trick for parallelizing convolutional neural networks",
    authors="Krizhevsky",
    year=2014,
    where="arXiv 1404.5997",
    read="its abstract, the author's code and configurations, and what others quote",
    settings=(
        Setting("machine", Number("8 K20 in one server", Mark.RECALLED, _MEMORY)),
        Setting("network", Number("AlexNet of one tower", Mark.SECOND_HAND, "the author's configurations")),
        Setting("batch", Number("128 per device", Mark.SECOND_HAND, "the author's configurations, to 4 devices")),
        Setting("1 device", Number("98.05 hours", Mark.SECOND_HAND, _QUOTED)),
    ),
    questions=(SPEED,),
)
