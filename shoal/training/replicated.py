"""A run of several replicas, from its settings to its result: started here, or as ranks of a world that is there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.config import TrainConfig, read_recipe
from shoal.errors import CheckpointError, ConfigError, PeerError, RunError
from shoal.exchanges import Backup, Dasgd, Downpour, ExchangeOptions
from shoal.exchanging import Meeting, server_count
from shoal.files import write_text_atomically
from shoal.launching import Failure, Replicas, World, joined, table_of
from shoal.linking import LOOPBACK
from shoal.machine import threads_each
from shoal.planning.strategies import AUTO
from shoal.result import RunResult
from shoal.training import checkpoint
from shoal.training.conductor import Conductor, Past
from shoal.training.folder import RunFolder
from shoal.training.job import load_whole
from shoal.training.listener import About, Listener
from shoal.training.replica import train_replica

MEETING = "shoal/meeting"
RESULT = "shoal/result"
LEAVE_SECONDS = 30.0
"""What the other replicas have to leave when the run is over."""


def train_here(config: TrainConfig, resumed: Path | None, listener: Listener, device: str) -> RunResult:
    """Start all replicas on this host and conduct them."""
    options = _options(config)
    each = config.workers // config.replicas
    threads = threads_each(config.threads, config.workers)
    config = config.model_copy(update={"threads": threads})
    replicas = Replicas(
        config.replicas, each, threads=threads, timeout=config.timeout, device=device, survives=options.survives
    )
    with _conducting(config, resumed, listener, one_host=True, host=LOOPBACK, store=replicas.table) as conductor:
        try:
            replicas.run(
                train_replica,
                config,
                conductor.meeting,
                _checkpoint(resumed),
                config.workers,
                over=lambda: conductor.over,
                on_stop=conductor.stop,
                on_lost=lambda replica, failure: conductor.lost(replica, _why(failure)),
            )
        except RunError as error:
            if conductor.result is None:  # what ends after that is no news
                raise conductor.error or error from error
        if conductor.error is None:
            conductor.wait_for_all(LEAVE_SECONDS)  # those that joined late were not started here
        return conductor.ended()


def train_in_world(
    config: TrainConfig, resumed: Path | None, listener: Listener, device: str, world: World
) -> RunResult:
    """As one rank of a world that torchrun or srun started; rank 0 conducts beside its own training."""
    if world.size % config.replicas:
        raise ConfigError(
            f"replicas = {config.replicas} does not divide the {world.size} ranks that {world.origin} started.",
            "Every replica has the same number of ranks: start a multiple of --replicas.",
        )
    each = config.workers // config.replicas
    inside = world.in_replica(each)
    table = table_of(inside, config.timeout)
    replica = world.rank // each

    def train(meeting: Meeting) -> None:
        with joined(inside, device, config.timeout):
            train_replica(config, meeting, _checkpoint(resumed), world.local_size or world.size, replica)

    if world.rank:
        train(Meeting.from_json(table.get(MEETING).decode()))
        text = table.get(RESULT).decode()
        if not text:
            raise PeerError("the run ended without a result.", "Rank 0, which conducted it, says why.")
        return RunResult.model_validate_json(text)
    one_host, host, store = world.on_one_host, world.listens_at, (world.host, world.port)
    with _conducting(config, resumed, listener, one_host=one_host, host=host, store=store) as conductor:
        table.set(MEETING, conductor.meeting.to_json())
        try:
            train(conductor.meeting)
            conductor.wait_for_all(LEAVE_SECONDS)
            result = conductor.ended()
        except BaseException as error:
            table.set(RESULT, "")  # the others need not wait for one
            raise conductor.error or error from error
        table.set(RESULT, result.to_json())
        return result


def join_run(folder: Path) -> None:
    """Start one more replica on this host for the run whose folder this is, while it goes on."""
    path = RunFolder(folder).meeting
    try:
        meeting = Meeting.from_json(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(
            f"--join {str(folder)!r}: no run with replicas goes on there.",
            "Give the --out folder of a run that is under way with an asynchronous exchange.",
        ) from None
    if meeting.shared is not None and not meeting.shared.exists():
        raise ConfigError(
            f"the run in {str(folder)!r} keeps its weights in the memory of another host.",
            "Join it from there, or start it with --exchange-options servers=processes.",
        )
    config = TrainConfig.parse({**read_recipe(RunFolder(folder).config), "out": folder}, source="--join: ")
    options = _options(config)
    if options.lockstep:
        raise ConfigError(
            f"a run with the exchange {options.name!r} takes no replica late.", "Join an asynchronous one."
        )
    each = config.workers // config.replicas
    threads = threads_each(config.threads, config.workers)
    replicas = Replicas(1, each, threads=threads, timeout=config.timeout, device="cpu", survives=False)
    never, nothing = (lambda: False), (lambda *_: None)
    try:
        replicas.run(_train_late, config, meeting, config.workers, over=never, on_stop=nothing, on_lost=nothing)
    except PeerError as error:
        if path.exists():
            raise
        raise PeerError(
            f"the run in {str(folder)!r} ended before this replica had left it.",
            "What the run itself printed says why.",
        ) from error


def _train_late(config: TrainConfig, meeting: Meeting, ranks_here: int, _: int) -> None:
    train_replica(config, meeting, None, ranks_here, None)


@contextmanager
def _conducting(
    config: TrainConfig, resumed: Path | None, listener: Listener, *, one_host: bool, host: str, store: tuple[str, int]
) -> Iterator[Conductor]:
    """Everything that a run needs beside its replicas, for as long as it lasts."""
    options = _options(config)
    about, config = _look(config, options)
    held = server_count(options, config.replicas, one_host=one_host, weight_bytes=4 * about.parameters)
    past = _past(resumed, config)
    folder = RunFolder.create(config) if resumed is None else RunFolder.open(resumed)
    write_text_atomically(folder.config, config.to_yaml())
    conductor = Conductor(config, options, about, folder, listener, past, held=held, host=host, store=store)
    try:
        _write_private(folder.meeting, conductor.meeting.to_json())
        conductor.start_servers()
        listener.started(about, folder)
        for warning in warnings(config, options):
            conductor.warn(warning)
        yield conductor
        if conductor.result is not None:
            listener.finished(conductor.result, folder)
    finally:
        listener.ended()
        folder.meeting.unlink(missing_ok=True)
        conductor.close()


def _look(config: TrainConfig, options: ExchangeOptions) -> tuple[About, TrainConfig]:
    """Find what is wrong with the user's input before any replica is started; and what the run is about."""
    each = config.workers // config.replicas
    alone = config.model_copy(
        update={"device": "cpu", "batch": config.replica_batch, "workers": each, "replicas": 1, "exchange": None}
    )
    splits, _, model = load_whole(alone)
    together = 1 if options.lockstep else config.batch // config.replica_batch
    about = About(
        model=config.model,
        parameters=sum(p.numel() for p in model.parameters()),
        data=splits.name,
        train_samples=len(splits.train),
        test_samples=len(splits.test),
        origin=splits.origin,
        epochs=config.epochs,
        # The same samples as one worker would see with the whole batch, in whole batches of it.
        steps_per_epoch=len(splits.train) // config.batch * together,
        batch=config.batch,
        workers=config.workers,
        plan=config.plan,
        replicas=config.replicas,
        exchange=options.name,
        device=config.device if config.device != "auto" else "cpu",
        threads=config.threads or 1,
        timeout=config.timeout,
        survives=options.survives,
        done=0,
    )
    if config.plan == AUTO and each > 1 and config.replicas > 1:
        raise ConfigError(
            "plan = 'auto' would be searched by every replica for itself, and they must agree.",
            f"Find one first, with shoal plan --model {config.model} --workers {each} --out plan.json, and give "
            "--plan plan.json.",
        )
    if not about.steps_per_epoch:
        raise ConfigError(
            f"batch = {config.batch} is larger than the data set, which has {about.train_samples} samples.",
            f"Give a --batch of at most {about.train_samples}.",
        )
    return about, config.model_copy(update={"data": splits.name})


