"""A network in training that is laid over ranks: this rank's part of it, and what the loop must know of the others.

What the ranks decide (stop, diverged) comes from values that are equal on all of them, so they decide alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from shoal.config import TrainConfig
from shoal.data import BatchPart
from shoal.exchanging import Replica
from shoal.execution import (
    ParallelModule,
    clip_grad_norm_,
    full_state_dict,
    load_full_state_dict,
)
from shoal.execution.laying import Captured, capture_on_all, lay
from shoal.execution.whole import holders, load_parts, state_parts, tell_holders
from shoal.finding import choose_plan
from shoal.finding.auto import gives_losses, price_from_cache
from shoal.launching import tell_stage
from shoal.lowering.boundary import IO, Boundary, even_shares
from shoal.lowering.owners import OptimizerState
from shoal.lowering.step_traffic import GRADIENTS
from shoal.partition import Box
from shoal.plan import Plan, factors_option, steps_in_laps
from shoal.planning import resolve
from shoal.planning.outlining import outline_of
from shoal.planning.resolve import without_laps
from shoal.planning.strategies import AUTO
from shoal.profiling.profile import OnMeasured
from shoal.traffic import Sent, total
from shoal.training.checkpoints.tensor_files import Place
from shoal.training.laps import step_after_lap
from shoal.training.network import Criterion, Held, Network, PartOf, count_parameters
from shoal.transport import Transport
from shoal.transport.agreement import agree

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shapes:
    """Of global batches."""

    train: Shape
    test: Shape
    segments: bool
    """Whether a label belongs to a pixel and not to a sample."""

    def labels(self, shape: Shape) -> Shape:
        """The shape of the labels of a batch of this shape."""
        return (shape[0], *shape[2:]) if self.segments else shape[:1]


class LaidNetwork(Network):
    """This rank's part of the network."""

    module: ParallelModule

    def __init__(
        self,
        module: ParallelModule,
        tester: ParallelModule,
        transport: Transport,
        shapes: Shapes,
        io: IO,
        criterion: Criterion,
        parameters: int,
        build: Callable[[], nn.Module],
    ) -> None:
        super().__init__(module, module.plan, criterion, parameters, transport)
        self.rank, self.ranks = transport.rank, transport.world
        self._tester = tester  # the same as `module` unless test samples have another shape
        self._current = module
        self._shapes, self._io, self._build = shapes, io, build
        self._sent_aside = transport.sent.bytes

    @property
    def plain(self) -> None:
        return None

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.module(x, y)
        return result

    def gathering(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.module.no_sync()

    def trained_by(self, optimizer: torch.optim.Optimizer) -> None:
        if steps_in_laps(self.module.plan.laps):
            self.module.after_lap(partial(step_after_lap, optimizer, self.ranks))

    def clip_gradients(self, longest: float) -> None:
        clip_grad_norm_(self.module, longest)

    def part_in_mean(self, loss: Tensor, y: Tensor, samples: int) -> Tensor:
        share = self.module.loss_share  # by weights of classes, where the loss has such
        if share is None:
            share = y.numel() / prod(self._shapes.labels((samples, *self._shapes.train[1:])))
        return loss.detach().double() * share

    def agreed(self, wishes: int) -> int:
        # They travel with the numbers that ranks tell each other at the start of every forward pass.
        agreed = self._current.flagged
        self._current.flag = wishes
        return agreed

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return self.transport.gather_numbers(numbers)

    def training_part(self, samples: int) -> BatchPart:
        return self._part(self.module, (samples, *self._shapes.train[1:]))

    @contextmanager
    def evaluating(self) -> Iterator[tuple[nn.Module, PartOf]]:
        with self._aside():
            if self._tester is not self.module:
                load_full_state_dict(self._tester, full_state_dict(self.module))
            self._current = self._tester.eval()
            try:
                yield self._tester, lambda size: self._part(self._tester, (size, *self._shapes.test[1:]))
            finally:
                self._tester.train()
                self._current = self.module

    def as_replica(self, optimizer: torch.optim.Optimizer, transport: Transport) -> Replica:
        return replica_of(self.module, optimizer, transport)

    def bytes_per_step(self, batches: int) -> int:
        predicted = self.module.predicted(accumulated=batches > 1)
        gradients = predicted.get(GRADIENTS, Sent()).bytes  # summed with the last batch
        return batches * (total(predicted).bytes - gradients) + gradients

    def bytes_sent(self) -> int:
        return self.transport.sent.bytes - self._sent_aside

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is sent inside is no part of a training step."""
        before = self.transport.sent.bytes
        try:
            yield
        finally:
            self._sent_aside += self.transport.sent.bytes - before

    def held(self) -> Mapping[str, Held]:
        parts = state_parts(self.module)
        return {
            key: Held(shard.tensor, None if shard.box is None else Place(shard.box, shard.shape), shard.shape, first)
            for key, (shard, first) in parts.items()
        }

    def load(self, read: Callable[[str, Box], Tensor], *, batches: int) -> None:
        load_parts(self.module, read)
        self.module.steps = batches  # dropout's masks depend on it

    def whole(self) -> nn.Module | None:
        with self._aside():
            full = full_state_dict(self.module, rank0_only=True)
        if self.rank:
            return None
        module = self._build()
        module.load_state_dict(full)
        return module

    def _part(self, module: ParallelModule, shape: Shape) -> BatchPart:
        labels = self._shapes.labels(shape)
        if self._io == "share":
            return share_of(shape, labels, self.rank, self.ranks)
        result = module.output_tile(shape[0])
        if result is not None and len(result) > len(labels):  # of scores, which have channels
            result = (*result[:1], *result[2:])
        return BatchPart(_window(module.input_tile(shape[0]), shape), _window(result, labels))


def share_of(shape: Shape, labels: Shape, rank: int, ranks: int) -> BatchPart:
    """A rank's own samples of a batch, whole; shares differ by at most one."""
    shares = even_shares(shape[0], ranks)
    start = sum(shares[:rank])
    rows = slice(start, start + shares[rank])
    return BatchPart((rows, *_all_of(shape[1:])), (rows, *_all_of(labels[1:])))


def replica_of(module: ParallelModule, optimizer: torch.optim.Optimizer, transport: Transport) -> Replica:
    """A network that is laid over ranks as exchanges see it: each shard is spoken for by the first rank that holds it.

    `transport` is between the same ranks.
    """
    return Replica(
        dict(module.named_parameters()),
        optimizer,
        speaks_for=[name for name, ranks in holders(module).items() if ranks[0] == transport.rank],
        tell=lambda tensors: tell_holders(module, tensors),
        transport=transport,
    )


def lay_over_ranks(
    model: nn.Module,
    config: TrainConfig,
    transport: Transport,
    shapes: Shapes,
    criterion: Criterion,
    build: Callable[[], nn.Module],
    planning_progress: OnMeasured,
) -> LaidNetwork:
    """Lay `model` over all ranks as `config` says. Collective. `build` makes the same module anew.

    Where the first layer is cut in space each rank passes its own window of the samples, else its own samples.
    """
    captured = capture_on_all(
        transport, model, shapes.train, criterion, on_captured=lambda: tell_stage("have read the network")
    )
    plan: str | Plan = config.plan
    if plan == AUTO:
        plan = choose_plan(
            captured,
            transport,
            batch_norm=config.batch_norm,
            bucket_bytes=config.bucket_bytes,
            racing=config.race,
            factors=factors_option(config.factors),
            recompute=config.recompute,
            optimizer_slots=config.optimizer_slots,
            optimizer_state=config.optimizer_state,
            progress=planning_progress,
        ).plan
    io = agree(transport, lambda: _io_for(plan, captured, transport.world))

    def laid(captured: Captured, optimizer_state: OptimizerState = "whole") -> ParallelModule:
        return lay(
            captured,
            plan,
            transport,
            io=io,
            batch_norm=config.batch_norm,
            recompute=config.recompute,
            optimizer_state=optimizer_state,
            bucket_bytes=config.bucket_bytes,
            factors=factors_option(config.factors),
            seed=config.seed,
        )

    module = laid(captured, config.optimizer_state)
    in_laps, plan = module.plan.laps is not None, without_laps(plan)  # which are for training, with its loss
    tester = module if shapes.train[1:] == shapes.test[1:] else laid(capture_on_all(transport, model, shapes.test))
    network = LaidNetwork(module, tester, transport, shapes, io, criterion, count_parameters(model), build)
    graph, cuts = captured.graphs[True], dict(module.plan.layers)
    priced = None
    if not in_laps:  # of which the cost model knows nothing
        priced = price_from_cache(
            captured,
            cuts,
            transport,
            module.plan.name,
            io=io,
            batch_norm=config.batch_norm,
            bucket_bytes=module.bucket_bytes,
            factors=module.plan.factors or "never",
            recompute=module.plan.recompute,
            optimizer_slots=config.optimizer_slots,
            optimizer_state=config.optimizer_state,
        )
    network.price = priced
    if transport.rank == 0:
        network.outline = outline_of(
            graph, cuts, Boundary(io, transport.world), module.plan.name, losses=gives_losses(captured), priced=priced
        )
    return network


def _io_for(plan: str | Plan, captured: Captured, ranks: int) -> IO:
    graph = captured.graphs[True]
    names = [layer.name for captured_graph in captured.graphs.values() for layer in captured_graph.layers]
    cuts = resolve(plan, graph, ranks, names).cuts
    x = next(iter(graph.inputs))
    first = next(layer.name for layer in graph.layers if x in layer.reads)
    return "tile" if any(cuts[first].degree(dim) > 1 for dim in "dhw") else "share"


def _all_of(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _window(box: Box | None, shape: Shape) -> tuple[slice, ...]:
    """A rank without a box has no sample, of the whole sample's shape."""
    if box is None:
        return slice(0, 0), *_all_of(shape[1:])
    return tuple(slice(span.start, span.stop) for span in box)
