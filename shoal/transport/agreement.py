"""What goes wrong on one rank, all ranks say, before anybody waits for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from shoal.errors import PeerError, ShoalError
from shoal.transport.base import Transport

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Failed:
    """What a rank tells the others of its error."""

    what: str
    """Type and message, one line."""
    known: ShoalError | None
    """The error itself where it is one of ours."""


def agree(transport: Transport, attempt: Callable[[], Result], operation: str = "agree") -> Result:
    """`attempt` on all ranks. Where it fails on one it fails on all, so that nobody waits.

    An error of ours all ranks raise alike. Of any other one the rank itself raises its own, and the others a PeerError
    with its words. `attempt` must not wait for other ranks: they may have failed in it.
    """
    error: Exception | None = None
    result = None
    try:
        result = attempt()
    except PeerError:
        raise  # a rank that is gone cannot be told
    except Exception as found:
        if transport.world == 1:
            raise
        error = found
    told = transport.gather_objects(None if error is None else _told(error), operation)
    failed = {rank: one for rank, one in enumerate(told) if one is not None}
    if error is not None and not isinstance(error, ShoalError):
        raise error
    wrong = {rank: one.known for rank, one in failed.items() if one.known is not None}
    if wrong:
        rank, first = next(iter(wrong.items()))
        alone = len(wrong) < transport.world or len({str(one) for one in wrong.values()}) > 1
        problem = f"{transport.show([rank])}: {first.problem}" if alone else first.problem
        raise type(first)(problem, first.remedy) from None
    if failed:
        rank = next(iter(failed))
        raise PeerError(
            f"{transport.show([rank])} failed: {failed[rank].what}.",
            "Look at that rank's message; this one ends with it.",
        )
    return cast(Result, result)


def _told(error: Exception) -> _Failed:
    lines = str(error).strip().splitlines() or [""]
    # made anew: it is pickled, and must not take along what hangs on the error
    own = type(error)(error.problem, error.remedy) if isinstance(error, ShoalError) else None
    return _Failed(f"{type(error).__name__}: {lines[0]}".rstrip(": ."), own)
