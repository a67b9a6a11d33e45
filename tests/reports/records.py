"""A factory of made-up runs: plans, attempts and journals as the engine writes them."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matrix.journal import (
    AttemptRecord,
    Devices,
    EndRecord,
    Expectation,
    Failure,
    Journal,
    Layout,
    Metrics,
    PlannedCell,
    ProofRecord,
    Reference,
    RunRecord,
    Throughput,
)

DAY = datetime.date(2026, 6, 12)
START = datetime.datetime(2026, 6, 12, 14, 3, tzinfo=datetime.UTC)

LAYOUTS = {
    "single": Layout(name="single", devices=1, strategy="single"),
    "dp2": Layout(name="dp2", devices=2, strategy="data"),
    "fsdp4": Layout(name="fsdp4", devices=4, strategy="fully-sharded"),
}
PACKAGES = {
    "jax": {"jax": "0.6.2", "jaxlib": "0.6.2", "equinox": "0.12.2", "optax": "0.2.5", "numpy": "2.2.6"},
    "torch": {"torch": "2.7.1", "numpy": "2.2.6", "triton": "3.3.1"},
}

BASELINE = '''"""Train a small language model on one device."""

import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Model(width=128, depth=4).to(device)
if args.compile:
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

for step, batch in enumerate(batches(args.steps)):
    loss = model(batch.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step={step} loss={loss.item():.6f} tokens={batch.numel()}")
'''
PORT = (
    BASELINE.replace(
        "import torch\n", "import torch\nimport torch.distributed as dist\nfrom torch.nn.parallel import DDP\n"
    )
    .replace(
        'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n',
        "dist.init_process_group()\nrank = dist.get_rank()\n"
        'device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")\n',
    )
    .replace("    model = torch.compile(model)\n", "    model = torch.compile(model)\nmodel = DDP(model)\n")
)


def cell_id(axes: dict[str, str]) -> str:
    """The id of a cell: the main axes, then the others in order."""
    main = ("workload", "backend", "accelerator", "layout")
    rest = [f"{name}={axes[name]}" for name in sorted(axes) if name not in main]
    return "/".join([*(axes[name] for name in main), *rest])


def planned(
    workload: str = "gpt",
    backend: str = "torch",
    accelerator: str = "cpu",
    layout: str = "single",
    *,
    expect: tuple[str, str] | None = None,
    until: str | None = None,
    required: bool = False,
    written_for: str | None = "any",
    **further: str,
) -> PlannedCell:
    """A planned cell; `expect` is cause and reason of a known failure."""
    axes = {"workload": workload, "backend": backend, "accelerator": accelerator, "layout": layout, **further}
    return PlannedCell(
        cell=cell_id(axes),
        axes=axes,
        layout=LAYOUTS.get(layout, Layout(name=layout)),
        unit="tokens",
        written_for=written_for,
        expectation=Expectation(cause=expect[0], reason=expect[1], until=until) if expect else None,
        required=required,
    )


def trajectory(seed: int, steps: int = 30, error: float = 1e-7) -> list[tuple[int, float]]:
    """A falling loss; runs of one seed agree within the relative `error`."""
    curve, noise = random.Random(seed), random.Random(f"{seed} {error}")
    loss, points = 4.17, []
    for step in range(1, steps + 1):
        loss -= (loss - 1.9) * (0.06 + 0.03 * curve.random())
        points.append((step, loss * (1 + error * (2 * noise.random() - 1))))
    return points


def failure(
    cause: str,
    message: str,
    file: str = "torch/train.py",
    line: int = 18,
    *,
    source: str = BASELINE,
    rank: int | None = None,
    **more: Any,
) -> Failure:
    """A failure in the user's code, with its excerpt and a traceback of the usual length."""
    lines = source.splitlines()
    excerpt = [(n, lines[n - 1]) for n in range(max(1, line - 3), min(len(lines), line + 3) + 1)]
    frames = [
        f'  File "/opt/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line {n}, in _call_impl\n'
        "    return forward_call(*args, **kwargs)"
        for n in (1751, 1762, 1790)
    ]
    head = (
        f'Traceback (most recent call last):\n  File "{file}", line {line}, in <module>\n    {lines[line - 1].strip()}'
    )
    return Failure(
        cause=cause,
        message=message,
        signature=f"{cause}-{abs(sum(map(ord, message + file))) % 0xFFFFFF:06x}",
        rank=rank,
        frame=f"{file}:{line}",
        excerpt=excerpt,
        traceback=more.pop("traceback", "\n".join([head, *frames, f"RuntimeError: {message}"])),
        **more,
    )


