"""The evidence stage: the sources of a cell whose accelerator is absent, shown for each target in child processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matrix import evidence
from matrix.accelerators import cpu
from matrix.attempt import (
    Context,
    Limits,
    asked,
    blank,
    circumstances,
    new_folder,
    script_arguments,
    threads,
    unavailable,
    watched,
)
from matrix.environments import Compiler, Interpreter
from matrix.evidence import GIB, Producer, Work, bounded, targets, task, torch
from matrix.journal import AttemptRecord, Target
from matrix.keys import code_digest, file_digest
from matrix.launch import commands, process
from matrix.plan import Cell, Plan
from matrix.workload import Source

CONCLUSIONS = Path(__file__).parent


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
    described = targets.gpu_file(target.name)
    more = [
        producer.name,
        code_digest(producer.observer.parent),
        code_digest(CONCLUSIONS),
        target.model_dump(),
        file_digest(described) if described.exists() else None,
        compiler.fingerprint(),
    ]
    return blank(context, cell, source, where=where, more=more)


def perform(
    context: Context, cell: Cell, source: Source, producer: Producer, target: Target, known: dict[str, Any]
) -> AttemptRecord:
    """Run one source under a producer's observer, and conclude."""
    where, limits = interpreter(context, cell, producer), cell.limits
    devices = cell.layout.nodes * cell.layout.devices
    folder = new_folder(context.folder / "attempts" / cell.id, "evidence")
    pace = (producer.steps, 1) if producer.steps else (cell.run.steps, cell.run.log_every)
    memory_bytes, compiler = int(limits.memory_gib * GIB), compiler_of(context, cell, producer)
    work = Work(context, cell, source, target, folder, limits.timeout, memory_bytes, compiler, *asked(cell, *pace))
    added = {
        **threads(commands.ranks(source.launch, devices), context.beside),
        **cell.backend.environment,
        **cpu.environment(cell.backend.through or cell.backend.framework, devices),
        **producer.variables,
        **cell.environment,
    }
    script = [source.name, *script_arguments(cell, *pace), *source.arguments]
    bounds = Limits(work.timeout_s, work.timeout_s, work.memory_bytes)
    order = watched(context, cell, source, where, producer.observer, script, folder, devices, added, bounds, task(work))
    seen = process.run(order, lambda _: False)
    shown = bounded(work, seen) or producer.conclude(work, seen)
    return AttemptRecord(
        **known,
        outcome=shown.outcome,
        evidence=shown.evidence,
        reason=shown.reason,
        failure=shown.failure,
        target=shown.target or target,
        compiled=shown.compiled,
        **circumstances(context, cell, where, seen, added, order.command),
    )
