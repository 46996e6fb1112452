"""Gradients of weights from factors: each rank's rows to all that hold the same shard, and their product there.

Promise   the gradient is that of the sum, to rounding. All ranks multiply the same rows in the same order, so they get
          the same bits where their kernels are the same: on like processors, with one torch and as many threads.
Cost      rows times (input + output) numbers to each of the others, and a product over all ranks' rows and not over the
          own ones alone. Nothing waits for the messages before backward is through.
"""

import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.diary import now
from shoal.lowering.factors import Factors, factorable
from shoal.lowering.program import Program
from shoal.moves import Layout
from shoal.plan import FactorsOption
from shoal.planning.factors import Ways, chosen_factors, large_enough
from shoal.traffic import ring_bytes
from shoal.transport import Transport, Waitable
from shoal.transport.base import SUMMED_TO_MEASURE

log = logging.getLogger("shoal")

Own = tuple[Tensor, Tensor]
"""What a layer's part read, and the gradient of what it gave."""
SAMPLE = 1024
"""Rows and columns of the gradient that are timed in the place of a larger one."""
TIMES = 5


def own_gradient(own: Own | None, shard: Tensor) -> Tensor:
    """The gradient that this rank's rows alone give; zeros without any."""
    return torch.zeros_like(shard) if own is None else _product([_flat(own, shard)], [_rows(own, shard)], shard)


def add_product(total: Tensor | None, own: Own | None, shard: Tensor) -> Tensor:
    """`total`, changed in place, with what `own_gradient` gives added to it: the product needs no memory of its own."""
    if total is None or own is None:
        return own_gradient(own, shard) if total is None else total
    outputs, inputs = shard.shape
    read, grads = own[0].reshape(-1, inputs).to(shard.dtype), own[1].reshape(-1, outputs).to(shard.dtype)
    with torch.autocast(shard.device.type, enabled=False):
        return total.addmm_(grads.t(), read)


@dataclass
class Gathering:
    """Factors of a group of ranks on their way to each other."""

    factors: Factors
    shard: Tensor
    pieces: Sequence[Tensor]
    """Flat, in the order of ranks: all that a rank's part read, then all gradients."""
    works: Sequence[Waitable]
    transport: Transport

    def gradient(self) -> Tensor:
        """Wait for the others' factors; the gradient that all rows give."""
        for work in self.works:
            work.wait()
        begun, rank, diary = now(), self.transport.rank, self.transport.diary
        rows = [self.factors.rows[other] for other in self.factors.groups[rank]]
        gradient = _product(self.pieces, rows, self.shard) if rows else torch.zeros_like(self.shard)  # it holds nothing
        if diary is not None:
            diary.note("backward", f"{self.factors.layer}: weight gradient", begun)
        return gradient


def begin_gathering(factors: Factors, own: Own | None, shard: Tensor, transport: Transport) -> Gathering:
    """Start to send this rank's factors to the others of its group, and to receive theirs; counted as the layer's."""
    rank, mine = transport.rank, shard.new_empty(0) if own is None else _flat(own, shard)
    width = sum(factors.widths[rank])
    pieces = {
        other: mine if other == rank else shard.new_empty(factors.rows[other] * width) for other in factors.groups[rank]
    }
    peers = factors.peers(rank)
    works: Sequence[Waitable] = ()
    if peers:
        before, transport.label = transport.label, factors.layer
        sends = [(other, mine) for other in peers if mine.numel()]
        receives = [(other, pieces[other]) for other in peers if pieces[other].numel()]
        # a layer has no moves of its own: those of its tiles and results have the tags of other instructions
        works = transport.begin_moves(sends, receives, 2 * factors.index + 1, kind="gradients")
        transport.label = before
    return Gathering(factors, shard, list(pieces.values()), works, transport)


def _flat(own: Own, shard: Tensor) -> Tensor:
    """Under autocast factors may have other types than the weight."""
    return torch.cat([piece.reshape(-1).to(shard.dtype) for piece in own])


