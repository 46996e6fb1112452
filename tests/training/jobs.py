"""What runs inside the ranks: the trainer's own steps under a plan, beside one device's, in float64."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import TrainConfig
from shoal.training import checkpoint
from shoal.training.checkpoint import Progress
from shoal.training.job import Job, equipped, prepare
from shoal.training.step import autocast, train_step
from shoal.transport import Transport

STEPS = 3


class Net(nn.Module):
    """Two convolutions and a head in float64: under every plan some layer sends something."""

    def __init__(self, channels: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self._dropout = dropout
        self.a = nn.Conv2d(channels, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x.to(self.a.weight.dtype)))
        x = F.relu(self.b(x))
        if self._dropout:
            x = F.dropout(x, self._dropout, self.training)
        result: Tensor = self.head(x.mean((2, 3)))
        return result


def net(*, input: tuple[int, ...], classes: int, dtype: str = "float64", dropout: float = 0.0) -> nn.Module:
    """The factory that `--model` names."""
    return Net(input[0], classes, dropout).to(getattr(torch, dtype))


def settings(**more: Any) -> TrainConfig:
    common = {"model": f"{Path(__file__)}:net", "data": "synthetic", "input": (3, 8, 8), "classes": 4, "batch": 8}
    buckets = {} if more.get("plan") in ("fsdp2", "post-local-sgd") else {"bucket_bytes": 1 << 16}
    return TrainConfig(**{**common, **buckets, "threads": 1, "device": "cpu", **more})


def trained(job: Job, steps: int = STEPS, first: int = 0) -> float:
    """Take some steps of the first epoch; the sum of their losses."""
    total = 0.0
    for step in range(first, first + steps):
        rate = job.config.lr / (1 + step)
        loss = train_step(job, job.batches(0, step), rate=rate)
        total += sum(row[0] for row in job.network.gather([float(loss)]))
    return total


def state_of(job: Job) -> dict[str, Tensor]:
    """Everything that training changed, whole, on rank 0."""
    model, optimizer = job.network.states(job.optimizer)
    remembered = {f"{name}/{key}": value for name, kept in optimizer.items() for key, value in kept.items()}
    averages = {} if job.average is None else job.network.put_together(job.average.parts)
    with job.tested():
        tested, _ = job.network.states(job.optimizer)
        tested = {f"{name}/tested": value.clone() for name, value in tested.items()}
    return {
        **model,
        **{key: value for key, value in remembered.items() if value is not None},
        **{f"{name}/average": value for name, value in averages.items()},
        **tested,
    }


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest of any tensor, relative to its largest element."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-6)) for name in theirs
    )


def beside_one_device(plan: str, kinds: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(difference of losses, of states) between all ranks under a plan and one device, for each kind of training."""
    config = settings(plan=plan, workers=Transport().world, label_smoothing=0.1)
    both = prepare(config, Transport(alone=True)), prepare(config, Transport())
    first = {name: tensor.clone() for name, tensor in both[0].network.module.state_dict().items()}
    found = []
    for kind in kinds:
        alone, together = (anew(job, settings(**kind), first) for job in both)
        losses = [trained(job) for job in (alone, together)]
        states = [state_of(job) for job in (alone, together)]
        apart = difference(states[1], states[0]) if together.network.rank == 0 else 0.0
        found.append((abs(losses[1] - losses[0]) / losses[0], apart))
    return found


def in_lower_precision(plan: str) -> dict[str, tuple[float, float]]:
    """For each precision, how far what was learned differs from one device's, and from full precision's.

    Relative to the largest change of each tensor. With two batches a step, and bytes that were predicted sent.
    """
    config = settings(plan=plan, workers=Transport().world, model_options={"dtype": "float32"})
    both = prepare(config, Transport(alone=True)), prepare(config, Transport())
    first = {name: tensor.clone() for name, tensor in both[0].network.module.state_dict().items()}
    learned: dict[str, list[dict[str, Tensor]]] = {}
    for amp in ("off", "bf16", "fp16"):
        for job in both:
            job = anew(job, settings(amp=amp, accumulate=2, clip=0.5), first)
            before = job.network.bytes_sent()
            trained(job)
            sent = job.network.bytes_sent() - before
            with autocast(job):
                assert sent == STEPS * job.network.bytes_per_step(2), amp
            model, _ = job.network.states(job.optimizer)
            changes = {name: tensor - first[name] for name, tensor in model.items()}
            learned.setdefault(amp, []).append({name: change.clone() for name, change in changes.items()})
    if Transport().rank:
        return {}
    full, _ = learned["off"]
    return {amp: (difference(together, alone), difference(alone, full)) for amp, (alone, together) in learned.items()}


def anew(job: Job, config: TrainConfig, first: Mapping[str, Tensor]) -> Job:
    """The same network, as it was at first, in another training: laying it over ranks anew would take longer."""
    job.network.load(first, {}, job.optimizer, batches=0)
    return equipped(config, job.splits, job.network, job.loader, job.device)


def goes_on(plan: str, path: Path, kind: dict[str, Any]) -> bool:
    """Whether a run that is saved and goes on in another job is the run that was never stopped, bit for bit."""
    config = settings(**kind, plan=plan, workers=Transport().world)
    whole, stopped, resumed = (prepare(config, Transport()) for _ in range(3))
    trained(whole)
    trained(stopped, STEPS - 1)
    checkpoint.save(path, stopped, replace(Progress.start(stopped.device), steps=STEPS - 1))
    Transport().gather_numbers([])  # until rank 0 has written it
    assert checkpoint.restore(path, resumed).steps == STEPS - 1
    trained(resumed, 1, first=STEPS - 1)
    assert kind.get("ema") is None or resumed.average is not None
    ours, theirs = state_of(resumed), state_of(whole)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def post_local(kind: dict[str, Any]) -> tuple[float, float, float, float]:
    """One number of the weights after some steps on its own: of this rank, of the other, their mean, and as tested."""
    job = prepare(settings(plan="post-local-sgd", workers=2, **kind), Transport())
    trained(job)
    weight = job.network.module.get_parameter("head.bias")
    own, other = (row[0] for row in job.network.gather([float(weight[0])]))
    mean = job.network.states(job.optimizer)[0]["head.bias"][0]
    with job.network.evaluating():
        tested = float(weight[0])
    assert float(weight[0]) == (own, other)[job.network.rank]  # it goes on with its own
    return own, other, float(mean), tested
