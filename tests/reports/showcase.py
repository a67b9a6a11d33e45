"""Two made-up runs as a project would have them: a CPU box that runs much, a GPU host that runs what it can."""

from __future__ import annotations

import datetime

from matrix.journal import Changes, Failure, Metrics, PlannedCell

from .records import PORT, START, MadeUpRun, around, attempt, failure, planned, processes, trajectory


def showcase() -> list[MadeUpRun]:
    """Both runs."""
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
