"""Networks, data, losses and optimizers of one's own, from Python: on one worker, on ranks and on replicas."""

import json
import threading
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.cli.evaluate import show
from shoal.config import EvaluateConfig
from shoal.data import BatchOrder
from shoal.errors import CheckpointError, ConfigError, DataError, InputError, ModelError
from shoal.training.learning_rate import rate_at
from shoal.using.testing import start
from tests.cli.commands import as_ranks, begin

CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


class Net(nn.Module):
    def __init__(self, input: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(input[0], 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))
        return scores


def weighted(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, weight=CLASS_WEIGHTS, label_smoothing=0.1)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, each with its own rate."""
    *body, weight, bias = parameters
    groups: list[dict[str, Any]] = [{"params": [*body, weight]}, {"params": [bias], "lr": 0.002}]
    return torch.optim.AdamW(groups, lr=0.01)


def one_rate(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def samples(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(count)
    y = torch.arange(count) % 3
    return TensorDataset(torch.randn(count, 1, 8, 8, generator=drawn) + y.view(-1, 1, 1, 1) / 2, y)


def job(out: Path, **changes: Any) -> Any:
    own = {"model": Net, "data": (samples(55), samples(30)), "loss": weighted, "optimizer": adam}
    return {**own, "batch": 11, "epochs": 2, "threads": 1, "seed": 3, "out": out, **changes}


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[shoal.RunResult, Path]:
    """The run on one worker."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return shoal.train(**job(folder)), folder


def test_one_worker_does_what_a_plain_loop_does(alone: tuple[shoal.RunResult, Path]) -> None:
    torch.manual_seed(3)
    net, data = Net((1, 8, 8), 3), samples(55)
    optimizer = adam(net.parameters())
    order = BatchOrder(samples=55, batch=11, seed=3)
    losses = []
    for step in range(10):
        x, y = data[torch.from_numpy(order.indices(*divmod(step, 5)))]
        rate = rate_at(step, peak=0.01, schedule="cosine", warmup_steps=0, total_steps=10)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, rate * 0.002 / 0.01
        optimizer.zero_grad()
        loss = weighted(net(x), y)
        torch.autograd.backward(loss)
        losses.append(loss.item())
        optimizer.step()
    result, folder = alone
    assert result.final_loss == pytest.approx(sum(losses[5:]) / 5, rel=1e-6)
    for name, tensor in weights(folder).items():  # to rounding: here torch has all threads
        torch.testing.assert_close(tensor, net.state_dict()[name], rtol=1e-4, atol=1e-6)
    assert (result.model, result.data) == ("python:tests.test_own_objects.Net", f"python:{name_of(data)}")
    kept = json.loads((folder / "objects.json").read_text())
    assert kept == {
        "schema": "shoal.objects/1",
        "model": "python:tests.test_own_objects.Net",
        "data": f"python:{name_of(data)}",
        "loss": "python:tests.test_own_objects.weighted",
        "optimizer": "python:tests.test_own_objects.adam",
    }


def name_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@pytest.mark.parametrize("plan", ["data", pytest.param("spatial", marks=pytest.mark.thorough)])
def test_unequal_shares_of_ranks_give_one_devices_run(
    plan: str, alone: tuple[shoal.RunResult, Path], tmp_path: Path
) -> None:
    result = shoal.train(
        **job(tmp_path / "run", workers=2, plan=plan, loss=nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1))
    )
    wanted, folder = alone
    assert result.final_loss == pytest.approx(wanted.final_loss, rel=1e-5)
    assert result.test_accuracy == wanted.test_accuracy
    for name, tensor in weights(folder).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], tensor, rtol=1e-3, atol=1e-4)


