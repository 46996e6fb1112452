"""The papers' data is well-formed, every number has a mark and a source, and a small paper is answered whole."""

from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from shoal import papers, zoo
from shoal.cli.papers import SIGNS, numbers, show, shown
from shoal.cluster import Cluster
from shoal.errors import InputError
from shoal.paper import (
    Case,
    Cell,
    Cuts,
    Kernels,
    Line,
    Mark,
    Missing,
    Number,
    Paper,
    Question,
    Rate,
    Replicas,
    SearchTime,
    Seconds,
    Sent,
    Setting,
    Staleness,
    Step,
    Way,
)
from shoal.repeating.answers import answered
from shoal.repeating.steps import EFFICIENCY, Steps, cluster_of

pytestmark = pytest.mark.usefixtures("one_thread")

READ_IN_FULL = {"optcnn"}
RECALLED = {"yadan": {"1.59", "1.50", "1.46", "256 in all"}, "owt": {"1.95", "6.25", "8 K20 in one server"}}
"""What nobody here could read again."""


def reported(paper: Paper) -> Iterator[Number]:
    yield from (setting.value for setting in paper.settings)
    for question in paper.questions:
        for line in question.lines:
            yield from (cell for cell in line.cells if isinstance(cell, Number))


def steps_of(paper: Paper) -> Iterator[Step]:
    for asked in paper.asked():
        cases: tuple[Case, ...] = (*asked.of, *asked.over) if isinstance(asked, Rate) else (asked.of,)
        yield from (case.step if isinstance(case, Replicas) else case for case in cases)


@pytest.mark.parametrize("name", papers.NAMES)
def test_data_is_well_formed(name: str) -> None:
    paper = papers.load(name)
    assert paper.name == name
    assert paper.settings
    assert paper.questions
    for number in reported(paper):
        assert number.text
        assert number.source
        assert number.mark not in (Mark.SIMULATED, Mark.MEASURED), "these are found, never written down"
        if number.mark is Mark.PAPER and name not in READ_IN_FULL:
            assert "abstract" in number.source, f"{number.text}: no more of this paper was read"
    for step in steps_of(paper):
        assert step.network in zoo.names()
        assert cluster_of(step).ranks == step.ranks
        assert step.fitted or cluster_of(step).device.efficiency == EFFICIENCY


def test_one_efficiency_for_all_is_that_of_the_preset_without_a_fit() -> None:
    preset = Cluster.load("p100-4x4").device
    assert preset.efficiency == EFFICIENCY
    assert "efficiency assumed" in preset.source


@pytest.mark.parametrize("name", RECALLED)
def test_what_is_recalled_is_never_shown_as_the_papers(name: str) -> None:
    recalled = {number.text for number in reported(papers.load(name)) if number.mark is Mark.RECALLED}
    assert recalled == RECALLED[name]
    for number in reported(papers.load(name)):
        assert shown(number).endswith(" ?") == (number.mark is Mark.RECALLED)
        assert (number.text in RECALLED[name]) == (number.mark is Mark.RECALLED)


def test_every_mark_has_a_sign_of_its_own() -> None:
    assert set(SIGNS) == set(Mark)
    assert len(set(SIGNS.values())) == len(Mark)


def test_a_paper_that_is_not_there() -> None:
    with pytest.raises(InputError, match="there is no paper 'optcn'"):
        papers.load("optcn")


LENET = Step("lenet5", 4, "layer-wise", each=8, cluster="titan-4")
SERIAL, SERVERS = Way(overlap=False), Way(overlap=False, servers=True)
PUBLISHED = Way(overlap=False, servers=True, equal=True, one_by_one=True)


def lenet(plan: str, way: Way, ranks: int = 4, pins: tuple[tuple[str, str], ...] = ()) -> Step:
    return Step("lenet5", ranks, plan, each=8, cluster="titan-4", way=way, pins=pins)


@pytest.fixture(scope="module")
def steps() -> Steps:
    return Steps()


