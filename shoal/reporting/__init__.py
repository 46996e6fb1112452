"""Folders of runs and comparisons -> numbers, sentences, charts and a page: see docs/report.md."""

from collections.abc import Sequence
from pathlib import Path

from shoal.reporting.page import PAGE, Report, report_of, write_page
from shoal.reporting.records import Study, read_run, read_study

__all__ = ["Report", "Study", "read_run", "read_study", "report_of", "write_page", "write_report"]


def write_report(folder: Path | Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of a run's or a comparison's folder, into it unless `out` names a file; returns where it is.

    Several folders of runs are put beside each other. Runs that failed, go on or are damaged are named on the page. A
    path that holds no run is an `InputError`, and so is that the extra `report` is not installed.
    """
    folders = [folder] if isinstance(folder, Path) else list(folder)
    study = read_study(folders)
    return write_page(study, out or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE)))
