"""What a command is asked to do, as one frozen value: a training run, a comparison with one device, a plan.

The command line's flags, a recipe's keys and `OUT/config.yaml` are these fields and no others, so one
check serves all three. Each field's text below is its help on the command line.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shoal.errors import ConfigError, suggestion
from shoal.exchanges import EXCHANGES, ExchangeOptions, Rates, parse_exchange
from shoal.machine import cores
from shoal.optimizers import OPTIMIZERS, OptimizerName, OptimizerOptions, Sgd, parse_optimizer
from shoal.units import Period, WorkerRange, parse_quantity

Schedule = Literal["cosine", "step", "constant"]
TORCH_STRATEGIES = ("ddp", "fsdp2", "post-local-sgd")
"""Strategies of torch's own, which have the place of a plan over all workers."""


def _split_sizes(value: object) -> object:
    """`"3,224,224"` (or `3x224x224`) from a command line is the list `[3, 224, 224]` of a recipe."""
    return value.replace("x", ",").split(",") if isinstance(value, str) else value


_BETWEEN = re.compile(r",(?![^\[]*\])")
"""Commas between options, not those of a list in brackets."""


def _split_options(value: object) -> object:
    """`"width=16,sizes=[3,5]"` from a command line is the mapping of a recipe, its values read as YAML's."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in _BETWEEN.split(value) if part]
    if any(not name or not equals for name, equals, _ in pairs):
        raise ValueError("name=value, or several with commas between")
    return {name.strip(): yaml.safe_load(text) for name, _, text in pairs}


def _bytes(value: object) -> object:
    """`8GiB` is a number of bytes."""
    try:
        return value if value is None else int(parse_quantity(value, "bytes"))
    except ValueError:
        raise ValueError("a number of bytes, alone or with a unit: 500000000, 500MB, 8GiB") from None


def _none(value: object) -> object:
    """`none` is nothing: what was given in a recipe, or in the run that goes on, can be taken back."""
    return None if value == "none" else value


def _count(value: object) -> object:
    """`auto` is one worker per core of this machine."""
    return cores() if value == "auto" else value


def _split_names(value: Any) -> Any:
    """`"data,owt"` from a command line, also given in parts, is the list `[data, owt]` of a script."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, tuple | list):
        return tuple(part for given in value for part in (_split_names(given) if isinstance(given, str) else (given,)))
    return value


Names = Annotated[tuple[str, ...], BeforeValidator(_split_names)]


def _trace(value: object) -> object:
    """`10`, `20-30` or `20:30` as text; in a recipe also a number, or whether to record at all."""
    if value is None or value is False:
        return None
    text = TRACED if value is True else str(value).replace(":", "-")
    first, to, last = text.partition("-")
    fits = first.isdecimal() and int(first) > 0 and (not to or (last.isdecimal() and int(last) >= int(first)))
    if not fits or (int(last) - int(first) + 1 if to else int(first)) > MOST_TRACED:
        raise ValueError(f"a number of steps such as 10, or from-to such as 20-30, at most {MOST_TRACED} of them")
    return text


TRACED = "10"
"""Steps that are recorded unless told otherwise."""
MOST_TRACED = 1000
"""Steps that may be recorded: a file of more is hard to open."""
WARM_UP = 5
"""Steps before those that are recorded, where only their number is told: the first ones are not like the others."""

Workers = Annotated[
    int,
    BeforeValidator(_count),
    Field(
        gt=0,
        description="Ranks in all, started on this host; auto is one per core. Under torchrun and srun: their number.",
    ),
]
Elastic = Annotated[
    WorkerRange | None, PlainValidator(WorkerRange.parse), PlainSerializer(lambda value: value and str(value))
]
Every = Annotated[Period, PlainValidator(Period.parse), PlainSerializer(str)]
Options = Annotated[dict[str, Any], BeforeValidator(_split_options)]
Shape = Annotated[tuple[Annotated[int, Field(gt=0)], ...], BeforeValidator(_split_sizes), Field(min_length=1)]


