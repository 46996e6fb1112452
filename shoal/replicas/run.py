"""A run of several replicas, from its settings to its result: started here, or as ranks of a world that is there."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.config import TrainConfig, read_recipe
from shoal.errors import ConfigError, DiedError, LeftError, Loss, LostError, PeerError, RunError, StoppedError
from shoal.exchanges import ExchangeOptions, Rates
from shoal.exchanging import Kind, Meeting
from shoal.files import write_text_atomically
from shoal.inference import Inference
from shoal.launching import HERE, Again, Failure, Place, Replicas, World, joined, table_of, told_to_all
from shoal.machine import threads_each
from shoal.planning.strategies import AUTO
from shoal.replicas.conducting import Conducting
from shoal.replicas.effects import HowFar
from shoal.replicas.own_states import own_carried_over
from shoal.replicas.recorder import Recorder, read_past
from shoal.replicas.worker import train_replica
from shoal.result import RunResult
from shoal.training import initial
from shoal.training.checkpoints.carry_over import told
from shoal.training.checkpoints.folder import Checkpoint
from shoal.training.checkpoints.restoring import read_state, settings_before
from shoal.training.job import load_whole, make_optimizer
from shoal.training.laps import check_laps
from shoal.training.listener import About, Listener
from shoal.training.metrics import lines_are_missing
from shoal.training.network import count_parameters
from shoal.training.numbering import Numbering
from shoal.training.outcome import describe, inference_of
from shoal.training.own_objects import NO_OBJECTS, OwnObjects, check_same, other_weights, write_objects
from shoal.training.run_folder import RunFolder

END = "shoal/end"
HEARD_SECONDS = 5.0
"""For as long rank 0 of a world stays after the end, for those that have not heard of it."""
"""Where rank 0 of a world says how the run ended."""
LEAVE_SECONDS = 30.0
"""Time that the other replicas have to leave when the run is over."""


def train_here(
    config: TrainConfig,
    resumed: Path | None,
    listener: Listener,
    device: str,
    own: OwnObjects = NO_OBJECTS,
    place: Place = HERE,
    *,
    replaces: int = 0,
) -> RunResult:
    """Start all replicas, on this host or where `place` starts them, and conduct them in this process.

    `replaces`: lost replicas in whose place another is started, which joins, where the exchange takes late ones.
    """
    options = _options(config)
    each = config.workers // config.replicas
    threads = threads_each(config.threads, config.workers)
    config = config.model_copy(update={"threads": threads})
    replicas = Replicas(
        config.replicas,
        each,
        threads=threads,
        timeout=config.timeout,
        device=device,
        survives=options.survives,
        place=place,
    )
    with _conducting(
        config,
        resumed,
        listener,
        own,
        one_host=place.one_host,
        host=place.address,
        store=replicas.table,
        servers_here=True,  # this process is where the run is lost if it is lost: nowhere are they safer
    ) as conducting:
        late = (config, conducting.meeting, config.workers, own)
        again = Again(_train_late, late, replaces, conducting.replaced)

        def lost(replica: int, failure: Failure) -> None:
            if replica < config.replicas:  # those that came late have numbers of the coordinator's, which misses them
                conducting.lost(replica, _why(failure))

        try:
            replicas.run(
                train_replica,
                config,
                conducting.meeting,
                conducting.checkpoint,
                config.workers,
                own,
                over=lambda: conducting.over,
                on_stop=conducting.stop,
                on_lost=lost,
                given_up=lambda: conducting.given_up,
                others=lambda: options.survives and conducting.goes_on,
                on_stage=listener.starting,
                again=again if options.takes_late else None,
            )
        except KeyboardInterrupt:
            if conducting.error is None or isinstance(conducting.error, PeerError | DiedError):
                raise  # the end of the replicas is all that went wrong
            raise conducting.error from conducting.error.__cause__
        except RunError as error:
            if conducting.result is None:  # processes that end after that need not be reported
                if conducting.error is None or isinstance(conducting.error, LostError):
                    _note_loss(error, error.loss, conducting)
                    raise  # it says why the replica was lost
                _note_loss(conducting.error, error.loss, conducting)
                cause = conducting.error.__cause__ or error
                raise conducting.error from cause
        if conducting.error is None:
            conducting.wait_for_all(LEAVE_SECONDS)  # those that joined late were not started here
        elif conducting.result is None:
            _note_loss(conducting.error, None, conducting)
        return conducting.ended()


def _note_loss(error: Exception, seen: Loss | None, conducting: Conducting) -> None:
    """Note at the error that ends a run who was lost: those that died, and those that the conductor has given up on.

    `seen`: what whoever started the replicas saw of it.
    """
    if isinstance(error, RunError):
        error.loss = Loss(
            lost=tuple(sorted({*(() if seen is None else seen.lost), *conducting.given_up})),
            noticed=min(seen.noticed if seen is not None else time.time(), conducting.noticed or time.time()),
            steps=conducting.counted,
            stepped=conducting.stepped,
        )


def train_in_world(
    config: TrainConfig,
    resumed: Path | None,
    listener: Listener,
    device: str,
    world: World,
    own: OwnObjects = NO_OBJECTS,
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

    def train(meeting: Meeting, checkpoint: Checkpoint | None) -> bool:
        with joined(inside, device, config.timeout):
            return train_replica(config, meeting, checkpoint, world.local_size or world.size, own, replica)

    if isinstance(own.model, nn.Module) and told_to_all(world, table, own.digest(), config.timeout) != own.digest():
        raise other_weights()
    if world.rank:
        told = json.loads(told_to_all(world, table, None, config.timeout, last=True))
        checkpoint = None if told["checkpoint"] is None else Checkpoint(Path(told["checkpoint"]))
        if not train(Meeting.from_json(told["meeting"]), checkpoint):
            table.set(_heard_by(world.rank), "")
            raise LeftError(
                f"replica {replica} was asked to stop and has left; the others go on.",
                "The result will be in the run's folder.",
            )
        told = table.get(END).decode()
        table.set(_heard_by(world.rank), "")
        return _result_in(told)
    one_host, host, store = world.on_one_host, world.listens_at, world.url
    with _conducting(config, resumed, listener, own, one_host=one_host, host=host, store=store, here=0) as conducting:
        try:
            whence = None if conducting.checkpoint is None else str(conducting.checkpoint.path.resolve())
            text = json.dumps({"meeting": conducting.meeting.to_json(), "checkpoint": whence})
            told_to_all(world, table, text, config.timeout, last=True)
            train(conducting.meeting, conducting.checkpoint)
            conducting.wait_for_all(LEAVE_SECONDS)
            result = conducting.ended()
        except BaseException as error:
            _tell_the_end(table, world, error)  # so that the others do not wait for this replica
            if conducting.error is None:
                raise
            raise conducting.error from conducting.error.__cause__ or error
        _tell_the_end(table, world, result)
        return result


def _tell_the_end(table: Any, world: World, end: RunResult | BaseException) -> None:
    """Tell the others of a world how the run ended.

    The table may end with this process: where they ask for more than a failure, it stays until they have heard, or for
    a moment. Those that are lost never will.
    """
    table.set(END, _told_of(end))
    if isinstance(end, RunResult | StoppedError):
        with suppress(RuntimeError):
            table.wait([_heard_by(rank) for rank in range(1, world.size)], timedelta(seconds=HEARD_SECONDS))


def _heard_by(rank: int) -> str:
    return f"{END}/heard by {rank}"


def _told_of(end: RunResult | BaseException) -> str:
    """What rank 0 of a world tells the others of how the run ended; of a failure no more than that: it is told once."""
    return json.dumps(
        {
            "result": end.to_json() if isinstance(end, RunResult) else None,
            "stopped": [end.problem, end.remedy] if isinstance(end, StoppedError) else None,
        }
    )


def _result_in(told: str) -> RunResult:
    """On another rank: the result, or why there is none; that the run was stopped is no failure of any rank."""
    match json.loads(told):
        case {"result": str(text)}:
            return RunResult.model_validate_json(text)
        case {"stopped": [str(problem), str(remedy)]}:
            raise StoppedError(problem, remedy)
        case _:
            raise PeerError("the run ended without a result.", "Rank 0, which conducted it, says why.")


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
    check_same(RunFolder(folder), {})
    config = TrainConfig.parse({**read_recipe(RunFolder(folder).config), "out": folder}, source="--join: ")
    options = _options(config)
    if not options.takes_late:
        raise ConfigError(
            f"with {options.name} no replica can join later.",
            "Start the run with an exchange that takes late replicas, such as downpour.",
        )
    each = config.workers // config.replicas
    threads = threads_each(config.threads, config.workers)
    replicas = Replicas(1, each, threads=threads, timeout=config.timeout, device="cpu", survives=False)
    never, nothing = (lambda: False), (lambda *_: None)
    try:
        replicas.run(
            _train_late, config, meeting, config.workers, NO_OBJECTS, over=never, on_stop=nothing, on_lost=nothing
        )
    except PeerError as error:
        if path.exists():
            raise
        raise PeerError(
            f"the run in {str(folder)!r} ended before this replica had left it.",
            "What the run itself printed says why.",
        ) from error


def _train_late(config: TrainConfig, meeting: Meeting, ranks_here: int, own: OwnObjects, _: int) -> None:
    train_replica(config, meeting, None, ranks_here, own, None)


@contextmanager
def _conducting(
    config: TrainConfig,
    resumed: Path | None,
    listener: Listener,
    own: OwnObjects,
    *,
    one_host: bool,
    host: str,
    store: str,
    servers_here: bool | None = None,
    here: int | None = None,
) -> Iterator[Conducting]:
    """Everything that a run needs beside its replicas, for as long as it lasts. `here`: a replica in this process."""
    options = _options(config)
    about, inference, begun_with, config = _look(config, options, own, fresh=resumed is None)
    held = options.holding(config.replicas, one_host=one_host, weight_bytes=4 * about.parameters)
    folder = RunFolder.create(config) if resumed is None else RunFolder.open(resumed)
    with ExitStack() as stack:
        stack.enter_context(folder.held(resumed=resumed is not None))
        whence = None if resumed is None else _Whence.of(resumed, folder, config, about)
        with folder.writing(folder.config):
            write_text_atomically(folder.config, config.to_yaml())
        with folder.writing(folder.inference):
            write_text_atomically(folder.inference, inference.to_json())
        write_objects(folder, own)
        recorder = Recorder(
            folder,
            config,
            about,
            length=0 if whence is None else whence.metrics_length,
            spared=None if whence is None else whence.checkpoint,
        )
        stack.callback(recorder.close)
        conducting = Conducting(
            config,
            options,
            about,
            recorder,
            listener,
            None if whence is None else whence.past,
            checkpoint=None if whence is None else whence.checkpoint,
            held=held,
            host=host,
            store=store,
            folder=str(folder.path),
            servers_here=servers_here,
            own=here,
        )
        stack.callback(conducting.close)
        stack.callback(folder.meeting.unlink, missing_ok=True)
        stack.callback(listener.ended)
        with folder.writing(folder.meeting):
            _write_private(folder.meeting, conducting.meeting.to_json())
        conducting.start_servers()
        listener.started(about, folder)
        if whence is not None and recorder.lacks_lines:
            conducting.warn(lines_are_missing(whence.past.counted))
        for text in (*config.decided(), *begun_with, *(() if whence is None else whence.told)):
            conducting.warn(text)
        rates = config.rates()
        if told := rates.told(Rates(config.lr, config.momentum)):
            conducting.warn(
                f"{options.name} with {config.replicas} replicas {told}; --exchange-options rates=given keeps yours."
            )
        for warning in options.warnings(config.replicas, lr=rates.lr, momentum=rates.momentum):
            conducting.warn(warning)
        yield conducting
        if conducting.result is not None:
            if config.trace is not None and not folder.trace.exists():
                conducting.warn(f"no replica took any of the steps that --trace {config.trace} names.")
            listener.finished(conducting.result, folder)


def _look(
    config: TrainConfig, options: ExchangeOptions, own: OwnObjects, *, fresh: bool
) -> tuple[About, Inference, list[str], TrainConfig]:
    """Find what is wrong with the user's input before any replica is started; and what the run is about.

    Not `fresh`: it goes on. Then what people should know of its first weights was told before.
    """
    each = config.workers // config.replicas
    alone = config.model_copy(
        update={"device": "cpu", "batch": config.replica_batch, "workers": each, "replicas": 1, "exchange": None}
    )
    check_laps(config)
    splits, _, model = load_whole(alone, own, fresh=fresh)
    told = initial.told(model, config) if fresh else []
    assert isinstance(options, Kind)
    if own.optimizer is not None or config.optimizer != "sgd" or config.optimizer_options:
        # Of SGD servers can do all that it is told otherwise.
        optimizer = make_optimizer(alone, model.parameters(), own)
        options.taken_over(optimizer)
        config = own.settled(config, optimizer)
    if own.optimizer is not None:
        _check_unchanged(config, options, optimizer)
    if config.clip is not None and options.taken_over(torch.optim.SGD(model.parameters())) is not None:
        raise ConfigError(
            f"clip = {config.clip:g} is of the gradients that a step is made of, and with {options.name} servers step, "
            "each of which has a part of them.",
            "Leave --clip out, or use an exchange whose replicas step themselves, such as allreduce or local.",
        )
    about = describe(
        config,
        splits,
        parameters=count_parameters(model),
        # The same samples as one worker would see with the whole batch.
        steps_per_epoch=Numbering.of(config, len(splits.train)).per_epoch,
        plan=config.plan,
        device=config.device if config.device != "auto" else "cpu",
        exchange=options.name,
        survives=options.survives,
        own_loss=own.loss is not None,
    )
    if config.plan == AUTO and each > 1 and config.replicas > 1:
        raise ConfigError(
            "plan = 'auto' would be searched by every replica for itself, and they must agree.",
            f"Find one first, with shoal plan --model {config.model} --workers {each} --out plan.json, and give "
            "--plan plan.json.",
        )
    if not about.steps_per_epoch:
        raise ConfigError(
            f"a step on {config.samples_per_step} samples is larger than the data set, which has "
            f"{about.train_samples}.",
            f"Give a --batch, times --accumulate, of at most {about.train_samples}.",
        )
    return about, inference_of(alone, splits), told, config.model_copy(update={"data": splits.name})


def _check_unchanged(config: TrainConfig, options: ExchangeOptions, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an exchange that would change an optimizer of the user's own."""
    rates = list(dict.fromkeys(float(group["lr"]) for group in optimizer.param_groups))
    if len(rates) > 1:
        raise ConfigError(
            f"{options.name} steps all parameters at one rate, and the groups of {type(optimizer).__name__} have "
            f"{' and '.join(f'{rate:g}' for rate in rates)}.",
            "Give all groups the same rate, or train one replica.",
        )
    kept = {float(group.get("momentum", 0.0)) for group in optimizer.param_groups}
    if kept != {float(config.rates().momentum)}:
        raise ConfigError(
            f"{options.name} with {config.replicas} replicas changes the momentum, and yours is in the optimizer.",
            "Keep it with exchange_options={'rates': 'given'}, or use another exchange.",
        )