def attempt(
    cell: PlannedCell,
    outcome: str = "pass",
    *,
    evidence: str = "executed",
    role: str = "baseline",
    phase: str = "correctness",
    machine: str = "buildbox",
    run: str = "2026-06-12-cpu",
    tokens: float | None = None,
    startup: float = 3.1,
    **fields: Any,
) -> AttemptRecord:
    """One attempt. `tokens` is the throughput of a measurement, in tokens per second."""
    backend = cell.axes["backend"]
    framework = "jax" if backend == "jax" else "torch"
    metrics = fields.pop("metrics", None)
    if metrics is None and outcome == "pass":
        metrics = Metrics(
            loss=trajectory(7, error=2e-7),
            deviation=3.1e-7,
            tolerance=1e-5,
            throughput=Throughput(unit="tokens/s", median=tokens, samples=[tokens]) if tokens else None,
            step_s=5120 / tokens if tokens else None,
            startup_s=startup,
            peak_memory_bytes=734 * 2**20,
            comparable=fields.pop("comparable", True),
        )
    default_source = f"{framework}/train.py" if role == "baseline" else f"{framework}/ddp.py"
    source = fields.pop("source", default_source) if evidence != "none" else None
    values: dict[str, Any] = {
        "run": run,
        "machine": machine,
        "cell": cell.cell,
        "key": f"{cell.cell} {source}",
        "phase": phase,
        "axes": cell.axes,
        "implementation": framework,
        "source": source,
        "role": role if source else None,
        "outcome": outcome,
        "evidence": evidence,
        "metrics": metrics or Metrics(),
        "devices": Devices(
            kind=DEVICE_KINDS.get(cell.axes["accelerator"], cell.axes["accelerator"]),
            expected=cell.layout.devices,
            used=cell.layout.devices if outcome == "pass" else None,
            detail=_seen(cell) if evidence == "executed" else {},
        ),
        "precision": "ieee-f32",
        "environment": {
            "interpreter": "/opt/env/bin/python 3.11.9",
            "packages": PACKAGES[framework],
            "os": "Debian GNU/Linux 12",
            "cpu": "AMD EPYC 7543",
            "cores": 8,
            "warm": phase == "measurement",
        },
        "started": START.isoformat(),
        "duration_s": 14.2,
        "reproduce": f"python {source} --steps 30 --size tiny --seed 0" if source else "",
    }
    return AttemptRecord(**{**values, **fields})


def _seen(cell: PlannedCell) -> dict[str, Any]:
    """What the observers of the ranks report."""
    kind = DEVICE_KINDS.get(cell.axes["accelerator"], "")
    ranks = cell.layout.devices
    share = 1 / ranks if cell.layout.strategy == "fully-sharded" else 1.0
    return {
        str(rank): {
            "framework": "torch",
            "host": "buildbox",
            "devices": [{"platform": "cpu", "kind": kind, "work": True, "parameter_bytes": int(7_372_800 * share)}],
            "fingerprint": f"{(rank + 11) * 48_271:08x}",
            "work_share": 1 / ranks,
        }
        for rank in range(ranks)
    }


DEVICE_KINDS = {"cpu": "AMD EPYC 7543 (1 core each)", "cuda": "NVIDIA H100 80GB", "rocm": "AMD Instinct MI300X"}


