"""What one rank finds wrong with the user's input, all ranks say."""

from collections.abc import Callable
from typing import TypeVar, cast

from shoal.errors import InputError
from shoal.transport.base import Transport

Result = TypeVar("Result")


def agree(transport: Transport, attempt: Callable[[], Result]) -> Result:
    """`attempt` on all ranks. Where one finds the user's input wrong all raise its error, so that nobody waits."""
    error, result = None, None
    try:
        result = attempt()
    except InputError as found:
        if transport.world == 1:
            raise
        error = found
    errors = transport.gather_objects(error)
    wrong = [rank for rank, one in enumerate(errors) if one is not None]
    if wrong:
        first = errors[wrong[0]]
        alone = len({str(one) for one in errors}) > 1
        raise type(first)(f"rank {wrong[0]}: {first.problem}" if alone else first.problem, first.remedy) from None
    return cast(Result, result)
