"""What is run: studies of rows, each a configuration beside the common settings."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

ONE_WORKER = "one worker"


@dataclass(frozen=True)
class Row:
    """One configuration: its name in the table, and the options of `shoal train` that make it."""

    name: str
    options: tuple[str, ...]
    exchange: str = "none"
    replicas: int = 1


def _row(name: str, exchange: str, options: str = "", *, replicas: int = 2, workers: int = 0, more: str = "") -> Row:
    """Replicas of one worker each, unless there are more `workers`."""
    chosen = ["--replicas", str(replicas), "--workers", str(workers or replicas), "--exchange", exchange]
    if options:
        chosen += ["--exchange-options", options]
    return Row(name, (*chosen, *more.split()), exchange, replicas)


def _alone() -> Row:
    return Row(ONE_WORKER, ("--workers", "1"))


def _exchanges() -> list[Row]:
    return [
        _alone(),
        _row("allreduce", "allreduce"),
        _row("backup, 2 + 1", "backup", "backups=1", replicas=3),
        _row("downpour", "downpour"),
        _row("dasgd", "dasgd"),
        _row("downpour over links, n_sync 4", "downpour", "servers=processes,n_sync=4"),
        _row("dasgd over links, n_sync 4", "dasgd", "servers=processes"),
    ]


def _dasgd() -> list[Row]:
    """Ablation of two and of five workers, with a cold start (Chan & Lane 2014: one to five)."""
    return [
        _alone(),
        *(
            _row(
                f"{workers}: sparse {sparse}, momentum {momentum}, decay {decay}",
                "dasgd",
                f"servers=processes,sparse={sparse},decay={decay}",
                replicas=workers,
                more="" if momentum == "on" else "--momentum 0",
            )
            for workers in (2, 5)
            for sparse in ("none", "threshold", "sampled")
            for momentum in ("off", "on")
            for decay in ("none", "exponential")
        ),
    ]


def _periods() -> list[Row]:
    """Clients x n_sync, cold and warm (Paine et al. 2013)."""
    return [
        _row(
            f"{clients} clients, n_sync {period}, {'warm' if lone_batches else 'cold'}",
            "downpour",
            f"n_sync={period},warm_start={lone_batches}",
            replicas=clients,
        )
        for clients in (1, 2, 4, 8)
        for period in (1, 10, 50, 300)
        for lone_batches in ((0, 500) if clients > 1 else (0,))
    ]


def _modes() -> list[Row]:
    """Sync, async and mixed by 1, 2 and 4 servers, four workers each (Campos et al. 2017)."""
    return [
        _alone(),
        _row("allreduce, 4 workers", "allreduce", replicas=4),
        *(
            _row(f"sync, 4 workers, {_servers(count)}", "sync", f"shards={count}", replicas=4)
            for count in SERVER_COUNTS
        ),
        *(
            _row(f"async, 4 workers, {_servers(count)}", "downpour", _processes(count), replicas=4)
            for count in SERVER_COUNTS
        ),
        *(
            _row(f"mixed, 2 nodes of 2, {_servers(count)}", "downpour", _processes(count), workers=4, more=NODE_OF_TWO)
            for count in SERVER_COUNTS
        ),
    ]


SERVER_COUNTS = (1, 2, 4)
NODE_OF_TWO = "--plan data"


def _servers(count: int) -> str:
    return f"{count} server{'s' if count > 1 else ''}"


def _processes(count: int) -> str:
    return f"servers=processes,shards={count}"


UNTOLD = (
    *("allreduce", "sync", "backup", "gossip", "easgd", "local"),
    *("downpour", "dasgd", "hogwild", "softsync", "admm"),
)
UNTOLD_REPLICAS = (2, 4, 8)


def _untold() -> list[Row]:
    """Every exchange with the rates that one gets without asking for any."""
    return [_alone(), *(_untold_row(name, replicas) for replicas in UNTOLD_REPLICAS for name in UNTOLD)]


def _untold_row(exchange: str, replicas: int) -> Row:
    """`backup` has one replica more, whose gradient may be late."""
    if exchange != "backup":
        return _row(f"{exchange}, {replicas}", exchange, replicas=replicas)
    more = _row(f"backup, {replicas} + 1", "backup", "backups=1", replicas=replicas + 1)
    return Row(more.name, more.options, more.exchange, replicas)


STUDIES: dict[str, Callable[[], list[Row]]] = {
    "exchanges": _exchanges,
    "dasgd": _dasgd,
    "periods": _periods,
    "modes": _modes,
    "untold": _untold,
}


def chosen_rows(rows: Iterable[Row], names: str, replicas: str) -> list[Row]:
    """Those of the names (or exchanges) between semicolons and the replicas between commas, and always one worker."""
    wanted, counts = names.split(";"), [int(count) for count in replicas.split(",") if count]
    return [
        row
        for row in rows
        if row.name == ONE_WORKER
        or ((not names or row.name in wanted or row.exchange in wanted) and (not counts or row.replicas in counts))
    ]
