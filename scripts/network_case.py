"""One network under one plan beside one device, through `shoal.parallelize`'s own steps. Runs inside the ranks.

Networks may give any structure of tensors. The loss is a fixed random projection of all of them, so that every element
of every output sends a gradient back. Compared in float64: outputs, the input's gradient, all parameters' gradients,
the whole state after one step of SGD (buffers of the first pass among it), and an evaluation after it.
"""

import logging
import math
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import TreeSpec, tree_flatten

from scripts.network_list import Network
from shoal.errors import PeerError, ShoalError
from shoal.execution import ParallelModule, full_state_dict
from shoal.execution.laying import Captured, capture_on_all, lay
from shoal.plan import Plan
from shoal.transport import Transport
from shoal.verifying.compare import apart, scales_of, size
from shoal.verifying.one_device import shaken
from tests.parity.plans import random_plan

TOLERANCE = 1e-9
STRIDE = 1e-3
"""The step's length over the length of all parameters."""
STOCHASTIC_DEPTH = {"StochasticDepth": "p", "DropPath": "drop_prob"}
"""torchvision's and timm's module, and what its rate is called."""
RANDOM = "random"
"""The plan with a cut of its own for every layer, drawn from what the layers' rules allow."""


@dataclass(frozen=True)
class Answer:
    """What one rank found."""

    outcome: Literal["exact", "different", "refused"]
    difference: float = 0.0
    """The largest relative one."""
    where: str = ""
    text: str = ""
    """Of a refusal."""
    peer: bool = False
    """Whether it only tells of another rank's refusal."""


def run_case(network: Network, plan: str) -> Answer:
    """Compare; a refusal is an answer, every other error goes to the caller. A collective."""
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    try:
        subject = _subject(network)
        found = subject.compare(plan)
    except ShoalError as error:
        return Answer("refused", text=f"{type(error).__name__}: {error.problem}", peer=isinstance(error, PeerError))
    where = max(found, key=lambda name: found[name])
    if found[where] <= TOLERANCE:
        return Answer("exact", found[where], where)
    return Answer("different", found[where], where, subject.noise(where))


@dataclass(frozen=True)
class Run:
    """One device's numbers."""

    outputs: tuple[object, ...]
    structure: TreeSpec
    grads: Mapping[str, Tensor]
    x_grad: Tensor
    after: Mapping[str, Tensor]
    evaluated: tuple[object, ...]
    rate: float


class Subject:
    """A network, its batch and one device's run of it; captured once for all plans."""

    def __init__(self, network: Network) -> None:
        self.network = network
        seed = zlib.crc32(network.key.encode())
        torch.manual_seed(seed)
        self.model = _lively(network.build().double().train())
        self.x = torch.randn(network.shape, dtype=torch.float64)
        self.seed = seed
        self.weights: dict[int, Tensor] = {}
        self.one = self.alone(self.model)
        self.captured: Captured = capture_on_all(Transport(), deepcopy(self.model), self.x, None, None)

    def alone(self, model: nn.Module) -> Run:
        """One device: a pass, a step, an evaluation."""
        eager, x = deepcopy(model), self.x.clone().requires_grad_()
        outputs, structure = tree_flatten(eager(x))
        torch.autograd.backward(self.loss(outputs, slice(None)))
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in eager.named_parameters()}
        rate = STRIDE * _length(eager.parameters()) / (_length(grads.values()) or 1.0)
        torch.optim.SGD(eager.parameters(), lr=rate, weight_decay=1e-3).step()
        with torch.no_grad():
            evaluated = tree_flatten(eager.eval()(self.x))[0]
        assert x.grad is not None
        after = {name: tensor.detach().clone() for name, tensor in eager.state_dict().items()}
        for tensor in (*_tensors(outputs), *_tensors(evaluated), *grads.values(), *after.values()):
            assert torch.isfinite(tensor).all(), "one device's own numbers are not finite"
        return Run(_detached(outputs), structure, grads, x.grad, after, _detached(evaluated), rate)

    def loss(self, outputs: Sequence[object], rows: slice) -> Tensor:
        """Of a part of the batch: the mean over its samples of a fixed random projection of all outputs."""
        samples = len(range(self.network.batch)[rows])
        total = torch.zeros((), dtype=torch.float64)
        for number, tensor in enumerate(outputs):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                if number not in self.weights:
                    draw = torch.Generator().manual_seed(self.seed + number)
                    self.weights[number] = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
                total = total + (tensor * self.weights[number][rows]).sum() / samples
        return total

    def compare(self, plan: str) -> dict[str, float]:
        """This rank's largest differences by what was compared. A collective."""
        transport, one = Transport(), self.one
        cuts: str | Plan = random_plan(self.seed, self.captured, transport.world) if plan == RANDOM else plan
        model = lay(deepcopy(self.captured), cuts, transport, in_place=True)
        share = self.network.batch // transport.world
        rows = slice(transport.rank * share, (transport.rank + 1) * share)
        x = self.x[rows].clone().requires_grad_()
        outputs, structure = tree_flatten(model.train()(x))
        torch.autograd.backward(self.loss(outputs, rows))
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }
        torch.optim.SGD(model.parameters(), lr=one.rate, weight_decay=1e-3).step()
        after = _own_and_whole(model)
        with torch.no_grad():
            evaluated = tree_flatten(model.eval()(x.detach()))[0]
            for name, parameter in model.named_parameters():
                parameter.copy_(grads[name])  # so that what gathers states gathers gradients
        gathered = _own_and_whole(model)
        found = {"structure": 0.0 if structure == one.structure else math.inf}
        found |= _outputs("output", outputs, one.outputs, rows)
        x_grad = torch.full_like(x, math.inf) if x.grad is None else x.grad / transport.world  # of this rank's own loss
        found["input gradient"] = apart(x_grad, one.x_grad[rows], size(one.x_grad))
        found |= _states("gradient", gathered, one.grads)
        found |= _states("state", after, one.after)
        found |= _outputs("evaluated output", evaluated, one.evaluated, rows)
        return found

    def noise(self, where: str) -> str:
        """How far one device, its weights changed in their last bit, is from itself."""
        other, every = self.alone(shaken(self.model, 1)), slice(None)
        found = _outputs("output", other.outputs, self.one.outputs, every)
        found["input gradient"] = apart(other.x_grad, self.one.x_grad, size(self.one.x_grad))
        found |= _states("gradient", [other.grads], self.one.grads)
        found |= _states("state", [other.after], self.one.after)
        found |= _outputs("evaluated output", other.evaluated, self.one.evaluated, every)
        return f"one device is {found.get(where, 0.0):.0e} from itself there, its weights changed in their last bit"