def test_replicas_take_a_module_with_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(8)
    net = Net((1, 8, 8), 3)
    given = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    common = {"model": net, "loss": None, "optimizer": one_rate, "batch": 10, "batch_norm": "local", "epochs": 1}
    loaders = tuple(DataLoader(samples(count), batch_size=10, shuffle=True) for count in (40, 30))
    result = shoal.train(**job(tmp_path / "two", **{**common, "data": loaders, "exchange": "allreduce", "workers": 2}))
    assert (result.replicas, result.batch, result.exchange) == (2, 10, "allreduce")
    assert all(torch.equal(tensor, given[name]) for name, tensor in net.state_dict().items())
    wanted = shoal.train(**job(tmp_path / "one", **{**common, "data": (samples(40), samples(30))}))
    assert result.final_loss == pytest.approx(wanted.final_loss, rel=0.2)  # each replica normalises its own half


THEMSELVES = {"dasgd", "easgd", "admm", "gossip", "local"}
"""Exchanges whose replicas step by the optimizer that they were given."""


@pytest.mark.parametrize(
    "exchange",
    [
        "gossip",
        "downpour",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("sync", "backup", "dasgd", "softsync", "hogwild", "easgd", "admm", "local")
        ),
    ],
)
def test_other_exchanges_take_objects_too_or_say_what_they_cannot_do(exchange: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"batch": 8, "epochs": 1, "loss": weighted, "exchange": exchange, "replicas": 2}
    result = shoal.train(**job(tmp_path / "run", **own, optimizer=plain_sgd))
    assert (result.replicas, result.exchange, result.samples) == (2, exchange, 48)
    given = {name: value for name, value in job(tmp_path).items() if name in ("model", "data", "loss")}
    again = shoal.resume(tmp_path / "run", {"epochs": 2}, **given, optimizer=plain_sgd)
    assert again.samples == 96
    if exchange not in THEMSELVES:
        with pytest.raises(ConfigError, match="servers step in the place of the optimizer, as SGD"):
            shoal.train(**job(tmp_path / "refused", **own, optimizer=one_rate))


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02)


def test_a_run_goes_on_with_the_same_objects_only(tmp_path: Path) -> None:
    steady = {"schedule": "constant"}
    shoal.train(**job(tmp_path / "whole", **steady))
    folder = tmp_path / "half"
    shoal.train(**job(folder, epochs=1, **steady))
    own = {name: value for name, value in job(folder).items() if name in ("model", "data", "loss", "optimizer")}
    again = shoal.resume(folder, {"epochs": 2}, **own)
    assert again.steps == 10
    assert all(torch.equal(tensor, weights(tmp_path / "whole")[name]) for name, tensor in weights(folder).items())
    with pytest.raises(CheckpointError, match=r"with a loss of one's own, tests.*weighted.*\n.*shoal.resume\('"):
        shoal.resume(folder, {"epochs": 3}, **{**own, "loss": None})
    with pytest.raises(CheckpointError, match=r"begun with the optimizer .*adam, now it is .*one_rate"):
        shoal.resume(folder, {"epochs": 3}, **{**own, "optimizer": one_rate})
    run = begin(tmp_path, "shoal", "train", "--resume", str(folder), "--epochs", "3")
    _, err = run.communicate(timeout=100)
    assert run.returncode == 2
    assert "Go on from Python with the same objects: shoal.resume(" in err.replace("\n", " ")


def test_a_later_test_says_that_its_loss_is_not_the_runs_own(tmp_path: Path) -> None:
    def doubled(scores: Tensor, target: Tensor) -> Tensor:
        return 2 * F.cross_entropy(scores, target)

    common: dict[str, Any] = {"model": "lenet5", "data": "synthetic:32", "input": (1, 28, 28), "batch": 16, "epochs": 1}
    result = shoal.train(**common, loss=doubled, out=tmp_path / "own")
    tested = start(tmp_path / "own", EvaluateConfig())
    assert tested.own_loss is not None
    assert tested.own_loss.endswith("doubled")
    assert tested.loss == pytest.approx(result.test_loss / 2)
    show(tested, Console(file=(printed := StringIO()), width=80))
    assert "trained with another loss" in printed.getvalue()
    shoal.train(**common, out=tmp_path / "usual")
    assert start(tmp_path / "usual", EvaluateConfig()).own_loss is None


