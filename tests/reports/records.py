"""A factory of made-up runs: plans, attempts and journals as the engine writes them."""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matrix.journal import (
    AttemptRecord,
    Changes,
    Devices,
    EndRecord,
    Expectation,
    Failure,
    Journal,
    Layout,
    Metrics,
    PlannedCell,
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
            detail={"parameter bytes per device": [1_843_200] * cell.layout.devices} if outcome == "pass" else {},
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
        return Journal(path, self.record(), list(self.attempts), self.end() if self.ended else None)

    def write(self, folder: Path, torn: str = "") -> Path:
        """Write `journal.jsonl` and the logs into `folder`; `torn` is what a killed run leaves behind."""
        folder.mkdir(parents=True, exist_ok=True)
        records = [self.record(), *self.attempts, *([self.end()] if self.ended else [])]
        lines = [record.model_dump_json(exclude_none=True, by_alias=True) for record in records]
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


def showcase() -> list[MadeUpRun]:
    """Two machines as a project would have them: a CPU box that runs much, a GPU host that runs what it can."""
    return [_cpu_box(), _gpu_host()]


def _cpu_box() -> MadeUpRun:
    run = MadeUpRun()
    rates = {"gpt": 41_300.0, "digits": 152_000.0, "resnet": 8_120.0, "diffusion": 6_350.0}
    factor = {"jax": 1.18, "torch": 1.0, "torch-compile": 1.31, "torch-xla": 0.94}
    for workload in rates:
        for backend in factor:
            for accelerator in ("cpu", "cuda", "rocm", "tpu"):
                for layout in ("single", "dp2", "fsdp4"):
                    _cpu_cell(run, workload, backend, accelerator, layout, rates[workload] * factor[backend])
    return run


def _cpu_cell(run: MadeUpRun, workload: str, backend: str, accelerator: str, layout: str, rate: float) -> None:
    if (backend, accelerator) == ("torch-xla", "rocm"):
        return
    expect = None
    if workload == "resnet" and backend == "torch" and layout == "dp2":
        expect = ("wrong-result", "batch statistics are per rank; SyncBatchNorm needs a GPU")
    cell = planned(workload, backend, accelerator, layout, expect=expect, until="2027-06-30" if expect else None)
    if accelerator == "tpu" and backend == "jax":
        if workload == "diffusion" and layout != "fsdp4":
            message = "RESOURCE_EXHAUSTED: ran out of memory in memory space hbm: used 19.21G of 15.75G"
            run.add(
                cell,
                attempt(cell, "fail", evidence="compiled", failure=failure("out-of-memory-device", message, line=13)),
            )
        else:
            run.add(cell, attempt(cell, evidence="compiled", metrics=Metrics()))
        return
    if accelerator in ("cuda", "rocm") and backend == "torch-compile" and layout == "single":
        run.add(cell, attempt(cell, evidence="traced", metrics=Metrics()))
        return
    if accelerator != "cpu":
        reason = {"cuda": "no NVIDIA device node", "rocm": "no /dev/kfd", "tpu": "no TPU on the PCI bus"}[accelerator]
        run.add(cell, attempt(cell, "unavailable", evidence="none", reason=reason))
        return
    if workload == "digits" and backend == "torch-xla":
        run.add(cell, attempt(cell, "unavailable", evidence="none", reason="package torch_xla is not installed"))
        return
    seed = f"{workload}{backend}{layout}"
    devices = {"single": 1, "dp2": 2, "fsdp4": 4}[layout]
    rate *= (1, 1.55, 2.1)[(1, 2, 4).index(devices)]
    comparable = layout == "single"
    if layout == "single":
        if workload == "diffusion" and backend == "torch-compile":
            run.add(cell, attempt(cell, "fail", failure=_inductor(), logs=_logs(run, cell, 1)))
            return
        passed = attempt(cell, logs=_logs(run, cell, 1))
        run.add(cell, passed, *processes(cell, around(rate, 5, seed), comparable=comparable))
        return
    idle = attempt(
        cell,
        "fail",
        failure=failure("idle-devices", f"1 of {devices} devices did work; the script uses only its first", line=11),
        logs=_logs(run, cell, 1),
    )
    changes = Changes(added=6, deleted=1, hunks=3) if layout == "dp2" else Changes(added=19, deleted=4, hunks=6)
    if workload == "resnet" and backend == "torch":
        message = "loss 3.90412 at step 2, reference 3.94178: off by 9.6e-03, tolerance 1e-05"
        wrong = failure("wrong-result", message, "torch/ddp.py", 22, source=PORT)
        drift = [(step, value * (1 + 0.0004 * step)) for step, value in trajectory(7)]
        metrics = Metrics(loss=drift[:12], deviation=9.6e-3, tolerance=1e-5)
        run.add(
            cell,
            idle,
            attempt(cell, "fail", role="port", failure=wrong, metrics=metrics, logs=_logs(run, cell, devices)),
        )
        return
    if backend == "torch-compile" and layout == "fsdp4":
        stacks = {str(rank): _stack(rank) for rank in range(devices)}
        hang = failure(
            "hang", "no progress for 60 s; rank 2 waits in all_gather, the others in reduce_scatter", "torch/ddp.py",
            23, source=PORT, rank=2, stacks=stacks,
        )  # fmt: skip
        run.add(cell, idle, attempt(cell, "fail", role="port", failure=hang, logs=_logs(run, cell, devices)))
        return
    if backend == "torch-xla":
        lacking = failure(
            "unsupported-op", "no XLA lowering for aten::_foreach_lerp_.Scalar", "torch/ddp.py", 24, source=PORT
        )
        run.add(cell, idle, attempt(cell, "fail", role="port", failure=lacking, logs=_logs(run, cell, devices)))
        return
    port = attempt(cell, role="port", changes=changes, logs=_logs(run, cell, devices))
    measured = processes(cell, around(rate, 5, seed), role="port", changes=changes, comparable=comparable)
    run.add(cell, idle, port, *measured)


def _gpu_host() -> MadeUpRun:
    run = MadeUpRun(
        run="2026-06-11-nightly",
        machine="gpu-4",
        definition="nightly",
        started=START - datetime.timedelta(hours=11),
        host={
            "os": "Ubuntu 24.04",
            "cpu": "Intel Xeon Platinum 8480+",
            "cores": 32,
            "memory_bytes": 512 * 2**30,
            "devices": ["NVIDIA H100 80GB"] * 4,
        },
    )
    rates = {"gpt": 1_930_000.0, "digits": 960_000.0, "resnet": 311_000.0}
    for workload, rate in rates.items():
        for backend, factor in {"jax": 1.05, "torch": 1.0, "torch-compile": 1.62}.items():
            for layout, scale in {"single": 1.0, "dp2": 1.93}.items():
                cell = planned(workload, backend, "cuda", layout, written_for="any", required=True)
                seed = f"{workload}{backend}{layout}gpu"
                if layout == "single":
                    if workload == "resnet" and backend == "torch-compile":
                        run.add(cell, attempt(cell, "error", reason="the worker's socket closed before its hello"))
                        continue
                    measured = processes(cell, around(rate * factor, 6, seed), startup=9.4)
                    run.add(cell, attempt(cell, logs=_logs(run, cell, 1)), *measured)
                    continue
                message = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79.11 GiB of which 1.2 GiB is free"
                if workload == "resnet":
                    oom = failure("out-of-memory-device", message, "torch/ddp.py", 22, source=PORT, rank=0)
                    run.add(cell, attempt(cell, "fail", role="port", failure=oom, logs=_logs(run, cell, 2)))
                    continue
                idle = failure("idle-devices", "1 of 2 devices did work; the script uses only its first", line=11)
                changes = Changes(added=6, deleted=1, hunks=3)
                measured = processes(
                    cell, around(rate * factor * scale, 6, seed), role="port", changes=changes, startup=11.8
                )
                run.add(
                    cell,
                    attempt(cell, "fail", failure=idle),
                    attempt(cell, role="port", changes=changes, logs=_logs(run, cell, 2)),
                    *measured,
                )
    return run


def _inductor() -> Failure:
    message = "InductorError: CppCompileError: C++ compile error, command: g++ -O3 -march=native -ffast-math"
    return failure("compile-error", message, line=17)


def _stack(rank: int) -> str:
    call = "all_gather_into_tensor" if rank == 2 else "reduce_scatter_tensor"
    return (
        f'Thread 0x7f21 (active): "MainThread"\n    {call} (torch/distributed/distributed_c10d.py:4012)\n'
        "    post_backward_hook (torch/distributed/_composable/fsdp/_fsdp_param_group.py:380)\n    <module> (ddp.py:23)"
    )


def _logs(run: MadeUpRun, cell: PlannedCell, ranks: int) -> dict[str, str]:
    names = {}
    for rank in range(ranks):
        name = f"logs/{cell.cell.replace('/', '-')}/rank{rank}.log"
        lines = [f"step={step} loss={loss:.6f} tokens=5120" for step, loss in trajectory(7)]
        run.logs[name] = "\n".join([f"rank {rank} of {ranks} starts", *lines]) + "\n"
        names[str(rank)] = name
    return names


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
