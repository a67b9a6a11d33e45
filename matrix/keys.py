"""Keys: a digest of everything that decides how an attempt comes out, so that a resumed run repeats what changed."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from matrix import outcome
from matrix.environments import Interpreter
from matrix.journal import Reference
from matrix.plan import Cell
from matrix.workload import FILE, Source

WHOLE = 64 << 20  # bytes; of a larger data file size and modification time are taken instead of its content
LONGEST = 200  # characters of a text that may name a file


def key(cell: Cell, source: Source | None, interpreter: Interpreter, phase: str, more: object = None) -> str:
    """The key of the attempts of one source in one cell.

    It covers the resolved cell, the bytes of the source, of the other sources that it uses, and of every other file in
    the workload's folder that is no source (data, helper modules), the reference and its tolerance, how the backend and
    the accelerator set a cell up and look at it (with all that runs inside a cell), interpreter and packages, and the
    version of the judge; not the text of the definition.
    `more` is what else there is: the target that it is compiled for.
    """
    run, backend = cell.run.model_dump(), cell.backend
    measure = run.pop("measure")
    facts = {
        "cell": cell.id,
        "layout": cell.layout.model_dump(),
        "run": run,
        "measure": measure if phase == "measurement" else None,
        "arguments": [dict(cell.workload.arguments), cell.arguments],
        "backend": [backend.flags, dict(backend.environment), backend.compiles, file_digest(backend.observer)],
        "inside": _inside(),
        "environment": dict(cell.environment),
        "shown": dict(cell.accelerator.environment(backend.through or backend.framework, cell.layout.devices)),
        "progress": cell.workload.progress,
        "reference": _reference_digest(cell.reference) if cell.reference else None,
        "source": [source.name, source.launch, file_digest(source.file), *source.arguments] if source else None,
        "uses": _uses(cell, source) if source else None,
        "data": _data(cell) if source else None,
        "interpreter": interpreter.fingerprint(),
        "judge": outcome.VERSION,
        "phase": phase,
        **({"more": more} if more is not None else {}),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def _inside() -> str:
    """Of what runs inside every cell: the observers load each other."""
    return data_digest(Path(__file__).parent / "inside", frozenset())


def _uses(cell: Cell, source: Source) -> list[str]:
    names = frozenset(_other_sources(cell) - {FILE})
    return [*map(file_digest, _used(cell.workload.folder, names, source.file, source.file.stat().st_mtime_ns))]


@functools.cache
def _used(folder: Path, names: frozenset[str], script: Path, changed: int) -> list[Path]:
    """The other declared sources that a source uses, also by way of each other and of helper modules.

    Args:
        folder: the workload's.
        names: of its declared sources.
        script: the file of the source.
        changed: when that was changed, so that it is read again after an edit.
    """
    declared = {folder / name for name in names} - {script}
    found, todo = {script}, [script]
    while todo:
        file = todo.pop()
        roots = dict.fromkeys((script.parent, file.parent, folder))
        for word in _mentioned(file):
            paths = (root / path for root in roots for path in (f"{word}.py", f"{word}/__init__.py"))
            used = {path for path in paths if path.is_file()} or {each for each in declared if each.stem == word}
            todo += used - found
            found |= used
    return sorted(found & declared)


def _mentioned(file: Path) -> set[str]:
    """What a script may import, as paths without the ending: by `import`, or by a text that names a module or a file.

    A text may be something else; then its script is run once too often.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = [each.name for each in node.names]
            names |= {node.module or "", *inner, *(f"{node.module}.{each}" for each in inner)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < LONGEST:
            names.add(node.value.removesuffix(".py").replace("/", "."))
    return {name.replace(".", "/") for name in names if all(map(str.isidentifier, name.split(".")))}


_data_digests: dict[Path, str] = {}  # by a workload's folder: as it was when this run first looked
_reference_digests: dict[int, tuple[Reference, str]] = {}  # by identity; the object is held, so that it stays its own


def _data(cell: Cell) -> str:
    folder = cell.workload.folder
    if folder not in _data_digests:
        _data_digests[folder] = data_digest(folder, _other_sources(cell))
    return _data_digests[folder]


def data_of(cells: Iterable[Cell]) -> dict[str, str]:
    """The digests of the cells' data: taken once for a run, since its own scripts may write into their folders."""
    return {str(cell.workload.folder): _data(cell) for cell in cells if cell.implementation is not None}


def use_data(digests: dict[str, str]) -> None:
    """Use digests that another process of this run has taken."""
    _data_digests.update({Path(folder): digest for folder, digest in digests.items()})


def _reference_digest(reference: Reference) -> str:
    if id(reference) not in _reference_digests:
        data = json.dumps(reference.model_dump(mode="json"), sort_keys=True)
        _reference_digests[id(reference)] = reference, hashlib.sha256(data.encode()).hexdigest()
    return _reference_digests[id(reference)][1]


def _other_sources(cell: Cell) -> frozenset[str]:
    """Files whose changes do not concern an attempt: the workload's own file, and all declared sources."""
    names = {FILE}
    for implementation in cell.workload.implementations.values():
        names |= {source.name for source in (implementation.baseline, *implementation.ports)}
    return frozenset(names)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_digest(folder: Path) -> str:
    """SHA-256 of the Python files in a folder: of what looks at an attempt, or concludes from it."""
    found = [[path.name, file_digest(path)] for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def data_digest(folder: Path, without: frozenset[str]) -> str:
    """Digest of the files below a workload's folder, links followed, caches and hidden ones left out.

    A file that cannot be read, or is gone before it is, counts by its name: what a script does with it, the attempt
    shows.
    """
    digest = hashlib.sha256()
    seen: set[tuple[int, int]] = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in seen:  # a link that leads back up
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(files):
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if relative not in without and not name.startswith("."):
                digest.update(f"{relative}\0{_content(path)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _content(path: Path) -> str:
    try:
        if not path.is_file():
            return "no file"
        status = path.stat()
        return file_digest(path) if status.st_size <= WHOLE else f"{status.st_size} {status.st_mtime_ns}"
    except OSError as error:
        return type(error).__name__