def test_names_and_settings_may_be_keywords(tmp_path: Path) -> None:
    result = shoal.train(
        model="lenet5", data="synthetic:32", input=(1, 28, 28), batch=16, epochs=1, out=tmp_path / "run"
    )
    assert (result.model, result.data, result.steps) == ("lenet5", "synthetic:32", 2)
    assert not (tmp_path / "run" / "objects.json").exists()


class Locked(TensorDataset):
    """Samples that another process cannot have."""

    def __init__(self) -> None:
        super().__init__(*samples(20).tensors)
        self.lock = threading.Lock()


class LockedNet(Net):
    def __init__(self) -> None:
        super().__init__((1, 8, 8), 3)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"data": (Locked(), Locked())},
            r"the data that was given cannot be sent to other .*\nGive a function",
        ),
        ({"model": LockedNet()}, r"the module that was given cannot be copied.*\nGive a function"),
    ],
)
def test_what_cannot_be_sent_is_named(changes: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        shoal.train(**job(tmp_path / "run", workers=2, **changes))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, ModelError, "is a sum: of one sample it is"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, ModelError, r"returns a tensor of the shape \(2,\), not one"),
        ({"loss": nn.BCELoss()}, ModelError, "raised ValueError"),
        ({"loss": "cross_entropy"}, ConfigError, "losses have none"),
        ({"loss": 3}, ConfigError, "loss = int does not work"),
        ({"lr": 0.1}, ConfigError, "lr = 0.1 is given beside an optimizer of your own"),
        ({"optimizer": lambda _: 3}, ConfigError, "returned int, not a torch.optim.Optimizer"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1)}, ConfigError, "optimizer = SGD does not work"),
        (
            {"exchange": "downpour", "batch": 10, "workers": 2, "optimizer": one_rate},
            ConfigError,
            "do what AdamW does",
        ),
        ({"exchange": "local", "batch": 10, "workers": 2}, ConfigError, "AdamW have 0.01 and 0.002"),
        ({"model": Net((1, 8, 8), 3), "model_options": {"width": 3}}, ConfigError, "are for a factory"),
        ({"model": 3}, ConfigError, "model = int does not work"),
        ({"model": lambda: 3}, ModelError, "returned int, not a torch.nn.Module"),
        ({"model": Net((1, 8, 8), 4)}, ModelError, r"returns \(1, 4\) for one sample"),
        ({"data": (samples(20),)}, DataError, "is not a training and a test part"),
        ({"data": (DataLoader(samples(20), 5, shuffle=True), samples(9))}, ConfigError, "batch = 11, but the loader"),
        ({"data": "digits", "loader_workers": 2}, ConfigError, "and none was given"),
        ({"epohcs": 3}, ConfigError, "Did you mean 'epochs'"),
        ({"config": shoal.TrainConfig(epochs=1)}, ConfigError, "is given beside a TrainConfig"),
    ],
)
def test_what_does_not_work_is_named(changes: Any, error: type[Exception], said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        shoal.train(**job(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


SCRIPT = """
import sys
import torch
import shoal
from tests.test_own_objects import Net, job
if sys.argv[2] == "other":
    torch.manual_seed(int(__import__("os").environ["RANK"]))
print(shoal.train(**job(sys.argv[1], model=Net if sys.argv[2] == "factory" else Net((1, 8, 8), 3))).test_accuracy)
"""


@pytest.mark.parametrize(("which", "code"), [("factory", 0), pytest.param("other", 1, marks=pytest.mark.thorough)])
def test_under_torchrun_every_rank_has_its_own_objects(which: str, code: int, tmp_path: Path) -> None:
    """In ranks that have its variables."""
    (tmp_path / "script.py").write_text(SCRIPT)
    _, err = as_ranks(tmp_path, 2, tmp_path / "script.py", str(tmp_path / "run"), which, code=code)
    if code:
        assert "does not have the same weights on all ranks" in err
    else:
        assert (tmp_path / "run" / "result.json").exists()
