"""Profile: time the tiles that a search will ask about, the links, and what a step costs besides. A collective."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import psutil
import torch
from torch import nn

from shoal.cluster import Cluster, Device, Efficiency
from shoal.execution.laying import capture_modes, lay
from shoal.execution.randomness import LayerRandom
from shoal.operators.base import Op, Part, Rule
from shoal.operators.registry import rule_for
from shoal.planning.costs import first_part
from shoal.planning.stages import Stage
from shoal.profiling.kernels import kernel_key, low, time_kernel
from shoal.profiling.links import here, measure_levels
from shoal.simulating.speeds import KernelTime
from shoal.timings import Timings
from shoal.transport import Transport

OnMeasured = Callable[[int, int, str], None]
"""Told (done, of how many, what is next)."""


def tiles_to_time(
    stages: Sequence[Stage], flowing: frozenset[str], dtype: str
) -> Iterator[tuple[str, Op, Rule, Part, frozenset[str], bool]]:
    """Every distinct kernel of cuts along one axis, and of whole layers; cuts along several are composed of these."""
    seen: set[str] = set()
    for stage in stages:
        for choice in stage.choices:
            for op, cut in zip(stage.ops, choice, strict=True):
                if len(cut.degrees) > 1:
                    continue
                rule, part = rule_for(op), first_part(op, cut)
                letters = frozenset(letter for letter, _ in cut.degrees)
                input_grad = any(read in flowing for read in op.layer.reads)
                key = kernel_key(op, rule, part, letters, dtype, input_grad=input_grad)
                if key not in seen and op.layer.output.differentiable:
                    seen.add(key)
                    yield key, op, rule, part, letters, input_grad


def profile(
    stages: Sequence[Stage],
    flowing: frozenset[str],
    transport: Transport,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    known: Timings | None = None,
    progress: OnMeasured = lambda *_: None,
) -> Timings:
    """Timings for a search over these stages, all ranks at work at once as in training.

    `flowing`: the values that get a gradient.
    `known`: what was measured before on this machine; only what is missing is measured. Minutes for large networks.
    """
    timings = known if known is not None else measure_machine(transport, device, progress)
    name = str(dtype).removeprefix("torch.")
    wanted = [tile for tile in tiles_to_time(stages, flowing, name) if tile[0] not in timings.kernels]
    measured: dict[str, KernelTime] = {}
    for number, (key, op, rule, part, letters, input_grad) in enumerate(wanted):
        progress(number, len(wanted), op.layer.name)
        measured[key] = time_kernel(
            op,
            rule,
            part,
            letters,
            dtype,
            device,
            lambda layer: LayerRandom(0, layer, 0),
            input_grad=input_grad,
            together=lambda seconds: max(row[0] for row in transport.gather_numbers([seconds])),
        )
    progress(len(wanted), len(wanted), "")
    numbers = [seconds for time in measured.values() for seconds in (time.forward, time.to_input, time.to_weights)]
    rows = transport.gather_numbers(numbers) if numbers else []
    means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    return timings.with_kernels(
        {key: (means[3 * i], means[3 * i + 1], means[3 * i + 2]) for i, key in enumerate(measured)}
    )


def measure_machine(transport: Transport, device: torch.device, progress: OnMeasured = lambda *_: None) -> Timings:
    """Everything but kernels: links, overheads, the optimizer, copies. Some seconds."""
    progress(0, 1, "links")
    levels = measure_levels(transport, device)
    progress(0, 1, "overheads")
    layer, step = _overheads(transport, device)
    update, copy = _per_byte(transport, device)
    cluster = Cluster(name="this machine", device=_device(device), levels=levels)
    return Timings(
        cluster=cluster,
        ranks=transport.world,
        threads=torch.get_num_threads(),
        layer_overhead=layer,
        step_overhead=step,
        update_per_byte=update,
        copy_per_byte=copy,
        machine=here(),
        versions={"torch": torch.__version__, "python": platform.python_version()},
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def _device(device: torch.device) -> Device:
    """By name; its speed is in the kernels, so that the numbers here are only rough."""
    memory = psutil.virtual_memory().total
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    a = torch.rand(1024, 1024, device=device)
    seconds = _time(lambda: a @ a, 5)
    b = torch.empty(16 << 20, device=device)
    moving = _time(lambda: b.add_(1), 5)
    return Device(
        name=str(device),
        memory=int(memory),
        flops=2 * 1024**3 / seconds,
        memory_bandwidth=2 * b.nbytes / moving,
        efficiency=Efficiency(peak_fraction=1.0, half=0.0, launch=0.0),
        source="measured: a product of 1024 x 1024, an addition in place of 64 MiB",
    )


def _time(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return low(times)


def _overheads(transport: Transport, device: torch.device) -> tuple[float, float]:
    """(seconds per layer beyond its kernel, seconds per step), from small networks of two depths."""
    seconds = []
    depths = (4, 36)
    for depth in depths:
        features = 16
        layers: list[nn.Module] = [nn.Linear(features, features), *(nn.ReLU() for _ in range(depth))]
        captured = capture_modes(nn.Sequential(*layers).to(device), (2 * transport.world, features))
        model = lay(captured, "data", transport, seed=0)
        x = torch.rand(2, features, device=device)
        times = []
        for repeat in range(12):
            transport.gather_numbers([0.0])
            start = time.perf_counter()
            model(x).sum().backward()
            if repeat > 1:
                times.append(time.perf_counter() - start)
        seconds.append(low(times))
    x = torch.rand(2, 16, device=device, requires_grad=True)
    grad = torch.ones(2, 16, device=device)
    kernel = _time(lambda: torch.autograd.grad(torch.relu(x), x, grad), 20)
    slope = (seconds[1] - seconds[0]) / (depths[1] - depths[0])
    layer = max(0.0, slope - kernel)
    step = max(0.0, seconds[0] - slope * (depths[0] + 1))
    rows = transport.gather_numbers([layer, step])
    return max(row[0] for row in rows), max(row[1] for row in rows)


def _per_byte(transport: Transport, device: torch.device) -> tuple[float, float]:
    """(seconds of the optimizer, seconds of a copy) per byte, all ranks at once."""
    parameter = nn.Parameter(torch.zeros(8 << 20, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.0, momentum=0.9, fused=True)
    transport.gather_numbers([0.0])
    update = _time(lambda: optimizer.step(), 5) / parameter.nbytes
    source = torch.zeros(4 << 20, device=device)
    target = torch.empty_like(source)
    transport.gather_numbers([0.0])
    copy = _time(lambda: target.copy_(source), 5) / source.nbytes
    rows = transport.gather_numbers([update, copy])
    return max(row[0] for row in rows), max(row[1] for row in rows)
