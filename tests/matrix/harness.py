"""Run a real script as a cell, without a controller: a workload folder is written, its attempts come back."""

from __future__ import annotations

import functools
import itertools
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from matrix import backends, definition, environments, judge, plan, runner
from matrix.attempt import Context
from matrix.environments import Interpreter
from matrix.journal import AttemptRecord
from matrix.judge import CellVerdict
from matrix.plan import Cell

SHIPPED = Path(__file__).parents[2] / "workloads"
DIGITS = SHIPPED / "digits"
_numbers = itertools.count(1)


XLA = "PORTMATRIX_TORCH_XLA"
"""Names an interpreter that has torch_xla, which wants a torch of its own."""


@functools.cache
def interpreter(backend: str) -> Interpreter:
    """What the interpreter that runs the tests, or the one for PyTorch/XLA, says of a backend; asked once."""
    chosen = {backend: os.environ[XLA]} if backend.startswith("torch-xla") and XLA in os.environ else {}
    return environments.find([backends.available()[backend]], chosen)[backend]


@dataclass
class Bench:
    """A folder for workloads, a definition and a run."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    interpreters: dict[str, Interpreter] = field(default_factory=dict)
    """Instead of the ones that are asked."""

    def workload(
        self,
        name: str,
        scripts: Mapping[str, str],
        implementations: Mapping[str, Any],
        reference: str | None = None,
        tolerance: Mapping[str, float] | None = None,
        data: Mapping[str, Path] | None = None,
        **more: Any,
    ) -> Path:
        """Write a workload's folder.

        Args:
            scripts: text of each file, by its path in the folder.
            implementations: as in workload.yaml.
            reference: text of reference.csv.
            tolerance: by precision.
            data: files or folders that are linked in, by their path in the folder.
            more: further keys of workload.yaml.
        """
        folder = self.folder / "workloads" / name
        for file, text in scripts.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        for file, target in (data or {}).items():
            (folder / file).symlink_to(target)
        described: dict[str, Any] = {
            "about": "made for a test",
            "unit": "examples",
            "implementations": implementations,
            **more,
        }
        if reference is not None:
            (folder / "reference.csv").write_text(reference)
            described["reference"] = {"file": "reference.csv", "tolerance": dict(tolerance or {"ieee-f32": 1e-4})}
        (folder / "workload.yaml").write_text(yaml.safe_dump(described, sort_keys=False))
        return folder

    def cell(
        self, workload: str, backend: str = "torch", layout: str = "single", accelerator: str = "cpu", **run: Any
    ) -> Cell:
        """The one cell of a definition over these values; `dp2` is two devices, data-parallel."""
        text = {
            "matrix": {
                "workload": [workload],
                "backend": [backend],
                "accelerator": [accelerator],
                "layout": [layout],
            },
            "layouts": {
                "dp2": {"devices": 2, "strategy": "data"},
                "fsdp2": {"devices": 2, "strategy": "fully-sharded"},
                "tp2": {"devices": 2, "strategy": "tensor"},
            },
            "run": {"steps": 6, **run},
            **self.settings,
        }
        path = self.folder / "definition.yaml"
        path.write_text(yaml.safe_dump(text, sort_keys=False))
        return plan.plan(definition.load(path)).cells[0]

    def context(self, cell: Cell, **more: Any) -> Context:
        name = cell.backend.name
        asked = self.interpreters.get(name) or interpreter(name)
        folder = self.folder / f"run-{next(_numbers)}"
        return Context("run", "machine", folder, {name: asked}, environments.host(), **more)

    def attempts(self, cell: Cell, **more: Any) -> list[AttemptRecord]:
        """Everything that the runner attempts for the cell."""
        return list(runner.correctness(self.context(cell, **more), cell))

    def verdict(self, cell: Cell, **more: Any) -> CellVerdict:
        return judge.judge([cell.planned()], self.attempts(cell, **more))[0]


def edited(script: Path, *pairs: tuple[str, str]) -> str:
    """The text of a shipped script with passages replaced; each must be there exactly once."""
    text = script.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, f"{script}: {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    return text


def digits(bench: Bench, name: str = "edited", **scripts: str) -> Path:
    """A copy of the shipped digits workload in which scripts are replaced: `torch_train=..., jax_sharded=...`."""
    described = yaml.safe_load((DIGITS / "workload.yaml").read_text())
    texts = {}
    for implementation in described["implementations"].values():
        for source in (implementation["baseline"], *implementation.get("ports", ())):
            key = source["file"].removesuffix(".py").replace("/", "_")
            texts[source["file"]] = scripts.pop(key, None) or (DIGITS / source["file"]).read_text()
    assert not scripts, f"digits has no {', '.join(scripts)}"
    tolerance = described.pop("reference")["tolerance"]
    reference = (DIGITS / "reference.csv").read_text()
    described.pop("about"), described.pop("unit")
    return bench.workload(
        name,
        texts,
        described.pop("implementations"),
        reference,
        tolerance,
        {"data": DIGITS / "data"},
        **described,
    )
