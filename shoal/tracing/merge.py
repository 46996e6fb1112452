"""Diaries of ranks -> one Trace. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.diary import Diary, Event, MessageEnd
from shoal.timeline import Message, Slice, Trace

SECOND = 1e9


@dataclass(frozen=True)
class RankRecord:
    """What one rank noted, and how far its clock is ahead of that of the trace."""

    rank: int
    """As messages call it."""
    name: str
    events: Sequence[Event]
    ends: Sequence[MessageEnd]
    left_out: int
    ahead: int = 0

    @classmethod
    def of(cls, diary: Diary, rank: int, name: str) -> "RankRecord":
        """What is in a diary by now."""
        return cls(rank, name, list(diary.events), list(diary.ends), diary.left_out)


def trace_of(records: Sequence[RankRecord], title: str) -> Trace:
    """All ranks on one clock, in seconds of it: `from_zero` lets the first slice begin at 0."""
    rows = {record.rank: row for row, record in enumerate(records)}
    return Trace(
        title=title,
        origin="measured",
        ranks=tuple(record.name for record in records),
        slices=tuple(
            _slice(event, row, record.ahead, rows) for row, record in enumerate(records) for event in record.events
        ),
        messages=tuple(_messages(records, rows)),
    )


def together(traces: Iterable[Trace], title: str) -> Trace:
    """Traces of different ranks on one clock as one, their ranks one after the other."""
    ranks: list[str] = []
    slices: list[Slice] = []
    messages: list[Message] = []
    for trace in traces:
        first = len(ranks)
        ranks += trace.ranks
        slices += (
            replace(piece, rank=first + piece.rank, peers=tuple(first + peer for peer in piece.peers))
            for piece in trace.slices
        )
        messages += (replace(each, src=first + each.src, dst=first + each.dst) for each in trace.messages)
    return Trace(title, "measured", tuple(ranks), tuple(slices), tuple(messages))


def left_out(records: Iterable[RankRecord]) -> str | None:
    """What to tell people where diaries had no room for everything."""
    missing = sum(record.left_out for record in records)
    return (
        f"the trace is full: {missing:,} events of its last steps are missing. Record fewer steps." if missing else None
    )


def _slice(event: Event, row: int, ahead: int, rows: Mapping[int, int]) -> Slice:
    kind, label, start, end, lane, step, size, peers = event
    return Slice(
        kind=kind,
        rank=row,
        label=label,
        start=(start - ahead) / SECOND,
        end=(end - ahead) / SECOND,
        lane=lane,
        step=step,
        bytes=size,
        peers=tuple(rows[peer] for peer in peers if peer in rows),
    )


def _messages(records: Sequence[RankRecord], rows: Mapping[int, int]) -> Iterable[Message]:
    """Both ends of each message, where both were noted. It arrives when the one who waits for it has it."""
    sent = {end[:5]: (end, record.ahead) for record in records for end in record.ends if end.sent}
    for record in records:
        for end in record.ends:
            if end.sent or end[:5] not in sent:
                continue
            begin, ahead = sent[end[:5]]
            left, arrived = begin.at - ahead, end.at - record.ahead
            yield Message(
                src=rows[end.src],
                dst=rows[end.dst],
                label=begin.label,
                sent=left / SECOND,
                received=max(left, arrived) / SECOND,  # what little clocks of two hosts still differ by
                bytes=begin.bytes,
            )
