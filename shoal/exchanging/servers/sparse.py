"""What of a gradient, or of a change of weights, is worth sending: the large elements and their places.

    replica    Remainder.take(gradients)  ──▶ [Sparse] ──▶  UpdateRule.apply_sparse     server   (the way there)
    replica    Sparse.set_in(weights)     ◀── [Sparse] ◀──  Mirror.changes        server   (the way back)

Keeps     `Remainder`: what is not sent is not lost. Sent plus kept is gradient plus kept before, to the bit.
          `Mirror`: the server knows to the bit what each replica has, since values are set, never added.
Costs     4 bytes per element sent on top of its value, so never more than the whole tensor: one that would need more
          is sent whole. One pass over the elements to choose, whatever the kind, and its sample's places, which are
          remembered (at most 4 bytes per element); `Remainder` adds a pass before it that reads two tensors, of a
          change three, and writes one.
Failure   what is not a number, or infinite, counts as large and is sent: divergence shows where weights are kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Selection = Literal["threshold", "sampled", "topk"]

DENSE_BELOW = 1024
"""Tensors of fewer elements (biases, batch norms) go whole: there is little to save, and every element counts."""
SAMPLED_HITS = 100
"""Elements of a sample that reach the cutoff: with so many, the true share differs by about a tenth."""
FEWEST_SAMPLED = 4096
"""A sample is at least so large."""
_BLOCK = 1 << 17
"""Elements looked at in one go: what is computed of them stays in the processor's cache."""
_INDEX_BYTES = 4
_GOLDEN = (math.sqrt(5) - 1) / 2
_MOST_ELEMENTS = np.iinfo(np.int32).max
_KNOWN_TO_NUMPY = {torch.float16, torch.float32, torch.float64}


@dataclass(frozen=True, eq=False, slots=True)
class Sparse:
    """Some elements of a flat tensor of `size` elements, or all.

    `indices` (int32) ascend and are unique. Where all elements are there, the indices say nothing and are left out: an
    empty tensor. Both tensors are contiguous; their elements are shared with nothing.
    """

    indices: Tensor
    values: Tensor
    size: int

    @property
    def whole(self) -> bool:
        """Whether all elements are there, in order and without indices."""
        return self.values.numel() == self.size

    @property
    def nbytes(self) -> int:
        """What travels."""
        return self.indices.nbytes + self.values.nbytes

    def on_host(self) -> "Sparse":
        """In host memory, where shards live; itself where it is there already."""
        return self if self.values.is_cpu else Sparse(self.indices.cpu(), self.values.cpu(), self.size)

    def dense(self) -> Tensor:
        """A new flat tensor with these elements, and zeros elsewhere."""
        whole = self.values.new_zeros(self.size)
        self.set_in(whole)
        return whole

    def set_in(self, target: Tensor) -> None:
        """Overwrite these elements of `target`, which is flat and has `size` elements."""
        if self.whole:
            target.copy_(self.values)
        else:
            target[self.indices] = self.values


@dataclass(frozen=True, kw_only=True)
class Selector:
    """Which elements of a tensor are large enough to be sent.

    "threshold": those of at least `threshold`, an absolute magnitude; with 0 the whole tensor. One value for all
    tensors starves those of small gradients.
    "topk": the largest, `density` times the size of each tensor, to the element.
    "sampled": those above a cutoff that a sample of each tensor gives; about `density` of them, within a tenth or two
    where magnitudes vary. Where many are equal they go together, which may be the whole tensor.

    The last two send at least one element of each tensor and leave out zeros, so of zeros alone they send nothing.
    "topk" takes about twice as long, since it sorts only what a generous cutoff leaves. All send a tensor whole when it
    has fewer than `DENSE_BELOW` elements, or when the chosen elements with their indices would be no smaller.
    """

    kind: Selection = "sampled"
    density: float = 0.01
    threshold: float = 0.0
    residual: bool = True
    """Whether a `Remainder` keeps what was not sent, or drops it."""

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"cannot send a share of {self.density} of a tensor: it must be above 0 and at most 1")
        if not self.threshold >= 0:
            raise ValueError(f"cannot send what is larger than {self.threshold}: the threshold must be at least 0")

    def select(self, values: Tensor, base: Tensor | None = None) -> Sparse:
        """The elements of the flat `values` that are large, or far from `base` where that is given.

        The result holds the elements themselves, not their distance from `base`. The same values give the same
        choice: samples are not drawn at random.
        """
        values = values.detach()
        size = values.numel()
        if size > _MOST_ELEMENTS:
            raise ValueError(f"cannot index a tensor of {size} elements with 32 bits: use more servers")
        if self.sends_whole(values):
            return _whole(values)
        match self.kind:
            case "threshold":
                chosen = _where_large(values, base, self.threshold)
            case "sampled":
                chosen = _where_large(values, base, _cutoff(values, base, self.density))
            case "topk":
                chosen = _largest(values, base, self.density)
        if not _saves(chosen.numel(), values):
            return _whole(values)
        return Sparse(chosen, values.index_select(0, chosen), size)

    def sends_whole(self, values: Tensor) -> bool:
        """Whether all of such a tensor is sent whatever its values are."""
        size = values.numel()
        everything = self.threshold == 0 if self.kind == "threshold" else not _saves(self.density * size, values)
        return everything or size < DENSE_BELOW

    def most(self, size: int, dtype: torch.dtype) -> int:
        """How many elements "topk" sends of a tensor at most, whatever its values; `size` where it sends all."""
        count = _wanted(self.density, size)
        like = torch.empty(size, dtype=dtype, device="meta")
        saves = _saves(self.density * size, like) and _saves(count, like)
        return count if saves and size >= DENSE_BELOW else size