class Checked(BaseModel):
    """Frozen settings of one command. Unknown names and values out of range are refused with `ConfigError`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
    described_as: ClassVar[str]
    """What these are settings of, for messages."""

    def __init__(self, **values: Any) -> None:
        """The first value that is wrong is a `ConfigError`."""
        self._fill(values, source="")

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, source: str = "") -> Self:
        """The same of raw values, from a file or the command line; `source` stands before the message."""
        config = cls.__new__(cls)
        config._fill(values, source)
        return config

    def tells(self, name: str) -> bool:
        """Whether a setting was given, and not left to us."""
        return name in self.model_fields_set

    def _fill(self, values: Mapping[str, Any], source: str) -> None:
        fields = type(self).model_fields
        for name in values:
            if name not in fields:
                raise ConfigError(
                    f"{source}{name!r} is not a setting of {self.described_as}.", suggestion(name, fields)
                )
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _explain(error.errors()[0], fields, source) from None


class Settings(Checked):
    """What training and its check ask of a network and its plan."""

    model: str = "lenet5"
    """A zoo name; timm:, torchvision: or monai:NAME; package.module:factory or path/to/file.py:factory for your own."""
    model_options: Options = Field(default_factory=dict)
    """Further keywords for the network's factory, such as width=16,strides=[2,2]."""
    data: str | None
    input: Shape | None = None
    """One sample's shape, channels first, such as 3,224,224; the data's own unless given."""
    classes: int | None = Field(default=None, gt=0)
    """Number of classes; the data's own unless given."""
    batch: int
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the first weights, the order of samples, dropout and augmentation."""

    workers: Workers = 1
    plan: str = "data"
    """How layers are cut over the workers: data, model, owt, spatial, RxG such as 2x2, a file; auto is searched."""
    batch_norm: Literal["exact", "local"] = "exact"
    """Statistics over the whole batch, or over each worker's samples as DDP takes them."""
    recompute: bool | None = None
    """Compute activations a second time in backward, and keep less, or never; as the plan says unless given."""
    factors: str = "auto"
    """Send linear layers' inputs and output gradients, not summed gradients: auto, always, never, or layers' names."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds that a worker waits for another before the run fails."""
    threads: int | None = Field(default=None, gt=0)
    """Threads per worker; all cores shared among the workers unless given."""


