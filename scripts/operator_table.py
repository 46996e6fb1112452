"""Write docs/operators.md, the table "operator x cut", from the rules themselves.

    python -m scripts.operator_table           # write it
    python -m scripts.operator_table --check   # fail if the file is not what would be written

Each cell is asked of the rule (`rule.axes`) for a call of that operator in tests/unit/operator_cases.py; the tests
run the same calls cut along every such axis.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from tests.unit.operator_cases import EXAMPLES, WITHOUT_RULE, Example

COLUMNS = "ncdhwk"
NONE = "\N{EN DASH}"
FILE = Path(__file__).parent.parent / "docs" / "operators.md"

HEAD = f"""\
# Operators and their cuts

<!-- Made by `python -m scripts.operator_table`; do not edit. -->

Into which dims each operator's work may be cut. The letters are those of a plan: `n` sample, `c` channel, `d` depth,
`h` height, `w` width, `k` the input channels that a layer contracts.

| cell | meaning |
|---|---|
| exact | may be cut here; the result is one device's, up to the order of float additions |
| sum | may be cut here too: parts hold partial sums, which are added up behind the layer |
| {NONE} | no such dim, or a cut here is refused with a `PlanError` that names the cuts that fit |
| whole | no rule: the operator runs whole on every rank, right and without gain, and Shoal says so |

A dim gets its letter by its place in the output: `nc` for 2 dims, `ncw` for 3, `nchw` for 4, `ncdhw` for 5. A call in a
form that the rule does not speak of, such as a convolution without a batch dim, runs whole. Every "exact" and "sum" of
this table is run by `tests/unit/test_operator_table.py` and compared with one device: outputs, gradients, buffers.

"""


def cells(example: Example) -> tuple[str, ...]:
    """What the rule allows, by column."""
    axes = {axis.letter: "sum" if axis.summed else "exact" for axis in example.axes}
    return tuple(axes.get(letter, NONE) for letter in COLUMNS)


def rows(examples: Iterable[Example]) -> list[str]:
    """One row for all operators of one kind that share a note and their cells."""
    found: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for example in examples:
        key = (type(example.rule).__module__, example.note, cells(example))
        words = found.setdefault(key, [])
        if example.word not in words:
            words.append(example.word)
    return [
        f"| {', '.join(f'`{word}`' for word in words)}{f' ({note})' if note else ''} | {' | '.join(marks)} |"
        for (_, note, marks), words in found.items()
    ]


def render() -> str:
    """The whole file."""
    head = f"| operator | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}\n"
    without = ", ".join(f"`{example.word}`" for example in WITHOUT_RULE)
    last = f"| {without}, and every other operator | {' | '.join(['whole'] * len(COLUMNS))} |\n"
    return HEAD + head + "\n".join(rows(EXAMPLES)) + "\n" + last


def main() -> int:
    """Write the file, or check it."""
    if "--check" in sys.argv[1:]:
        fresh = FILE.read_text(encoding="utf-8") == render()
        print(f"{FILE} is {'up to date' if fresh else 'not up to date: python -m scripts.operator_table'}")
        return 0 if fresh else 1
    FILE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
