"""What the tool costs: a cell's wall time over the bare script's, and trivial cells per second beside other runners.

    python benchmarks/overhead.py [--seconds 20] [--cells 40] [--reframe /path/to/reframe]

One run prints ratios; absolute times are of this machine on this day. Trivial cells are processes of the same Python
that print two lines and end: through `portmatrix run`, through plain pytest with a subprocess each, and through
ReFrame (`pip install reframe-hpc`, in an environment of its own), all one at a time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A backend that needs no framework: what is measured is the tool, not the import of torch.
BARE_BACKEND = """
from dataclasses import dataclass, replace
from pathlib import Path
from matrix.backends import Backend
HERE = Path(__file__).parent
BACKEND = Backend(name="bare", framework="bare", distribution="bare",
                  observer=HERE / "bare_observer.py", probe=HERE / "bare_probe.py")
"""
BARE_OBSERVER = """
class Observer:
    enough = None
    def graphs(self): return 0
    def seen(self):
        device = {"platform": "cpu", "id": "cpu", "kind": "cpu", "runtime": None, "parameter_bytes": 8, "work": 1}
        return {"framework": "bare", "devices": [device], "dtypes": {"float64": 1}}
    def remove(self): pass
    def final(self): return {"graphs": 0, "device_peak_bytes": None}
