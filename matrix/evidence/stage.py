"""The evidence stage: the sources of a cell whose accelerator is absent, shown for each target in child processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from matrix import evidence
from matrix.accelerators import cpu
from matrix.attempt import (
    WORKER,
    Context,
    blank,
    command_line,
    environment_record,
    new_folder,
    own,
    script_arguments,
    threads,
    unavailable,
)
from matrix.environments import Compiler, Interpreter
from matrix.evidence import Producer, Work, bounded, targets, task, torch
from matrix.journal import AttemptRecord, Target
from matrix.keys import file_digest
from matrix.launch import commands, process
from matrix.launch.process import Order
from matrix.plan import Cell, Plan
from matrix.workload import Source

GIB = 1 << 30


def compilers(plan: Plan) -> list[Compiler]:
    """The interpreters that the evidence of a plan's cells needs besides those of their backends."""
    from matrix.backends import available

    found: dict[str, Compiler] = {}
    for cell in plan.cells:
        if not cell.targets or cell.accelerator.absent() is None:
            continue
        for producer, _ in chances(cell):
            if producer is not None and producer.compiler is not None:
                name = f"{producer.compiler}-{cell.accelerator.name}"
                packages = producer.packages.get(cell.accelerator.name, ())
                found[name] = Compiler(available()[producer.compiler], name, packages)
    return list(found.values())


def chances(cell: Cell) -> list[tuple[Producer | None, Target]]:
    """For each target of a cell the producer that serves it; one that is about no particular chip comes once."""
    found: list[tuple[Producer | None, Target]] = []
    seen = set()
    for target in cell.targets:
        producer = evidence.producer_for(cell.backend.name, cell.accelerator.name, target)
        if producer is not None and not producer.particular:
            if producer.name in seen:
                continue
            seen.add(producer.name)
            target = targets.describe(cell.accelerator.name, targets.ANY)
        found.append((producer, target))
    return found


def interpreter(context: Context, cell: Cell, producer: Producer) -> Interpreter:
    """Where the script runs: where the compiler is, if that is an interpreter of the cell's own backend."""
    if producer.compiler == cell.backend.name:
        return context.interpreters[f"{producer.compiler}-{cell.accelerator.name}"]
    return context.interpreters[cell.backend.name]


def obstacle(context: Context, cell: Cell, producer: Producer | None, target: Target) -> str | None:
    """Why a target cannot be asked here; None when it can."""
    if producer is None:
        if cell.backend.name in torch.BACKENDS and target.accelerator == "tpu":
            return "PyTorch itself has no TPU device; torch-xla gives it one"
        return f"nothing shows {cell.backend.name} for {target.about} without it"
    devices = cell.layout.nodes * cell.layout.devices
    if target.devices is not None and target.devices < devices:
        return f"{target.about} has {target.devices} chips, the layout needs {devices}"
    if target.slices > 1 and target.devices != devices:
        return f"{target.about} have {target.devices} chips, and a layout of {devices} would not use them all"
    where = interpreter(context, cell, producer)
    if where.path is None:
        return where.absent
    if producer.compiler is not None:
        compiler = context.interpreters[f"{producer.compiler}-{cell.accelerator.name}"]
        missing = [name for name in producer.packages.get(cell.accelerator.name, ()) if name not in compiler.packages]
        if missing:
            verb = "are" if len(missing) > 1 else "is"
            return f"no compiler for {cell.accelerator.name.upper()} here: {', '.join(missing)} {verb} not installed"
    return None


def outlook(context: Context, cell: Cell) -> str | None:
    """What the stage will try to show of a cell, in words; None when nothing."""
    words = [
        f"{producer.evidence} for {target.about}"
        for producer, target in chances(cell)
        if producer is not None and obstacle(context, cell, producer, target) is None
    ]
    return " and ".join(words) or None


