"""An error on one rank becomes an error on all ranks, before any of them waits for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from shoal.errors import PeerError, ShoalError

Result = TypeVar("Result")


class Gathers(Protocol):
    """Ranks that can tell each other something: a transport, or an assembly of all ranks of a world."""

    world: int

    def gather_objects(self, value: Any, operation: str = ...) -> list[Any]:
        """Something that pickles, from every rank to every rank."""
        ...

    def show(self, ranks: Sequence[int]) -> str:
        """Ranks for people."""
        ...


@dataclass(frozen=True)
class _Failed:
    """What a rank tells the others of its error."""

    what: str
    """Type and message, one line."""
    known: ShoalError | None
    """The error itself where it is one of ours."""


def agree(transport: Gathers, attempt: Callable[[], Result], operation: str = "agree") -> Result:
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
    except Exception as caught:
        if transport.world == 1:
            raise
        error = caught
    told = transport.gather_objects(None if error is None else _told(error), operation)
    failed = {rank: failure for rank, failure in enumerate(told) if failure is not None}
    if error is not None and not isinstance(error, ShoalError):
        raise error
    wrong = {rank: failure.known for rank, failure in failed.items() if failure.known is not None}
    if wrong:
        rank, first = next(iter(wrong.items()))
        alone = len(wrong) < transport.world or len({str(known) for known in wrong.values()}) > 1
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
    # a new error: it is pickled, and must not take the old one's traceback and context along
    own = type(error)(error.problem, error.remedy) if isinstance(error, ShoalError) else None
    return _Failed(f"{type(error).__name__}: {lines[0]}".rstrip(": ."), own)
