"""Outline: a network under a plan, stage by stage, with all that a picture of it shows, as `outline.json` holds it.

It is drawn, compared and read without the network itself and without torch, so that the folder of a run is enough.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import InputError
from shoal.files import write_text_atomically
from shoal.partition import Cut


class OutlineStage(BaseModel):
    """An input of the network, or a layer with the layers that follow it and share its cut."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    name: str
    operators: tuple[str, ...]
    """What its layers do, first to last; none for an input."""
    shape: tuple[int, ...]
    """Of its output, with the whole batch."""
    cut: str | None
    """How its output is cut; None for an input."""
    reads: tuple[str, ...]
    """Names of the stages that it reads."""
    parameters: int = 0
    """Numbers that it learns."""
    gradient_bytes: int = 0
    """What all ranks send in one step to add up their gradients."""
    compute_seconds: float | None = None
    """Predicted, of the busiest rank, forward and backward; None where nothing was predicted."""
    communication_seconds: float | None = None
    """Predicted: moves, sums and gradients, most of the last behind backward."""

    @property
    def is_input(self) -> bool:
        """Whether it is given to the network and not computed."""
        return self.cut is None

    def parsed_cut(self) -> Cut:
        """The cut as a value; of an input, which is not cut, the whole."""
        return Cut.parse(self.cut or "1")


class OutlineEdge(BaseModel):
    """Rows that go from rank to rank between two stages, forward and backward together, in one step."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    source: str
    reader: str
    """The same as `source` for partial sums that are added up within a stage."""
    bytes: int
    """0 for an edge that takes what another one brings."""


class Outline(BaseModel):
    """`OUT/outline.json`."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    schema_: Literal["shoal.outline/1"] = Field(default="shoal.outline/1", alias="schema")
    plan: str
    """What people call the plan."""
    ranks: int = Field(gt=0)
    stages: tuple[OutlineStage, ...]
    """Each after those that it reads."""
    edges: tuple[OutlineEdge, ...]
    """Where rows travel."""
    step_seconds: float | None = None
    """Predicted; None where nothing was predicted."""

    @property
    def row_bytes(self) -> int:
        """Rows that travel between ranks in one step."""
        return sum(edge.bytes for edge in self.edges)

    @property
    def gradient_bytes(self) -> int:
        """What all ranks send in one step to add up gradients."""
        return sum(stage.gradient_bytes for stage in self.stages)

    def rows_into(self, stage: str) -> int:
        """Bytes of rows that travel to a stage, and within it."""
        return sum(edge.bytes for edge in self.edges if edge.reader == stage)

    def to_json(self) -> str:
        """The text of the file."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True) + "\n"

    def save(self, path: Path) -> None:
        """Write it; it appears whole or not at all."""
        write_text_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; anything else is an `InputError`."""
        remedy = "`shoal train` with several workers writes such a file into the run's folder."
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"outline {str(path)!r} cannot be read: {error}.", remedy) from None
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise InputError(f"outline {str(path)!r}: {where or 'content'}: {problem['msg']}.", remedy) from None
