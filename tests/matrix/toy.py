"""A framework, backend, observer and workloads that need no real framework: a cell takes a tenth of a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

LIMIT_S = 120.0
ROOT = Path(__file__).parents[2]

FRAMEWORK = {
    "toyframe.py": "DEVICE = 'cpu'\n",
    "toy_backend.py": """
        from pathlib import Path
        from matrix.backends import Backend
        HERE = Path(__file__).parent
        BACKEND = Backend(
            name="toy", framework="toy", distribution="toyframe",
            observer=HERE / "toy_observer.py", probe=HERE / "toy_probe.py",
        )
        """,
    "toy_observer.py": """
        import sys
        class Observer:
            def graphs(self): return 0
            def remove(self): pass
            def final(self): return {"graphs": 0, "device_peak_bytes": None}
            def seen(self):
                there = "toyframe" in sys.modules
                device = {"id": "cpu", "platform": "cpu", "kind": "toy", "work": 1, "parameter_bytes": 8}
                return {"framework": "toy" if there else None, "devices": [device], "dtypes": {"float32": 1}}
        def observe(after_import):
            return Observer()
        """,
    "toy_probe.py": """
        import json, toyframe
        print(json.dumps({"version": "1.0", "devices": {"cpu": 1}, "device": toyframe.DEVICE}))
        """,
    "toyframe-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toyframe\nVersion: 1.0\n",
    "toyframe-1.0.dist-info/entry_points.txt": "[portmatrix.backends]\ntoy = toy_backend:BACKEND\n",
}

# Loss 1/step, as the reference has it.
TRAIN = """
import argparse, os, sys, time
import toyframe
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--log-every", type=int, default=1)
options = parser.parse_args()
{before}
for step in range(1, options.steps + 1):
    if step == 1 or step % options.log_every == 0:
        print(f"step={{step}} loss={{1 / step:.9f}} examples={{8 * options.log_every}}")
{after}
"""
REFERENCE = "step,loss\n" + "".join(f"{step},{1 / step!r}\n" for step in range(1, 41))


def train(before: str = "", after: str = "") -> str:
    """A script that passes, with more code before and after its loop."""
    return TRAIN.format(before=textwrap.dedent(before), after=textwrap.dedent(after))


def install(folder: Path) -> None:
    """Write the toy's packages into a folder that can be put on PYTHONPATH."""
    for name, text in FRAMEWORK.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))


@dataclass
class Toy:
    """A working directory with a definition over toy workloads, and the command to run it."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    workloads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        install(self.folder / "site")

    @property
    def definition(self) -> Path:
        return self.folder / "toy.yaml"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def workload(self, name: str, baseline: str | None = None, port: str | None = None, **more: Any) -> Path:
        """Write a workload; its baseline passes when it is left out."""
        folder = self.folder / "workloads" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(train() if baseline is None else baseline)
        scripts: dict[str, Any] = {"baseline": {"file": "train.py"}}
        if port is not None:
            (folder / "port.py").write_text(port)
            scripts["ports"] = [{"file": "port.py", "for": {"strategy": "single"}}]
        (folder / "reference.csv").write_text(REFERENCE)
        described = {
            "about": "made for a test",
            "unit": "examples",
            "implementations": {"toy": scripts},
            "arguments": {"steps": "--steps", "log_every": "--log-every"},
            "reference": {"file": "reference.csv", "tolerance": {"ieee-f32": 1e-4}},
            **more,
        }
        (folder / "workload.yaml").write_text(yaml.safe_dump(described, sort_keys=False))
        if name not in self.workloads:
            self.workloads.append(name)
        return folder

    def write(self, **more: Any) -> None:
        """Write the definition over all workloads so far."""
        text = {
            "matrix": {
                "workload": self.workloads,
                "backend": ["toy"],
                "accelerator": ["cpu"],
                "layout": ["single"],
            },
            "run": {"steps": 3, "timeout": 60, "measure": {"processes": 1, "steps": 24, "log_every": 2}},
            **self.settings,
            **more,
        }
        self.definition.write_text(yaml.safe_dump(text, sort_keys=False))

    def variables(self) -> dict[str, str]:
        foreign = ("PYTEST", "CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        own = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        # Runs of one machine wait for each other's measurements, by a lock in the folder of temporary files.
        return own | {"PYTHONPATH": str(self.folder / "site"), "TMPDIR": str(self.folder)} | self.environment

    def command(self, *words: str) -> list[str]:
        """`portmatrix WORDS`, by the interpreter that runs the tests; `-P`: as the installed command starts."""
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from matrix.cli import main; sys.exit(main())"
        return [sys.executable, "-P", "-c", code, *words]

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more}
        return subprocess.Popen(self.command(*words), cwd=self.folder, env=self.variables(), **settings)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`portmatrix run` of the definition."""
        return subprocess.run(
            self.command("run", str(self.definition), *words),
            cwd=self.folder,
            env=self.variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def journals(self) -> list[Path]:
        return sorted(self.results.glob("*/journal.jsonl"))

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The whole records of the newest journal."""
        lines = self.journals()[-1].read_bytes().splitlines() if self.journals() else []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [record for record in found if kind is None or record["kind"] == kind]

    def tries(self) -> list[tuple[str, int, str, str | None, str]]:
        """Of each attempt: workload, number, phase, source, outcome."""
        return [
            (a["axes"]["workload"], a["attempt"], a["phase"], a.get("source"), a["outcome"])
            for a in self.records("attempt")
        ]


def counts(records: list[dict[str, Any]]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for record in records:
        found[record["kind"]] = found.get(record["kind"], 0) + 1
    return found
