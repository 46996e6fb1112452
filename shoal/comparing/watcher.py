"""Who hears what a comparison does: the live table, or a user's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.comparison import Cell, Comparison


class Watcher:
    """Hears what a comparison does; override what you want to hear. Some of it comes from another thread."""

    def began(self, comparison: Comparison, folder: Path) -> None:
        """Everything is checked; what was done before is kept."""

    def stage(self, what: str) -> None:
        """What goes on now beside the runs: a plan is searched, a rate, steps are timed."""

    def run_began(self, cell: Cell, how: str) -> None:
        """A run begins; `how`: anew, or from its checkpoint."""

    def run_starting(self, cell: Cell, what: str) -> None:
        """How far its workers are on their way to the first step."""

    def run_wrote(self, cell: Cell, line: Mapping[str, Any]) -> None:
        """The run wrote a line of metrics."""

    def run_ended(self, cell: Cell, comparison: Comparison) -> None:
        """The run is done, or has failed: the cell's state says which."""

    def wrote(self, page: Path) -> None:
        """The page of the comparison is made."""

    def told(self, text: str) -> None:
        """Something that people should know."""

    def ended(self) -> None:
        """Nothing more will be heard, whether the comparison finished or not."""
