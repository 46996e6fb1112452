"""Write docs/networks.md, the table "network x plan", by running every cell on two processes.

    python -m scripts.network_table                    # run what is not yet known, write the file
    python -m scripts.network_table --only resnet      # of the networks with this in their name
    python -m scripts.network_table --defects          # once more what was neither exact nor refused
    python -m scripts.network_table --check            # fail if the file is not what would be written

Needs the packages of the extra `zoo-wide`. Takes an hour or two: finished cells are kept in docs/networks.json, so
that a run that was stopped goes on where it was, until a source file of Shoal changes; `--keep` keeps them even then.

A cell that is neither exact nor refused (another number, a foreign traceback, a hang) is a defect; with one the exit
is 1.
"""

import argparse
import json
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from scripts.network_case import RANDOM, TOLERANCE, Answer, run_case
from scripts.network_list import NETWORKS, Network
from tests.parity.pool import Pool, RankError

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "networks.md"
KEPT = ROOT / "docs" / "networks.json"
PLANS = ("data", "model", "spatial", "owt", RANDOM)
RANKS = 2
SECONDS = 400.0
"""For one cell, the network's first capture included."""
PACKAGES = ("torch", "torchvision", "timm", "segmentation-models-pytorch")

HEAD = """\
# Networks from other packages

<!-- Made by `python -m scripts.network_table`; do not edit. -->

Networks of torchvision, timm and segmentation-models-pytorch under the plans that need no profile and under one random
plan each (a cut of its own for every layer, drawn from what the layers' rules allow), on {ranks} processes, beside the
plain module on one device. To install the packages (torch stays as it is) and to make this table:

    pip install -e '.[dev,zoo-wide]'
    python -m scripts.network_table

| cell | meaning |
|---|---|
| a number | exact; the largest relative difference, at most {tolerance:.0e} |
| refused | `shoal.parallelize` says why; the numbers lead to the messages below the table |
| DEFECT | neither; none may be here |

Compared in float64: all outputs, the gradient of the input, the gradients of all parameters, all parameters and buffers
after a step of SGD, and an evaluation after it. A difference is relative to the tensor's largest element, as in
[verify.md](verify.md). Images are small, weights random; dropout and stochastic depth are off; parameters that start
as one repeated number (such as scales at zero) are drawn, so that nothing hides behind them. A network may have several
outputs, in any structure; the loss is a random projection of all. What is not in the table yet was not run: finished
cells are kept in `networks.json`, and `--keep` goes on from them though Shoal has changed since.

"""


@dataclass(frozen=True)
class Cell:
    """What came of one network under one plan."""

    outcome: str
    """`exact`, `refused` or `defect`."""
    difference: float = 0.0
    text: str = ""
    """The refusal, or what is wrong."""
    seconds: float = 0.0


def judged(answers: Sequence[Answer]) -> Cell:
    """All ranks' answers as one."""
    outcomes = {answer.outcome for answer in answers}
    worst = max(answers, key=lambda answer: answer.difference)
    if outcomes == {"exact"}:
        return Cell("exact", worst.difference)
    if outcomes == {"refused"}:
        told = [answer.text for answer in answers if not answer.peer]
        return Cell("refused", text=told[0]) if told else Cell("defect", text=f"no rank says why: {answers[0].text}")
    if "different" in outcomes:
        return Cell("defect", worst.difference, f"{worst.where} differs by {worst.difference:.0e}; {worst.text}")
    return Cell("defect", text="; ".join(f"rank {r}: {a.outcome} {a.text}" for r, a in enumerate(answers)))


