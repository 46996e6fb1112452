"""What a comparison runs, decided without running anything."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.cli.compare_table import _Growing
from shoal.comparing.cells import (
    BASELINE,
    TESTS,
    Request,
    cells,
    steps_between_tests,
    steps_of_own,
    strategies,
)
from shoal.comparing.timing import can_be_timed, whole_periods
from shoal.comparison import Comparison
from shoal.config import TORCH_STRATEGIES, CompareConfig, TrainConfig
from shoal.errors import ConfigError
from shoal.exchanges import EXCHANGE_NAMES, parse_exchange


def asked(recipes: dict[str, dict[str, Any]] | None = None, **settings: Any) -> Request:
    own = {name: value for name, value in settings.items() if name in CompareConfig.model_fields}
    train = {name: value for name, value in settings.items() if name not in own}
    return Request(CompareConfig(**own), train, recipes or {})


def made(recipes: dict[str, dict[str, Any]] | None = None, **settings: Any) -> dict[str, TrainConfig]:
    return {strategy.name: strategy.config for strategy in strategies(asked(recipes, **settings))}


def test_plans_are_over_all_workers() -> None:
    found = made(plans="data,owt,ddp", workers=4)
    assert list(found) == [BASELINE, "data", "owt", "ddp"]
    assert {name: (config.workers, config.replicas) for name, config in found.items()} == {
        BASELINE: (1, 1),
        **dict.fromkeys(["data", "owt", "ddp"], (4, 1)),
    }


def test_plans_with_exchanges_are_inside_replicas_and_torchs_stand_alone() -> None:
    found = made(plans="data,owt,ddp", exchanges="allreduce,downpour,none", baseline=False)
    crossed = [f"{plan} + {exchange}" for plan in ("data", "owt") for exchange in ("allreduce", "downpour")]
    assert set(found) == {*crossed, "data", "owt", "ddp"}
    for name in crossed:
        assert (found[name].workers, found[name].replicas) == (4, 2), name
    assert (found["ddp"].workers, found["ddp"].exchange) == (4, None)
    assert (found["owt"].workers, found["owt"].exchange) == (4, None)


def test_one_plan_has_replicas_of_one_worker_and_the_exchanges_names() -> None:
    found = made(exchanges="allreduce,local", workers=3, baseline=False)
    assert {name: config.replicas for name, config in found.items()} == {"allreduce": 3, "local": 3}


def test_untold_it_compares_what_people_ask_first() -> None:
    assert list(made()) == [BASELINE, "data", "auto", "ddp"]
    assert list(made({"mine": {"plan": "owt", "workers": 2}})) == [BASELINE, "mine"]


def test_options_win_over_recipes_but_for_what_makes_the_strategy() -> None:
    found = made({"mine": {"workers": 2, "epochs": 9, "exchange": "easgd"}}, epochs=2, lr=0.01)
    assert (found["mine"].epochs, found["mine"].lr, found["mine"].exchange) == (2, 0.01, "easgd")


@given(
    st.sets(st.sampled_from(["data", "owt", *TORCH_STRATEGIES]), min_size=1),
    st.sets(st.sampled_from([name for name in EXCHANGE_NAMES if name != "backup"])),
    st.integers(2, 6),
)
def test_samples_are_equal_whatever_is_compared(plans: set[str], exchanges: set[str], replicas: int) -> None:
    request = asked(plans=sorted(plans), exchanges=sorted(exchanges), workers=2 * replicas)
    found = strategies(request)
    for strategy in found:
        config = strategy.config
        assert config.samples_per_step == found[0].config.samples_per_step
        assert config.threads == found[0].config.threads
        options = config.exchange_settings()
        assert options is None or config.replica_batch * options.parts_of_batch(config.replicas) == config.batch
    between = steps_between_tests(found[0].config, 4000, 1000)
    for cell in cells(found, (0, 3), between):
        config = TrainConfig(**cell.settings)
        options = config.exchange_settings()
        own = config.batch if options is None or options.same_batch else config.replica_batch
        assert config.eval_steps is not None
        assert config.eval_steps * own == between * config.batch, cell.strategy
    assert len({cell.folder for cell in cells(found, (0, 3), between)}) == 2 * len(found)


@given(st.integers(1, 20), st.integers(64, 100_000), st.integers(1, 20_000))
def test_tests_are_some_and_cheap(epochs: int, train: int, test: int) -> None:
    config = TrainConfig(epochs=epochs)
    steps, between = epochs * (train // 64), steps_between_tests(config, train, test)
    assert 1 <= between <= max(1, steps)
    assert steps // between <= 2 * TESTS or steps < 2 * TESTS


def test_steps_of_asynchronous_runs_are_those_of_a_replica() -> None:
    assert steps_of_own(TrainConfig(workers=4, exchange="downpour"), 10) == 40
    assert steps_of_own(TrainConfig(workers=4, exchange="allreduce"), 10) == 10
    assert steps_of_own(TrainConfig(workers=4), 10) == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exchanges": "downpuor"}, "there is no exchange 'downpuor'"),
        ({"plans": "data,owt", "exchanges": "local", "workers": 2}, "2 workers are too few for two replicas of two"),
        ({"plans": "data,owt", "exchanges": "local", "workers": 2, "replicas": 2}, "too few for two replicas of two"),
        ({"exchanges": "local", "workers": 3, "replicas": 2}, "3 workers cannot be 2 replicas"),
        ({"exchanges": "local", "workers": 1}, "1 workers are too few for two replicas"),
        ({"plans": "data", "replicas": 2}, "replicas = 2 keep together by no exchange"),
        ({"plans": "data,data"}, "the plan 'data' is given twice"),
        ({"seeds": "1,1"}, "the seed 1 is given twice"),
        ({"plans": "data", "plan": "owt"}, "plan = 'owt' is not for all runs alike"),
        ({"patience": 2}, "patience = 2 lets runs stop early"),
        ({"rates": "0.1,0.2", "lr": 0.1}, "lr = 0.1 is given beside rates"),
        ({"plans": "ddp", "workers": 2, "batch": 63}, "batch = 63 is not divided evenly by the 2 workers of ddp"),
        ({"plans": "data", "momentum": 2}, "momentum = 2 does not work"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategies(asked(**settings))


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ({"ddp": {"plan": "data", "workers": 2}}, "two strategies are called 'ddp'"),
        (
            {"mine": {"model": "alexnet"}},
            "mine has model = 'alexnet' and one worker 'lenet5': that is not equal samples",
        ),
        ({"mine": {"batch": 32, "accumulate": 3}}, "samples_per_step"),
    ],
)
def test_recipes_that_cannot_be_compared(recipes: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategies(asked(recipes, plans="data,ddp"))


def test_a_request_survives_its_file_and_says_how_to_repeat_it() -> None:
    request = asked(plans="data,ddp", seeds="0,1", baseline=False, epochs="2", input="1,8,8")
    again = Request.from_dict(request.to_dict(), Path("there"))
    assert again.to_dict() == request.to_dict()
    assert (
        again.to_dict()
        == asked(plans=("data", "ddp"), seeds=(0, 1), baseline=False, epochs=2, input=(1, 8, 8)).to_dict()
    )
    assert request.command(Path("there")) == (
        "shoal compare --plans data,ddp --seeds 0,1 --no-baseline --input 1,8,8 --epochs 2 --out there"
    )


def test_turns_last_whole_periods() -> None:
    assert whole_periods(parse_exchange("local", {"period": 8}), 3) == 8
    assert whole_periods(parse_exchange("downpour", {"n_sync": 4}), 9) == 12
    assert whole_periods(parse_exchange("allreduce", {}), 3) == 3


def test_who_cannot_take_turns_says_why() -> None:
    assert can_be_timed(TrainConfig(workers=2), 2) is None
    assert can_be_timed(TrainConfig(), 2) is None
    assert "3 workers, and the others have 2" in str(can_be_timed(TrainConfig(workers=3), 2))
    late = TrainConfig(workers=2, exchange="downpour", exchange_options={"warm_start": 5})
    assert "first 5 batches" in str(can_be_timed(late, 2))
    dropping = TrainConfig(workers=3, exchange="backup", exchange_options={"backups": 1})
    assert "drops gradients" in str(can_be_timed(dropping, 3))


def test_the_live_table_fits_and_says_how_far_each_run_is() -> None:
    console = Console(file=StringIO(), width=80, force_terminal=True, color_system=None)
    table = _Growing(console)
    made_cells = cells(strategies(asked(plans="data,owt", exchanges="allreduce,downpour")), (0,), 5)
    table._comparison = Comparison(command="", cells=made_cells)
    table.run_began(made_cells[1], "starts anew")
    table.run_starting(made_cells[1], "2 of 4 workers have loaded data and network")
    table.run_wrote(made_cells[1], {"event": "steps", "samples": 640, "samples_per_sec": 1234.5, "loss": 1.0})
    table.run_wrote(made_cells[1], {"event": "test", "samples": 1280, "test_accuracy": 0.5})
    console.print(table._drawn())
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (line,) = [line for line in lines if line.startswith("data + allreduce, seed 0")]
    assert line.split()[-4:] == ["1,280", "samples", "0.5000", "1,234"]
