"""Inference: what a trained network needs beside its weights, in one small file.

It is `OUT/inference.json`, and the same text stands in the metadata of `OUT/model.safetensors` under the key
`METADATA`, so that the weights alone are enough to use a network.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.errors import CheckpointError

SCHEMA: Literal["shoal.inference/1"] = "shoal.inference/1"
METADATA = "shoal.inference"
"""The key of the same text in the metadata of a weights file."""

Sizes = tuple[Annotated[int, Field(gt=0)], ...]


class Preparation(BaseModel):
    """How a raw sample becomes what the network reads: (raw - mean) / std in each channel, then the network's size."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    values: Literal["bytes", "numbers", "own"]
    """Raw values: bytes of 0 to 255, as in images; other numbers, as the data set stores them; or prepared by code of
    the user's own, which is not repeated here."""
    shape: Sizes
    """Of a raw sample, channels first."""
    mean: tuple[float, ...]
    """Of each channel, in the unit of the raw values."""
    std: tuple[Annotated[float, Field(gt=0)], ...]

    @model_validator(mode="after")
    def _one_for_each_channel(self) -> Self:
        if not len(self.mean) == len(self.std) == self.shape[0]:
            raise ValueError(f"{len(self.mean)} means and {len(self.std)} deviations for {self.shape[0]} channels")
        return self

    @classmethod
    def own(cls, shape: tuple[int, ...]) -> Self:
        """Of samples that arrive as the network reads them."""
        return cls(values="own", shape=shape, mean=(0.0,) * shape[0], std=(1.0,) * shape[0])


class Inference(BaseModel):
    """`OUT/inference.json`: everything but the weights that a trained network needs to be used and tested again."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    schema_: Literal["shoal.inference/1"] = Field(default=SCHEMA, alias="schema")
    task: Literal["classify", "segment"]
    """One class for a sample, or one for each of its pixels."""
    model: str | None
    """As `--model` takes it; None for a network that was given as an object."""
    model_options: dict[str, Any]
    """Further keywords of its factory."""
    input: Sizes
    """One sample of the network, channels first, as its factory was told."""
    classes: tuple[str, ...] = Field(min_length=1)
    """The name of each class; its place is the network's output channel."""
    preparation: Preparation
    data: str
    """The data set that it was trained on, as `--data` takes it."""
    seed: int
    batch: int = Field(gt=0)
    """Samples of a test's batch."""
    versions: dict[str, str]
    """Of the libraries that trained it."""

    def to_json(self) -> str:
        """The text of `inference.json`."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str) -> Self:
        """What `to_json` wrote; a `CheckpointError` that names `source` where it is damaged or of another version."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{source} is no JSON: {error}.", "Copy the run's folder again.") from None
        if not isinstance(content, Mapping) or content.get("schema") != SCHEMA:
            found = content.get("schema") if isinstance(content, Mapping) else None
            raise CheckpointError(
                f"{source} has the schema {found!r}, which this version does not read.", f"It needs {SCHEMA!r}."
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            detail = error.errors()[0]
            where = ".".join(map(str, detail["loc"]))
            raise CheckpointError(
                f"{source} is damaged: {where}: {detail['msg']}.", "Copy the run's folder again."
            ) from None


def numbered(classes: int) -> tuple[str, ...]:
    """Names of classes that have none: their numbers.

    >>> numbered(3)
    ('0', '1', '2')
    """
    return tuple(map(str, range(classes)))
