"""The picture of a plan: well-formed, every stage and edge in it, nothing on top of anything else."""

import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.cluster import Cluster
from shoal.errors import InputError
from shoal.execution.laying import Captured, capture_modes
from shoal.finding.auto import cost_model, gives_losses
from shoal.lowering.boundary import Boundary, even_shares, step_program
from shoal.outline import Outline
from shoal.partition import Cut
from shoal.planning import resolve
from shoal.planning.outlining import edge_bytes, outline_of
from shoal.planning.price import Price, price
from shoal.planning.stages import stages_of
from shoal.profiling.measured import Analytic
from shoal.reporting.picture import BOX_HEIGHT, BOX_WIDTH, COLOURS, kind_of, numbers_of, picture

SVG = "{http://www.w3.org/2000/svg}"


class Branches(nn.Module):
    """A residual, a concatenation of branches of unequal length, and a name that XML must not read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.long = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
        self.short = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        import torch

        x = self.first(x).relu()
        joined = torch.cat([x + self.long(x), self.short(x)], 1)
        scores: Tensor = self.head(F.adaptive_avg_pool2d(joined, 1).flatten(1))
        return scores


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture_modes(Branches(), (8, 3, 12, 12), F.cross_entropy)


def drawn(captured: Captured, plan: str, ranks: int, title: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(picture(outlined(captured, plan, ranks), title=title))


def outlined(captured: Captured, plan: str, ranks: int, priced: Price | None = None) -> Outline:
    graph = captured.graphs[True]
    cuts = resolve(plan, graph, ranks).cuts
    losses = gives_losses(captured)
    return outline_of(graph, cuts, Boundary("tile", ranks), plan, losses=losses, priced=priced)


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("plan", ["data", "model", "owt", "spatial", "2x2"])
def test_every_stage_is_a_box_of_its_own(captured: Captured, plan: str) -> None:
    root = drawn(captured, plan, 4)
    boxes = [
        (float(rect.get("x", "0")), float(rect.get("y", "0")))
        for rect in root.iter(f"{SVG}rect")
        if rect.get("width") == str(BOX_WIDTH)
    ]
    assert len(boxes) == len(stages_of(captured.graphs[True], 4))
    for (x, y), (other_x, other_y) in combinations(boxes, 2):
        assert abs(x - other_x) >= BOX_WIDTH or abs(y - other_y) >= BOX_HEIGHT
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    assert all(0 <= x <= width - BOX_WIDTH and 0 <= y <= height - BOX_HEIGHT for x, y in boxes)
    assert {"first", "short", "head", "x", "target"} <= set(texts(root))


def test_title_and_cuts_are_written_as_text(captured: Captured) -> None:
    root = drawn(captured, "spatial", 4, title="a <b> & c")
    assert "a <b> & c" in texts(root)
    assert "h2w2" in texts(root)


def test_one_rank_moves_nothing(captured: Captured) -> None:
    root = drawn(captured, "data", 1)
    assert "0 B of rows travel" in texts(root)[1]
    assert not any(re.fullmatch(r"[\d.]+ [KM]?i?B", text) for text in texts(root))


def edges_and_price(captured: Captured, plan: str) -> tuple[dict[tuple[str, str], int], Price]:
    graph = captured.graphs[True]
    cuts = resolve(plan, graph, 4).cuts
    model = cost_model(captured, Analytic(Cluster.load("titan-4")), 4)
    shares = even_shares(graph.batch, 4)
    program = step_program(graph, cuts, Boundary("tile", 4), shares, losses=gives_losses(captured))
    return edge_bytes(program, 4), price(model, cuts, plan)


def test_bytes_on_the_edges_are_those_of_the_price(captured: Captured) -> None:
    """By channel no gradients are summed, so that all that a layer sends is on the edges into it, but for the loss."""
    edges, known = edges_and_price(captured, "model")
    into = {row.name: sum(sent for (_, reader), sent in edges.items() if reader == row.name) for row in known.layers}
    layers = [row for row in known.layers if not row.name.startswith("loss.")]
    assert {row.name: row.bytes for row in layers} == {row.name: into[row.name] for row in layers}
    assert sum(into.values()) > 0


@pytest.mark.parametrize("plan", ["spatial", "owt", "2x2"])
def test_edges_have_no_more_than_the_price(captured: Captured, plan: str) -> None:
    edges, known = edges_and_price(captured, plan)
    assert 0 < sum(edges.values()) < known.bytes


def test_by_sample_only_gradients_travel(captured: Captured) -> None:
    edges, known = edges_and_price(captured, "data")
    assert edges == {}
    assert known.bytes > 0


@pytest.mark.parametrize("plan", ["data", "model", "owt", "spatial"])
def test_an_outline_says_what_the_price_says_and_reads_back(captured: Captured, plan: str, tmp_path: Path) -> None:
    _, known = edges_and_price(captured, plan)
    outline = outlined(captured, plan, 4, known)
    assert outline.step_seconds == known.seconds
    computing = sum(stage.compute_seconds or 0.0 for stage in outline.stages)
    assert computing == pytest.approx(sum(row.compute for row in known.layers))
    assert outline.row_bytes + outline.gradient_bytes <= known.bytes
    if plan == "data":  # gradients, and the shares of the loss
        assert outline.gradient_bytes == pytest.approx(known.bytes, rel=0.02)
    outline.save(tmp_path / "outline.json")
    assert Outline.load(tmp_path / "outline.json") == outline


def test_pointing_at_a_stage_shows_its_numbers(captured: Captured) -> None:
    outline = outlined(captured, "data", 4, edges_and_price(captured, "data")[1])
    told = numbers_of(next(stage for stage in outline.stages if stage.name == "first"), outline)
    assert told[:4] == ["first", "output 8 x 8 x 12 x 12", "cut n4: 4 of 4 ranks", "224 parameters"]
    assert told[4] == "sums of gradients: 5.2 KiB per step"  # 2 (4 - 1) x 224 x 4
    assert "computing" in told[5]
    shown = [title.text for title in drawn(captured, "data", 4).iter(f"{SVG}title")]
    assert len(shown) == len(outline.stages)
    assert any("224 parameters" in (text or "") for text in shown)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"schema": "shoal.outline/1", "plan": "x", "ranks": 0}'])
def test_what_is_no_outline_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "outline.json").write_text(text)
    with pytest.raises(InputError, match=r"outline\.json"):
        Outline.load(tmp_path / "outline.json")


def test_kinds_have_colours() -> None:
    kinds = [kind_of(Cut.parse(text)) for text in ("n4", "c2", "h2", "h2w2", "d2", "k2", "n2k2", "1")]
    assert kinds == ["n", "c", "h/w", "h/w", "h/w", "k", "mixed", "whole"]
    assert set(kinds) == set(COLOURS)
