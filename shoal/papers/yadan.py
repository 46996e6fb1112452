"""Multi-GPU Training of ConvNets (Yadan, Adams, Taigman, Ranzato 2013). Its abstract and quotations were read."""

from shoal.paper import Line, Mark, Number, Paper, Question, Rate, Setting, Step, Way

_CCV = "the documents of ccv, which quote it"
_MEMORY = "days from memory, not confirmed; divided by us"
_ROWS = (
    ("2, model", "model", 2, Number("1.59", Mark.RECALLED, _MEMORY)),
    ("2, data", "data", 2, Number("1.50", Mark.RECALLED, _MEMORY)),
    ("4, data", "data", 4, Number("1.46", Mark.RECALLED, _MEMORY)),
    ("4, 2x2", "2x2", 4, Number("2.2", Mark.SECOND_HAND, _CCV)),
)
_REPEATED = {"2, model": "1.71", "2, data": "1.85", "4, data": "2.67", "4, 2x2": "2.52"}
_LINKS = (1.0, 0.5, 0.25)


def _speedup(plan: str, ranks: int, bandwidth: float, *, overlap: bool, fitted: bool) -> Rate:
    def step(plan: str, ranks: int) -> Step:
        return Step(
            "alexnet",
            ranks,
            plan,
            each=256,
            batch=256,
            cluster="titan-4",
            way=Way(overlap=overlap),
            bandwidth=bandwidth,
            fitted=fitted,
        )

    return Rate((step(plan, ranks),), (step("data", 1),))


def _sweep(title: str, *, fitted: bool, notes: tuple[str, ...]) -> Question:
    return Question(
        title,
        ("reported", "6 GB/s", "3 GB/s", "1.5 GB/s", "6, added", "3, added", "1.5, added"),
        tuple(
            Line(
                label,
                (
                    reported,
                    *(
                        _speedup(plan, ranks, bandwidth, overlap=overlap, fitted=fitted)
                        for overlap in (True, False)
                        for bandwidth in _LINKS
                    ),
                ),
            )
            for label, plan, ranks, reported in _ROWS
        ),
        notes,
    )


SWEEP = _sweep(
    "Speedup over 1 device, by link and overlap",
    fitted=False,
    notes=("added: added up, no overlap. The link is assumed, PCIe 2.0 at 6 of its 8 GB/s, a link for each card.",),
)
SLOW_KERNELS = _sweep(
    "The same with kernels as slow as the paper's 1 device",
    fitted=True,
    notes=("The preset's efficiency is fitted to 10.5 days on one device; all other tables have one for all papers.",),
)
REPEATED = Question(
    "The same by others: Tencent, 4 K20c",
    ("reported", "K20, 6 GB/s", "added up"),
    tuple(
        Line(
            label,
            (
                Number(_REPEATED[label], Mark.SECOND_HAND, "an article on Tencent's platform"),
                *(
                    Rate(
                        (Step("alexnet", ranks, plan, 256, "k20-8", 256, Way(overlap=overlap)),),
                        (Step("alexnet", 1, "data", 256, "k20-8", 256, Way(overlap=overlap)),),
                    )
                    for overlap in (True, False)
                ),
            ),
        )
        for label, plan, ranks, _ in _ROWS
    ),
    ("Here data is ahead of the hybrid: which one wins is a matter of links and kernels, not a law.",),
)

PAPER = Paper(
    name="yadan",
    title="Multi-GPU Training of ConvNets",
    authors="Yadan, Adams, Taigman, Ranzato",
    year=2013,
    where="arXiv 1312.5853",
    read="its abstract, and what others quote",
    settings=(
        Setting("machine", Number("4 TITAN cards of 6 GB in one server", Mark.PAPER, "the abstract")),
        Setting("batch", Number("256 in all", Mark.RECALLED, "from memory, not confirmed")),
        Setting("1 device", Number("10.5 days for 100 epochs", Mark.SECOND_HAND, _CCV)),
    ),
    questions=(SWEEP, SLOW_KERNELS, REPEATED),
    notes=("Our AlexNet has one tower; whether the paper's had two, which exchange less, is not known here.",),
)
