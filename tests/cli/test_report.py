"""`shoal report` and `shoal train --json` as people and programs use them."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Shoal
from tests.reporting.folders import write_run
from tests.reporting.test_page import data_of, words

pytest.importorskip("altair", reason="needs the extra `report`")
pytest.importorskip("vl_convert", reason="needs the extra `report`")


def test_of_a_real_run_the_page_the_result_and_the_terminal_agree(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    trained = shoal("train", "--data", tiny, "--model", "lenet5", "--workers", "2", "--epochs", "1", "--batch", "8",
                    "--threads", "1", "--out", "run", "--json")  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    result = json.loads(trained.stdout)
    assert result == json.loads((tmp_path / "run/result.json").read_text())
    assert "test accuracy" in trained.stderr
    made = shoal("report", "run")
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "wrote run/report.html" in made.stdout
    assert '<g class="stage">' in page  # the plan as a picture
    told = shoal("report", "run", "--json")
    content = json.loads(told.stdout)
    assert data_of(page) == content
    assert content["data"]["tests"][-1]["accuracy"] == result["test_accuracy"]
    assert all(" ".join(words(row["value"])) in " ".join(words(made.stdout)) for row in content["summary"])


@pytest.mark.parametrize(
    ("given", "named"), [(["nowhere"], "nowhere"), ([], "DIR"), (["run", "--out", "no/x.html"], "no/x.html")]
)
def test_wrong_input_is_one_message(shoal_here: Shoal, tmp_path: Path, given: list[str], named: str) -> None:
    write_run(tmp_path / "run")
    done = shoal_here("report", *given)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
