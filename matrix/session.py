"""A run: its folder, its journal, what it plans, and what an earlier, interrupted run already knows."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import filelock

from matrix import definition, environments, journal, judge, plan
from matrix.attempt import Context, now
from matrix.environments import Interpreter
from matrix.errors import UsageError
from matrix.journal import AttemptRecord, EndRecord, ResumeRecord, RunRecord
from matrix.plan import Cell, Plan

MAX_SOURCE = 1 << 20  # characters of a script that a journal carries


@dataclass(frozen=True)
class Options:
    """What the command line asks of a run."""

    definition: str
    select: str = ""
    python: tuple[str, ...] = ()
    results: Path = Path("results")
    resume: bool = False
    live: bool = False
    budget_min: float | None = None
    workers: int = 1


def tool_version() -> str:
    try:
        return version("portmatrix")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"


def make_plan(options: Options) -> Plan:
    """The selected cells of the definition."""
    found = plan.plan(definition.load(options.definition))
    return found.select(options.select) if options.select else found


def ask(options: Options, planned: Plan) -> dict[str, Interpreter]:
    """The interpreters of the plan's backends, and what they say of themselves."""
    from matrix.backends import available

    backends = {cell.backend.name: cell.backend for cell in planned.cells}
    chosen = environments.parse_python_options(options.python, available())
    named = {name: planned.definition.interpreter(name) for name in backends}
    defined = {name: str(path) for name, path in named.items() if path is not None}
    return environments.find(backends.values(), chosen, defined)


def context_without_run(options: Options, planned: Plan) -> Context:
    """What is needed to ask what can be shown of a plan here, without running it."""
    return Context("", environments.machine_id(), Path(), ask(options, planned), environments.host())


class Session:
    """An open run in the controller, the only process that writes the journal."""

    def __init__(self, options: Options, planned: Plan, interpreters: Mapping[str, Interpreter]):
        self.options = options
        self.plan = planned
        self.interpreters = interpreters
        self.machine = environments.machine_id()
        self.host = environments.host()
        results = options.results.absolute()
        earlier = self._newest(results) if options.resume else None
        self.folder = earlier.path.parent if earlier else self._new_folder(results)
        self.lock = filelock.FileLock(self.folder / ".lock")
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UsageError(f"{self.folder}: another portmatrix is running in this folder") from None
        self.attempts: list[AttemptRecord] = list(earlier.attempts) if earlier else []
        self.carried = len(self.attempts)
        self.run = earlier.run.run if earlier else self.folder.name
        self.writer = journal.Writer(self.folder / "journal.jsonl")
        self._open(earlier is not None)

    def _newest(self, results: Path) -> journal.Journal:
        """The newest run of this definition under the folder of results."""
        path = str(self.plan.definition.path)
        for candidate in sorted(results.glob("*/journal.jsonl"), reverse=True):
            try:
                found = journal.read(candidate)
            except journal.JournalError:
                continue
            if found.run.definition_path == path:
                return found
        raise UsageError(f"--resume: there is no run of {self.plan.definition.name} under {results}")

    def _new_folder(self, results: Path) -> Path:
        name = re.sub(r"[^\w.-]+", "-", self.plan.definition.name)
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
        for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
            folder = results / f"{stamp}-{name}{suffix}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise UsageError(f"cannot write results to {results}: {error.strerror}") from None
            return folder
        raise UsageError(f"{results}: there are a thousand runs of this second already")

    def _open(self, resumed: bool) -> None:
        cells = self.plan.cells
        common: dict[str, Any] = {
            "started": now(),
            "tool": tool_version(),
            "selection": self.plan.selection,
            "plan": [cell.planned() for cell in cells],
            "references": _references(cells),
            "sources": _sources(cells),
            "notices": list(self.plan.notices),
        }
        if resumed:
            self.writer.append(ResumeRecord(**common))
            return
        self.writer.append(
            RunRecord(
                run=self.run,
                machine=self.machine,
                definition=self.plan.definition.name,
                definition_path=str(self.plan.definition.path),
                host=self.host | {"interpreters": {n: i.as_data() for n, i in self.interpreters.items()}},
                **common,
            )
        )

    def context(self) -> Context:
        """What attempts in this process need to know."""
        prior = tuple(a for a in self.attempts[: self.carried] if a.machine == self.machine)
        return Context(
            run=self.run,
            machine=self.machine,
            folder=self.folder,
            interpreters=self.interpreters,
            host=self.host,
            prior=prior,
            live=self.options.live,
            beside=max(1, self.options.workers),
        )

    def record(self, attempt: AttemptRecord) -> AttemptRecord:
        """Number an attempt within its cell, and put it on disk."""
        number = 1 + sum(earlier.cell == attempt.cell for earlier in self.attempts)
        attempt = attempt.model_copy(update={"attempt": number})
        self.attempts.append(attempt)
        self.writer.append(attempt)
        return attempt

    def verdicts(self) -> list[judge.CellVerdict]:
        return judge.judge([cell.planned() for cell in self.plan.cells], self.attempts)

    def end(self, code: int) -> None:
        """The run went to its end."""
        self.writer.append(EndRecord(ended=now(), exit_code=code))

    def close(self) -> None:
        self.writer.close()
        self.lock.release()


def _references(cells: Sequence[Cell]) -> dict[str, journal.Reference]:
    found = {}
    for cell in cells:
        if cell.implementation is not None and cell.reference is not None:
            own = cell.implementation.reference is not None
            name = f"{cell.workload.name}/{cell.implementation.name}" if own else cell.workload.name
            found[name] = cell.reference
    return found


def _sources(cells: Sequence[Cell]) -> dict[str, str]:
    found = {}
    for cell in cells:
        baseline, ports = cell.sources()
        for source in (baseline, *ports) if baseline else ():
            name = f"{cell.workload.name}/{source.name}"
            if name not in found:
                found[name] = source.file.read_text("utf-8", "replace")[:MAX_SOURCE]
    return found


def pack(session: Session) -> str:
    """What a process of pytest-xdist needs to run cells of this session, as JSON."""
    return json.dumps(
        {
            "definition": session.options.definition,
            "select": session.options.select,
            "folder": str(session.folder),
            "run": session.run,
            "machine": session.machine,
            "host": session.host,
            "workers": session.options.workers,
            "carried": session.carried,
            "interpreters": {name: each.as_data() for name, each in session.interpreters.items()},
        },
        default=dict,
    )


def unpack(text: str) -> tuple[Plan, Context]:
    """The plan and the context that `pack` described; earlier attempts are read from the journal."""
    data = json.loads(text)
    planned = make_plan(Options(data["definition"], data["select"]))
    folder = Path(data["folder"])
    attempts = journal.read(folder).attempts[: data["carried"]] if data["carried"] else []
    context = Context(
        run=data["run"],
        machine=data["machine"],
        folder=folder,
        interpreters={name: Interpreter(**each) for name, each in data["interpreters"].items()},
        host=data["host"],
        prior=tuple(a for a in attempts if a.machine == data["machine"]),
        beside=max(1, data["workers"]),
    )
    return planned, context
