"""Test accuracy of replicas under each exchange beside one worker's, at equal samples, over seeds.

    python -m benchmarks.exchange_accuracy.bench --study exchanges [--data fashion-mnist --model lenet5 --epochs 5]
    python -m benchmarks.exchange_accuracy.bench --study dasgd --data audiomnist --model acoustic
    python -m benchmarks.exchange_accuracy.bench --study periods --rates untold --eval-steps 200
    python -m benchmarks.exchange_accuracy.bench --study modes --rates untold --eval-steps 200
    python -m benchmarks.exchange_accuracy.bench --study untold --keep untold.jsonl [--only-replicas 2]

dasgd: ablation, cold start. periods: clients x n_sync, cold and warm (Paine). modes: sync, async, mixed; 1, 2 and 4
servers (Campos). untold: every exchange with the rates that one gets without asking for any, and its goal.

Every row is first tuned, unless one rate is given or the rates are untold: short runs over a grid of learning rates
on a seed that is not reported, the best of which is then run on the seeds. Each run is a comparison of one cell
(`shoal.compare`); what is printed comes from its result.json and metrics.jsonl.

`--keep FILE` adds a line per finished run, and does not run again what has one: a study goes on where it was stopped.
`--table FILE` in its place, with the other options the same, starts nothing and prints what is there.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.exchange_accuracy.runs import Outcome, RunFailedError, Runs
from benchmarks.exchange_accuracy.studies import ONE_WORKER, STUDIES, Row, chosen_rows
from benchmarks.exchange_accuracy.tables import (
    TUNED_HEAD,
    UNTOLD_HEAD,
    accuracy_of,
    learned,
    mean_accuracy,
    tuned_line,
    untold_line,
)

TUNING_SEED = 1000
UNTOLD = "untold"


def main() -> None:
    """Tune, run, print."""
    args = _arguments()
    runs = Runs(args.table or args.keep, only_kept=args.table is not None)
    rows = chosen_rows(STUDIES[args.study](), args.rows, args.only_replicas)
    untold = args.study == UNTOLD
    print(_title(args), flush=True)
    print(UNTOLD_HEAD if untold else TUNED_HEAD, flush=True)
    base: float | None = None
    failures: list[str] = []
    for row in rows:
        try:
            line, mean = (_untold if untold else _tuned)(args, runs, row, base)
        except RunFailedError as failure:
            failures.append(str(failure))
            print(f"| {row.name} | FAILED |", flush=True)
            continue
        if line:
            print(line, flush=True)
        if row.name == ONE_WORKER:
            base = mean
    if failures:
        sys.exit("\n".join(failures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=STUDIES, default="exchanges")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="0.0125,0.025,0.05,0.1", help="to choose from; or 'untold': none is given")
    parser.add_argument("--tuning-epochs", type=int, default=2)
    parser.add_argument("--eval-steps", help="steps from one test to the next, for the column time to accuracy")
    parser.add_argument("--rows", default="", help="names of rows or exchanges, with semicolons between; else all")
    parser.add_argument("--only-replicas", default="", help="rows of so many replicas, such as 2 or 2,4; else all")
    parser.add_argument("--target", type=float, default=0.85, help="test accuracy for the column time to accuracy")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--keep", type=Path, metavar="FILE", help="add a line per finished run; skip those it has")
    kept.add_argument("--table", type=Path, metavar="FILE", help="start nothing; print what FILE has")
    return parser.parse_args()


def _title(args: argparse.Namespace) -> str:
    untold = UNTOLD in (args.study, args.rates)
    rates = "rates untold" if untold else f"tuned over {args.rates} with {args.tuning_epochs} epochs"
    return f"{args.model} on {args.data}, batch {args.batch}, {args.epochs} epochs, {args.seeds} seeds; {rates}"


def _common(args: argparse.Namespace, epochs: int, *more: str) -> list[str]:
    sizes = ["--model", args.model, "--data", args.data, "--batch", str(args.batch), "--threads", "1"]
    return [*sizes, "--epochs", str(epochs), *more]


def _untold(args: argparse.Namespace, runs: Runs, row: Row, base: float | None) -> tuple[str, float | None]:
    """The line of a row without any rate given, and its mean accuracy where it learned at all."""
    outcomes = _on_seeds(runs, row, _common(args, args.epochs), args.seeds)
    return (untold_line(row, outcomes, base) if outcomes else ""), mean_accuracy(learned(outcomes))


def _tuned(args: argparse.Namespace, runs: Runs, row: Row, base: float | None) -> tuple[str, float | None]:
    """The line of a row at its best rate, and its mean accuracy."""
    rate, tuning = _best_rate(args, runs, row)
    more = [] if rate == UNTOLD else ["--lr", rate]
    if args.eval_steps is not None:
        more += ["--eval-steps", args.eval_steps]
    outcomes = _on_seeds(runs, row, _common(args, args.epochs, *more), args.seeds)
    line = tuned_line(row, tuning, rate, outcomes, base, args.target) if outcomes else ""
    return line, mean_accuracy(outcomes)


def _on_seeds(runs: Runs, row: Row, options: Sequence[str], seeds: int) -> list[Outcome]:
    outcomes = [runs.outcome(row, options, seed) for seed in range(seeds)]
    return [outcome for outcome in outcomes if outcome is not None]


def _best_rate(args: argparse.Namespace, runs: Runs, row: Row) -> tuple[str, str]:
    """The best rate by short runs, and what these gave; the only one, if there is one."""
    rates = args.rates.split(",")
    if len(rates) == 1:
        return rates[0], "not tuned"
    tried = {rate: runs.outcome(row, _common(args, args.tuning_epochs, "--lr", rate), TUNING_SEED) for rate in rates}
    done = {rate: outcome for rate, outcome in tried.items() if outcome is not None}
    shown = ", ".join(f"{rate}: {accuracy_of(outcome)}" for rate, outcome in done.items())
    return max(done, key=lambda rate: done[rate].accuracy or -1.0, default=rates[0]), shown


if __name__ == "__main__":
    main()
