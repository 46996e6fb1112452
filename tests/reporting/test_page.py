"""The page as text: what it says is what the terminal prints, what it holds is what it shows, and no name is markup."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from shoal import reporting
from shoal.cli.report import show
from shoal.errors import InputError
from shoal.reporting import read_study, report_of, write_report
from shoal.reporting.datasets import MOST_POINTS
from shoal.reporting.page import needed
from shoal.reporting.summary import rows_of
from tests.reporting.folders import result_of, write_comparison, write_run

pytest.importorskip("altair", reason="needs the extra `report`")
pytest.importorskip("vl_convert", reason="needs the extra `report`")


def printed(report: reporting.Report, width: int = 80) -> str:
    file = io.StringIO()
    show(report, Console(file=file, width=width, color_system=None))
    return file.getvalue()


def words(text: str) -> list[str]:
    return text.replace("\u00a0", " ").split()


def text_of(page: str) -> str:
    """Of the part that people read."""
    body = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    plain = re.sub(r"<[^>]+>", " ", body)
    return plain.replace("&lt;", "<").replace("&gt;", ">").replace("&#39;", "'").replace("&amp;", "&")


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'id="report-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    content: dict[str, object] = json.loads(found[1])
    return content


def test_what_prints_is_what_the_page_shows(tmp_path: Path) -> None:
    for folder in (write_comparison(tmp_path / "cmp"), write_run(tmp_path / "one", cut="c2", predicted=0.009)):
        report = report_of(read_study([folder]))
        page = write_report(folder).read_text(encoding="utf-8")
        shown = " ".join(words(text_of(page)))
        for line in printed(report).splitlines():
            for part in re.split(r" {2,}", line.strip()):
                assert " ".join(words(part)) in shown
        assert data_of(page) == json.loads(report.to_json())


def test_a_table_fits_a_screen(tmp_path: Path) -> None:
    report = report_of(read_study([write_comparison(tmp_path / "cmp")]))
    lines = printed(report, 200).splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert "peak" in lines[1]
    assert not any("…" in line for line in lines)


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "one")).read_text(encoding="utf-8")
    head = page[: page.index("<body>")]
    assert "default-src 'none'" in head
    assert not re.search(r'(?:src|href)="(?!data:|#)', page[: page.index('id="report-data"')])
    assert 0.8e6 < len(page) < 1.2e6


def test_names_from_files_are_never_markup(tmp_path: Path) -> None:
    bad = "</script><img src=x onerror=alert(1)>"
    folder = write_run(tmp_path / "one", strategy=bad, cut="c2", settings={"model": bad, "note": bad})
    page = write_report(folder).read_text(encoding="utf-8")
    assert "<img src=x" not in page
    assert bad in text_of(page)
    assert bad in json.dumps(data_of(page))


def test_what_a_run_does_not_have_has_no_chart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", finished=False)
    (folder / "metrics.jsonl").write_text("")
    page = write_report(folder).read_text(encoding="utf-8")
    assert 'class="chart"' not in page
    assert "no step is logged" in page


def test_a_large_comparison_stays_small(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "cmp", seeds=range(5), steps=2000, every=1)
    assert write_report(folder).stat().st_size < 4e6
    report = report_of(read_study([folder]))
    for name in ("tests", "steps"):
        rows = [row for row in report.datasets[name] if row["run"] == "owt-0"]
        assert len(rows) <= MOST_POINTS
        assert rows[-1]["step"] == 2000
    assert "up to 9 lines of metrics in a row make one" in " ".join(report.notes)


def test_what_is_missing_to_make_a_page_is_named() -> None:
    with pytest.raises(InputError, match="no_such_package") as told:
        needed("no_such_package")
    assert "shoal-train[report]" in told.value.remedy


def test_the_summary_of_a_run_says_what_it_did() -> None:
    rows = {row.whole_label: row.value for row in rows_of(result_of(predicted=0.011, replicas=2))}
    assert rows["step"] == "10.0 ms (median)"
    assert rows["step, predicted"] == "11.0 ms (+10%)"
    assert rows["time in the exchange"] == "38%, 38%"
    assert rows["lost replicas"] == "1"


def test_a_page_needs_no_torch() -> None:
    code = "import sys, shoal.reporting.page, shoal.cli.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