class TrainConfig(Settings):
    """One training run. Frozen; unknown names and values out of range are refused with `ConfigError`."""

    described_as = "a training run"

    data: str = "default"
    """A data set's name, folder:PATH, pairs:PATH, windows:PATH, npz:PATH, synthetic; default takes the first found."""
    batch: int = Field(default=64, gt=0)
    """Samples per step, over all workers together."""
    plan: str = Field(
        default="data",
        description="How layers are cut over the workers: data, model, owt, spatial, RxG such as 2x2, a file; owt:b, "
        f"owt:c: linear layers in laps; auto is searched; {', '.join(TORCH_STRATEGIES)}: torch's own.",
    )
    augment: str = ""
    """Random changes to training samples, such as flip,shift:4,crop:256."""

    epochs: int = Field(default=5, gt=0)
    """Passes over the training set."""
    init: Path | None = None
    """A .safetensors file of the first weights, such as another run's model.safetensors; drawn unless given."""
    init_partial: bool = False
    """Take of --init what has the network's names and shapes, and say what does not."""
    optimizer: OptimizerName = "sgd"
    """What makes a step of the gradients, as torch.optim has it; one device's steps under any plan."""
    optimizer_options: Options = Field(default_factory=dict)
    """Further options of the optimizer, such as betas=[0.9,0.95],eps=1e-6 or nesterov=true."""
    optimizer_state: Literal["whole", "cut"] = "whole"
    """What the optimizer remembers of a parameter that workers have copies of: all on each, or each a part of it."""
    lr: float = Field(default=Sgd.lr, gt=0)
    """Peak learning rate; unless given, of sgd what the network bears, of adam and the like 0.001, of adagrad 0.01."""
    schedule: Schedule = "cosine"
    """How the rate falls: cosine to zero, step (a tenth after 1/2 and again after 3/4), or constant."""
    warmup: float = Field(default=0.0, ge=0)
    """Epochs in which the rate climbs to its peak, before the schedule begins."""
    momentum: float = Field(default=Sgd.momentum, ge=0, lt=1)
    """Momentum of sgd and rmsprop, of which rmsprop has none unless given."""
    weight_decay: float = Field(default=Sgd.weight_decay, ge=0)
    """Penalty on the weights; of adamw 0.01 and of the others but sgd 0 unless given."""
    last_batch: Literal["drop", "keep"] = "drop"
    """Samples at the end of an epoch that are too few for a batch: left out of it, or trained on as a smaller one."""
    accumulate: int = Field(default=1, gt=0)
    """Batches of one step: as a step on so many times --batch, in the memory of one, but for batch norm."""
    clip: float | None = Field(default=None, gt=0)
    """Largest norm of the gradients of the whole network; longer ones are scaled down to it."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of every label that is spread over all classes in training; tests take labels as they are."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Forward passes of training in lower precision, by autocast; fp16 scales the loss. Tests are in full precision."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay of a running average of the weights, such as 0.999, which is then what is tested and saved as weights."""

    on: Literal["here", "ray"] = "here"
    """Who starts the workers: here, this host does; ray, a Ray cluster, as actors. See docs/clusters_howto.md."""

    replicas: int = Field(
        default=1,
        gt=0,
        description="Copies of the network, each on workers / replicas of the workers under the plan; "
        "kept together by the exchange.",
    )
    exchange: Annotated[str | None, BeforeValidator(_none)] = Field(
        default=None,
        description=f"How replicas keep together: {', '.join(EXCHANGES)}; allreduce unless given; none: one network. "
        "See docs/exchanges.md.",
    )
    exchange_options: Options = Field(default_factory=dict)
    """Options of the exchange, such as n_sync=4,servers=processes."""
    slow: Options = Field(default_factory=dict)
    """Make one worker slow on purpose, such as rank=1,factor=3: three times as long per step."""

    race: bool = True
    """With the plan auto: run the best few for some steps and take the fastest, not the prediction's word."""
    bucket_bytes: int | None = Field(default=None, gt=0)
    """Bytes of gradients that are summed at a time; measured on the link unless given."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes an accelerator where there is one."""

    out: Path | None = None
    """Folder for the results; a new one under runs/ unless given."""
    eval_every: int = Field(default=1, gt=0)
    """Epochs from one test to the next; the last epoch is always tested."""
    patience: int | None = Field(default=None, gt=0)
    """Stop at the end of an epoch when so many tests in a row were not better than the best one before."""
    eval_steps: int | None = Field(default=None, gt=0)
    """Test after every so many steps too, between the tests of `eval_every`."""
    checkpoint_every: Every = Period(1, "epochs")
    """Time from one checkpoint to the next, such as 500steps, 1epoch or 10min; the end and Ctrl-C always leave one."""
    keep: int = Field(default=2, gt=0)
    """Checkpoints that are kept, the newest; of two, the older is used where the newer is damaged."""
    restarts: int = Field(default=0, ge=0)
    """How often a run goes on by itself after a death: from its last checkpoint, or with a replica started anew."""
    elastic: Elastic = None
    """MIN:MAX workers: go on with fewer after a loss, with more after a minute, or SECONDS as in MIN:MAX:SECONDS."""
    log_every: int = Field(default=50, gt=0)
    """Steps from one line of metrics.jsonl to the next."""
    tensorboard: bool = False
    """Write what metrics.jsonl has as TensorBoard's events too, into OUT/tensorboard; needs that package."""
    trace: Annotated[str | None, BeforeValidator(_trace)] = Field(
        default=None,
        description="Record what every worker does in some steps, as trace.json: so many after the first few, "
        f"{TRACED} unless told, or from-to such as 20-30. See docs/trace.md.",
        json_schema_extra={"metavar": "[STEPS]", "alone": TRACED},
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """What no field can see alone."""
        if self.warmup >= self.epochs:
            raise ConfigError(
                f"warmup = {self.warmup:g} epochs does not end within epochs = {self.epochs}.",
                "Give a shorter --warmup or more --epochs.",
            )
        if self.init_partial and self.init is None:
            raise ConfigError("init_partial takes a part of no file.", "Name the file with --init.")
        self._decide_rates()
        begins_with_most = self.elastic is not None and not (self.tells("workers") or self.tells("replicas"))
        if self.elastic is not None and begins_with_most:
            self.__dict__["workers"] = self.elastic.most
        if self.exchange is not None and not self.tells("replicas"):  # between whom, if not between all workers?
            self.__dict__["replicas"] = self.workers
        if not (self.tells("workers") or begins_with_most):  # replicas alone say how many there are: one each
            self.__dict__["workers"] = self.replicas
        self._check_replicas()
        if self.plan in TORCH_STRATEGIES:
            self._check_torch_strategy()
        if self.elastic is not None:
            self._check_elastic(self.elastic)
        return self

    def _check_elastic(self, elastic: WorkerRange) -> None:
        """A range that the run begins in, for a run that needs all its workers."""
        options = self.exchange_settings()
        if options is not None and options.survives:
            raise ConfigError(
                f"elastic = '{elastic}' is for plans and for allreduce and sync, which need all their replicas.",
                f"Leave --elastic out: {options.name} goes on without a lost replica by itself, and --join adds one.",
            )
        if self.plan == "post-local-sgd":
            raise ConfigError(
                f"elastic = '{elastic}' does not go with post-local-sgd, whose workers have weights of their own.",
                "Leave --elastic out, or choose another plan.",
            )
        if not elastic.least <= self.workers <= elastic.most:
            raise ConfigError(
                f"elastic = '{elastic}', but the run begins on {self.workers} workers.",
                "Give --workers, or --replicas, within the range, or leave them out to begin with the most.",
            )

    @property
    def goes_on_by_itself(self) -> bool:
        """Whether somebody waits to go on with what the survivors of a loss still hold."""
        return self.restarts > 0 or self.elastic is not None

    def optimizer_settings(self) -> OptimizerOptions:
        """The optimizer's own options, checked."""
        return parse_optimizer(self.optimizer, self.optimizer_options)

    @property
    def optimizer_slots(self) -> int:
        """Tensors that the optimizer remembers of each parameter."""
        return self.optimizer_settings().slots(self.momentum)

    def _decide_rates(self) -> None:
        """Rate, momentum and weight decay that are usual for the optimizer, where they were not given."""
        options = self.optimizer_settings()
        self.__dict__["optimizer_options"] = options.model_dump(mode="json", exclude_unset=True)
        if options.momentum is None and self.tells("momentum") and self.momentum:
            raise ConfigError(
                f"momentum = {self.momentum:g} is not for {self.optimizer}, which has none of this name.",
                "Leave --momentum out; what the optimizer has instead is said with --optimizer-options.",
            )
        usual = {"lr": options.rate_for(self.model), "momentum": options.momentum, "weight_decay": options.weight_decay}
        for name, value in usual.items():
            if not self.tells(name):
                self.__dict__[name] = value or 0.0
        if isinstance(options, Sgd) and options.nesterov and (not self.momentum or options.dampening):
            raise ConfigError(
                f"nesterov = true does not go with momentum = {self.momentum:g} and dampening = {options.dampening:g}.",
                "Nesterov's needs a --momentum above 0, and no dampening.",
            )

    def on_workers(self, workers: int) -> Self:
        """The same settings on so many workers; what was not given is decided anew."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, "workers": workers})

    def decided(self) -> list[str]:
        """What was decided because it was not given, and people may have meant otherwise."""
        options = self.exchange_settings()
        usual = type(self).model_fields["batch"].default
        told = []
        if self.optimizer != "sgd" and not (self.tells("lr") and self.tells("weight_decay")):
            told.append(f"{self.optimizer} with --lr {self.lr:g} and --weight-decay {self.weight_decay:g}.")
        elif not self.tells("lr") and self.lr != Sgd.lr:
            told.append(f"--lr {self.lr:g}, which {self.model} bears, instead of {Sgd.lr:g}.")
        if options is not None and self.replicas == 1:
            told.append(f"{options.name} with one replica exchanges nothing: give --replicas.")
        if not self.tells("batch") and self.batch != usual:
            who = f"{self.replicas} replicas" if self.replicas > 1 else f"{self.workers} workers"
            told.append(f"--batch {self.batch}, which {who} can share equally, instead of {usual}.")
        return told

    def _check_replicas(self) -> None:
        if self.workers % self.replicas:
            raise ConfigError(
                f"replicas = {self.replicas} does not divide workers = {self.workers}.",
                "Every replica has the same number of workers: give a multiple of --replicas as --workers.",
            )
        if self.exchange is None and self.exchange_options and self.replicas == 1:
            raise ConfigError(
                f"exchange_options = {self.exchange_options} are for no exchange.", "Name it with --exchange."
            )
        options = self.exchange_settings()
        if options is None:
            unknown = self.slow
        else:
            self._check_steps(options)
            if self.optimizer_state == "cut":
                raise ConfigError(
                    f"optimizer_state = 'cut' does not go with {options.name}: replicas exchange whole parts.",
                    "Leave --optimizer-state out, or train one network over all workers, without --exchange.",
                )
            unknown = {name: value for name, value in self.slow.items() if name not in ("rank", "factor")}
            self._check_batch(options)
        if unknown:
            raise ConfigError(
                f"slow = {self.slow} does not work: it should be rank=R,factor=F in a run with an exchange.",
                "Such as --replicas 2 --exchange downpour --slow rank=1,factor=3.",
            )
        rank, factor = self.slow.get("rank", 0), self.slow.get("factor", 1)
        if not isinstance(rank, int) or not 0 <= rank < self.workers:
            raise ConfigError(f"slow: there is no rank {rank!r} among {self.workers} workers.", "Ranks count from 0.")
        if not isinstance(factor, int | float) or factor < 1:
            raise ConfigError(f"slow: factor = {factor!r} is not at least 1.", "Give such as factor=3.")

    def _check_torch_strategy(self) -> None:
        """What torch's own strategies do not do."""
        if self.exchange is not None or self.replicas > 1:
            raise ConfigError(
                f"plan = {self.plan!r} is a strategy of torch's own over all workers, without replicas and exchange.",
                "Leave --replicas and --exchange out, or choose a plan of Shoal's, such as data.",
            )
        if self.tells("batch_norm") and self.batch_norm == "exact":
            raise ConfigError(
                f"batch_norm = 'exact' is not what {self.plan} does: each worker takes the statistics of its samples.",
                "Leave --batch-norm out, or choose the plan data.",
            )
        self._share_batch(self.workers)
        self.check_equal_shares()
        refused = {
            "recompute": bool(self.recompute),
            "factors": self.factors != "auto",
            "optimizer_state": self.optimizer_state == "cut",
            "last_batch": self.last_batch == "keep",
        }
        if self.plan != "ddp":
            refused["ema"], refused["amp"] = self.ema is not None, self.amp == "fp16"
            refused["bucket_bytes"] = self.bucket_bytes is not None
        for name, asked in refused.items():
            if asked:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r} does not go with {self.plan}.",
                    f"Leave --{name.replace('_', '-')} out, or choose the plan data.",
                )

    def check_equal_shares(self) -> None:
        """A `ConfigError` where workers would have unequal shares, of which torch takes the plain mean."""
        if self.batch % self.workers:
            raise ConfigError(
                f"batch = {self.batch} is not divided evenly by the {self.workers} workers of {self.plan}.",
                "Give a --batch that is a multiple of --workers: torch takes the plain mean of the workers' gradients.",
            )

    def _check_steps(self, options: ExchangeOptions) -> None:
        """What is done around a step, where replicas exchange in its place."""
        if self.ema is not None and not options.averages_every_step:
            raise ConfigError(
                f"ema = {self.ema:g} averages the weights of every step, which with {options.name} no replica sees.",
                "Leave --ema out, or use an exchange after every step of which all have the same weights: allreduce.",
            )
        if self.amp == "fp16":
            raise ConfigError(
                f"amp = 'fp16' leaves out steps with infinite gradients, on which {options.name} would have to agree.",
                "Give --amp bf16, which needs no scaling.",
            )

    def _check_batch(self, options: ExchangeOptions) -> None:
        options.check_replicas(self.replicas)
        parts = options.parts_of_batch(self.replicas)
        self._share_batch(parts)
        if self.batch % parts:
            raise ConfigError(
                f"batch = {self.batch} is not divided evenly by {parts} replicas.",
                "Give a --batch that is a multiple of them: each replica takes an equal share.",
            )

    def _share_batch(self, parts: int) -> None:
        """A batch that nobody gave is one that so many can share equally."""
        if not self.tells("batch"):
            self.__dict__["batch"] = max(1, round(self.batch / parts)) * parts

    def exchange_settings(self) -> ExchangeOptions | None:
        """The exchange between replicas; None for one replica without any."""
        if self.exchange is None and self.replicas == 1:
            return None
        return parse_exchange(self.exchange or "allreduce", self.exchange_options).among(self.replicas)

    def rates(self) -> Rates:
        """Rate and momentum of the optimizer: the exchange's own, which it makes of those that are given."""
        given, options = Rates(self.lr, self.momentum), self.exchange_settings()
        return given if options is None else options.tuned(given, self.replicas)

    @property
    def replica_batch(self) -> int:
        """Samples of one gradient of one replica: its share of the batch."""
        options = self.exchange_settings()
        return self.batch if options is None else self.batch // options.parts_of_batch(self.replicas)

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step, over all workers together."""
        return self.batch * self.accumulate

    def traced_steps(self, done: int, total: int) -> range:
        """The steps that are recorded, counted from 1, of a run that has `total` and goes on after `done`."""
        if self.trace is None:
            return range(0)
        first, to, last = self.trace.partition("-")
        if to:
            return range(int(first), int(last) + 1)
        count = min(int(first), total - done)
        begin = done + min(WARM_UP, total - done - count) + 1
        return range(begin, begin + count)

    def to_yaml(self) -> str:
        """All fields, as a recipe that reads back to an equal value."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


