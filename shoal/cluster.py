"""Cluster: the devices that a plan is made for, and the links between them. Loads from and saves to versioned YAML.

Ranks are numbered so that neighbours in number are neighbours in the cluster: a level of size 4 holds ranks
0 to 3, 4 to 7 and so on. Every number has a `source` beside it, in words; docs/clusters.md has the schema.
"""

from collections.abc import Hashable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator
from pydantic_core import ErrorDetails

from shoal.errors import InputError, suggestion
from shoal.files import write_text_atomically
from shoal.units import parse_quantity, show_quantity

SCHEMA = "shoal.cluster/1"
_WRITE_ONE = "docs/clusters.md has the schema; Cluster.load(NAME).save(PATH) writes a preset to start from."


def _with_unit(kind: str) -> tuple[BeforeValidator, PlainSerializer]:
    """Read with or without a unit, written with one."""
    return BeforeValidator(lambda value: parse_quantity(value, kind)), PlainSerializer(
        lambda value: show_quantity(value, kind)
    )


_READ_MEMORY, _SHOW_MEMORY = _with_unit("bytes")
_READ_RATE, _SHOW_RATE = _with_unit("bytes/s")
_READ_SECONDS, _SHOW_SECONDS = _with_unit("seconds")
_READ_SPEED, _SHOW_SPEED = _with_unit("FLOP/s")
_READ_FLOPS, _SHOW_FLOPS = _with_unit("FLOP")

Memory = Annotated[int, _READ_MEMORY, _SHOW_MEMORY, Field(gt=0)]
Rate = Annotated[float, _READ_RATE, _SHOW_RATE, Field(gt=0)]
Duration = Annotated[float, _READ_SECONDS, _SHOW_SECONDS, Field(ge=0)]
Speed = Annotated[float, _READ_SPEED, _SHOW_SPEED, Field(gt=0)]
Flops = Annotated[float, _READ_FLOPS, _SHOW_FLOPS, Field(ge=0)]
Words = Annotated[str, Field(min_length=1)]


class _Frozen(BaseModel):
    """Unknown fields, infinities and values out of range are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Tile(_Frozen):
    """What a device's kernels compute of a product's result at a time; edges are padded to it."""

    rows: int = Field(gt=0, strict=True)
    columns: int = Field(gt=0, strict=True)

    def filled(self, rows: float, columns: float) -> float:
        """The fraction of the computed result that is wanted, of a result of this size, whichever way the tile lies.

        >>> Tile(rows=128, columns=32).filled(1000, 16)
        0.48828125
        """
        return max(
            rows / (ceil(rows / tall) * tall) * columns / (ceil(columns / wide) * wide)
            for tall, wide in ((self.rows, self.columns), (self.columns, self.rows))
        )


class Efficiency(_Frozen):
    """How much of its peak a device reaches: `peak_fraction * flops / (computed + half)`.

    Computed are `flops`, and what tiles are padded with.
    """

    peak_fraction: float = Field(gt=0, le=1)
    """What large convolutions and products reach, as a fraction of the peak."""
    half: Flops
    """FLOPs at which such a kernel reaches half of that."""
    launch: Duration
    """Seconds that every kernel costs, however small."""
    tile: Tile | None = None
    """Unless given, narrow and short products are as efficient as others of their work."""

    def fraction(self, flops: float, result: tuple[float, float] | None = None) -> float:
        """The fraction of its peak that a kernel of so many FLOPs reaches; `flops` is above 0.

        `result`: rows and columns of what it computes, where it is a product of two matrices.
        """
        filled = 1.0 if result is None or self.tile is None else self.tile.filled(*result)
        return self.peak_fraction * flops / (flops / filled + self.half)


class Device(_Frozen):
    """What one rank computes with."""

    name: Words
    memory: Memory
    """Bytes."""
    flops: Speed
    """Peak in float32, FLOP/s."""
    memory_bandwidth: Rate
    """Bytes/s, peak."""
    efficiency: Efficiency
    source: Words
    """Where these numbers are from, in words."""


class Level(_Frozen):
    """The links inside one group of ranks, such as the devices of one host or the hosts of one switch."""

    name: Words
    size: int = Field(gt=1, strict=True)
    """Ranks of one group; those of the outermost level are all ranks."""
    bandwidth: Rate
    """Bytes/s of one link, in each direction at the same time."""
    latency: Duration
    """Seconds from sending an empty message to having it."""
    shared: bool = Field(default=False, strict=True)
    """Whether the ranks of one inner group leave it by one link, as by a host's network card; else each has its own."""
    sum_bandwidth: Rate | None = None
    """Bytes/s that each rank sends while ranks add something up, where that differs from `bandwidth`."""
    sum_latency: Duration | None = None
    """Seconds of a sum of nothing over the ranks of one group, where that is not one latency per message of a ring."""
    wait: Duration = 0.0
    """Seconds that ranks lose, beyond the latency, when they meet in the middle of computing: one is always later."""
    skew: float = Field(default=0.0, ge=0)
    """Seconds more that they lose then, per second that they computed since they last met."""
    contention: float = Field(default=0.0, ge=0)
    """Seconds that computing loses to a sum in the background, per second that the sum takes alone; above 0 where
    processors carry messages."""
    source: Words
    """Where these numbers are from, in words."""

    @property
    def meeting(self) -> float:
        """Seconds of an empty message for which computing ranks stop."""
        return self.latency + self.wait

    @property
    def sum_rate(self) -> float:
        """Bytes/s that each rank sends while ranks add something up."""
        return self.sum_bandwidth or self.bandwidth

    def sum_start(self, ranks: int) -> float:
        """Seconds in which a ring of `ranks` adds up nothing."""
        return 2 * (ranks - 1) * self.latency if self.sum_latency is None else self.sum_latency