def attempts(context: Context, cell: Cell, sources: list[Source], absence: str) -> Iterator[AttemptRecord]:
    """For each target, the sources until one is accepted; yields what was done now, not what `context.prior` holds.

    Args:
        context: of the run.
        cell: a cell whose accelerator is absent.
        sources: its sources, in the order in which they are tried.
        absence: why it cannot be executed.
    """
    if not cell.targets or not sources:
        yield unavailable(context, cell, absence)
        return
    fails: set[str] = set()  # whatever the target: another one need not be asked
    for producer, target in chances(cell):
        reason = obstacle(context, cell, producer, target)
        if reason is not None or producer is None:
            yield unavailable(context, cell, f"{absence}; {reason}", target)
            continue
        for source in (each for each in sources if each.name not in fails):
            known_fields = _known(context, cell, source, producer, target)
            known = [a for a in context.prior if a.key == known_fields["key"] and a.outcome in ("pass", "fail")]
            attempt = known[-1] if known else perform(context, cell, source, producer, target, known_fields)
            if not known:
                yield attempt
            if attempt.outcome == "fail" and attempt.evidence == "none":
                fails.add(source.name)
            if attempt.outcome == "pass" or attempt.outcome == "error":
                break


def compiler_of(context: Context, cell: Cell, producer: Producer) -> str:
    """What compiles for the cell's accelerator: packages with their versions, the framework's first."""
    if producer.compiler is None:
        return ""
    found = context.interpreters[f"{producer.compiler}-{cell.accelerator.name}"].packages
    names = (producer.compiler, *producer.packages.get(cell.accelerator.name, ()))
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def _known(context: Context, cell: Cell, source: Source, producer: Producer, target: Target) -> dict[str, Any]:
    """The fields of the record that are known before anything ran."""
    where = interpreter(context, cell, producer)
    compiler = context.interpreters.get(f"{producer.compiler}-{cell.accelerator.name}", where)
    more = [producer.name, file_digest(producer.observer), target.model_dump(), compiler.fingerprint()]
    return blank(context, cell, source, where=where, more=more)


def perform(
    context: Context, cell: Cell, source: Source, producer: Producer, target: Target, known: dict[str, Any]
) -> AttemptRecord:
    """Run one source under a producer's observer, and conclude."""
    where = interpreter(context, cell, producer)
    assert where.path is not None
    limits = cell.limits
    devices = cell.layout.nodes * cell.layout.devices
    folder = new_folder(context.folder / "attempts" / cell.id, "evidence")
    compiler = compiler_of(context, cell, producer)
    work = Work(context, cell, source, target, folder, limits.timeout, int(limits.memory_gib * GIB), compiler)
    steps, log_every = (producer.steps, 1) if producer.steps else (cell.run.steps, cell.run.log_every)
    arguments = [*script_arguments(cell, steps, log_every), *source.arguments]
    ranks = commands.ranks(source.launch, devices)
    added = {
        **threads(ranks, context.beside),
        **cell.backend.environment,
        **cpu.environment(cell.backend.through or cell.backend.framework, devices),
        **producer.variables,
        **cell.environment,
    }
    settings = {
        "script": source.name,
        "arguments": arguments,
        "folder": str(folder),
        "observer": str(producer.observer),
        "progress": cell.workload.progress,
        "ranked": source.launch is not None,
        "faults": True,
        "task": task(work),
    }
    settings_file = folder / "settings.json"
    settings_file.write_text(json.dumps(settings))
    order = Order(
        command=commands.command(source.launch, where.path, [str(WORKER), str(settings_file)], devices),
        environment=own(os.environ) | added,
        cwd=cell.workload.folder,
        folder=folder,
        ranks=ranks,
        timeout_s=work.timeout_s,
        no_progress_s=work.timeout_s,
        echo=context.live,
        memory_bytes=work.memory_bytes,
    )
    seen = process.run(order, lambda _: False)
    shown = bounded(work, seen) or producer.conclude(work, seen)
    by_hand = commands.command(source.launch, where.path, [str(WORKER), str(settings_file)], devices)
    return AttemptRecord(
        **known,
        outcome=shown.outcome,
        evidence=shown.evidence,
        reason=shown.reason,
        failure=shown.failure,
        target=shown.target or target,
        compiled=shown.compiled,
        environment=environment_record(context, where, seen, added),
        logs={rank: str(path.relative_to(context.folder)) for rank, path in seen.logs.items()},
        duration_s=round(seen.duration_s, 3),
        reproduce=command_line(cell.workload.folder, added, by_hand),
    )
