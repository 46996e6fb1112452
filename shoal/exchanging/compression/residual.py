"""Error feedback: what one message left out is kept here and added to the next (Seide 2014, Karimireddy 2019)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.exchanging.compression.codecs import Codec


class Residual:
    """What of some tensors was not sent yet. They are compressed as one, in their order, so that few bytes are scales.

    Keeps     left + sent is what was given + left before, to rounding; with topk to the bit.
    Costs     memory for one copy of the tensors, none without `feedback`, where what is not sent is lost.
    Failure   what is not finite is sent as such (see `codecs`) and leaves nothing behind: one gradient that overflowed,
              which a loss scaler drops, does not stay for ever. A `ValueError` where types or devices differ.
    """

    def __init__(self, codec: Codec, like: Sequence[Tensor], *, feedback: bool = True) -> None:
        if len({(tensor.dtype, tensor.device) for tensor in like}) > 1:
            raise ValueError("tensors of several types or devices cannot be compressed as one")
        self.codec = codec
        self.sizes = [tensor.numel() for tensor in like]
        self._kind = like[0].dtype if like else torch.float32
        device = like[0].device if like else None
        self._flat = torch.zeros(sum(self.sizes), dtype=self._kind, device=device) if feedback else None
        self._left = [] if self._flat is None else list(self._flat.split_with_sizes(self.sizes))

    def take(self, values: Iterable[Tensor]) -> Tensor:
        """The payload to send now, of these flat tensors and of what was left; the tensors are not changed."""
        if self._flat is None:
            return self.codec.encode(torch.cat(list(values)))
        for left, new in zip(self._left, values, strict=True):
            left += new
        payload = self.codec.encode(self._flat)
        self._flat -= self.codec.decode(payload, self._flat.numel(), self._kind)
        self._flat.nan_to_num_(0.0, 0.0, 0.0)
        return payload

    def state(self) -> list[Tensor]:
        """What is left of each tensor, flat, to be saved; it changes with the next `take`. Without feedback nothing."""
        return self._left

    def load_state(self, state: Sequence[Tensor]) -> None:
        """Go on with what `state` gave, perhaps elsewhere. A `ValueError` where it is of other tensors."""
        if [tensor.numel() for tensor in state] != [tensor.numel() for tensor in self._left]:
            raise ValueError(f"what was left of {len(state)} tensors does not fit {len(self._left)} of other sizes")
        for left, saved in zip(self._left, state, strict=True):
            left.copy_(saved.view(-1))


def of_one_kind(kinds: Sequence[torch.dtype]) -> list[list[int]]:
    """Which tensors of these types are compressed together: their numbers, in order.

    >>> of_one_kind([torch.float32, torch.float64, torch.float32])
    [[0, 2], [1]]
    """
    by_kind: dict[torch.dtype, list[int]] = {}
    for number, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(number)
    return list(by_kind.values())