class Comings(_Frozen):
    """How long hosts stay, where they come and go; both are means of exponential distributions."""

    lifetime: Duration = Field(gt=0)
    """Seconds for which a host is there."""
    away: Duration
    """Seconds until another comes in its place; 0: none does."""
    source: Words
    """Where these numbers are from, in words."""


class Cluster(_Frozen):
    """Equal devices and levels of links, innermost first; no levels is one device alone. Frozen."""

    name: Words
    device: Device
    levels: tuple[Level, ...] = ()
    churn: Comings | None = None
    """Unless given, hosts neither die nor come."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Groups hold whole groups of the level inside them; only the outermost may end in a part of one."""
        for index, (inner, outer) in enumerate(zip(self.levels, self.levels[1:], strict=False), start=1):
            outermost = index == len(self.levels) - 1
            if outer.size <= inner.size or (outer.size % inner.size and not outermost):
                raise ValueError(
                    f"levels[{index}].size = {outer.size} is not a multiple, from 2 on, of the {inner.size} ranks of "
                    f"level {inner.name!r} inside it"
                )
        return self

    @property
    def ranks(self) -> int:
        """How many there are: the size of the outermost level."""
        return self.levels[-1].size if self.levels else 1

    def level_of(self, a: int, b: int) -> int | None:
        """Index of the innermost level that holds both ranks; None for a rank and itself.

        A rank that is not there is a `ValueError`.
        """
        for rank in (a, b):
            if not 0 <= rank < self.ranks:
                raise ValueError(f"rank {rank} is not one of the {self.ranks} of cluster {self.name!r}")
        if a == b:
            return None
        return next(index for index, level in enumerate(self.levels) if a // level.size == b // level.size)

    def first(self, ranks: int) -> "Cluster":
        """The cluster of the first `ranks` ranks; levels that they do not reach are left out."""
        if not 1 <= ranks <= self.ranks:
            raise InputError(
                f"cluster {self.name!r} has {self.ranks} ranks; {ranks} were asked for.",
                f"Ask for 1 to {self.ranks}, or describe a larger cluster in a file of your own. {_WRITE_ONE}",
            )
        if ranks == self.ranks:
            return self
        reached = [
            index for index, level in enumerate(self.levels) if index == 0 or self.levels[index - 1].size < ranks
        ]
        levels = [self.levels[index] for index in reached] if ranks > 1 else []
        if levels:
            levels[-1] = levels[-1].model_copy(update={"size": ranks})
        name = f"{self.name}, first {ranks}"
        return Cluster(name=name, device=self.device, levels=tuple(levels), churn=self.churn)

    def resized(self, ranks: int) -> "Cluster":
        """The cluster of `ranks` ranks like these: its first, or with more of its outermost links' groups."""
        if ranks <= self.ranks:
            return self.first(ranks)
        if not self.levels:
            raise InputError(
                f"cluster {self.name!r} is one device; {ranks} were asked for.",
                f"Describe the links between devices in a file of your own. {_WRITE_ONE}",
            )
        *inner, outermost = self.levels
        levels = (*inner, outermost.model_copy(update={"size": ranks}))
        return Cluster(name=f"{self.name}, as {ranks}", device=self.device, levels=levels, churn=self.churn)

    @classmethod
    def parse(cls, content: object, *, source: str = "") -> Self:
        """Check what a file holds; the first thing that is wrong is an `InputError` that names it and `source`."""
        if not isinstance(content, Mapping):
            raise InputError(f"{source}a cluster is names and values, not {type(content).__name__}.", _WRITE_ONE)
        fields = {str(name): value for name, value in content.items()}
        schema = fields.pop("schema", None)
        if schema != SCHEMA:
            raise InputError(f"{source}schema = {schema!r}; this version reads {SCHEMA!r}.", _WRITE_ONE)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _explain(error.errors()[0], source) from None

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """A preset by its name, or a YAML file by its path: with a folder or a suffix, or there under that name.

        An unknown name, or a file that is missing, not YAML or not a cluster, is an `InputError`.
        """
        text, path = str(name_or_path), Path(name_or_path)
        if text in presets():
            content = _read(_preset_folder() / f"{text}.yaml")
        elif path.name != text or path.suffix in (".yaml", ".yml") or path.is_file():
            content = _read(path)
        else:
            raise InputError(
                f"there is no cluster {text!r}.", f"{suggestion(text, presets())} Or give the path of a YAML file."
            )
        return cls.parse(content, source=f"cluster {text!r}: ")

    def save(self, path: str | Path) -> None:
        """Write the cluster as YAML that loads to an equal value; the file appears whole or not at all."""
        content = {"schema": SCHEMA, **self.model_dump(mode="json", exclude={"churn"} if self.churn is None else None)}
        write_text_atomically(Path(path), yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))