_last: list[tuple[str, Subject | ShoalError]] = []


def _subject(network: Network) -> Subject:
    """Kept for the next plan of the same network, refusals too."""
    if not _last or _last[0][0] != network.key:
        _last.clear()
        try:
            _last.append((network.key, Subject(network)))
        except ShoalError as error:
            _last.append((network.key, error.with_traceback(None)))
    found = _last[0][1]
    if isinstance(found, ShoalError):
        raise found
    return found


def _lively(model: nn.Module) -> nn.Module:
    """Nothing drawn while training, no branch that starts at nothing, statistics near the batch's.

    What dropout does under a plan is tested elsewhere. Scales that begin at 0 or 1e-6 would hide what is behind them.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if (rate := STOCHASTIC_DEPTH.get(type(module).__name__)) is not None:
            setattr(module, rate, 0.0)
        if isinstance(module, _BatchNorm):
            module.momentum = 0.9
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _own_and_whole(model: ParallelModule) -> list[Mapping[str, Tensor]]:
    """The whole states, gathered, and those that this rank has whole: a copy must be as right as the one gathered."""
    own = {name: shard.tensor.detach().clone() for name, shard in model.shards().items()}
    return [{name: tensor.clone() for name, tensor in full_state_dict(model).items()}, own]


def _states(kind: str, ours: Sequence[Mapping[str, Tensor]], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    scales = scales_of(theirs)
    whole, *copies = ours
    found = {
        f"{kind} {name}": apart(whole[name], tensor, scales[name]) if name in whole else math.inf
        for name, tensor in theirs.items()
    }
    for name, tensor in theirs.items():
        for copy in copies:
            if name in copy and copy[name].shape == tensor.shape:
                found[f"{kind} {name}"] = max(found[f"{kind} {name}"], apart(copy[name], tensor, scales[name]))
    return found


def _outputs(kind: str, ours: Sequence[object], theirs: Sequence[object], rows: slice) -> dict[str, float]:
    if len(ours) != len(theirs):
        return {kind: math.inf}
    found = {}
    for number, (mine, whole) in enumerate(zip(ours, theirs, strict=True)):
        name = f"{kind} {number}" if len(theirs) > 1 else kind
        if isinstance(mine, Tensor) and isinstance(whole, Tensor):
            found[name] = apart(mine, whole[rows], size(whole))
        else:
            found[name] = 0.0 if mine == whole else math.inf
    return found


def _tensors(leaves: Sequence[object]) -> Iterator[Tensor]:
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def _detached(leaves: Sequence[object]) -> tuple[object, ...]:
    return tuple(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def _length(tensors: Any) -> float:
    return math.hypot(*(torch.linalg.vector_norm(tensor.detach()).item() for tensor in tensors))
