"""Imports go one way: a layer may import only the layers named beside it. docs/architecture.md draws it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "shoal"

NOUNS = {
    *("_version", "errors", "units", "files", "machine"),
    *("partition", "moves", "graph", "plan", "traffic", "config", "result", "verdict", "cluster", "timings"),
    "exchanges",
}
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "units": set(),
    "files": set(),
    "machine": set(),
    "partition": {"errors"},
    "moves": {"partition"},
    "graph": {"partition"},
    "plan": {"errors", "files", "partition"},
    "exchanges": {"errors"},
    "config": {"errors", "machine", "units", "exchanges"},
    "result": {"_version"},
    "verdict": set(),
    "cluster": {"errors", "files", "units"},
    "timings": {"errors", "files", "cluster"},
    "traffic": set(),
    "operators": {"graph", "partition"},
    "capturing": {"errors", "graph", "operators"},
    "building": {"errors", "partition"},
    "lowering": {"errors", "graph", "moves", "partition", "traffic", "operators"},
    "planning": {"errors", "units", "graph", "partition", "moves", "plan", "cluster", "operators", "lowering"},
    "transport": {"errors", "traffic"},
    "execution": NOUNS | {"operators", "building", "capturing", "lowering", "planning", "transport"},
    "profiling": NOUNS | {"operators", "lowering", "planning", "transport", "execution"},
    "finding": NOUNS | {"lowering", "planning", "transport", "execution", "profiling"},
    "zoo": {"errors"},
    "data": {"errors", "files", "units"},
    "launching": {"errors", "machine"},
    "linking": {"errors"},
    "exchanging": {"errors", "exchanges", "traffic", "transport", "linking"},
    "training": NOUNS
    | {"zoo", "data", "launching", "lowering", "planning", "transport", "execution", "profiling", "finding"}
    | {"linking", "exchanging"},
    "verifying": NOUNS | {"operators", "lowering", "planning", "transport", "execution", "zoo", "data", "launching"},
    "cli": NOUNS
    | {"zoo", "data", "launching", "planning", "transport", "execution", "profiling", "finding"}
    | {"training", "verifying"},
    "__main__": {"cli"},
}
WITHOUT_TORCH = NOUNS
"""Layers that decide and never compute: they run and are tested where torch is not."""


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden(source: str, layer: str) -> list[str]:
    wrong = []
    for name in imported_modules(source):
        package, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        upwards = package == "shoal" and target != layer and target not in ALLOWED[layer]
        heavy = package == "torch" and layer in WITHOUT_TORCH
        if upwards or heavy:
            wrong.append(name)
    return wrong


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    assert forbidden(path.read_text(), layer_of(path)) == []


def test_every_layer_is_named_and_exists() -> None:
    assert {layer_of(path) for path in files()} == set(ALLOWED)


def test_order_has_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {layer for layer, below in ALLOWED.items() if layer not in done and below <= done}
        assert ready, f"a cycle among {set(ALLOWED) - done}"
        done |= ready


@pytest.mark.parametrize(
    ("source", "layer"),
    [
        ("from shoal.training import train", "data"),
        ("import shoal.cli.main", "training"),
        ("from shoal import training", "zoo"),
        ("import torch", "plan"),
        ("def f():\n    from torch import nn", "config"),
    ],
)
def test_the_check_can_fail(source: str, layer: str) -> None:
    assert forbidden(source, layer)
