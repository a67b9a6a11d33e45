"""The digits scripts, written the ways in which real scripts are written, and run as cells."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from matrix.accelerators import Accelerator
from matrix.journal import AttemptRecord
from matrix.plan import Cell
from tests.matrix.harness import DIGITS, Bench, edited, interpreter

REPEAT = int(os.environ.get("PORTMATRIX_REPEAT", "3"))
"""How often what must always hold is run again."""

TORCH = DIGITS / "torch" / "train.py"
DDP = DIGITS / "torch" / "ddp.py"
JAX = DIGITS / "jax" / "train.py"
SHARDED = DIGITS / "jax" / "sharded.py"

TORCH_STEP = """\
    optimizer.zero_grad()
    loss = loss_of(x, y)
    loss.backward()
    optimizer.step()
"""
TORCH_COMPILE = """\
if args.compile:
    model = torch.compile(model)
"""
TORCH_PRINT = 'print(f"step={step} loss={loss.item():.12g} examples={(step - logged) * BATCH}", flush=True)'
JAX_CALL = "    model, state, loss = train_step(model, state, x, y)\n"
JAX_STEP = JAX.read_text()[JAX.read_text().index("@eqx.filter_jit(donate") : JAX.read_text().index("# --- training")]
JAX_STATE = "state = optimizer.init(model)\n"
JAX_PLACED = "x, y = jax.device_put((images[batch], labels[batch]), sharded)"

Edits = tuple[tuple[str, str], ...]


def written(script: Path, *pairs: tuple[str, str]) -> str:
    """A shipped script in which passages are replaced by others, which may be indented as the test is."""
    return edited(script, *((old, dedent(new)) for old, new in pairs))


def dedent(text: str) -> str:
    """Text of a test as text of a script: `|` marks the margin where there is one."""
    if not text.lstrip().startswith("|"):
        return text
    lines = textwrap.dedent(text).strip().splitlines()
    return "\n".join(line.removeprefix("|") for line in lines) + "\n"


def workload(
    bench: Bench, name: str, framework: str, text: str, launch: str | None = None, reference: bool = True
) -> None:
    """A workload of one script, as its baseline, held to the reference of digits."""
    described = yaml.safe_load((DIGITS / "workload.yaml").read_text())
    baseline: dict[str, Any] = {"file": f"{framework}/train.py"} | ({"launch": launch} if launch else {})
    bench.workload(
        name,
        {f"{framework}/train.py": text},
        {framework: {"baseline": baseline}},
        (DIGITS / "reference.csv").read_text() if reference else None,
        described["reference"]["tolerance"],
        {"data": DIGITS / "data"},
        arguments=described["arguments"],
    )


def framework_of(backend: str) -> str:
    return "jax" if backend == "jax" else "torch"


def attempt(
    bench: Bench,
    text: str,
    backend: str = "torch",
    layout: str = "single",
    launch: str | None = None,
    reference: bool = True,
    accelerator: Accelerator | None = None,
    **run: Any,
) -> AttemptRecord:
    """Run a script as a cell; its last attempt."""
    workload(bench, "variant", framework_of(backend), text, launch, reference)
    cell = bench.cell("variant", backend, layout, **{"log_every": 1, **run})
    if accelerator is not None:
        cell = on(bench, cell, accelerator)
    return bench.attempts(cell)[-1]


def on(bench: Bench, cell: Cell, accelerator: Accelerator) -> Cell:
    """The cell on another accelerator, which its framework is said to see."""
    asked = interpreter(cell.backend.name)
    probe = {**asked.probe, "devices": {**asked.probe.get("devices", {}), accelerator.name: 1}}
    bench.interpreters[cell.backend.name] = replace(asked, probe=probe)
    return replace(cell, accelerator=accelerator)


def told(record: AttemptRecord) -> tuple[str, str | None]:
    """The outcome and the cause."""
    return record.outcome, record.failure.cause if record.failure else None


def explain(record: AttemptRecord) -> str:
    """What a failing test shows of an attempt."""
    said: Mapping[str, Any] = {
        "outcome": record.outcome,
        "reason": record.reason,
        "cause": record.failure and record.failure.cause,
        "message": record.failure and record.failure.message,
        "traceback": record.failure and record.failure.traceback,
        "losses": record.metrics.loss,
        "seen": record.devices.detail,
    }
    return yaml.safe_dump({key: value for key, value in said.items() if value}, sort_keys=False)