class VerifyConfig(Settings):
    """One comparison of a plan with one device. Frozen; refuses as `TrainConfig` does."""

    described_as = "a comparison with one device"

    data: str | None = None
    """A data set whose first samples are the batch, as for training; random numbers unless given."""
    batch: int = Field(default=4, gt=0)
    """Samples of the batch, over all workers together."""
    workers: Workers = 2
    steps: int = Field(default=3, gt=0)
    """Optimizer steps, after which parameters, buffers and an evaluation are compared."""
    dtype: Literal["float64", "float32"] = "float64"
    """Precision of both sides; float64 leaves a plan no rounding to hide behind."""
    tolerance: float | None = Field(default=None, gt=0)
    """Largest relative difference that passes; 1e-9 in float64 and 1e-3 in float32 unless given."""


class CompareConfig(Checked):
    """One comparison of strategies. What every run of it has in common are settings of `TrainConfig`."""

    described_as = "a comparison"

    plans: Names = Field(
        default=(),
        description="Plans with commas between, as in `shoal train --plan`; "
        f"{', '.join(TORCH_STRATEGIES)}: torch's own, over all workers. data,auto,ddp unless given.",
    )
    exchanges: Names = Field(
        default=(),
        description="Exchanges with commas between: every plan with each of them, between replicas; none: over all "
        "workers.",
    )
    workers: Annotated[int, BeforeValidator(_count), Field(gt=0)] | None = None
    """Ranks of every run; auto is one per core. 2 unless given, or 4 for several plans with exchanges."""
    replicas: int | None = Field(default=None, gt=1)
    """Replicas of every run with an exchange; of one worker each for one plan, of two for several, unless given."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], BeforeValidator(_split_names)] = Field(
        default=(0,), min_length=1
    )
    """Seeds with commas between, such as 0,1,2: a run of each strategy for each."""
    baseline: bool = True
    """Also run one worker, beside which speedup and efficiency stand."""
    target: float | None = Field(default=None, gt=0, lt=1)
    """Test accuracy whose time is compared; the largest that all strategies reach unless given."""
    rates: Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_split_names)] = ()
    """Learning rates with commas between: each strategy takes its best, by a short run with each."""
    rate_epochs: int = Field(default=1, gt=0)
    """Epochs of each such run, on a seed that is not compared."""
    rounds: int = Field(default=10, ge=0)
    """After the runs, steps of all strategies are timed in turns, in so many rounds; 0: not at all."""
    out: Path | None = None
    """Folder of the comparison, with a folder for every run; a new one under runs/ unless given."""


class EvaluateConfig(Checked):
    """One test of a trained network."""

    described_as = "a test of a trained network"

    data: str | None = None
    """A data set whose test part is taken, as for training; the one that it was trained on unless given."""
    model: str | None = None
    """The network where the run's own name for it does not lead to it any more; as in `shoal train --model`."""
    batch: int | None = Field(default=None, gt=0)
    """Samples per batch, over all workers together; as in training unless given."""
    workers: Workers = 1
    plan: str = "data"
    """How layers are cut over the workers: data, model, owt, spatial, RxG such as 2x2, a file; auto is searched."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds that a worker waits for another before the test fails."""
    threads: int | None = Field(default=None, gt=0)
    """Threads per worker; all cores shared among the workers unless given."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes an accelerator where there is one."""


