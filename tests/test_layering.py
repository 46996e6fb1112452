"""Imports go one way: a layer may import only the layers named beside it. docs/architecture.md draws it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "shoal"

NOUNS = {
    *("_version", "errors", "units", "files", "machine", "uncollected"),
    *("partition", "moves", "graph", "plan", "traffic", "config", "result", "verdict", "cluster", "timings"),
    *("exchanges", "inference", "optimizers", "timeline", "diary", "comparison", "outline", "paper"),
}
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "units": set(),
    "files": set(),
    "machine": set(),
    "uncollected": set(),
    "partition": {"errors"},
    "moves": {"partition"},
    "graph": {"partition"},
    "plan": {"errors", "files", "partition"},
    "exchanges": {"errors"},
    "optimizers": {"errors"},
    "config": {"errors", "machine", "units", "exchanges", "optimizers"},
    "result": {"_version"},
    "inference": {"errors"},
    "verdict": set(),
    "cluster": {"errors", "files", "units"},
    "timings": {"errors", "files", "cluster"},
    "paper": {"cluster"},
    "traffic": set(),
    "timeline": {"errors", "files"},
    "diary": {"timeline"},
    "comparison": {"errors", "files"},
    "outline": {"errors", "files", "partition"},
    "operators": {"graph", "partition"},
    "capturing": {"errors", "uncollected", "graph", "operators"},
    "building": {"errors", "partition"},
    "lowering": {"errors", "graph", "moves", "partition", "traffic", "operators"},
    "simulating": {"errors", "cluster", "partition", "moves", "traffic", "timeline", "operators", "lowering"},
    "planning": {
        "errors",
        "units",
        "uncollected",
        "graph",
        "partition",
        "moves",
        "plan",
        "cluster",
        "operators",
        "lowering",
    }
    | {"outline", "traffic", "timeline", "simulating"},
    "transport": {"errors", "traffic", "timeline", "diary"},
    "tracing": {"errors", "files", "timeline", "diary", "transport"},
    "execution": NOUNS | {"operators", "building", "capturing", "lowering", "planning", "transport"},
    "profiling": NOUNS | {"operators", "lowering", "simulating", "planning", "transport", "execution"},
    "finding": NOUNS | {"lowering", "simulating", "planning", "transport", "execution", "profiling"},
    "papers": {"errors", "cluster", "paper"},
    "repeating": NOUNS
    | {"operators", "lowering", "simulating", "planning", "execution", "profiling", "finding", "zoo"},
    "zoo": {"errors"},
    "data": {"errors", "files", "units", "inference"},
    "launching": {"errors", "machine", "transport"},
    "exchanging": {"errors", "exchanges", "traffic", "timeline", "diary", "transport"},
    "training": NOUNS
    | {"zoo", "data", "launching", "lowering", "planning", "transport", "execution", "profiling", "finding"}
    | {"exchanging", "tracing"},
    "replicas": NOUNS
    | {"tracing", "data", "launching", "planning", "transport", "execution", "exchanging", "training"},
    "swarm": NOUNS | {"simulating", "transport", "exchanging", "replicas"},
    "running": NOUNS | {"data", "launching", "planning", "training", "replicas"},
    "comparing": NOUNS | {"data", "launching", "planning", "transport", "training", "replicas", "running", "reporting"},
    "integrations": {"errors", "execution", "finding"},
    "verifying": NOUNS | {"operators", "lowering", "planning", "transport", "execution", "zoo", "data", "launching"},
    "using": NOUNS | {"zoo", "data", "launching", "planning", "transport", "execution", "training"},
    "reporting": {
        *("_version", "errors", "units", "files", "partition"),
        *("result", "timeline", "comparison", "outline"),
    },
    "cli": NOUNS
    | {"zoo", "data", "launching", "simulating", "planning", "transport", "execution", "profiling", "finding"}
    | {"training", "replicas", "running", "comparing", "verifying", "using", "tracing", "lowering", "reporting"}
    | {"papers", "repeating", "swarm"},
    "__main__": {"cli"},
}
WITHOUT_TORCH = NOUNS | {"papers"}
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


NETWORK = {"socket", "socketserver", "selectors", "ssl", "asyncio", "http.server"}
MAKERS = {"TCPStore", "FileStore", "HashStore", "rendezvous", "init_process_group", "new_group"}
OPEN_ONLY_THERE = "transport"
"""The layer that touches sockets and process groups."""
NAMES_ALONE = {"profiling/links.py": "the host's name"}
"""Others that import `socket`, and what for: they open nothing."""


def touches_network(source: str) -> list[str]:
    """What only `transport/` may do: import a module that opens sockets, or make a store or a process group."""
    modules = (name for name in imported_modules(source) if {name, name.rpartition(".")[0]} & NETWORK)
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    called = (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls)
    return [*modules, *(name for name in called if name in MAKERS or name.startswith("ProcessGroup"))]


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    assert forbidden(path.read_text(), layer_of(path)) == []


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_one_room_touches_the_network(path: Path) -> None:
    if layer_of(path) == OPEN_ONLY_THERE:
        return
    found = touches_network(path.read_text())
    assert found == (["socket"] if path.relative_to(ROOT).as_posix() in NAMES_ALONE else [])


@pytest.mark.parametrize(
    "source",
    [
        "import socket",
        "from http import server",
        "def f():\n    from socket import create_server",
        "import torch.distributed as dist\ndist.TCPStore('a', 1)",
        "dist.init_process_group()",
        "from x import ProcessGroupGloo\nProcessGroupGloo(store, 0, 2)",
    ],
)
def test_that_check_can_fail(source: str) -> None:
    assert touches_network(source)


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
        ("from shoal.running import train", "data"),
        ("import shoal.cli.main", "training"),
        ("from shoal import training", "zoo"),
        ("import torch", "plan"),
        ("def f():\n    from torch import nn", "config"),
    ],
)
def test_the_check_can_fail(source: str, layer: str) -> None:
    assert forbidden(source, layer)