def presets() -> list[str]:
    """Names of the clusters that come with Shoal."""
    return sorted(file.name.removesuffix(".yaml") for file in _preset_folder().iterdir() if file.name.endswith(".yaml"))


def _preset_folder() -> Traversable:
    return resources.files("shoal") / "clusters"


def _read(path: Path | Traversable) -> object:
    """What a YAML file holds, unchecked but for names that stand twice."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _WithoutDoubles)
    except FileNotFoundError:
        raise InputError(
            f"there is no cluster file {str(path)!r}.",
            f"Give the path of a YAML file, or a name of {', '.join(presets())}.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cluster {str(path)!r} cannot be read: {error}.", "Give a readable YAML file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise InputError(f"cluster {str(path)!r}{place} is not YAML: {problem}.", _WRITE_ONE) from None


class _WithoutDoubles(yaml.SafeLoader):
    """YAML forgets the first of two values under one name; whoever changed that one would not be told."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        for index, (key, _) in enumerate(node.value):
            if key.value in names[:index]:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _explain(detail: ErrorDetails, source: str) -> InputError:
    """The first thing that pydantic found wrong, by the field's place in the file."""
    place = ""
    for step in detail["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}"
    place = place.removeprefix(".")
    reason = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    match detail["type"]:
        case "missing":
            return InputError(f"{source}{place} is missing.", _WRITE_ONE)
        case "extra_forbidden":
            known: dict[str | int, type[BaseModel]] = {
                "device": Device,
                "efficiency": Efficiency,
                "tile": Tile,
                "levels": Level,
                "churn": Comings,
            }
            owner = next((known[step] for step in reversed(detail["loc"][:-1]) if step in known), Cluster)
            wrong = str(detail["loc"][-1])
            return InputError(f"{source}{place} is not a field of a cluster.", suggestion(wrong, owner.model_fields))
        case "value_error":
            return InputError(f"{source}{f'{place}: ' if place else ''}{reason}.", _WRITE_ONE)
        case _:
            return InputError(
                f"{source}{place} = {detail['input']!r} does not work: it should be {reason}.", _WRITE_ONE
            )
