"""Functions of torch, replaced for a while and for one thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, `owner.name` is `value`."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def here(own: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """`own` in this thread, `plain` in all others."""
    thread = threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (own if threading.get_ident() == thread else plain)(*args, **kwargs)

    return chosen