def test_the_search_is_best_under_whatever_cost_it_is_given(steps: Steps) -> None:
    for way, plan in [(Way(), "data"), (SERIAL, "owt"), (SERVERS, "owt"), (PUBLISHED, "data")]:
        best, other = steps.outcome(lenet("layer-wise", way)), steps.outcome(lenet(plan, way))
        assert best.seconds <= other.seconds * (1 + 1e-9), way


def test_what_a_cost_takes_for_granted_shows(steps: Steps) -> None:
    # One host: data sums every parameter over 4; rings send 2 * 3/4 of it, a server gets 3 copies and sends 3.
    rings, servers = (steps.outcome(lenet("data", way)) for way in (SERIAL, SERVERS))
    assert servers.bytes == rings.bytes
    assert servers.seconds > rings.seconds
    equal = steps.outcome(lenet("layer-wise", PUBLISHED))
    assert not any(letter in "dk" for cut in equal.cuts.values() for letter, _ in cut.degrees)
    pinned = steps.outcome(lenet("layer-wise", PUBLISHED, pins=(("conv1", "h2w2"),)))
    assert str(pinned.cuts["conv1"]) == "h2w2"
    assert pinned.seconds >= equal.seconds


def test_servers_are_not_played() -> None:
    with pytest.raises(ValueError, match="overlap=False"):
        Way(servers=True)


def small_paper() -> Paper:
    replicas = Replicas(lenet("data", Way(), 1), 4, "10Gbit/s", servers=2)
    cells: dict[str, Cell] = {
        "speed": Rate((LENET,), (lenet("data", Way(), 1),)),
        "seconds": Seconds(LENET),
        "kernels": Kernels(LENET, ("conv*",)),
        "bytes": Sent(lenet("data", Way())),
        "fewer": Sent(lenet("owt", Way()), lenet("data", Way())),
        "replicas": Rate((replicas,), (replicas.step,), per=4),
        "stale": Staleness(replicas),
        "cuts": Cuts(lenet("data", Way()), ("conv*", "fc*")),
        "search": SearchTime(LENET),
        "none": Missing("not simulated: no such thing"),
        "theirs": Number("12.2", Mark.PAPER, "its table"),
    }
    lines = tuple(Line(name, (cell,)) for name, cell in cells.items())
    setting = Setting("network", Number("LeNet-5", Mark.RECALLED, "from memory"))
    question = Question("All kinds", ("answer",), lines, ("A note.",))
    return Paper("small", "A Small Paper", "Nobody", 2020, "here", "all of it", (setting,), (question,))


def test_a_small_paper_is_answered_whole(steps: Steps) -> None:
    told: list[tuple[int, int, str]] = []
    done = answered(small_paper(), lambda *progress: told.append(progress), measure=True, steps=steps)
    rows = {row["label"]: row["cells"]["answer"] for row in numbers(done)["tables"][0]["rows"]}
    assert told[0] == (0, 9, "speed")
    assert told[-1] == (9, 9, "")
    assert {label for label, cell in rows.items() if cell.get("mark") == "simulated"} == {
        *("speed", "seconds", "kernels", "bytes", "fewer", "replicas", "stale", "cuts"),
    }
    assert rows["search"]["mark"] == "measured"
    assert rows["none"] == {"missing": "not simulated: no such thing"}
    assert rows["theirs"] == {"text": "12.2", "mark": "paper", "source": "its table"}
    assert 0 < rows["replicas"]["value"] < 1
    assert rows["stale"]["value"] == pytest.approx(3, abs=1)
    assert rows["cuts"]["text"] == "n4"
    assert rows["bytes"]["value"] == steps.outcome(lenet("data", Way())).bytes > 0


def test_tables_fit_and_every_number_has_its_sign(steps: Steps) -> None:
    console = Console(width=80, file=StringIO())
    show(answered(small_paper(), lambda *_: None, steps=steps), console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "12.2 p" in text
    assert "LeNet-5 ?" in text
    assert "-: not measured: ask with --measure" in text