@dataclass(frozen=True)
class _Whence:
    """From where a run goes on."""

    checkpoint: Checkpoint
    past: HowFar
    metrics_length: int
    told: list[str]
    """What people should know of it."""

    @classmethod
    def of(cls, path: Path, folder: RunFolder, config: TrainConfig, about: About) -> "_Whence":
        """The checkpoint at `path`, or the newest whole one of the run there, if the run can go on."""
        checkpoint, said = folder.choose(path)
        state = read_state(checkpoint, config)
        with checkpoint.trusted():
            past = read_past(checkpoint, state, config, about.train_samples)
            repeated_before, metrics_length = (state["progress"][name] for name in ("repeated", "metrics_length"))
        folder.check_unfinished(past.counted // about.steps_per_epoch, config, stopped=past.best.stops(config.patience))
        before = settings_before(state)
        repeated = past.samples_repeated - repeated_before
        lost = () if own_carried_over(state, config) else state.get("own_of_replicas", ())
        said = [*said, *told(before, config, repeated, lost)]
        return cls(checkpoint, past, metrics_length, said)


def _options(config: TrainConfig) -> ExchangeOptions:
    options = config.exchange_settings()
    assert options is not None
    return options


def _why(failure: Failure) -> str:
    return f"rank {failure.rank} {failure.what}"


def _write_private(path: Path, text: str) -> None:
    """Readable by this user only: it holds the token."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
