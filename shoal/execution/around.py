"""What a script may have put around a call of a parallel network, and what of it is refused.

    refused on all ranks    torch.utils.checkpoint, which would run the network a second time; DDP, which would take
                            shards for copies; transforms of torch.func
                            and forward-mode derivatives, which see no further than this rank's own autograd node;
                            hooks on what autograd saves and modes that change torch's functions
    refused at once         torch.export, torch.jit, torch.fx and torch.onnx: they would write down one rank's part.
                            A script asks for these on one rank, and the others do not wait for it

Cost      some 5 us for each call of the network: a look at the frames above it and at four flags of torch.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.nn.parallel import distributed
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._device import DeviceContext

from shoal.errors import RunError

_CHECKPOINT, _DDP = checkpoint.__file__, distributed.__file__
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


def refuse_writing_down() -> None:
    """Refuse a call that is made to write the network down as a graph or a file."""
    by = _writer()
    if by is not None:
        raise writing_down(by)
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        raise RunError(
            "a network that is laid over ranks cannot run in a FakeTensorMode: it sends tensors to other ranks.",
            "Take the shapes from the plain module, made on the meta device.",
        )


def writing_down(by: str) -> RunError:
    """What is wrong with it; `by`: the tool that does so."""
    return RunError(
        f"{by} would write down this rank's part of a network that is laid over ranks.",
        "Export the plain module: make a new one, and load model.state_dict() into it.",
    )


def _writer() -> str | None:
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    if _symbolic_trace._is_fx_tracing_flag or torch._C._get_dispatch_mode(_PROXY) is not None:
        return "torch.fx"
    return None


def problem_around(given: Any) -> RunError | None:
    """What makes this call one that a network over ranks cannot answer; `given`: its arguments."""
    if torch._C._functorch.maybe_current_level() is not None:
        return RunError(
            "torch.func (grad, vmap, jvp, jacrev, ...) cannot see through a network that is laid over ranks.",
            "Use torch.autograd.grad or backward(), and a loop in the place of vmap; or transform the plain module.",
        )
    if forward_ad._current_level >= 0 and any(map(_has_tangent, pytree.tree_leaves(given))):
        return RunError(
            "a network that is laid over ranks has no forward-mode derivative: an input is a dual tensor.",
            "Use torch.autograd.grad or backward(), or take the derivative of the plain module.",
        )
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return RunError(
                "torch.utils.checkpoint around a network that is laid over ranks would run it twice: with another "
                "dropout mask, and running statistics counted twice.",
                "Call the network itself and pass recompute=True to shoal.parallelize.",
            )
        if frame.f_code.co_filename == _DDP:
            return RunError(
                "DistributedDataParallel around a network that is laid over ranks would average parts of different "
                "parameters, and has given all ranks rank 0's.",
                "Leave it out: shoal.parallelize stands where it stood. Give DDP the other modules alone.",
            )
        frame = frame.f_back
    return _changing_mode()  # after torch.utils.checkpoint, which sets hooks of its own


def _changing_mode() -> RunError | None:
    """What would change the operators of a plain network, or what autograd keeps of them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and not getattr(hooks[0], "__qualname__", "").startswith("save_on_cpu."):
        return RunError(
            "torch.autograd.graph.saved_tensors_hooks around a network that is laid over ranks would see this rank's "
            "parts of tensors, not what one device keeps.",
            "Use torch.autograd.graph.save_on_cpu, or pass recompute=True to shoal.parallelize.",
        )
    for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        if not isinstance(mode, DeviceContext):
            return RunError(
                f"a TorchFunctionMode ({type(mode).__name__}) is around a network that is laid over ranks, of which it "
                "would not see the operators.",
                "Leave the mode for this call, or use it with the plain module.",
            )
    return None


def _has_tangent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and forward_ad.unpack_dual(leaf).tangent is not None  # type: ignore[no-untyped-call]


def is_batch_of_gradients(grads: Sequence[Tensor | None]) -> bool:
    """Whether a backward pass was given many gradients at once, as torch.vmap and `is_grads_batched=True` do."""
    return torch._C._functorch.maybe_current_level() is not None or any(
        grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads
    )


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Within, tensors are what they are, so that ranks can tell each other something."""
    with temporarily_clear_interpreter_stack():
        yield
