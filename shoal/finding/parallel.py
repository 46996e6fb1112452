"""`shoal.parallelize`: from an nn.Module to one that stands where DistributedDataParallel(model) stood."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from shoal.errors import ConfigError, RunError
from shoal.execution.laying import capture_on_all, draft_on_all, lay
from shoal.execution.loss import Loss
from shoal.execution.module import ParallelModule
from shoal.execution.tree import made_whole
from shoal.finding.auto import choose_plan
from shoal.lowering.boundary import IO
from shoal.lowering.owners import OptimizerState
from shoal.plan import Plan, factors_option
from shoal.planning.strategies import AUTO
from shoal.transport import Transport


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    example: Any,
    plan: str | Path | Plan = "data",
    *,
    io: IO = "share",
    loss: Loss | None = None,
    target: Any = None,
    batch_norm: Literal["exact", "local"] = "exact",
    seed: int | None = None,
    bucket_bytes: int | None = None,
    recompute: bool | None = None,
    factors: Literal["auto", "always", "never"] | Sequence[str] = "auto",
    optimizer_state: OptimizerState = "whole",
    group: dist.ProcessGroup | None = None,
) -> ParallelModule:
    """Lay `model` over the ranks of `group` (all ranks unless given) as `plan` says, in place, as DDP wraps it.

    model         a module; or a function that makes it, or a module on the `meta` device: then no rank ever holds a
                  whole tensor that the plan cuts, and the weights are those of one device with rank 0's torch seed
    example       a tensor, or the shape, of the GLOBAL batch; a tuple of those for several inputs, or a dict of them by
                  the names of `forward`'s arguments. Flags and other plain values among them are part of the call
    plan          "data", "model", "owt", "spatial", "RxG" such as "2x2", a `Plan`, or the path of a plan file; "auto":
                  searched and raced here, minutes the first time, remembered then. "owt:b", "owt:c": linear layers in
                  laps over some samples at a time, which needs `loss`; "owt:b1", "owt:c1": see `after_lap`
    io            "share": each rank passes its own samples and gets their results, as with DDP; "whole": every rank
                  passes and gets the whole batch; "tile": each rank passes its `input_box` and gets its `output_box`
    loss          optional: in training `model(x, y)` returns the loss of this rank's share, and the scores may stay
                  cut by channel; `target` is an example of the global y where it is not class numbers. It is given
                  what the network returns, and y
    batch_norm    "exact": one device's statistics; "local": each sample share its own, as DDP does
    seed          of dropout; from rank 0's torch seed unless given. Masks depend on seed, layer and step, not on the
                  plan
    bucket_bytes  of gradient sums; measured on the link unless given
    recompute     whether activations are computed a second time in backward, and not kept; as the plan says unless
                  given
    factors       whether ranks send each other a linear layer's inputs and output gradients in the place of the sum of
                  its weight's gradient: "auto" where that takes less time, measured here; "always"; "never"; or the
                  names of the layers. Not for a weight that is used twice, nor on top of what `.grad` holds already
    optimizer_state  "whole": ranks that have the same part of a parameter all remember and step the same; "cut": each
                  of them some of its rows, so that gradients and what the optimizer remembers take a share of the
                  memory (ZeRO). A parameter is then those rows; what is sent is the same. See docs/optimizer_state.md

    Promise: outputs, gradients and buffers are one device's, up to the order of float additions. The weights are rank
    0's, as with DDP. `model` becomes this rank's part: its parameters stay the same objects, so that an optimizer made
    before goes on, and hold this rank's shards where the plan cuts them.
    Cost: one capture per mode (0.1 to 2 s), then what the plan moves. Later calls with other sizes, flags or settings
    of modules are captured when they first come. A plan that does not fit the model, the ranks or the sizes is a
    `PlanError` with the layer's name; a network that cannot be captured is a `CaptureError`; both on all ranks.
    A collective: all ranks of the group call it.
    """
    choices = (
        ("io", io, ("share", "whole", "tile")),
        ("batch_norm", batch_norm, ("exact", "local")),
        ("optimizer_state", optimizer_state, ("whole", "cut")),
    )
    for name, given, known in choices:
        if given not in known:
            raise ConfigError(f"{name}={given!r} is not a choice.", f"{name} is {' or '.join(map(repr, known))}.")
    transport = Transport(group)
    draft = None
    if not isinstance(model, nn.Module) or any(tensor.is_meta for tensor in model.parameters()):
        draft = draft_on_all(transport, model)
        model = draft.model
        if plan == AUTO:
            raise ConfigError(
                "plan='auto' measures real steps, for which the network must be built.",
                "Pass the built network, or a plan that `shoal plan` or shoal.find_plan found.",
            )
    model = model.module if isinstance(model, ParallelModule) else model
    for path, inner in model.named_modules():
        if isinstance(inner, ParallelModule):
            raise RunError(
                f"module {path!r} of {type(model).__name__} is laid over ranks already, as a network of its own.",
                f"Lay the whole {type(model).__name__} at once, or lay the other parts by themselves.",
            )
    model = made_whole(model)
    captured = capture_on_all(transport, model, example, loss, target)
    if plan == AUTO:
        plan = choose_plan(
            captured,
            transport,
            io=io,
            batch_norm=batch_norm,
            bucket_bytes=bucket_bytes,
            factors=factors_option(factors),
            recompute=recompute,
            optimizer_state=optimizer_state,
        ).plan
    return lay(
        captured,
        plan,
        transport,
        io=io,
        batch_norm=batch_norm,
        seed=seed,
        bucket_bytes=bucket_bytes,
        recompute=recompute,
        factors=factors_option(factors),
        optimizer_state=optimizer_state,
        in_place=True,
        draft=draft,
    )