class Runner:
    """Runs cells on processes that are kept while all goes well."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pool: Pool | None = None

    def run(self, network: Network, plan: str) -> Cell:
        """One cell; whatever goes wrong in it."""
        start = time.monotonic()
        if self._pool is None:
            self._pool = Pool(RANKS, self._seconds)
        try:
            cell = judged(self._pool.run(run_case, network, plan))
        except RankError as error:
            cell = Cell("defect", text=_last_words(str(error)))
        if cell.outcome != "exact" and not cell.text.startswith("CaptureError"):
            self.close()  # ranks that stopped in the middle may wait for each other
        return Cell(cell.outcome, cell.difference, cell.text, round(time.monotonic() - start, 1))

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _last_words(trace: str) -> str:
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    places = [line for line in lines if line.startswith("File ") and "shoal" in line]
    return " | ".join([lines[0], *places[-1:], lines[-1]]) if len(lines) > 1 else lines[0]


def sources() -> str:
    """Changes with every source file that a cell depends on."""
    digest = 0
    for path in sorted([*(ROOT / "shoal").rglob("*.py"), Path(__file__).parent / "network_case.py"]):
        digest = zlib.crc32(path.read_bytes(), digest)
    return f"{digest:08x}"


def kept(*, old: bool) -> dict[str, Cell]:
    """Cells of earlier runs; none if Shoal has changed, unless old ones are wanted."""
    if not KEPT.exists():
        return {}
    found = json.loads(KEPT.read_text(encoding="utf-8"))
    if found["sources"] != sources() and not old:
        return {}
    return {key: Cell(**cell) for key, cell in found["cells"].items()}


def keep(cells: Mapping[str, Cell]) -> None:
    """Write all cells, at once or not at all."""
    KEPT.parent.mkdir(exist_ok=True)
    fresh = KEPT.with_suffix(".new")
    content = {"sources": sources(), "cells": {key: asdict(cell) for key, cell in cells.items()}}
    fresh.write_text(json.dumps(content, indent=1), encoding="utf-8")
    fresh.replace(KEPT)


def key_of(network: Network, plan: str) -> str:
    """Of a cell."""
    size = "x".join(map(str, network.shape))
    return f"{network.key} {size} {plan}"


def render(cells: Mapping[str, Cell]) -> str:
    """The whole file, of the cells that are known."""
    notes: dict[str, int] = {}
    rows, shown = [], []
    families: set[str] = set()
    for network in NETWORKS:
        found = [cells.get(key_of(network, plan)) for plan in PLANS]
        if any(found):
            families.add(network.family)
            batch = " x ".join(map(str, network.shape))
            marks = " | ".join(_mark(cell, notes) for cell in found)
            rows.append(f"| {network.family} | {_shown(network)} | {batch} | {marks} |\n")
            shown += [cell.outcome for cell in found if cell is not None]
    count = f"{len(families)} families, {len(rows)} networks, {len(shown)} cells: {shown.count('exact')} exact, "
    count += f"{shown.count('refused')} refused, {shown.count('defect') or 'no'} defects"
    used = ", ".join(f"{name} {version(name).split('+')[0]}" for name in PACKAGES)
    head = f"| family | network | batch | {' | '.join(PLANS)} |\n|---|---|---|{'---|' * len(PLANS)}\n"
    below = "".join(f"{number}. {_plain(text)}\n" for text, number in notes.items())
    top = HEAD.format(ranks=RANKS, tolerance=TOLERANCE)
    return f"{top}{count} ({used}).\n\n{head}{''.join(rows)}" + (f"\n{below}" if below else "")


def _mark(cell: Cell | None, notes: dict[str, int]) -> str:
    if cell is None:
        return ""
    if cell.outcome == "exact":
        return f"{cell.difference:.0e}"
    number = notes.setdefault(cell.text, len(notes) + 1)
    return f"{'refused' if cell.outcome == 'refused' else 'DEFECT'} ({number})"


def _shown(network: Network) -> str:
    package, name = network.source.split(":")
    options = ", ".join(f"{key}={_short(value)}" for key, value in network.options.items())
    return f"{package.split('.')[0]} `{name}`" + (f" ({options})" if options else "")


def _short(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def main(arguments: Iterable[str] | None = None) -> int:
    """Run, write, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="networks with this in their name")
    parser.add_argument("--plans", default=",".join(PLANS), help="of these plans, comma between")
    parser.add_argument("--defects", action="store_true", help="run cells again that were defects")
    parser.add_argument("--refused", action="store_true", help="run cells again that were refused")
    parser.add_argument("--keep", action="store_true", help="keep cells though Shoal has changed")
    parser.add_argument("--check", action="store_true", help="run nothing, compare the file with the kept cells")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time-out of a cell")
    args = parser.parse_args(list(arguments) if arguments is not None else None)
    cells = kept(old=args.keep or args.check or args.defects or args.refused)
    if args.check:
        fresh = FILE.read_text(encoding="utf-8") == render(cells)
        print(f"{FILE} is {'up to date' if fresh else 'not what the kept cells say: python -m scripts.network_table'}")
        return 0 if fresh else 1
    again = {"defect" if args.defects else "", "refused" if args.refused else ""}
    wanted = [
        (network, plan)
        for network in NETWORKS
        if not args.only or any(word in network.key for word in args.only)
        for plan in args.plans.split(",")
        if (cell := cells.get(key_of(network, plan))) is None or cell.outcome in again
    ]
    runner, begun = Runner(args.seconds), time.monotonic()
    try:
        for number, (network, plan) in enumerate(wanted, 1):
            cell = cells[key_of(network, plan)] = runner.run(network, plan)
            keep(cells)
            left = (time.monotonic() - begun) / number * (len(wanted) - number)
            said = f"{cell.difference:.0e}" if cell.outcome == "exact" else cell.text
            print(
                f"[{number}/{len(wanted)}, {left / 60:.0f} min left] {network.key} {plan} ({cell.seconds:.0f} s): "
                f"{cell.outcome} {said}",
                flush=True,
            )
    finally:
        runner.close()
    FILE.write_text(render(cells), encoding="utf-8")
    known = {key_of(network, plan) for network in NETWORKS for plan in PLANS}
    return 1 if any(cell.outcome == "defect" for key, cell in cells.items() if key in known) else 0


if __name__ == "__main__":
    sys.exit(main())