def observe(after_import): return Observer()
"""
BARE_PROBE = 'import json; print(json.dumps({"version": "1", "devices": {"cpu": 1}}))'
TRIVIAL = 'print("step=1 loss=1.0 examples=1", flush=True)\nprint("step=2 loss=1.0 examples=1", flush=True)\n'
LONG = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
step = 0
while time.monotonic() < end:
    step += 1
    total = sum(i * i for i in range(200_000))
    print(f"step={step} loss=1.0 examples=1", flush=True)
"""
WORKLOAD = """
about: a trivial script
unit: examples
implementations:
  bare: {baseline: {file: script.py}}
reference: {file: reference.csv, tolerance: {ieee-f64: 1.0e-5}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the script whose overhead is measured")
    parser.add_argument("--cells", type=int, default=40, help="trivial cells for each runner")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; medians are printed")
    parser.add_argument("--reframe", default=shutil.which("reframe"), help="the reframe command, if it is not on PATH")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        print(f"machine: {os.cpu_count()} cores, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}")
        bench.overhead(options.seconds, options.repeats)
        bench.trivial(options.cells, options.repeats, options.reframe)


class Bench:
    """A folder with a framework-free backend, and the same trivial job for every runner."""

    def __init__(self, folder: Path):
        self.folder = folder
        site = folder / "site"
        info = site / "bare-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bare\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[portmatrix.backends]\nbare = bare_backend:BACKEND\n")
        for name, text in (("backend", BARE_BACKEND), ("observer", BARE_OBSERVER), ("probe", BARE_PROBE)):
            (site / f"bare_{name}.py").write_text(text)
        self.environment = {**os.environ, "PYTHONPATH": str(site)}

    def time(self, command: list[str]) -> float:
        start = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True, env=self.environment, cwd=self.folder)
        if ended.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
        return time.perf_counter() - start

    def definition(self, script: str, cells: int, rows: int, arguments: str = "") -> Path:
        place = self.folder / f"job-{cells}-{abs(len(script))}"
        names = [f"w{index}" for index in range(cells)]
        for name in names:
            workload = place / "workloads" / name
            workload.mkdir(parents=True, exist_ok=True)
            (workload / "script.py").write_text(script)
            (workload / "workload.yaml").write_text(WORKLOAD)
            (workload / "reference.csv").write_text(
                "step,loss\n" + "".join(f"{step},1.0\n" for step in range(1, rows + 1))
            )
        path = place / "job.yaml"
        axes = f"workload: [{', '.join(names)}], backend: [bare], accelerator: [cpu], layout: [single]"
        path.write_text(f"matrix: {{{axes}}}\n{arguments}")
        return path

    def overhead(self, seconds: float, repeats: int) -> None:
        script = LONG.replace("float(sys.argv[1])", repr(seconds))
        path = self.definition(script, 1, 100_000)
        (self.folder / "bare.py").write_text(script)
        bare, cell = [], []
        for _ in range(repeats):  # in turns, so that a drift of the machine meets both
            bare.append(self.time([sys.executable, str(self.folder / "bare.py")]))
            cell.append(self.attempt(path))
        ratio = statistics.median(cell) / statistics.median(bare)
        by_hand, watched = statistics.median(bare), statistics.median(cell)
        print(f"a script of {seconds:g} s: bare {by_hand:.2f} s, as a cell {watched:.2f} s: x{ratio:.3f}")

    def attempt(self, path: Path) -> float:
        """The wall time of one cell's attempt, as the runner performs it."""
        code = (
            "import sys, time, tempfile, pathlib; from matrix import definition, plan, environments, runner;"
            "from matrix.attempt import Context;"
            f"cell = plan.plan(definition.load({str(path)!r})).cells[0];"
            "found = environments.find([cell.backend], {});"
            "folder = pathlib.Path(tempfile.mkdtemp());"
            "context = Context('r', 'm', folder, found, environments.host());"
            "start = time.perf_counter(); attempts = list(runner.correctness(context, cell));"
            "took = time.perf_counter() - start;"
            "assert attempts[0].outcome == 'pass', attempts[0]; print(took)"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=self.environment, check=True
        )
        return float(ended.stdout)

    def trivial(self, cells: int, repeats: int, reframe: str | None) -> None:
        runners = {"portmatrix": self.portmatrix, "pytest + subprocess": self.pytest}
        if reframe:
            runners["ReFrame"] = lambda count: self.reframe(reframe, count)
        else:
            print("ReFrame is not installed: its row is left out")
        for name, run in runners.items():
            # Twice as many cells cost twice as much but for the start-up, which the difference takes out.
            few = statistics.median(run(cells // 2) for _ in range(repeats))
            many = statistics.median(run(cells) for _ in range(repeats))
            each = (many - few) / (cells - cells // 2)
            print(f"{name:20} {each:.3f} s a trivial cell ({1 / each:.1f} cells/s); {cells} cells in {many:.2f} s")

    def portmatrix(self, count: int) -> float:
        path = self.definition(TRIVIAL, count, 2, "run: {steps: 2, measure: {processes: 1, steps: 2, log_every: 1}}\n")
        return self.time(
            [
                sys.executable,
                "-m",
                "matrix.cli",
                "run",
                str(path),
                "--results",
                str(self.folder / "results"),
                "--no-measure",
            ],
        )

    def pytest(self, count: int) -> float:
        (self.folder / "trivial.py").write_text(TRIVIAL)
        (self.folder / "test_trivial.py").write_text(
            "import subprocess, sys, pytest\n"
            f"@pytest.mark.parametrize('n', range({count}))\n"
            "def test_it(n):\n"
            "    subprocess.run([sys.executable, 'trivial.py'], check=True, capture_output=True)\n"
        )
        return self.time([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_trivial.py"])

    def reframe(self, command: str, count: int) -> float:
        (self.folder / "trivial.py").write_text(TRIVIAL)
        (self.folder / "reframe_trivial.py").write_text(
            "import reframe as rfm\nimport reframe.utility.sanity as sn\n"
            "@rfm.simple_test\n"
            "class Trivial(rfm.RunOnlyRegressionTest):\n"
            f"    number = parameter(range({count}))\n"
            "    valid_systems = ['*']\n    valid_prog_environs = ['*']\n"
            f"    executable = {sys.executable!r}\n    executable_opts = [{str(self.folder / 'trivial.py')!r}]\n"
            "    @sanity_function\n    def printed(self):\n        return sn.assert_found(r'step=2', self.stdout)\n"
        )
        words = ["-c", "reframe_trivial.py", "-r", "--exec-policy=serial", "--prefix", str(self.folder / "reframe")]
        return self.time([command, *words])


if __name__ == "__main__":
    main()
