"""What runs inside the ranks: the trainer's own steps under a plan, beside one device's, in float64."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal import zoo
from shoal.config import TrainConfig
from shoal.lowering import owners
from shoal.partition import slices, whole
from shoal.training.checkpoints.folder import CheckpointFolder, new_token
from shoal.training.checkpoints.job_state import take_snapshot
from shoal.training.checkpoints.progress import Progress
from shoal.training.checkpoints.restoring import restore
from shoal.training.checkpoints.saving import Saver
from shoal.training.checkpoints.tensor_files import Part
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
    """A job's settings. A plan such as `data cut` is `data` with the optimizer's state cut."""
    plan, cut, _ = more.get("plan", "data").partition(" cut")
    if cut:
        more = {**more, "plan": plan, "optimizer_state": "cut"}
    common = {"model": f"{Path(__file__)}:net", "data": "synthetic", "input": (3, 8, 8), "classes": 4, "batch": 8}
    buckets = {} if more.get("plan") in ("fsdp2", "post-local-sgd") else {"bucket_bytes": 1 << 16}
    return TrainConfig(**{**common, **buckets, "threads": 1, "device": "cpu", **more})


def prepared(config: TrainConfig, transport: Transport) -> Job:
    """Such a job; if the optimizer's state is cut, that of parameters as small as those here too."""
    with patch.object(owners, "LEAST_ELEMENTS", 1):
        return prepare(config, transport)


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
    saved = put_together(job)
    with job.tested():
        tested = put_together(job)["model"]
    return {
        **saved["model"],
        **saved["optimizer"],
        **{f"{name}/average": value for name, value in saved["average"].items()},
        **{f"{name}/tested": value for name, value in tested.items()},
        **{f"{kind}/{name}": value for kind in saved if "worker" in kind for name, value in saved[kind].items()},
    }


def put_together(job: Job) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint of a job holds, by kind, whole, on all ranks."""
    own = {
        kind: {name: Part(part.tensor.clone(), part.place) for name, part in parts.items()}  # sent without the others
        for kind, parts in take_snapshot(job).tensors.items()
    }
    found: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "average": {}}
    for kinds in Transport().gather_objects(own) if job.network.ranks > 1 else [own]:
        for kind, parts in kinds.items():
            for name, part in parts.items():
                shape = part.place.shape
                full = found.setdefault(kind, {}).setdefault(name, torch.empty(shape, dtype=part.tensor.dtype))
                full[slices(part.place.box, whole(shape))] = part.tensor
    return found


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest of any tensor, relative to its largest element."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-6)) for name in theirs
    )


def beside_one_device(plan: str, kinds: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(difference of losses, of states) between all ranks under a plan and one device, for each kind of training."""
    config = settings(plan=plan, workers=Transport().world, label_smoothing=0.1)
    both = prepared(config, Transport(alone=True)), prepared(config, Transport())
    first = {name: tensor.clone() for name, tensor in both[0].network.module.state_dict().items()}
    found = []
    for kind in kinds:
        alone, together = (anew(job, settings(**kind), first) for job in both)
        losses = [trained(job) for job in (alone, together)]
        states = [state_of(job) for job in (alone, together)]
        apart = difference(states[1], states[0]) if together.network.rank == 0 else 0.0
        found.append((abs(losses[1] - losses[0]) / losses[0], apart))
    return found


def uneven_epochs(plan: str, kind: dict[str, Any]) -> tuple[float, float, list[int]]:
    """Two epochs whose last step is smaller: (difference of losses, of states) to one device, samples of each step."""
    config = settings(plan=plan, workers=Transport().world, last_batch="keep", **kind)
    alone, together = prepared(config, Transport(alone=True)), prepared(config, Transport())
    losses = [0.0, 0.0]
    for number, job in enumerate((alone, together)):
        for epoch in range(2):
            for step in range(job.steps_per_epoch):
                loss = train_step(job, job.batches(epoch, step), rate=0.05, sizes=job.sizes(step))
                losses[number] += sum(row[0] for row in job.network.gather([float(loss)]))
    states = [state_of(job) for job in (alone, together)]
    sizes = [sum(together.sizes(step)) for step in range(together.steps_per_epoch)]
    return abs(losses[1] - losses[0]) / losses[0], difference(states[1], states[0]), sizes


def in_lower_precision(plan: str) -> dict[str, tuple[float, float]]:
    """For each precision, how far what was learned differs from one device's, and from full precision's.

    Relative to the largest change of each tensor. With two batches a step, and bytes that were predicted sent.
    """
    config = settings(plan=plan, workers=Transport().world, model_options={"dtype": "float32"})
    both = prepared(config, Transport(alone=True)), prepared(config, Transport())
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
            model = put_together(job)["model"]
            changes = {name: tensor - first[name] for name, tensor in model.items()}
            learned.setdefault(amp, []).append({name: change.clone() for name, change in changes.items()})
    if Transport().rank:
        return {}
    full, _ = learned["off"]
    return {amp: (difference(together, alone), difference(alone, full)) for amp, (alone, together) in learned.items()}


def anew(job: Job, config: TrainConfig, first: Mapping[str, Tensor]) -> Job:
    """The same network, as it was at first, in another training: laying it over ranks anew would take longer."""
    job.network.load(lambda name, box: first[name][slices(box, whole(first[name].shape))], batches=0)
    return equipped(config, job.splits, job.network, job.loader, job.device)


