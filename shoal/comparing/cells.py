"""What a comparison runs: strategies and seeds from what was asked. Pure: nothing is started here.

    plans                       each over all workers
    plans x exchanges           each plan inside every replica, each exchange between the replicas
    ddp fsdp2 post-local-sgd    torch's own: over all workers, whatever the exchanges
    recipes                     as they stand

All see equally many samples: of one data set, for one network, in as many epochs and as many samples per step.
"""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.comparison import Cell
from shoal.config import TORCH_STRATEGIES, CompareConfig, TrainConfig
from shoal.errors import ConfigError, suggestion
from shoal.exchanges import EXCHANGES
from shoal.machine import threads_each

BASELINE = "one worker"
NONE = "none"
"""In the place of an exchange: one replica over all workers."""
PLANS = ("data", "auto", "ddp")
"""Compared where nobody says what."""
OWN = frozenset({"plan", "exchange", "exchange_options", "workers", "replicas", "seed", "out"})
"""Settings of a run that the comparison decides, or a recipe."""
EQUAL = ("model", "model_options", "data", "input", "classes", "epochs", "samples_per_step")
"""Settings that make samples equal."""
TESTS = 30
"""Tests of a run, if they are cheap."""
FEWEST_TESTS = 5
TEST_SHARE = 0.25
"""Of the work of training, that tests may be."""
FORWARD = 1 / 3
"""Of the work of a training sample, that a tested one is."""
RATE_SEED = 1000
"""Of runs that search a rate: none that people compare by."""


@dataclass(frozen=True)
class Request:
    """What a comparison was asked."""

    config: CompareConfig
    train: Mapping[str, Any]
    """Settings of every run."""
    recipes: Mapping[str, Mapping[str, Any]]
    """Settings of runs of their own, by name."""

    def to_dict(self) -> dict[str, Any]:
        """For the comparison's file; what was not given is left out."""
        given = self.config.model_dump(mode="json", exclude_unset=True, exclude={"out"})
        recipes = {name: _plain(settings) for name, settings in self.recipes.items()}
        return {"compare": given, "train": _plain(self.train), "recipes": recipes}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], out: Path) -> "Request":
        """What `to_dict` gave, into this folder."""
        config = CompareConfig.parse({**content["compare"], "out": out}, source="--resume: ")
        return cls(config, content["train"], content["recipes"])

    def command(self, out: Path) -> str:
        """What to type for the same once more. Recipes are named as files are, wherever these lie now."""
        words = ["shoal", "compare", *(f"{name}.yaml" for name in self.recipes)]
        content = self.to_dict()
        for name, value in {**content["compare"], **content["train"], "out": str(out)}.items():
            words += _option(name, value)
        return shlex.join(words)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a file holds them, whether they came as text or not."""
    return TrainConfig.parse(settings).model_dump(mode="json", include=set(settings))


def _option(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return [f"--{flag}", str(value)]


@dataclass(frozen=True)
class Strategy:
    """One way to train the network, for all seeds."""

    name: str
    config: TrainConfig
    """Checked; the seed is each run's own."""
    settings: Mapping[str, Any]
    """The same as a recipe's keys, without what nobody gave."""


def strategies(request: Request) -> tuple[Strategy, ...]:
    """All that are compared; a `ConfigError` where one cannot be, or where they would not see equal samples."""
    _check(request)
    pairs = list(_named(request))
    named = dict(pairs)
    _check_folders([name for name, _ in pairs])
    batch = _common_batch(request, named)
    workers = _workers(request)
    common = {"batch": batch, "threads": threads_each(None, workers)}  # as many per worker everywhere
    made = []
    for name, own in named.items():
        settings = {**common, **own, **request.train}
        config = TrainConfig.parse(settings, source=f"{name}: ")
        if config.on != "here":
            raise ConfigError(
                f"{name}: on = {config.on!r}, but strategies are timed beside each other, in turns on this host.",
                "Leave --on out, or run each with shoal train and look at them together with shoal report.",
            )
        made.append(Strategy(name, config, _plain(settings)))
    _check_equal(made)
    return tuple(made)


def _check_folders(names: Sequence[str]) -> None:
    folders = [folder_of(name, 0) for name in names]
    for name, folder in zip(names, folders, strict=True):
        if folders.count(folder) > 1:
            raise ConfigError(f"two strategies are called {name!r}.", "Give plans and recipes names that differ.")


def _check(request: Request) -> None:
    config = request.config
    for name in request.train:
        if name in OWN:
            raise ConfigError(
                f"{name} = {request.train[name]!r} is not for all runs alike.",
                "Say it with --plans, --exchanges, --workers, --replicas, --seeds and --out, or in a recipe.",
            )
    if "patience" in request.train:
        raise ConfigError(
            f"patience = {request.train['patience']} lets runs stop early, which then do not see equal samples.",
            "Leave --patience out.",
        )
    if config.rates and "lr" in request.train:
        raise ConfigError(
            f"lr = {request.train['lr']} is given beside rates = {', '.join(map(str, config.rates))}.",
            "Give --lr for all runs, or --rates to let each strategy take its best.",
        )
    for exchange in config.exchanges:
        if exchange not in (*EXCHANGES, NONE):
            raise ConfigError(f"there is no exchange {exchange!r}.", suggestion(exchange, (*EXCHANGES, NONE)))
    if config.replicas is not None and not _crossed(config.exchanges):
        raise ConfigError(
            f"replicas = {config.replicas} keep together by no exchange.",
            "Name some with --exchanges, or leave it out.",
        )
    for what, given in (("plan", config.plans), ("exchange", config.exchanges), ("seed", config.seeds)):
        for one in given:
            if list(given).count(one) > 1:
                raise ConfigError(f"the {what} {one!r} is given twice.", f"Name each of --{what}s once.")