class NetworkConfig(Checked):
    """A network and the sizes for which it is planned."""

    model: str = "lenet5"
    """A zoo name; timm:, torchvision: or monai:NAME; package.module:factory or path/to/file.py:factory for your own."""
    model_options: Options = Field(default_factory=dict)
    """Further keywords for the network's factory, such as width=16,strides=[2,2]."""
    input: Shape | None = None
    """One sample's shape, channels first, such as 3,224,224; a zoo network's published one unless given."""
    classes: int | None = Field(default=None, gt=0)
    """Number of classes; a zoo network's published one unless given."""
    batch: int = Field(default=64, gt=0)
    """Samples per step, over all workers together."""


class ProfileConfig(NetworkConfig):
    """One profile of a network on this machine."""

    described_as = "a profile"

    workers: Annotated[int, BeforeValidator(_count), Field(gt=0)] = 2
    """Ranks in all; auto is one per core. A cluster's or a timings file's own number where one is given."""
    fresh: bool = False
    """Measure and search anew instead of taking what the cache remembers."""
    timeout: float = Field(default=300.0, gt=0)
    """Seconds that a worker waits for another before the command fails."""
    threads: int | None = Field(default=None, gt=0)
    """Threads per worker; all cores shared among the workers unless given."""


class PlanConfig(ProfileConfig):
    """One search for a plan: on a described cluster, from a timings file, or measured on this machine."""

    described_as = "a search for a plan"

    cluster: str | None = None
    """Plan for a cluster, by preset or YAML file, from its data sheet; nothing is started."""
    timings: Path | None = None
    """Plan from what `shoal profile` wrote; nothing is started."""
    memory: Annotated[int, BeforeValidator(_bytes), Field(gt=0)] | None = None
    """Bytes that a worker may hold at most, such as 8GiB."""
    pin: tuple[str, ...] = ()
    """A cut that you want, as PATTERN=CUT such as 'classifier.*=c4'; may be repeated, and a later one wins."""
    batch_norm: Literal["exact", "local"] = "exact"
    """Statistics over the whole batch, or over each worker's samples as DDP takes them."""
    factors: str = "auto"
    """Send linear layers' inputs and output gradients, not summed gradients: auto, always, never, or layers' names."""
    recompute: bool | None = None
    """Compute activations again in backward, always or never; only where it keeps --memory unless given."""
    optimizer: OptimizerName = "sgd"
    """What will train: adam and adamw remember two tensors of each parameter, the others one."""
    optimizer_state: Literal["whole", "cut"] = "whole"
    """What the optimizer remembers of a parameter that workers have copies of: all on each, or each a part of it."""
    race: bool = True
    """Run the best few plans and the fixed strategies for some real steps, and keep the fastest."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """What no field can see alone."""
        _check_one_source(self.cluster, self.timings)
        return self

    @property
    def optimizer_slots(self) -> int:
        """Tensors that the optimizer remembers of each parameter, with its usual options."""
        kind = OPTIMIZERS[self.optimizer]
        return kind().slots(kind.momentum or 0.0)

    @property
    def pins(self) -> dict[str, str]:
        """Pattern and cut of every pin, in order."""
        found: dict[str, str] = {}
        for pin in self.pin:
            pattern, equals, cut = pin.rpartition("=")
            if not (pattern and equals and cut):
                raise ConfigError(
                    f"pin {pin!r} is not a pattern and a cut.",
                    "Write PATTERN=CUT, such as --pin 'classifier.*=c4'; 1 leaves a layer whole.",
                )
            found.pop(pattern, None)
            found[pattern] = cut
        return found


class PricedConfig(NetworkConfig):
    """With what a plan file is priced, if at all."""

    described_as = "a plan to be shown"

    model: str = ""
    """The network that the plan is for, to show times and bytes; as in `shoal train --model`."""
    cluster: str | None = None
    """Price it on a cluster, by preset or YAML file, from its data sheet."""
    timings: Path | None = None
    """Price it from what `shoal profile` wrote."""
    batch_norm: Literal["exact", "local"] = "exact"
    """Statistics over the whole batch, or over each worker's samples as DDP takes them."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """What no field can see alone."""
        _check_one_source(self.cluster, self.timings)
        known = self.cluster is not None or self.timings is not None
        if known != bool(self.model):
            raise ConfigError(
                f"model = {self.model!r} without speeds has no price."
                if self.model
                else "speeds without a network have no price.",
                "Give --model, and --cluster or --timings beside it; or none of them to see the cuts alone.",
            )
        return self


