"""The layer at fault is the first that is wrong though all it depends on is right. Pure: differences in, layer out."""

import pytest

from shoal.graph import Layer, LayerGraph, State, TensorSpec, Value
from shoal.verifying.blame import suspects, with_readers_apart
from shoal.verifying.differences import Differences, Kind

SPEC = TensorSpec((4, 8), "float64", (1, 0))


def layer(name: str, *reads: str, states: tuple[str, ...] = ()) -> Layer:
    values = {f"v{i}": Value(read) for i, read in enumerate(reads)}
    return Layer(name, "aten.some.default", {**values, **{f"s{i}": State(s) for i, s in enumerate(states)}}, SPEC)


GRAPH = LayerGraph(
    layers=(
        layer("a", "x", states=("a.weight",)),
        layer("b", "a", states=("b.weight",)),
        layer("c", "a", states=("shared",)),
        layer("add", "b", "c"),
        layer("d", "add", states=("shared",)),
    ),
    inputs={"x": SPEC},
    states=dict.fromkeys(("a.weight", "b.weight", "shared"), SPEC),
    outputs=("d",),
    training=True,
    batch=4,
    any_batch=True,
)


@pytest.mark.parametrize(
    ("found", "layers", "fault"),
    [
        ({}, None, None),
        ({("value", "c"): 1, ("value", "add"): 1, ("value gradient", "d"): 1, ("loss", ""): 1}, ("c",), "output"),
        ({("output", ""): 1, ("gradient", "b.weight"): 1}, ("d",), "result"),
        ({("value gradient", "d"): 1, ("value gradient", "add"): 1}, ("d",), "result"),
        ({("value gradient", "a"): 1, ("gradient", "a.weight"): 1}, ("b", "c"), "input gradient"),
        ({("value gradient", "a"): 1, ("gradient", "b.weight"): 1}, ("b",), "parameter gradient"),
        ({("gradient", "shared"): 1, ("value gradient", "a"): 1}, ("c", "d"), "parameter gradient"),
        ({("value gradient", "add"): 1, ("gradient", "shared"): 1}, ("d",), "input gradient"),
        ({("input gradient", ""): 1}, ("a",), "input gradient"),
        ({("buffer", "b.weight"): 1, ("later state", "a.weight"): 1}, ("b",), "buffers"),
        ({("evaluated value", "b"): 1, ("evaluated value", "add"): 1}, ("b",), "evaluation"),
        ({("later state", "a.weight"): 1}, ("a",), "steps"),
        ({("later state", "unused"): 1}, ("unused",), "steps"),
        ({("later evaluation", ""): 1}, ("d",), "result"),
        ({("later evaluation", ""): 0.05, ("value", "a"): 0.005}, None, None),
        ({("value", "a"): float("inf")}, ("a",), "output"),
    ],
)
def test_the_first_that_is_wrong(found: Differences, layers: tuple[str, ...] | None, fault: str | None) -> None:
    blamed = suspects(GRAPH, GRAPH, found, 0.01, 0.1)
    assert (blamed and blamed.layers, blamed and blamed.fault) == (layers, fault)


def test_readers_get_copies_of_their_own() -> None:
    graph, copies = with_readers_apart(GRAPH, "a")
    assert list(copies.values()) == ["b", "c"]
    assert [one.name for one in graph.layers] == ["a", "b <- a", "b", "c <- a", "c", "add", "d"]
    assert graph.layers[2].reads == ("b <- a",)
    blamed = suspects(graph, graph, {("value gradient", "c <- a"): 1.0, ("value gradient", "a"): 1.0}, 0.01, 0.1)
    assert blamed is not None
    assert blamed.layers == ("c",)


def test_kinds_that_come_later_say_so() -> None:
    """The tolerance is chosen by that word."""
    kinds = Kind.__args__  # type: ignore[attr-defined]
    assert {kind for kind in kinds if kind.startswith("later")} == {"later state", "later evaluation"}