class Remainder:
    """What a replica has not sent yet, so that small gradients add up until they are large enough.

    With `residual=False` in the selector it keeps nothing, and what is not sent is lost. Takes as much memory as the
    gradients. `left` is all its state.
    """

    def __init__(self, selector: Selector, like: Sequence[Tensor]) -> None:
        self.selector = selector
        self.left = [torch.zeros_like(values) for values in like] if selector.residual else []
        self._whole: list[_Whole] = []
        """Tensors that are always sent whole, as one for each type and device: biases are many, and small."""
        self._chosen_of = list(range(len(self.left)))
        """The others."""
        if selector.residual:
            self._lay_whole_together()

    def _lay_whole_together(self) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, left in enumerate(self.left):
            if left.numel() <= _BLOCK and self.selector.sends_whole(left):
                kinds.setdefault((left.dtype, left.device), []).append(number)
        for numbers in kinds.values():
            sizes = [self.left[number].numel() for number in numbers]
            block = torch.cat([self.left[number] for number in numbers])
            self._whole.append(_Whole(block, numbers, sizes))
            for number, part in zip(numbers, block.split_with_sizes(sizes), strict=True):
                self.left[number] = part
                self._chosen_of.remove(number)

    def take(self, values: Sequence[Tensor]) -> list[Sparse]:
        """What to send now, of these flat tensors and of what was left before; the tensors are not changed.

        Of left + values, rounded once, every element is either sent, and leaves an exact zero, or stays as it is.
        """
        if not self.selector.residual:
            return [self.selector.select(new) for new in values]
        if self.left:
            torch._foreach_add_(self.left, list(values))
        return self._taken()

    def take_change(self, values: Sequence[Tensor], since: Sequence[Tensor]) -> list[Sparse]:
        """The same of values - since, to the bit, but without a large tensor for that difference. Needs a residual."""
        if not self.selector.residual:
            raise ValueError("a change is added to what was left, and without a residual nothing is")
        small: list[int] = []
        for number, (left, new, old) in enumerate(zip(self.left, values, since, strict=True)):
            if left.numel() <= _BLOCK:
                small.append(number)
                continue
            for start in range(0, left.numel(), _BLOCK):
                block = slice(start, start + _BLOCK)
                left[block] += new[block] - old[block]
        if small:
            change = torch._foreach_sub([values[number] for number in small], [since[number] for number in small])
            torch._foreach_add_([self.left[number] for number in small], change)
        return self._taken()

    def _taken(self) -> list[Sparse]:
        sent = {number: self._take(self.left[number]) for number in self._chosen_of}
        for whole in self._whole:
            sent |= whole.taken()
        return [sent[number] for number in range(len(self.left))]

    def _take(self, left: Tensor) -> Sparse:
        sent = self.selector.select(left)
        if sent.whole:
            left.zero_()
        elif left.is_cpu and left.dtype in _KNOWN_TO_NUMPY:  # several times faster
            left.numpy()[sent.indices.numpy()] = 0
        else:
            left[sent.indices] = 0
        return sent


@dataclass(frozen=True, eq=False)
class _Whole:
    """Tensors of one type that are parts of one block."""

    block: Tensor
    numbers: list[int]
    sizes: list[int]

    def taken(self) -> dict[int, Sparse]:
        """By number, all of each, which is zeros afterwards."""
        copy, none = self.block.clone(), _no_places(self.block.device)
        self.block.zero_()
        parts = zip(self.numbers, copy.split_with_sizes(self.sizes), self.sizes, strict=True)
        return {number: Sparse(none, part, size) for number, part, size in parts}


