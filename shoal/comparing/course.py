"""A comparison from the first run to the last, in one folder, which holds all that is needed to go on.

plans/     the plan `auto`, found once for all runs that have it
rates/     short runs with each rate, where rates are searched
NAME/      a run of one strategy with one seed, with all files of a run
comparison.json, report.html
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal import launching, planning
from shoal.comparing import runs
from shoal.comparing.cells import (
    BASELINE,
    RATE_SEED,
    Request,
    Strategy,
    cells,
    folder_of,
    steps_between_tests,
    strategies,
)
from shoal.comparing.timing import can_be_timed, time_in_turns
from shoal.comparing.watcher import Watcher
from shoal.comparison import FILE, Cell, Comparison
from shoal.config import TORCH_STRATEGIES, CompareConfig, TrainConfig
from shoal.errors import ConfigError, DivergedError, InputError, OutputError, ShoalError, StoppedError
from shoal.machine import threads_each
from shoal.plan import Plan
from shoal.planning.strategies import AUTO
from shoal.reporting import read_run, write_report
from shoal.training.device import kind_of_device
from shoal.training.job import load_whole, prepare
from shoal.training.laps import check_laps
from shoal.training.run_folder import RunFolder
from shoal.transport import Transport


def compare(
    recipes: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Comparison:
    """Train one network under several strategies at equal samples, one run after the other, in one folder.

    recipes   settings of strategies of one's own, by name, such as {"slow links": {"exchange": "dasgd", "workers": 2}}
    settings  of the comparison (plans, exchanges, workers, replicas, seeds, baseline, target, rates, rate_epochs,
              rounds, out), and those that every run has, as of `TrainConfig`

    A folder that holds the same comparison is gone on with: finished runs are kept, one that was stopped goes on from
    its checkpoint, one that failed is tried again. A run that fails is named with its cause, and the others go on.

    Raises `InputError` before anything is run, and `StoppedError` after Ctrl-C, when all files are whole.
    """
    own = {name: value for name, value in settings.items() if name in CompareConfig.model_fields}
    train = {name: value for name, value in settings.items() if name not in own}
    request = Request(CompareConfig.parse(own), train, recipes or {})
    return carry_out(request, watcher or Watcher())


def resume(path: Path, watcher: Watcher) -> Comparison:
    """Go on with the comparison in this folder."""
    return carry_out(Request.from_dict(Comparison.load(path).request, path), watcher)


def carry_out(request: Request, watcher: Watcher) -> Comparison:
    """What was asked, as far as it is not done."""
    world = launching.surrounding()
    if world is not None and world.size > 1:
        raise ConfigError(
            f"{world.origin} started {world.size} ranks, and a comparison starts the workers of its runs itself.",
            f"Start `shoal compare` without {world.origin}, on one host.",
        )
    made = strategies(request)
    _check_plans(made)
    between = _look(made[0].config)
    path = request.config.out or _fresh_name(made[0].config)
    folder = RunFolder(path)
    _make(path)
    with folder.held(resumed=False):
        comparison = _known(request, path) or Comparison(
            command=request.command(path),
            request=request.to_dict(),
            target=request.config.target,
            baseline=BASELINE if request.config.baseline else None,
            cells=cells(made, request.config.seeds, between),
        )
        comparison.save(path)
        try:
            return _Course(request, made, comparison, path, watcher).run()
        finally:
            watcher.ended()


def _check_plans(made: Iterable[Strategy]) -> None:
    """An unknown plan, or one for other ranks, is told before anything is run."""
    for strategy in made:
        config = strategy.config
        if config.plan not in TORCH_STRATEGIES:
            planning.check(config.plan, config.workers // config.replicas)
            check_laps(config)


def _look(config: TrainConfig) -> int:
    """Find what is wrong with network and data before anything is run; steps from one test to the next."""
    alone = {"device": "cpu", "workers": 1, "replicas": 1, "exchange": None, "plan": "data"}
    splits, _, _ = load_whole(config.model_copy(update=alone))
    return steps_between_tests(config, len(splits.train), len(splits.test))


def _fresh_name(config: TrainConfig) -> Path:
    words = re.sub(r"[^\w.-]+", "_", f"compare-{config.model}-{config.data}").strip("_")
    return Path("runs") / f"{words}-{time.strftime('%Y%m%d-%H%M%S')}"


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"--out {str(path)!r} cannot be written: {error.strerror or error}.",
            "Give a folder that you may write to, with --out DIR.",
        ) from None


def _known(request: Request, path: Path) -> Comparison | None:
    """What the folder holds of this comparison; an `OutputError` where it holds another."""
    if not (path / FILE).exists():
        return None
    there = Comparison.load(path)
    if there.request != request.to_dict():
        raise OutputError(
            f"--out {str(path)!r} holds another comparison: {there.command}",
            f"Give another --out, or go on with that one: shoal compare --resume {path}",
        )
    failed = {"state": "waiting", "why": None}
    again = (cell.model_copy(update=failed) if cell.state == "failed" else cell for cell in there.cells)
    return there.model_copy(update={"cells": tuple(again)})


class _Course:
    """A comparison on its way. `comparison` is what is done so far, and always what the file says."""

    def __init__(
        self, request: Request, made: tuple[Strategy, ...], comparison: Comparison, path: Path, watcher: Watcher
    ) -> None:
        self._request, self._path, self._watcher = request, path, watcher
        self._strategies = {strategy.name: strategy for strategy in made}
        self.comparison = comparison

    def run(self) -> Comparison:
        self._watcher.began(self.comparison, self._path)
        try:
            self._find_plans()
            self._search_rates()
            for cell in self.comparison.cells:
                if cell.state == "waiting":
                    self._run(cell)
            self._time_steps()
        except (KeyboardInterrupt, StoppedError) as error:
            done = sum(cell.state == "done" for cell in self.comparison.cells)
            raise StoppedError(
                f"stopped after {done} of {len(self.comparison.cells)} runs. All files are whole.",
                f"Go on with: shoal compare --resume {self._path}",
            ) from error
        self._write_page()
        return self.comparison

    def _write_page(self) -> None:
        self._watcher.stage("making the page")
        try:
            self._watcher.wrote(write_report(self._path))
        except InputError as error:  # what the runs did is there all the same
            self._watcher.told(f"no page was made: {error.problem} {error.remedy}")

    def _update(self, **changes: Any) -> None:
        self.comparison = self.comparison.model_copy(update=changes)
        self.comparison.save(self._path)

    # Cells

    def _run(self, cell: Cell) -> None:
        path = self._path / cell.folder
        how = "goes on from its checkpoint" if runs.can_go_on(path) else "starts anew"
        self._watcher.run_began(cell, how)
        why = None if runs.is_finished(path) else self._attempt(cell, self._config_of(cell))
        self._end(cell, why)

    def _attempt(self, cell: Cell, config: TrainConfig) -> str | None:
        """Train; None, or what went wrong."""
        try:
            runs.carry_out(
                config,
                lambda line: self._watcher.run_wrote(cell, line),
                lambda done, by, of: self._watcher.run_starting(cell, f"{by} of {of} workers {done}"),
            )
        except StoppedError:
            raise
        except Exception as error:  # whatever it is, the other runs go on
            return _told(error)
        return None

    def _end(self, cell: Cell, why: str | None) -> None:
        ended = cell.model_copy(update={"state": "failed" if why else "done", "why": why})
        self._update(cells=tuple(ended if one.folder == cell.folder else one for one in self.comparison.cells))
        self._watcher.run_ended(ended, self.comparison)

    def _config_of(self, cell: Cell) -> TrainConfig:
        return self._placed(TrainConfig.parse(cell.settings), self._path / cell.folder)

    def _placed(self, config: TrainConfig, out: Path) -> TrainConfig:
        """With its folder, and the plan that was found in the place of `auto`."""
        plan = self._plan_file(config)
        return config.model_copy(update={"out": out, **({"plan": str(plan)} if plan else {})})

    # The plan auto

    def _plan_file(self, config: TrainConfig) -> Path | None:
        """Where the plan lies that is meant by `auto`: one for as many ranks and samples of a replica."""
        ranks = config.workers // config.replicas
        if config.plan != AUTO or ranks == 1:
            return None
        return self._path / "plans" / f"auto-{ranks}-workers-batch-{config.replica_batch}.json"

    def _find_plans(self) -> None:
        """Once, before the first run: seeds and replicas must have the same."""
        for strategy in self._strategies.values():
            path = self._plan_file(strategy.config)
            if path is None or path.exists():
                continue
            self._watcher.stage(f"searching the plan auto for {strategy.name}")
            try:
                plan = _found(strategy.config, self._watcher.stage)
            except StoppedError:
                raise
            except Exception as error:  # its runs fail, the others go on
                self._fail_all(strategy, f"no plan was found: {_told(error)}")
                continue
            path.parent.mkdir(exist_ok=True)
            plan.save(path)
            self._watcher.told(f"the plan auto for {strategy.name} is {plan.name}: {plan.in_words()}")

    def _fail_all(self, strategy: Strategy, why: str) -> None:
        for cell in self.comparison.cells:
            if cell.strategy == strategy.name and cell.state == "waiting":
                self._end(cell, why)

    # Rates

    def _search_rates(self) -> None:
        waiting = {cell.strategy for cell in self.comparison.cells if cell.state == "waiting"}
        for name in self._strategies if self._request.config.rates else ():
            if name in waiting:
                self._search_rate(self._strategies[name])

    def _search_rate(self, strategy: Strategy) -> None:
        """Let the runs of a strategy have the rate with which short ones are best; they fail where there is none."""
        tried = dict(self.comparison.rates.get(strategy.name, {}))
        for rate in self._request.config.rates:
            if str(rate) in tried:
                continue
            try:
                tried[str(rate)] = self._accuracy_at(strategy, rate)
            except DivergedError:
                tried[str(rate)] = None
            except StoppedError:
                raise
            except Exception as error:  # its runs would fail as this one did
                self._fail_all(strategy, _told(error))
                return
            self._update(rates={**self.comparison.rates, strategy.name: tried})
        good = {rate: accuracy for rate, accuracy in tried.items() if accuracy is not None}
        if not good:
            self._fail_all(strategy, f"with none of the rates {', '.join(tried)} the loss stayed finite")
            return
        best = max(good, key=lambda rate: good[rate])
        found = (f"{rate}: {'diverged' if got is None else f'{got:.4f}'}" for rate, got in tried.items())
        self._watcher.told(f"{strategy.name} takes lr {best}, of {', '.join(found)}")
        self._update(cells=tuple(_at_rate(cell, strategy.name, float(best)) for cell in self.comparison.cells))

    def _accuracy_at(self, strategy: Strategy, rate: float) -> float:
        """Of a short run on a seed that is not compared."""
        path = self._path / "rates" / f"{folder_of(strategy.name, RATE_SEED)}-lr{rate:g}"
        self._watcher.stage(f"searching a rate for {strategy.name}: lr {rate:g}")
        if not runs.is_finished(path):
            short = {"lr": rate, "epochs": self._request.config.rate_epochs, "seed": RATE_SEED}
            config = TrainConfig.parse({**strategy.settings, **short})
            runs.carry_out(self._placed(config, path), lambda _: None, lambda *_: None)
        result = read_run(path).result
        assert result is not None
        return result.test_accuracy

    # Steps in turns

    def _time_steps(self) -> None:
        rounds = self._request.config.rounds
        if not rounds or self.comparison.step_seconds:
            return
        entrants, left_out = self._entrants()
        if len(entrants) > 1:
            self._watcher.stage("timing steps of all strategies in turns")
            try:
                seconds = time_in_turns(
                    entrants, rounds=rounds, on_stage=lambda done, *_: self._watcher.stage(f"timing steps: {done}")
                )
                self._update(step_seconds={name: tuple(each) for name, each in seconds.items()}, left_out=left_out)
            except StoppedError:
                raise
            except Exception as error:  # the runs are what they are
                left_out |= dict.fromkeys(entrants, _told(error))
                self._update(left_out=left_out)
        else:
            self._update(left_out=left_out)
        for name, why in left_out.items():
            self._watcher.told(f"steps of {name} were not timed in turns: {why}")

    def _entrants(self) -> tuple[dict[str, TrainConfig], dict[str, str]]:
        """Who takes turns, and who does not, and why."""
        first = {cell.strategy: cell for cell in reversed(self.comparison.cells) if cell.state == "done"}
        configs = {name: self._config_of(cell) for name, cell in first.items()}
        workers = max((config.workers for config in configs.values()), default=1)
        entrants: dict[str, TrainConfig] = {}
        left_out = {name: "it failed" for name in self._strategies if name not in first}
        for name in self._strategies:
            if name in configs:
                why = can_be_timed(configs[name], workers)
                if why is None:
                    entrants[name] = configs[name]
                else:
                    left_out[name] = why
        return entrants, left_out


def _at_rate(cell: Cell, strategy: str, rate: float) -> Cell:
    if cell.strategy != strategy:
        return cell
    return cell.model_copy(update={"settings": {**cell.settings, "lr": rate}})


def _found(config: TrainConfig, stage: Callable[[str], None]) -> Plan:
    """The plan `auto` for one replica of a run, searched on as many ranks."""
    ranks = config.workers // config.replicas
    alone = config.model_copy(
        update={"workers": ranks, "batch": config.replica_batch, "replicas": 1, "exchange": None, "slow": {}}
    )
    found = launching.run(
        _find_on_rank,
        alone,
        workers=ranks,
        threads=threads_each(config.threads, config.workers),
        timeout=config.timeout,
        device=kind_of_device(config, config.workers),
        on_stage=lambda done, by, of: stage(f"searching the plan auto: {by} of {of} workers {done}"),
    )
    return found[0]


def _find_on_rank(config: TrainConfig) -> Plan:
    return prepare(config, Transport()).network.plan


def _told(error: BaseException) -> str:
    """In one line, for people: what went wrong, without the way out."""
    if isinstance(error, ShoalError):
        return error.problem
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