def large_net(*, input: tuple[int, ...], classes: int, name: str) -> nn.Module:
    """A network of the zoo, small, in float64."""
    options = {"unet": {"width": 4, "depth": 2}}.get(name, {})
    network = zoo.build(name, input=input, classes=classes, options=options).double()
    return nn.Sequential(_Double(), network)


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def saved_after_two_steps(path: Path, plan: str, kind: dict[str, Any]) -> None:
    """A checkpoint after two steps under a plan; beside it what it must hold, and what the next three steps lead to."""
    job = prepared(settings(**kind, plan=plan, workers=Transport().world), Transport())
    trained(job, 2)
    _save(job, CheckpointFolder(path / "checkpoints"), 2)
    saved = put_together(job)
    trained(job, 3, first=2)
    reached = put_together(job)
    if Transport().rank == 0:
        torch.save({"saved": saved, "reached": reached}, path / "expected.pt")


def goes_on_from_each(paths: list[Path], plan: str, kind: dict[str, Any]) -> list[tuple[bool, float]]:
    """For each checkpoint: whether a job under this plan begins with what was saved, bit for bit; and how far its next
    three steps lead from those of the job that saved it.
    """
    job = prepared(settings(**kind, plan=plan, workers=Transport().world), Transport())
    found = []
    for path in paths:
        expected = torch.load(path / "expected.pt", mmap=True)
        job.optimizer.state.clear()
        restore(CheckpointFolder(path / "checkpoints").all()[-1], job)
        now = put_together(job)
        same = all(
            saved.keys() == now[what].keys() and all(torch.equal(now[what][name], saved[name]) for name in saved)
            for what, saved in expected["saved"].items()
        )
        trained(job, 3, first=2)
        reached = put_together(job)
        apart = max(difference(reached[what], there) for what, there in expected["reached"].items() if there)
        found.append((same, apart))
    return found


def _save(job: Job, folder: CheckpointFolder, steps: int) -> None:
    everyone = job.network.ranks > 1
    token = max(Transport().gather_objects(new_token()))
    if everyone or Transport().rank == 0:
        saver = Saver(folder, job, token=token, together=True, writing=lambda _: nullcontext())
        saver.save(replace(Progress.start(job.device), steps=steps))
        saver.finish()
    Transport().gather_numbers([])  # until rank 0 has written it


def goes_on(plan: str, path: Path, kind: dict[str, Any]) -> bool:
    """Whether a run that is saved and goes on in another job is the run that was never stopped, bit for bit."""
    config = settings(**kind, plan=plan, workers=Transport().world)
    whole, stopped, resumed = (prepared(config, Transport()) for _ in range(3))
    trained(whole)
    trained(stopped, STEPS - 1)
    folder = CheckpointFolder(path)
    _save(stopped, folder, STEPS - 1)
    (saved,) = folder.all()
    assert saved.damage() is None
    progress, told = restore(saved, resumed)
    assert (progress.steps, told) == (STEPS - 1, [])
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
    mean = job.network.held()["head.bias"].tensor[0]
    with job.network.evaluating():
        tested = float(weight[0])
    assert float(weight[0]) == (own, other)[job.network.rank]  # it goes on with its own
    return own, other, float(mean), tested


def beside_two_batch_sizes(plan: str) -> tuple[float, float]:
    """(difference of losses, of states) between the trainer and plain torch, whose linear layer steps after each lap.

    The batch is 7, and there are two ranks: 4 and 3 samples.
    """
    config = settings(plan=plan, workers=2, batch=7, momentum=0.9, weight_decay=0.01)
    job, alone = prepared(config, Transport()), prepared(config, Transport(alone=True))
    model = cast(Net, alone.network.module)  # of the file, which was loaded once more under another name
    front = torch.optim.SGD([*model.a.parameters(), *model.b.parameters()], lr=1.0, momentum=0.9, weight_decay=0.01)
    dense = torch.optim.SGD(model.head.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01)
    laps = [[0, 1, 2, 3], [4, 5, 6]] if plan == "owt:b1" else [[0, 1, 4, 5], [2, 3, 6]]
    expected = 0.0
    for step in range(STEPS):
        ((x, y),) = alone.batches(0, step)
        front.param_groups[0]["lr"], dense.param_groups[0]["lr"] = [config.lr / (1 + step) / part for part in (1, 2)]
        features = F.relu(model.b(F.relu(model.a(x.double())))).mean((2, 3))
        grad = torch.zeros_like(features)
        for samples in laps:
            part = features.detach()[samples].requires_grad_()
            loss = F.cross_entropy(model.head(part), y[samples])
            dense.zero_grad()
            torch.autograd.backward(loss)
            dense.step()
            assert part.grad is not None
            grad[samples] = part.grad * len(samples) / 7
            expected += float(loss) * len(samples) / 7
        front.zero_grad()
        torch.autograd.backward(features, grad)
        front.step()
    found = trained(job)
    full = put_together(job)["model"]
    assert job.optimizer.param_groups[0]["lr"] == config.lr / STEPS
    return abs(found - expected) / expected, difference(full, model.state_dict())
