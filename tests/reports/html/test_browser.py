"""The page in Chromium: nothing hostile runs, the filter and the keyboard work, narrow and dark are readable."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from matrix.failures import CAUSES
from reports.build import build
from reports.html import page as page_module

from ..hostile import hostile_run
from ..records import DAY, MadeUpRun, planned
from ..showcase import showcase

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed")

ARGUMENTS = (
    "--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip
Page = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        yield chromium
        chromium.close()


def built(folder: Path, *runs: MadeUpRun) -> str:
    for run in runs:
        run.write(folder / "results" / run.run)
    return build([folder / "results"], folder / "out", DAY).page.as_uri()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory.mktemp("showcase"), *showcase())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "INLINE_CELLS", 10)
        return built(tmp_path_factory.mktemp("large"), *showcase())


class Tab:
    """A page, with all that it complained of and all that it asked for."""

    def __init__(self, browser: Any, address: str, **options: Any):
        options = {"viewport": {"width": 1400, "height": 900}, **options}
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def marks(self) -> list[str]:
        """The cells of the matrix that are shown, as symbols with the words below them."""
        return self.page.eval_on_selector_all(
            ".matrix tbody a", "all => all.filter(a => a.checkVisibility({visibilityProperty: true})).map(a => a.hash)"
        )

    def until(self, condition: str, argument: object = None) -> None:
        """Wait for a condition; `wait_for_function` of playwright needs `eval`, which the page's policy forbids."""
        deadline = time.monotonic() + 30
        while not self.page.evaluate(condition, argument):
            assert time.monotonic() < deadline, f"never came true: {condition}"
            time.sleep(0.02)

    def type(self, query: str) -> None:
        self.page.fill("#q", query)
        self.page.keyboard.press("Enter")


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Any]:
    tabs: list[Tab] = []

    def opened(address: str, **options: Any) -> Tab:
        tabs.append(Tab(browser, address, **options))
        return tabs[-1]

    yield opened
    for tab in tabs:
        tab.context.close()


@pytest.mark.parametrize("inline", [400, 0])
def test_nothing_of_a_hostile_run_runs(open_tab: Any, tmp_path: Path, inline: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(page_module, "INLINE_CELLS", inline)
    tab = open_tab(built(tmp_path, hostile_run()))
    for link in tab.page.query_selector_all(".matrix tbody a"):
        tab.page.evaluate("hash => { location.hash = hash }", link.get_attribute("href"))
        tab.until("() => document.querySelector('details.cell[open], article.cell:not([hidden])') !== null")
        tab.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    for element in tab.page.query_selector_all("b-evil, main img, main script"):
        pytest.fail(element.evaluate("each => each.outerHTML"))
    for query in ("<script>window.hacked=1</script>", 'cause:"<script>', "((", '"', "-", "cause:", "\\", "*"):
        tab.type(query)
    assert tab.page.evaluate("window.hacked") is None
    for width in (420, 1400):
        tab.page.set_viewport_size({"width": width, "height": 900})
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.page.evaluate("getComputedStyle(document.body).display") == "block"
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("file:")] == []
    assert "hacked=1</script>" in tab.page.inner_text("main")
    assert not re.search("[\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\0]", tab.page.inner_text("body"))


def test_the_filter_narrows_rows_columns_and_sections(open_tab: Any, address: str) -> None:
    tab = open_tab(address)
    every = len(tab.marks())
    tab.type("cause:hang")
    assert len(tab.marks()) == 4
    assert tab.page.inner_text("#q-found") == "4 of 181 cells"
    assert tab.page.inner_text(".matrix thead").split() == ["Workload", "torch-compile", "cpu", "fsdp4"]
    assert len(tab.page.query_selector_all("details.cell:not([hidden])")) == 4
    tab.type("backend:torch accelerator:cpu")
    assert len(tab.marks()) == 12  # torch is matched whole: neither torch-compile nor torch-xla
    tab.type("backend:torch* accelerator:cpu -layout:dp2,fsdp4")
    assert len(tab.marks()) == 12  # three backends, four workloads, single
    tab.type("gpt ALL_GATHER")
    assert len(tab.marks()) == 1
    tab.type("cause:hnag")
    assert tab.page.inner_text("#q-found") == (
        "No cell. cause is one of hang, unsupported-op, out-of-memory-device, wrong-result, compile-error"
    )
    tab.type("")
    assert len(tab.marks()) == every
    assert tab.complaints == []


def test_of_very_many_lines_a_button_shows_the_rest(open_tab: Any, tmp_path: Path) -> None:
    run = MadeUpRun()
    for number in range(130):
        run.add(planned(f"workload-{number:03}"))
    long = built(tmp_path, run)
    tab = open_tab(long)
    assert len(tab.marks()) == 100
    tab.type("workload:workload-1*")
    assert len(tab.marks()) == 30
    assert tab.page.is_hidden("#more")
    tab.type("-workload:workload-000")
    assert tab.page.inner_text("#more") == "Show all 129 lines"
    tab.page.click("#more")
    assert len(tab.marks()) == 129
    bare = open_tab(long, java_script_enabled=False)
    assert bare.page.is_visible(".matrix tbody tr:last-child a")
    assert bare.page.is_hidden("#more")


