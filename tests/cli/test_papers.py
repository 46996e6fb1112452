"""`shoal papers` as people call it, and wrongly."""

import json

from shoal import papers
from tests.cli.conftest import Shoal
from tests.cli.test_refusals import refused


def test_which_papers_there_are(shoal: Shoal) -> None:
    run = shoal("papers")
    assert run.returncode == 0, run.stderr
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert all(name in run.stdout for name in papers.NAMES)
    listed = json.loads(shoal("papers", "--json").stdout)
    assert [paper["name"] for paper in listed] == list(papers.NAMES)


def test_a_paper_for_programs(shoal: Shoal) -> None:
    run = shoal("papers", "chan-lane", "--json")
    assert run.returncode == 0, run.stderr
    (table,) = json.loads(run.stdout)["tables"]
    last = table["rows"][-1]
    assert last["label"] == "5 workers"
    assert last["cells"]["reported"] == {"text": "about 0.68", "mark": "paper", "source": "the abstract"}
    slow, fast = last["cells"]["1 Gbit/s"], last["cells"]["10 Gbit/s"]
    assert slow["mark"] == fast["mark"] == "simulated"
    assert 0 < slow["value"] < fast["value"] < 1


def test_refusals(shoal: Shoal) -> None:
    assert "there is no paper 'optcn'" in refused(shoal, "papers", "optcn")
    assert "--measure is for one paper" in refused(shoal, "papers", "--measure")