def _past(resumed: Path | None, config: TrainConfig) -> Past:
    if resumed is None:
        return Past()
    folder = RunFolder.open(resumed)
    content = checkpoint.read(folder.checkpoint, config)
    before = TrainConfig.model_validate(content["config"])
    if before.replica_batch != config.replica_batch:
        raise CheckpointError(
            f"--resume: a replica's batch was {before.replica_batch} samples, now it is {config.replica_batch}.",
            "The batches that are done would be others: give the options that decide it (backups) as before.",
        )
    if folder.result.exists() and content["position"]["epoch"] >= config.epochs:
        raise CheckpointError(
            f"--resume {str(resumed)!r}: that run has finished its {config.epochs} epochs.",
            f"Ask for more with --epochs {config.epochs + 5}, or start another run.",
        )
    return Past(
        counted=content["steps"],
        again=tuple(content.get("again", ())),
        metrics_length=content["metrics_length"],
        wall_seconds=content["wall_seconds"],
        last_loss=content["last_loss"],
        step_seconds=tuple(content["step_seconds"].tolist()),
        tested=content.get("tested", 0),
        scores=content.get("replicas", {}),
        events=tuple(content.get("events", ())),
    )


def warnings(config: TrainConfig, options: ExchangeOptions) -> list[str]:
    """What may surprise in these settings."""
    found = []
    at_server = (isinstance(options, Downpour) and options.server_rule == "sgd") or (
        isinstance(options, Dasgd) and options.momentum_at == "server"
    )
    if at_server and config.momentum > 0 and config.replicas > 1:
        found.append(
            f"momentum {config.momentum:g} at the server adds to that of {config.replicas} asynchronous replicas: "
            f"a rate tuned for one worker may diverge. If it does, lower --lr (now {config.lr:g}) or --momentum."
        )
    if isinstance(options, Backup) and options.backups == 0:
        found.append("backups=0 waits for every replica; allreduce does so without a server.")
    return found


def _options(config: TrainConfig) -> ExchangeOptions:
    options = config.exchange_settings()
    assert options is not None
    return options


def _checkpoint(resumed: Path | None) -> Path | None:
    return None if resumed is None else RunFolder.open(resumed).checkpoint


def _why(failure: Failure) -> str:
    return f"rank {failure.rank} {failure.what}"


def _write_private(path: Path, text: str) -> None:
    """For this user alone: it holds the token."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
