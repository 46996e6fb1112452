"""Some steps of a training loop, recorded on all ranks: switched on before the first of them and off after the last."""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from shoal.diary import Diary
from shoal.timeline import Trace
from shoal.tracing.clocks import clock_offsets
from shoal.tracing.merge import RankRecord, left_out, trace_of
from shoal.tracing.modules import LayerNotes
from shoal.transport import Transport


class Recording:
    """Records `steps` of a loop on `transport`'s ranks; all of them call the same methods.

    `plain`: the network where it runs as it is on one device; one that is laid over ranks notes its layers itself.
    """

    def __init__(self, transport: Transport, steps: range, plain: nn.Module | None = None) -> None:
        self._transport, self._steps, self._plain = transport, steps, plain
        self._diary = Diary()
        self._layers: LayerNotes | None = None
        self._done = not steps

    def begin_step(self, number: int) -> Diary | None:
        """The diary of this step, or None where it is not recorded."""
        if self._done or number not in self._steps:
            return None
        if self._transport.diary is None:
            self._transport.diary = self._diary
            self._layers = None if self._plain is None else LayerNotes(self._plain, self._diary)
        self._diary.begin_step(number)
        return self._diary

    def ends_with(self, number: int) -> bool:
        """Whether a step was the last that is recorded."""
        return not self._done and number == self._steps[-1]

    def end(self, title: str, name: Callable[[int], str] = "rank {}".format) -> tuple[Trace, str | None] | None:
        """What was recorded, on rank 0, and what people should know of it; None elsewhere and where nothing was.

        A collective. Nothing is recorded from here on. `name`: what a rank is called.
        """
        was_on, self._done = not self._done and self._transport.diary is self._diary, True
        self._transport.diary = None
        if self._layers is not None:
            self._layers.close()
            self._layers = None
        return gathered(self._transport, self._diary, title, name) if was_on else None


def gathered(
    transport: Transport, diary: Diary, title: str, name: Callable[[int], str]
) -> tuple[Trace, str | None] | None:
    """The diaries of all ranks as one trace, on rank 0; None elsewhere. A collective."""
    rank = transport.members[transport.rank]
    record = RankRecord.of(diary, rank, name(rank))
    offsets = clock_offsets(transport)
    everyones: list[RankRecord] = transport.gather_objects(record, "trace")
    if transport.rank:
        return None
    records = [replace(own, ahead=ahead) for own, ahead in zip(everyones, offsets, strict=True)]
    return trace_of(records, title), left_out(records)
