"""Comparison: one network under several strategies at equal samples, as `DIR/comparison.json` holds it.

Each cell is a run of its own, in a folder of its own beside the file; what it did stands there, in `result.json` and
the other files of a run's folder, and is not repeated here. The file says which cells there are, what became of them,
and what only the comparison knows: steps that were timed in turns, and the rates that were searched.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import InputError
from shoal.files import write_text_atomically

FILE = "comparison.json"

CellState = Literal["waiting", "done", "failed"]


class Cell(BaseModel):
    """One strategy with one seed."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    strategy: str
    """What people call it, the same for all its seeds: `owt`, `data + downpour`, `ddp`."""
    settings: dict[str, Any]
    """Of the run, as a recipe's keys; its seed among them. The plan `auto` stands for the one that was found before
    the first run, in `plans/` beside the file."""
    folder: str
    """The run's folder, relative to the comparison's."""
    state: CellState = "waiting"
    why: str | None = None
    """Of a failed cell: what the run said."""


class Comparison(BaseModel):
    """What `shoal compare` was asked and has done so far."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    schema_: Literal["shoal.comparison/1"] = Field(default="shoal.comparison/1", alias="schema")
    command: str
    """What to type to repeat it."""
    request: dict[str, Any] = Field(default_factory=dict)
    """What it was asked: the settings of the comparison, those of every run, and the recipes' own."""
    baseline: str | None = None
    """The strategy on one worker, beside which speedup and efficiency stand; None where there is none."""
    target: float | None = None
    """The test accuracy whose time is compared; None: the largest that all strategies reach."""
    cells: tuple[Cell, ...]
    step_seconds: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """By strategy: seconds of a step in each round, all strategies in turns in every round."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """By strategy: why its steps were not timed in turns with the others'."""
    rates: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    """By strategy, where a rate was searched: accuracy by rate; None where the loss did not stay finite."""

    def save(self, folder: Path) -> None:
        """Write it into the comparison's folder; it appears whole or not at all."""
        write_text_atomically(folder / FILE, self.model_dump_json(indent=1, by_alias=True) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Of a comparison's folder; a folder without one is an `InputError`."""
        remedy = "`shoal compare --out DIR` makes such a folder."
        try:
            return cls.model_validate_json((folder / FILE).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"no comparison can be read from {str(folder)!r}: {error}.", remedy) from None
        except ValidationError as error:
            raise InputError(
                f"{str(folder / FILE)!r} does not have the fields of a comparison: {error.errors()[0]['msg']}.", remedy
            ) from None