def test_a_filter_is_a_link_that_can_be_shared(open_tab: Any, address: str) -> None:
    tab = open_tab(address + "#q=verdict%3Arefused")
    assert tab.page.input_value("#q") == "verdict:refused"
    assert len(tab.marks()) == 2
    tab.page.fill("#q", "cause:hang")
    tab.until("() => location.hash === '#q=cause%3Ahang'")
    tab.page.click(".tiles .broken a")
    assert tab.page.inner_text("#q-found") == "16 of 181 cells"


@pytest.mark.parametrize("size", ["small", "large"])
def test_the_keyboard_goes_from_the_filter_to_a_cell_and_back(
    open_tab: Any, address: str, large: str, size: str
) -> None:
    tab = open_tab(address if size == "small" else large)
    keys = tab.page.keyboard
    keys.press("/")
    keys.type("cause:hang")
    keys.press("Enter")
    focused = "document.activeElement.getAttribute('href')"
    first = tab.page.evaluate(focused)
    assert first == tab.marks()[0]
    keys.press("ArrowDown")
    second = tab.page.evaluate(focused)
    assert second == tab.marks()[1]
    keys.press("ArrowRight")  # no further column is shown
    assert tab.page.evaluate(focused) == second
    keys.press("Enter")
    tab.until("() => document.querySelector('details.cell[open], article.cell:not([hidden])') !== null")
    assert "digits/torch-compile/cpu/fsdp4" in tab.page.inner_text("details.cell[open], article.cell")
    assert tab.page.evaluate("document.activeElement.closest('.cell') !== null")
    keys.press("Escape")
    assert tab.page.evaluate(focused) == second
    assert tab.complaints == []


def test_the_matrix_is_one_stop_for_the_tab_key(open_tab: Any, address: str) -> None:
    tab = open_tab(address)
    stops = tab.page.eval_on_selector_all(".matrix a", "all => all.filter(each => each.tabIndex === 0).length")
    assert stops == 1


def test_both_renderings_of_a_section_say_the_same(open_tab: Any, address: str, large: str) -> None:
    small_tab, large_tab = open_tab(address), open_tab(large)
    words = (
        "cell => [...cell.querySelectorAll('.group')].map(each => each.textContent.replace(/Copy$|\\s+/g, ' ').trim())"
    )
    for mark in small_tab.marks()[::7]:
        for tab in (small_tab, large_tab):
            tab.page.evaluate("hash => { location.hash = hash }", mark)
        large_tab.until("id => document.querySelector('#opened').dataset.id === id", mark[1:])
        one = small_tab.page.query_selector(mark).evaluate(words)
        other = large_tab.page.query_selector("#opened").evaluate(words)
        assert [re.sub(r"\s+|Copy", "", text) for text in one] == [re.sub(r"\s+|Copy", "", text) for text in other]


def test_the_command_is_copied(open_tab: Any, address: str) -> None:
    tab = open_tab(address, permissions=["clipboard-read", "clipboard-write"])
    tab.page.evaluate("hash => { location.hash = hash }", tab.marks()[0])
    tab.page.click("details.cell[open] .command button")
    tab.page.wait_for_selector("details.cell[open] .command button:has-text('Copied')")
    assert tab.page.evaluate("navigator.clipboard.readText()") == "python jax/train.py --steps 30 --size tiny --seed 0"


@pytest.mark.parametrize("width", [320, 420, 1400])
def test_the_page_never_scrolls_sideways(open_tab: Any, address: str, width: int) -> None:
    tab = open_tab(address, viewport={"width": width, "height": 900})
    tab.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_script_everything_is_readable(open_tab: Any, address: str) -> None:
    tab = open_tab(address, java_script_enabled=False)
    assert tab.page.is_hidden(".filter")
    assert tab.page.is_visible(".matrix tbody tr:last-child a")
    tab.page.click("details.cell:has-text('gpt/torch-compile/cpu/fsdp4') > summary")
    assert tab.page.is_visible(f"details.cell[open] >> text={CAUSES['hang'].advice}")


# The contrast of every text with what is painted behind it (WCAG 2.1, 1.4.3).
CONTRAST = """() => {
  const channels = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = channels(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return null;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const direct = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!direct || !element.checkVisibility() || element.closest(".h, .skip, svg")) continue;
    const [a, b] = [luminance(channels(getComputedStyle(element).color)), luminance(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(open_tab: Any, address: str, scheme: str) -> None:
    tab = open_tab(address, color_scheme=scheme)
    tab.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 20, 24)"}[scheme]
    assert tab.page.evaluate(CONTRAST) == []


def test_the_printed_page_has_the_matrix_whole_and_no_controls(open_tab: Any, address: str) -> None:
    tab = open_tab(address)
    tab.page.emulate_media(media="print")
    assert tab.page.is_hidden(".filter")
    box = tab.page.query_selector("#matrix .scroll").bounding_box()
    table = tab.page.query_selector(".matrix").bounding_box()
    assert table["height"] <= box["height"] + 1
    assert table["width"] <= 1031  # A4 landscape less its margins: 297 mm - 24 mm, at 96 dpi
