"""What ranks hold in a step, as torch's allocator notes it, beside what the model of memory says. Runs inside ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from shoal.execution.laying import capture_modes, lay
from shoal.finding.race import example_of
from shoal.lowering.boundary import Boundary, even_shares, step_program
from shoal.planning.resolve import resolve
from shoal.planning.step_memory import step_memories
from shoal.transport import Transport
from shoal.zoo.by_name import build


def most_held(step: Callable[[], None]) -> int:
    """The most bytes of tensors that live at a time, of those that a step makes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()
    results: Any = profiled.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def held(
    net: str, options: Mapping[str, Any], shape: tuple[int, ...], plan: str, *, recompute: bool, segments: bool = False
) -> tuple[int, int]:
    """(bytes that a step's tensors take at most, bytes that were predicted of them) on this rank.

    Gradients are counted, parameters are not; the caller's input is neither.
    """
    torch.manual_seed(0)
    target = torch.zeros((shape[0], *shape[2:]), dtype=torch.int64) if segments else None
    captured = capture_modes(build(net, **options), shape, F.cross_entropy, target)
    transport = Transport()
    laid = lay(captured, plan, transport, io="tile", seed=0, bucket_bytes=1 << 20, recompute=recompute, factors="never")
    graph = captured.graphs[True]
    args, kwargs = example_of(laid, captured, graph)

    def step() -> None:
        for parameter in laid.parameters():
            parameter.grad = None
        torch.autograd.backward(laid(*args, **kwargs).sum())

    step()  # makes what is made once
    for parameter in laid.parameters():
        parameter.grad = None
    measured = most_held(step)
    world, rank = transport.world, transport.rank
    shares = even_shares(graph.batch, world)
    program = step_program(graph, resolve(plan, graph, world).cuts, Boundary("tile", world), shares, losses=True)
    sizes = {name: 4 if spec.differentiable else 8 for name, spec in {**graph.specs, **graph.states}.items()}
    (memory,) = step_memories(program, [rank], sizes, optimizer_slots=0, recompute=recompute)
    parameters = sum(parameter.nbytes for parameter in laid.parameters())
    return measured, memory.total - memory.libraries - parameters