def _rows(own: Own, shard: Tensor) -> int:
    return own[0].numel() // shard.shape[1]


def _product(pieces: Sequence[Tensor], rows: Sequence[int], shard: Tensor) -> Tensor:
    """The gradient that these factors give together."""
    outputs, inputs = shard.shape
    read = [piece[: count * inputs].view(count, inputs) for piece, count in zip(pieces, rows, strict=True)]
    grads = [piece[count * inputs :].view(count, outputs) for piece, count in zip(pieces, rows, strict=True)]
    with torch.autocast(shard.device.type, enabled=False):
        return torch.mm(_together(grads).t(), _together(read))


def _together(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def choose_factors(
    program: Program,
    homes: Mapping[str, Layout],
    states: Mapping[str, Tensor],
    wanted: FactorsOption,
    transport: Transport,
) -> tuple[str, ...]:
    """The layers whose weights' gradients ranks are to find from factors. A collective, with one answer on all ranks.

    With "auto" what takes less here: measured on a few small sums and products, some ten milliseconds, where the
    network has a weight that is large enough. Where ranks would not compute the same bits, none.
    """
    found = factorable(program, homes)
    ways = _measured(found, states, transport) if wanted == "auto" else {}
    return tuple(factors.layer for factors in chosen_factors(found, wanted, lambda own: ways.get(own.weight)).values())


def _measured(found: Mapping[str, Factors], states: Mapping[str, Tensor], transport: Transport) -> dict[str, Ways]:
    """Both ways to the gradient of every weight that is large enough."""
    sizes = {weight: states[weight].element_size() for weight in found}
    large = {weight: factors for weight, factors in found.items() if large_enough(factors, sizes[weight])}
    measured = transport.measured_sums() if large else None
    if measured is None:
        return {}
    kernels = transport.gather_objects(_kernels())
    if len(set(kernels)) > 1:
        log.info("Gradients are summed, and not found from factors: ranks compute with different kernels, %s.", kernels)
        return {}
    longer = [_longer_product(factors, states[weight], transport.rank) for weight, factors in large.items()]
    slowest = [max(seconds) for seconds in zip(*transport.gather_numbers(longer), strict=True)]
    start = max(small for small, _ in measured)
    per_byte = max(seconds for _, seconds in measured) / SUMMED_TO_MEASURE[1]
    ways = {}
    for (weight, factors), product in zip(large.items(), slowest, strict=True):
        sums = gathers = 0.0
        for rank, (inputs, outputs) in enumerate(factors.widths):
            size, others = inputs * outputs * sizes[weight], factors.peers(rank)
            if not others:
                continue
            per_sent = per_byte * size / max(ring_bytes(size, len(others) + 1, 0), 1)
            received = sum(factors.elements(other) for other in others)
            carried = max(len(others) * factors.elements(rank), received) * sizes[weight]
            sums, gathers = max(sums, per_byte * size), max(gathers, start + per_sent * carried)
        ways[weight] = Ways(sums, gathers, product)
    return ways


def _kernels() -> tuple[object, ...]:
    """What decides on the bits of a product: equal on ranks that compute the same."""
    return torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()


def _longer_product(factors: Factors, shard: Tensor, rank: int) -> float:
    """Seconds that multiplying all rows takes beyond this rank's own, as if time grew with rows: it does so at most.

    Of a smaller weight, taken to this one's size.
    """
    inputs, outputs = (min(size, SAMPLE) for size in factors.widths[rank])
    rows, own = factors.all_rows(rank), factors.rows[rank]
    if not inputs * outputs * rows:
        return 0.0
    sample = shard.detach().new_zeros(outputs, inputs)
    piece, taken = sample.new_zeros(rows * (inputs + outputs)), []
    for _ in range(TIMES):
        begun = time.perf_counter()
        _product([piece], [rows], sample)
        if shard.is_cuda:
            torch.cuda.synchronize(shard.device)
        taken.append(time.perf_counter() - begun)
    return min(taken) * (rows - own) / rows * shard.numel() / (inputs * outputs)