class Mirror:
    """A server's copy of the weights that one replica has, to choose which changes it needs most.

    `held` is to the bit what the replica has, if it had `weights` at first and does `set_in` with all changes, in
    order and with nothing else; weights may even be written to while changes are chosen. When weights stop changing,
    "topk" and "sampled" bring the replica all of them in some rounds, "threshold" those farther off than that.
    Takes as much memory as the weights.
    """

    def __init__(self, selector: Selector, weights: Sequence[Tensor]) -> None:
        self.selector = selector
        self.held = [weight.detach().clone() for weight in weights]

    def changes(self, weights: Sequence[Tensor]) -> list[Sparse]:
        """The weights that differ most from the replica's, as values to set; taken as received from here on."""
        changes = []
        for held, weight in zip(self.held, weights, strict=True):
            sent = self.selector.select(weight, base=held)
            sent.set_in(held)
            changes.append(sent)
        return changes


def _wanted(density: float, size: int) -> int:
    """How many of `size` elements are a share of them; one at least."""
    return max(1, round(density * size))


def _saves(count: float, values: Tensor) -> bool:
    """Whether so many elements with their indices are fewer bytes than the whole tensor."""
    return count * (_INDEX_BYTES + values.itemsize) < values.nbytes


def _whole(values: Tensor) -> Sparse:
    return Sparse(_no_places(values.device), values.clone(), values.numel())


@lru_cache
def _no_places(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.int32, device=device)


def _magnitude(values: Tensor, base: Tensor | None) -> Tensor:
    return values.abs() if base is None else (values - base).abs_()


def _where_large(values: Tensor, base: Tensor | None, threshold: float) -> Tensor:
    """Where magnitudes reach `threshold`, ascending; where they are not zero, if it is 0.

    NaN counts as large; if the threshold is NaN, everything does.
    """
    if not values.is_cpu or values.dtype not in _KNOWN_TO_NUMPY:
        magnitude = _magnitude(values, base)
        large = magnitude != 0 if threshold == 0 else (magnitude < threshold).logical_not_()
        return large.nonzero().flatten().int()
    # numpy finds what is not zero several times faster than torch does
    return torch.from_numpy(_where_large_numpy(values.numpy(), None if base is None else base.numpy(), threshold))


def _where_large_numpy(
    values: NDArray[np.floating], base: NDArray[np.floating] | None, threshold: float
) -> NDArray[np.int32]:
    places = [np.empty(0, np.int32)]
    with np.errstate(invalid="ignore", over="ignore"):  # divergence is reported elsewhere
        for start in range(0, len(values), _BLOCK):
            block = slice(start, start + _BLOCK)
            magnitude = np.abs(values[block] if base is None else values[block] - base[block])
            large = magnitude != 0 if threshold == 0 else np.logical_not(magnitude < threshold)
            places.append((np.flatnonzero(large) + start).astype(np.int32))
    return np.concatenate(places)


def _largest(values: Tensor, base: Tensor | None, density: float) -> Tensor:
    """Where the largest magnitudes are, ascending: exactly `density` of them, or all that are not zero if fewer."""
    count = _wanted(density, values.numel())
    cutoff = _cutoff(values, base, 2 * density)  # twice as many as wanted, so that nearly always enough are left
    chosen = _where_large(values, base, cutoff)
    if cutoff > 0 and chosen.numel() < count:  # the sample was not typical
        chosen = _where_large(values, base, 0.0)
    if chosen.numel() <= count:
        return chosen
    magnitude = _magnitude(values[chosen], None if base is None else base[chosen])
    return chosen[magnitude.topk(count, sorted=False).indices.sort().values]


def _cutoff(values: Tensor, base: Tensor | None, density: float) -> float:
    """The magnitude that about `density` of the elements reach: that of some element, so perhaps 0 or NaN."""
    places = _sample(values.numel(), max(FEWEST_SAMPLED, math.ceil(SAMPLED_HITS / density)))
    if places is not None:
        places = places.to(values.device)
        values = values.index_select(0, places)
        base = None if base is None else base.index_select(0, places)
    sample = _magnitude(values, base)
    count = _wanted(density, sample.numel())
    if sample.is_cpu and sample.dtype in _KNOWN_TO_NUMPY:  # several times faster; both take NaN for the largest
        return float(np.partition(sample.numpy(), -count)[-count])
    return float(sample.topk(count).values[-1])


@lru_cache(maxsize=256)
def _sample(size: int, wanted: int) -> Tensor | None:
    """`wanted` places below `size`, one in each of equal parts, at changing spots; None if that is hardly fewer.

    Even steps would be one column of a matrix whenever they are a multiple of its width. Multiples of the golden ratio
    are as even, and do not fall into step with any width.
    """
    if 2 * wanted >= size:  # and in smaller parts two places could coincide
        return None
    part = torch.arange(wanted, dtype=torch.float64)
    return ((part + part * _GOLDEN % 1) * (size / wanted)).long().clamp_(max=size - 1)