class SimulateConfig(NetworkConfig):
    """One simulation of a plan on a cluster."""

    described_as = "a simulation"

    cluster: str | None = None
    """The cluster, by preset or YAML file, from its data sheet."""
    timings: Path | None = None
    """Instead of a cluster: what `shoal profile` wrote."""
    workers: int | None = Field(default=None, gt=0)
    """Devices, for a plan by name; a plan file's own number, or all of the cluster's, unless given."""
    batch_norm: Literal["exact", "local"] = "exact"
    """Statistics over the whole batch, or over each worker's samples as DDP takes them."""
    factors: str = "auto"
    """Send linear layers' inputs and output gradients, not summed gradients: auto, always, never, or layers' names."""
    recompute: bool | None = None
    """Compute activations a second time in backward, or never; as the plan says unless given."""
    what_if: tuple[str, ...] = ()
    """Also simulate a change, such as bandwidth=2x,devices=64; of bandwidth, latency, compute, devices. Repeatable."""
    steps: int = Field(default=1, gt=0)
    """Steps to simulate, one after the other."""
    slow: tuple[str, ...] = ()
    """A rank that computes slower, as RANK=SPEED such as 3=0.5; may be repeated."""
    jitter: float = Field(default=0.0, ge=0)
    """Spread of the time of each task that computes, as a part of it."""
    seed: int = Field(default=0, ge=0)
    """Of the jitter, and of all else that is drawn."""
    replicas: int | None = Field(default=None, gt=0)
    """Instead of a plan: so many replicas of one device each, with an exchange between them."""
    exchange: str = "allreduce"
    """How these keep together."""
    exchange_options: Options = Field(default_factory=dict)
    """Settings of the exchange, such as n_sync=4."""
    churn: str | None = None
    """How long replicas live and are away, as lifetime=7200,away=1800 seconds, or none; the cluster's unless given."""
    step_seconds: float | None = Field(default=None, gt=0)
    """Of a replica's step; from the cluster's data sheet unless given."""
    server_bandwidth: str | None = None
    """Of each server's link, such as 1Gbit/s; as all hosts' unless given."""
    train: bool = False
    """Compute real gradients in simulated order, and test: how accurate after how many simulated seconds."""
    data: str | None = None
    """With train: what to train on."""
    lr: float = Field(default=Sgd.lr, gt=0)
    """With train: the learning rate of one worker; what the network bears unless given."""
    momentum: float = Field(default=Sgd.momentum, ge=0, lt=1)
    """With train: the momentum of one worker."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """What no field can see alone."""
        if not self.tells("lr"):
            self.__dict__["lr"] = Sgd.rate_for(self.model)
        self._check_replicas()
        _check_one_source(self.cluster, self.timings)
        if self.cluster is None and self.timings is None:
            raise ConfigError(
                "a simulation needs speeds.", "Give --cluster NAME, or --timings FILE that `shoal profile` wrote."
            )
        _ = self.slow_ranks
        return self

    def _check_replicas(self) -> None:
        """Which options are for replicas alone, and which are not for them."""
        if self.replicas is None:
            for name in ("exchange", "exchange_options", "churn", "step_seconds", "server_bandwidth", "train", "data"):
                if self.tells(name):
                    raise ConfigError(
                        f"--{name.replace('_', '-')} is for several replicas.", "Give --replicas too, and no plan."
                    )
            return
        for name in ("what_if", "workers", "timings"):
            if self.tells(name):
                raise ConfigError(f"--{name.replace('_', '-')} is not for replicas.", "Leave it out, or --replicas.")
        if self.data is not None and not self.train:
            raise ConfigError(f"--data {self.data} is read where gradients are computed.", "Give --train too.")

    @property
    def slow_ranks(self) -> dict[int, float]:
        """The speeds of slow ranks, by rank."""
        speeds = {}
        for text in self.slow:
            rank, _, speed = text.partition("=")
            try:
                speeds[int(rank)] = float(speed)
            except ValueError:
                raise ConfigError(
                    f"slow = {text!r} is not RANK=SPEED.", "Write the rank's number and its speed, such as 3=0.5."
                ) from None
        return speeds


def _check_one_source(cluster: str | None, timings: Path | None) -> None:
    if cluster is not None and timings is not None:
        raise ConfigError(
            f"--cluster {cluster} and --timings {timings} both say how fast things are.",
            "Give one: a cluster's data sheet, or what was measured.",
        )


def _explain(detail: ErrorDetails, fields: Mapping[str, FieldInfo], source: str) -> ConfigError:
    name = str(detail["loc"][0])
    field = fields[name]
    given = detail["input"] if len(detail["loc"]) == 1 else f"part {detail['loc'][-1]!r}"
    reason = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return ConfigError(
        f"{source}{name} = {given!r} does not work: it should be {reason}.",
        f"{name.replace('_', '-')}: {field.description}",
    )


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings in a YAML recipe, unchecked but for being a list of names and values.

    A file that is missing, is not YAML or holds something else is a `ConfigError` with the line and column.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no recipe {str(path)!r}.", "Give the path of a YAML file, or settings as options."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {error}.", "Give a readable YAML file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ConfigError(
            f"recipe {str(path)!r}{place} is not YAML: {problem}.",
            "Write one `name: value` per line; `shoal train --print-config` prints a whole recipe.",
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"recipe {str(path)!r} holds a {type(content).__name__}, not names and values.",
            "Write one `name: value` per line; `shoal train --print-config` prints a whole recipe.",
        )
    return {str(name).replace("-", "_"): value for name, value in content.items()}
