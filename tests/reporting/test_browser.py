"""The page in a real browser: drawn without an error and without a request, readable by night, on a phone and on paper.

Debian's Chromium is used where it is installed; elsewhere these tests are skipped.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.reporting import write_report
from tests.reporting.folders import write_comparison, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("altair", reason="needs the extra `report`")
pytest.importorskip("vl_convert", reason="needs the extra `report`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
DRAWN = "document.querySelectorAll('.chart').length === document.querySelectorAll('.chart.drawn').length"
MARKS = """[...document.querySelectorAll('.chart')].map(
    (place) => [place.id, place.querySelectorAll('svg [aria-roledescription], svg .mark-line path').length])"""
PAPER = "getComputedStyle(document.body).backgroundColor"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


class Seen:
    """A page that was opened, with all that it said and asked for."""

    def __init__(self, browser: Any, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function(DRAWN, timeout=90_000)

    def requests(self) -> list[str]:
        return [url for url in self.asked if not url.startswith(("file:", "data:", "blob:"))]

    def sideways(self) -> int:
        """Pixels by which the page is wider than the screen."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_comparison(tmp_path_factory.mktemp("browser") / "cmp"))


def test_a_comparison_is_drawn_without_errors_and_without_a_network(browser: Any, compared: Path) -> None:
    seen = Seen(browser, compared)
    marks = dict(seen.page.evaluate(MARKS))
    assert len(marks) >= 14
    assert all(count > 0 for count in marks.values()), marks
    assert seen.page.locator("#chart-step-times svg").count() == 1
    assert seen.said == []
    assert seen.requests() == []
    assert seen.sideways() <= 0

    bar = seen.page.locator("#chart-throughput svg path[aria-roledescription='bar']").first
    bar.hover()
    tip = seen.page.locator("#vg-tooltip-element.visible")
    tip.wait_for(timeout=10_000)
    assert "11,347" in tip.inner_text()

    seen.page.locator(".plan .stage").nth(2).hover()
    shown = seen.page.locator("#tip")
    assert "fc" in shown.inner_text()
    assert "rows to it: 58.6 KiB per step" in shown.inner_text()

    seen.page.locator("select[data-shows=plan]").select_option(index=1)
    assert [part.is_visible() for part in seen.page.locator("[data-of=plan]").all()] == [False, True]

    with seen.page.expect_download() as begun:
        seen.page.locator("[data-save=tests]").click()
    lines = Path(begun.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "strategy,run,seed,step,samples,seconds,accuracy,loss"
    assert len(lines) == 1 + 8 * 6


def test_the_page_has_a_light_and_a_dark_side_and_paper_is_white(browser: Any, compared: Path) -> None:
    seen = Seen(browser, compared, dark=True)
    night = seen.page.evaluate(PAPER)
    axis = "getComputedStyle(document.querySelector('#chart-accuracy-time text')).fill"
    label = seen.page.evaluate(axis)
    seen.page.locator("#theme").click()
    assert seen.page.evaluate(PAPER) == "rgb(255, 255, 255)" != night
    assert seen.page.evaluate(axis) != label  # charts change with the page
    seen.page.locator("#theme").click()
    assert seen.page.evaluate(PAPER) == night
    seen.page.emulate_media(media="print")
    assert seen.page.evaluate(PAPER) == "rgb(255, 255, 255)"
    assert not seen.page.locator("#theme").is_visible()
    assert seen.page.pdf(format="A4")[:5] == b"%PDF-"


def test_a_phone_shows_all_without_scrolling_sideways(browser: Any, compared: Path, tmp_path: Path) -> None:
    alone = write_report(write_run(tmp_path / "one", cut="c2", predicted=0.009, traced=True))
    for path in (compared, alone):
        seen = Seen(browser, path, width=390)
        assert seen.sideways() <= 0
        assert all(count > 0 for count in dict(seen.page.evaluate(MARKS)).values())
        assert seen.said == []