def _crossed(exchanges: Sequence[str]) -> list[str]:
    return [exchange for exchange in exchanges if exchange != NONE]


def _plans(request: Request) -> tuple[str, ...]:
    config = request.config
    if config.plans:
        return config.plans
    if config.exchanges:
        return ("data",)
    return () if request.recipes else PLANS


def _own_plans(request: Request) -> list[str]:
    return [plan for plan in _plans(request) if plan not in TORCH_STRATEGIES]


def _workers(request: Request) -> int:
    """Of every run, but for recipes."""
    config = request.config
    if config.workers is not None:
        return config.workers
    if config.replicas is not None:
        return config.replicas * (2 if len(_own_plans(request)) > 1 else 1)
    return 4 if _crossed(config.exchanges) and len(_own_plans(request)) > 1 else 2


def _replicas(request: Request) -> int:
    """Of every run with an exchange."""
    workers, plans = _workers(request), _own_plans(request)
    each = 2 if len(plans) > 1 else 1  # on one worker all plans are the same
    replicas = request.config.replicas or max(1, workers // each)
    if workers % replicas:
        raise ConfigError(
            f"{workers} workers cannot be {replicas} replicas of equally many.",
            "Give a multiple of --replicas as --workers.",
        )
    if replicas < 2 or workers // replicas < each:
        raise ConfigError(
            f"{workers} workers are too few for two replicas"
            + (f" of two each, which it takes for {', '.join(plans)} to differ." if each > 1 else "."),
            f"Give --workers {2 * max(2, request.config.replicas or 2)}"
            + (", or one plan." if each > 1 else ", or leave --exchanges out."),
        )
    return replicas


def _named(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and settings of every strategy, as far as they are its own."""
    config, workers = request.config, _workers(request)
    if config.baseline:
        yield BASELINE, {"workers": 1}
    for plan in _plans(request):
        if plan in TORCH_STRATEGIES:
            yield plan, {"plan": plan, "workers": workers}
            continue
        label = Path(plan).stem if plan.endswith(".json") or "/" in plan else plan
        for exchange in config.exchanges or (NONE,):
            if exchange == NONE:
                yield label, {"plan": plan, "workers": workers}
                continue
            replicas = _replicas(request)
            own = {"workers": workers, "replicas": replicas, "exchange": exchange}
            inside = workers > replicas
            yield f"{label} + {exchange}" if inside else exchange, {**own, **({"plan": plan} if inside else {})}
    yield from ((name, dict(settings)) for name, settings in request.recipes.items())


def _common_batch(request: Request, named: Mapping[str, Mapping[str, Any]]) -> int:
    """Of all runs; unless given, the usual one or as much more as it takes for equal shares everywhere."""
    given = [settings["batch"] for settings in (request.train, *request.recipes.values()) if "batch" in settings]
    if given:
        return int(TrainConfig.parse({"batch": given[0]}).batch)
    parts = [1]
    for name, settings in named.items():
        config = TrainConfig.parse(settings, source=f"{name}: ")
        options = config.exchange_settings()
        if options is not None:
            parts.append(options.parts_of_batch(config.replicas))
        elif config.plan in TORCH_STRATEGIES:
            parts.append(config.workers)
    multiple, usual = math.lcm(*parts), int(TrainConfig.model_fields["batch"].default)
    return max(1, round(usual / multiple)) * multiple


def _check_equal(made: Sequence[Strategy]) -> None:
    for other in made[1:]:
        for what in EQUAL:
            first, second = getattr(made[0].config, what), getattr(other.config, what)
            if first != second:
                raise ConfigError(
                    f"{other.name} has {what} = {second!r} and {made[0].name} {first!r}: that is not equal samples.",
                    f"Give one for all as an option; it wins over what recipes say of {what}.",
                )


def steps_between_tests(config: TrainConfig, train_samples: int, test_samples: int) -> int:
    """Batches of `samples_per_step` from one test to the next, where nobody said.

    Some thirty tests, but not so many that they are more than a quarter of the work of training.
    """
    steps = max(1, config.epochs * (train_samples // config.samples_per_step))
    cheap = TEST_SHARE * config.epochs * train_samples / max(1.0, FORWARD * test_samples)
    return max(1, steps // max(FEWEST_TESTS, min(TESTS, int(cheap))))


def steps_of_own(config: TrainConfig, steps: int) -> int:
    """So many steps on whole batches, in steps as this run counts them: with most exchanges those of one replica."""
    options = config.exchange_settings()
    if options is None or options.same_batch:
        return steps
    return steps * (config.batch // config.replica_batch)


def cells(made: Iterable[Strategy], seeds: Sequence[int], between: int) -> tuple[Cell, ...]:
    """A run of every strategy for every seed, all strategies of a seed one after the other."""
    return tuple(
        Cell(
            strategy=strategy.name,
            settings={
                **strategy.settings,
                "eval_steps": steps_of_own(strategy.config, int(strategy.config.eval_steps or between)),
                "seed": seed,
            },
            folder=folder_of(strategy.name, seed),
        )
        for seed in seeds
        for strategy in made
    )


def folder_of(strategy: str, seed: int) -> str:
    """A run's folder in the comparison's.

    >>> folder_of("owt + downpour", 0)
    'owt-downpour-seed0'
    """
    words = re.sub(r"[^\w.]+", "-", strategy).strip("-")
    return f"{words}-seed{seed}"