@dataclass
class MadeUpRun:
    """A run under construction; `write` leaves its journal on disk."""

    plan: list[PlannedCell] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    run: str = "2026-06-12-cpu"
    machine: str = "buildbox"
    definition: str = "cpu"
    started: datetime.datetime = START
    proofs: list[ProofRecord] = field(default_factory=list)
    ended: bool = True
    host: dict[str, Any] = field(
        default_factory=lambda: {
            "os": "Debian GNU/Linux 12",
            "cpu": "AMD EPYC 7543",
            "cores": 8,
            "memory_bytes": 64 * 2**30,
            "devices": ["cpu"],
        }
    )
    notices: list[str] = field(default_factory=list)
    selection: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)

    def add(self, cell: PlannedCell, *attempts: AttemptRecord) -> MadeUpRun:
        """Plan a cell, with the attempts that were made in it; they get this run's name, machine and numbers."""
        self.plan.append(cell)
        for number, each in enumerate(attempts, 1):
            update = {"run": self.run, "machine": self.machine, "attempt": each.attempt or number}
            self.attempts.append(each.model_copy(update=update))
        return self

    def record(self) -> RunRecord:
        workloads = dict.fromkeys(cell.axes["workload"] for cell in self.plan)
        sources = {f"{name}/torch/train.py": BASELINE for name in workloads}
        sources |= {f"{name}/torch/ddp.py": PORT for name in workloads}
        return RunRecord(
            run=self.run,
            machine=self.machine,
            started=self.started.isoformat(),
            tool="0.1.0",
            definition=self.definition,
            definition_path=f"matrix/definitions/{self.definition}.yaml",
            selection=self.selection,
            plan=self.plan,
            references={
                name: Reference(loss=trajectory(7, error=0), tolerance={"ieee-f32": 1e-5}) for name in workloads
            },
            sources=sources | self.sources,
            host=self.host,
            notices=self.notices,
        )

    def end(self) -> EndRecord:
        return EndRecord(ended=(self.started + datetime.timedelta(minutes=18)).isoformat(), exit_code=0)

    def journal(self, path: Path = Path("journal.jsonl")) -> Journal:
        """The run as `matrix.journal.read` would give it."""
        end = self.end() if self.ended else None
        return Journal(path, self.record(), attempts=list(self.attempts), proofs=list(self.proofs), end=end)

    def write(self, folder: Path, torn: str = "") -> Path:
        """Write `journal.jsonl` and the logs into `folder`; `torn` is what a killed run leaves behind."""
        folder.mkdir(parents=True, exist_ok=True)
        records = [self.record(), *self.attempts, *self.proofs, *([self.end()] if self.ended else [])]
        # json and not pydantic's writer, which refuses unpaired surrogates: a damaged journal may hold them
        lines = [json.dumps(record.model_dump(exclude_none=True, by_alias=True)) for record in records]
        data = "\n".join(lines) + "\n" + torn
        (folder / "journal.jsonl").write_bytes(data.encode("utf-8", "surrogatepass"))
        for name, text in self.logs.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="surrogateescape")
        return folder


def processes(cell: PlannedCell, rates: Sequence[float], **fields: Any) -> list[AttemptRecord]:
    """A measurement attempt per rate."""
    return [attempt(cell, phase="measurement", tokens=rate, **fields) for rate in rates]


def around(rate: float, n: int, seed: int | str, spread: float = 0.02) -> list[float]:
    """`n` rates that scatter around one."""
    source = random.Random(seed)
    return [rate * (1 + spread * (2 * source.random() - 1)) for _ in range(n)]


def many(records: int, processes_per_cell: int = 3) -> Iterable[PlannedCell | AttemptRecord]:
    """Cells, each followed by its attempts, until there are `records` attempts."""
    made, number = 0, 0
    backends = ("jax", "torch", "torch-compile", "torch-xla")
    while made < records:
        per_line = len(backends) * 4 * 6
        workload = f"workload-{number // per_line:04}"
        backend = backends[number % 4]
        accelerator = ("cpu", "cuda", "rocm", "tpu")[number // 4 % 4]
        cell = planned(workload, backend, accelerator, f"layout{number // 16 % 6}")
        number += 1
        yield cell
        if number % 7 == 3:
            batch = [attempt(cell, "fail", failure=failure("hang", f"no progress for {number % 90} s", rank=1))]
        else:
            batch = [attempt(cell), *processes(cell, around(40_000, processes_per_cell, number))]
        for each in batch[: records - made]:
            yield each
            made += 1
