"""How long a report of very many records takes, and how quickly its page answers in a browser.

    python benchmarks/report.py [--records 100000] [--processes 3] [--browser /usr/bin/chromium]

Prints the time to write and read the journal, to build the report, the peak memory of the build (a process of its
own), the sizes of the files, and in Chromium (with `playwright` installed) the time to load the page, to filter the
matrix and to open a cell. With `--processes 0` every record is a cell.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from matrix.journal import PlannedCell  # noqa: E402
from tests.reports.records import MadeUpRun, many  # noqa: E402

# Opens the cell behind the last mark that is shown, and waits until the page has drawn it.
OPEN_LAST = """async () => {
  const marks = document.querySelectorAll(".matrix tbody tr:not([hidden]) a:not(.off)");
  const begin = performance.now();
  marks[marks.length - 1].click();
  await new Promise((done) => setTimeout(done, 0));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  return [performance.now() - begin, document.querySelector("article.cell, details.cell[open]").innerText.length];
}"""
FILTER = """async (query) => {
  const input = document.querySelector("#q"), found = document.querySelector("#q-found");
  const begin = performance.now();
  input.focus();
  input.value = query;
  input.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  return [performance.now() - begin, found.textContent];
}"""
CHROMIUM = [
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=3, help="measurement attempts of each cell that runs")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--keep", type=Path, help="folder for the journal and the report")
    parser.add_argument("--build", nargs=2, type=Path, help=argparse.SUPPRESS)  # the child that is measured
    args = parser.parse_args()
    if args.build:
        print(json.dumps(build(*args.build)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        begin = time.perf_counter()
        cells = write(args.records, args.processes, folder / "run")
        print(f"{args.records:,} records of {cells:,} cells written in {time.perf_counter() - begin:.1f} s")
        child = [sys.executable, __file__, "--build", str(folder / "run"), str(folder / "report")]
        figures = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
        print(f"built in {figures['total_s']:.1f} s ({figures['cpu_s']:.1f} s of processor time)")
        print(f"peak memory {figures['peak_mib']:,.0f} MiB")
        for name, size in figures["sizes"].items():
            print(f"  {name:12} {size / 1e6:8.1f} MB")
        look(args.browser, folder / "report" / "index.html")


def write(records: int, processes: int, folder: Path) -> int:
    """Write a journal; returns the number of its cells."""
    run = MadeUpRun()
    for each in many(records, processes):
        if isinstance(each, PlannedCell):
            run.plan.append(each)
        else:
            run.attempts.append(each)
    run.write(folder)
    return len(run.plan)


def build(source: Path, out: Path) -> dict[str, object]:
    """Build the report in this process, and say what it took."""
    from reports.build import build as build_report

    begin, used = time.perf_counter(), time.process_time()
    built = build_report([source], out)
    return {
        "total_s": time.perf_counter() - begin,
        "cpu_s": time.process_time() - used,
        "peak_mib": peak_kib() / 1024,
        "sizes": {path.name: path.stat().st_size for path in built.paths},
    }


def peak_kib() -> int:
    """The most memory of this process; `getrusage` would count its parent's too, from before `exec`."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0])


def look(browser: str, page: Path) -> None:
    """Time the page in Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("playwright is not installed, so no browser was timed")
        return
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=list(CHROMIUM))
        tab = chromium.new_page(viewport={"width": 1400, "height": 900})
        begin = time.perf_counter()
        tab.goto(page.as_uri())
        tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")
        print(f"page loaded in {time.perf_counter() - begin:.1f} s")
        for query in ("cause:hang", "backend:torch workload:workload-0003", "layout4 -backend:jax", ""):
            milliseconds, found = tab.evaluate(FILTER, query)
            print(f"  filter {query!r:42} {milliseconds:7.0f} ms  {found}")
        milliseconds, length = tab.evaluate(OPEN_LAST)
        print(f"  open a cell {milliseconds:38.0f} ms  {length:,} characters")
        chromium.close()


if __name__ == "__main__":
    main()
