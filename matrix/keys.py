"""Keys: a digest of everything that decides how an attempt comes out, so that a resumed run repeats what changed."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path

from matrix import outcome
from matrix.environments import Interpreter
from matrix.plan import Cell
from matrix.workload import FILE, Source

WHOLE = 64 << 20  # bytes; of a larger data file size and modification time are taken instead of its content


def key(cell: Cell, source: Source | None, interpreter: Interpreter, phase: str) -> str:
    """The key of the attempts of one source in one cell.

    It covers the resolved cell, the bytes of the source and of every other file in the workload's folder that is not
    another source (data, helper modules), the reference and its tolerance, interpreter and packages, and the version
    of the judge; not the text of the definition.
    """
    run = cell.run.model_dump()
    measure = run.pop("measure")
    facts = {
        "cell": cell.id,
        "layout": cell.layout.model_dump(),
        "run": run,
        "measure": measure if phase == "measurement" else None,
        "arguments": [dict(cell.workload.arguments), cell.arguments],
        "environment": dict(cell.environment),
        "progress": cell.workload.progress,
        "reference": cell.reference.model_dump(mode="json") if cell.reference else None,
        "source": [source.name, source.launch, file_digest(source.file)] if source else None,
        "data": data_digest(cell.workload.folder, _other_sources(cell)) if source else None,
        "interpreter": interpreter.fingerprint(),
        "judge": outcome.VERSION,
        "phase": phase,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _other_sources(cell: Cell) -> frozenset[str]:
    """Files whose changes do not concern an attempt: all declared sources, the workload's file and its references."""
    names = {FILE}
    for implementation in cell.workload.implementations.values():
        names |= {source.name for source in (implementation.baseline, *implementation.ports)}
    return frozenset(names)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.lru_cache(maxsize=1024)
def data_digest(folder: Path, without: frozenset[str]) -> str:
    """Digest of the files below a workload's folder, caches and hidden ones aside."""
    digest = hashlib.sha256()
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(files):
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if relative in without or name.startswith(".") or not path.is_file():
                continue
            status = path.stat()
            content = file_digest(path) if status.st_size <= WHOLE else f"{status.st_size} {status.st_mtime_ns}"
            digest.update(f"{relative}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
