"""What is known about an operator stands in shoal/operators: nobody else asks what an operator is called.

A text that names an operator is found where it is compared (`==`, `in`, `startswith`, a `case`), where it stands in a
collection or is a key, and wherever it begins with `aten.`; operators themselves (`torch.ops.aten.add.Tensor`) are
found everywhere.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.test_layering import ROOT, files

ASKING = {"startswith", "endswith", "removeprefix", "removesuffix", "get", "find", "index", "count", "match"}

EXCEPTIONS = {
    # layers that stand for no operator of the network's own: they are made, not asked about
    ("capturing/reader.py", "aten.add.Tensor"),
    ("capturing/reader.py", "aten.to.dtype"),
    ("capturing/reader.py", "aten.expand.default"),
    ("capturing/reader.py", "aten.clone.default"),
    ("verifying/blame.py", "aten.clone.default"),
    # how an operator is written for a reader
    ("verdict.py", "aten."),
    ("cli/plan_table.py", "norm"),
    # functions of torch that a network asks about its call
    ("capturing/questions.py", "is_autocast_enabled"),
    ("capturing/questions.py", "is_autocast_cpu_enabled"),
    ("capturing/questions.py", "get_autocast_dtype"),
    # the word of an augmentation
    ("data/augment.py", "flip"),
}
"""(file, text) that may stand outside of shoal/operators."""

OBJECTS = {
    # nodes of a graph that are made, not asked about
    ("capturing/prepare.py", "resolve_conj.default"),
    ("capturing/prepare.py", "view_as_real.default"),
    ("capturing/prepare.py", "view_as_complex.default"),
    ("capturing/prepare.py", "to.dtype"),
    ("capturing/prepare.py", "detach.default"),
}
"""(file, operator) likewise."""

NOT_OF_LAYERS = {
    "building/factory_journal.py": "what a function that makes a network calls to fill its weights",
    "building/playing.py": "which of these calls can be played again on a box of the weights",
    "building/recording.py": "which of these calls draw, and which make tensors",
    "cli/papers.py": "what is told of a paper: its name, its title, where it appeared",
    "cli/trace.py": "kinds of what a rank does in time",
    "timeline.py": "the same",
    "reporting/charts.py": "the same",
    "lowering/tasks.py": "kinds of tasks of a step",
    "simulating/simulate.py": "the same",
    "execution/cut_parameters.py": "which functions of torch a script may call on its part of a parameter",
}
"""Files that name operators and speak of no layer of a network."""


def is_operator(text: str) -> bool:
    """Whether a text names an operator of torch, with or without its namespace and overload, or begins as names do."""
    word = text.removeprefix("aten.").strip(".").partition(".")[0]
    if hasattr(object, word):  # such as __eq__, which every object has
        return False
    return text.startswith("aten.") or (word.isidentifier() and hasattr(torch.ops.aten, word))


def texts(node: ast.AST) -> Iterator[str]:
    """Texts that stand in an expression itself, in a collection or not."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for item in node.elts:
            yield from texts(item)
    elif isinstance(node, ast.Starred):
        yield from texts(node.value)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            yield from texts(key) if key is not None else ()


def _about_operators(node: ast.AST) -> bool:
    """Whether an expression speaks of the operator of a layer or of a node: `layer.op`, `node.target`, a `word`."""
    names = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return bool(names & {"op", "target", "word", "_word", "operator"})


def named(source: str) -> set[str]:
    """Texts that name an operator and are asked about."""
    found: set[str] = set()
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            found |= {node.value} if node.value.startswith("aten.") else set()
        if isinstance(node, ast.Compare) and _about_operators(node):
            found |= {text for side in (node.left, *node.comparators) for text in texts(side) if is_operator(text)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _about_operators(node.func.value):
            given = [text for argument in node.args for text in texts(argument)]
            found |= {text for text in given if node.func.attr in ASKING and is_operator(text)}
        if isinstance(node, ast.Match) and _about_operators(node.subject):
            values = [one.value for one in ast.walk(node) if isinstance(one, ast.MatchValue)]
            found |= {text for value in values for text in texts(value) if is_operator(text)}
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
            several = [text for text in texts(node) if is_operator(text)]
            found |= set(several) if len(several) > 2 else set()
    return found


def objects(source: str) -> set[str]:
    """Operators of torch that stand in the code: `add.Tensor`; empty for their namespace alone, `torch.ops.aten`."""
    tree = ast.parse(source)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    whole = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in inner]
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "torch.ops"]
    known = [text.partition("ops.aten")[2].strip(".") for text in whole if "ops.aten" in text]
    return {*known, *("" for _ in imported)}


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_operators_are_asked_about_in_one_place(path: Path) -> None:
    file = str(path.relative_to(ROOT))
    if file.startswith("operators/") or file in NOT_OF_LAYERS:
        return
    source = path.read_text()
    assert {text for text in named(source) if (file, text) not in EXCEPTIONS} == set()
    assert {text for text in objects(source) if (file, text) not in OBJECTS} == set()


def test_exceptions_are_all_needed() -> None:
    assert [(file, text) for file, text in EXCEPTIONS if text not in named((ROOT / file).read_text())] == []
    assert [(file, text) for file, text in OBJECTS if text not in objects((ROOT / file).read_text())] == []
    assert [file for file in NOT_OF_LAYERS if not named((ROOT / file).read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        'views = layer.op.startswith("aten.detach.")',
        'if "batch_norm" in layer.op: pass',
        'if ".linear." in layer.op: pass',
        'word = layer.op.split(".")[1]\nif word == "cat": pass',
        'VIEWS = ("view", "reshape", "flatten")',
        'COUNTS = {"conv2d": 1, "linear": 2, "mean": 3}',
        'if word.startswith(("conv2d", "linear")): pass',
        'match word:\n    case "relu": pass',
        'NORM = f"aten.{norm}.default"',
    ],
)
def test_the_check_can_fail(source: str) -> None:
    assert named(source)


@pytest.mark.parametrize(
    "source",
    [
        "if node.target is torch.ops.aten.add.Tensor: pass",
        "KNOWN = (torch.ops.aten.relu.default, 1)",
        "from torch import ops\nadd = ops.aten.add",
        "aten = torch.ops.aten",
        "from torch.ops import aten",
        "found = getattr(torch.ops.aten, word)",
    ],
)
def test_the_check_of_operators_themselves_can_fail(source: str) -> None:
    assert objects(source)


def test_words_that_are_no_operators_pass() -> None:
    assert not named('"""Such as `aten.conv2d.default`."""\nif plan == "data" or kind in ("sum", "mean"): pass')
