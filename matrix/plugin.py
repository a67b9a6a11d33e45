"""The pytest plugin: a cell is a test item; after the last one, what passed is measured with nothing beside it."""

from __future__ import annotations

import shlex
import sys
import time
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from matrix import journal, judge, runner, session
from matrix.attempt import Context, alone, blank
from matrix.errors import ToolError, UsageError
from matrix.journal import AttemptRecord
from matrix.judge import CellVerdict
from matrix.plan import Cell, Plan
from matrix.session import Session
from matrix.terminal import Progress, cell_of

WORKERINPUT = "portmatrix"


class CellFailed(Exception):
    """A cell that is not as the definition expects."""

    def __init__(self, verdict: CellVerdict):
        super().__init__(verdict.why)
        self.verdict = verdict


class CellItem(pytest.Item):
    """A cell as a test: it runs its attempts, and fails, skips or xfails by the cell's verdict."""

    cell: Cell
    context: Context
    budget_end: float | None
    made: list[AttemptRecord]
    late = False  # whether there was no time left to begin it

    def runtest(self) -> None:
        self.made = []
        if self.budget_end is not None and time.monotonic() > self.budget_end:
            self.late = True
            pytest.skip("not run: the budget is used up")
        try:
            for attempt in runner.correctness(self.context, self.cell):
                self.made.append(attempt)
        except Exception as error:
            self.made.append(_broken(self.context, self.cell, error))
        prior = [attempt for attempt in self.context.prior if attempt.cell == self.cell.id]
        verdict = judge.judge([self.cell.planned()], [*prior, *self.made])[0]
        if verdict.verdict == "error" or not verdict.as_expected:
            raise CellFailed(verdict)
        if verdict.expectation == "met" and verdict.cell.expectation:
            pytest.xfail(f"{verdict.cause}: {verdict.cell.expectation.reason}")
        if verdict.verdict == "unproven":
            pytest.skip(verdict.why)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CellFailed):
            return explain(excinfo.value.verdict)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.cell.id


def _broken(context: Context, cell: Cell, error: Exception) -> AttemptRecord:
    """The record of a cell at which this tool broke: by a mistake of its own, or for want of what a system gives."""
    text = "" if isinstance(error, OSError) else "".join(traceback.format_exception(error))
    return _tool_error(context, cell, f"{type(error).__name__}: {error}", text)


def _tool_error(context: Context, cell: Cell, reason: str, text: str) -> AttemptRecord:
    reason, text = (each.encode("utf-8", "replace").decode() for each in (reason, text))
    try:
        known = blank(context, cell, None)
    except Exception:  # the very files of the cell cannot be read
        known = {"run": context.run, "machine": context.machine, "cell": cell.id, "key": "", "axes": dict(cell.axes)}
    return AttemptRecord(**known, outcome="error", reason=reason, environment={"tool_traceback": text} if text else {})


def explain(verdict: CellVerdict) -> str:
    """A failed cell in words: the cause, the place in the user's code, the rest."""
    attempt = verdict.attempt
    failure = attempt.failure if attempt else None
    lines = []
    if failure is None:
        state = {"passed": "passes, although it is expected to fail: remove the expectation"}.get(verdict.expectation)
        lines.append(state or f"{verdict.verdict}: {verdict.why}")
        if attempt and "tool_traceback" in attempt.environment:
            lines.append(attempt.environment["tool_traceback"])
    else:
        lines.append(f"{failure.cause}: {failure.message}")
        if verdict.expectation == "other-cause" and verdict.cell.expectation:
            lines.append(f"expected was {verdict.cell.expectation.cause}")
        if verdict.expectation == "expired" and verdict.cell.expectation:
            lines.append(f"the expectation held until {verdict.cell.expectation.until}")
        if failure.frame:
            lines.append(f"at {failure.frame}")
            wanted = int(failure.frame.rpartition(":")[2])
            lines += [f"{'>' if number == wanted else ' '} {number:4} {text}" for number, text in failure.excerpt]
        for rank, stack in failure.stacks.items():
            lines.append(f"rank {rank}:\n{stack}")
    if verdict.cell.required and not verdict.executed:
        lines.append("required by the definition, and not executed")
    if attempt and attempt.reproduce:
        lines.append(f"by hand: {attempt.reproduce}")
    return "\n".join(lines)


class DefinitionFile(pytest.File):
    """A definition as pytest collects it."""

    def collect(self) -> Iterator[CellItem]:
        state = self.config.stash[STATE]
        for cell in state.plan.cells:
            item = CellItem.from_parent(self, name=cell.id)
            item.cell, item.context, item.budget_end = cell, state.context, state.budget_end
            item.made = []
            yield item


@dataclass(frozen=True)
class State:
    """What the plugin knows in this process: the controller's session, or what a worker was told."""

    plan: Plan
    context: Context
    budget_end: float | None
    controller: Session | None


STATE = pytest.StashKey[State]()


def pytest_configure(config: pytest.Config) -> None:
    told = getattr(config, "workerinput", None)
    if told is not None:
        plan, context = session.unpack(told[WORKERINPUT])
        config.stash[STATE] = State(plan, context, told.get("portmatrix_budget_end"), None)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    state = node.config.stash[STATE]
    node.workerinput[WORKERINPUT] = session.pack(state.controller)
    node.workerinput["portmatrix_budget_end"] = state.budget_end


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> DefinitionFile | None:
    state = parent.config.stash.get(STATE, None)
    if state is None or file_path != state.plan.definition.path:
        return None
    return DefinitionFile.from_parent(parent, path=file_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report: Any = yield
    if call.when == "call" and isinstance(item, CellItem):
        # An attribute, not a property of JUnit's: xdist carries it to the controller.
        report.portmatrix = [journal.line(attempt) for attempt in item.made]
        report.portmatrix_cell = item.cell.id
        report.portmatrix_late = item.late
        report.portmatrix_failure = str(report.longrepr) if report.failed else ""
    return report


class Controller:
    """What only the controller does: write the journal, measure, report progress."""

    def __init__(self, controlled: Session, progress: Progress):
        self.session = controlled
        self.progress = progress
        self.trouble: str | None = None
        """Why the run could not go on."""
        self.left: list[str] = []
        """What the budget left no time for, in words."""
        self.late_cells = 0

    def record(self, attempt: AttemptRecord) -> AttemptRecord:
        try:
            return self.session.record(attempt)
        except ToolError as error:
            self.trouble = str(error)
            pytest.exit(self.trouble)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.late_cells += getattr(report, "portmatrix_late", False)
        for line in getattr(report, "portmatrix", ()):
            self.record(AttemptRecord.model_validate_json(line))
        if report.failed and not hasattr(report, "portmatrix"):  # its process crashed, or broke around the cell
            cell = next((cell for cell in self.session.plan.cells if cell.id == cell_of(report.nodeid)), None)
            if cell is not None:
                reason = report.longreprtext.strip().splitlines()[-1]
                self.record(_tool_error(self.session.context(), cell, reason, report.longreprtext))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        result: Any = yield
        stopped = session.shouldstop or session.shouldfail or session.config.option.collectonly
        budget_end = session.config.stash[STATE].budget_end
        if self.session.options.measure and not stopped:
            self.measure(budget_end)
        if self.session.options.prove_changes and not stopped:
            self.prove(budget_end)
        if self.late_cells:
            self.left.insert(0, f"{self.late_cells} cells were not run")
        if self.left:
            self.progress.note(f"the budget is used up: {', '.join(self.left)}; --resume goes on")
        return result

    def measure(self, budget_end: float | None) -> None:
        """Phase 2: processes of every cell that passed, in turns, one at a time."""
        context = self.session.context()
        waiting = []
        for cell in self.session.plan.cells:
            attempts = [a for a in self.session.of_cell[cell.id] if a.machine == self.session.machine]
            source = runner.passing(cell, attempts)
            if source is not None:
                done = runner.measured(context, cell, source, attempts)
                waiting += [(turn, cell, source) for turn in range(done, cell.run.measure.processes)]
        waiting.sort(key=lambda each: each[0])  # stable: process 1 of every cell, then process 2
        if not waiting:
            return
        self.progress.measuring(len(waiting))
        failed: set[str] = set()
        with alone(self.progress.note):
            for turn, cell, source in waiting:
                if cell.id in failed:
                    continue
                if budget_end is not None and time.monotonic() > budget_end:
                    self.left.append("not everything was measured")
                    return
                try:
                    *failures, attempt = runner.measure(context, cell, source)
                except Exception as error:
                    broken = {"phase": "measurement", "source": source.name, "role": source.role}
                    failures, attempt = [], _broken(context, cell, error).model_copy(update=broken)
                for failure in failures:
                    self.record(failure)
                if attempt.outcome != "pass":
                    failed.add(cell.id)  # another process of it would say the same
                self.progress.measured(cell, turn + 1, self.record(attempt))

    def prove(self, budget_end: float | None) -> None:
        """Phase 3, when asked for: every port that passed, without each of its hunks."""
        from matrix.changes import proof  # here, since few runs prove anything

        prover = proof.Prover(
            self.session.context(),
            self.session.record_proof,
            self.progress.said,
            late=lambda: budget_end is not None and time.monotonic() > budget_end,
            measure=self.session.options.measure,
        )
        for ported in proof.ported(self.session.plan.cells, self.session.attempts):
            if prover.late():
                self.left.append("not every port was proven")
                break
            try:
                proven = prover.prove(ported, self.session.proofs)
                if prover.late() and not proven.complete:
                    self.left.append(f"{ported.source.name} was not proven in {ported.cell.id}")
                    break
            except (UsageError, OSError) as error:
                self.progress.note(f"{ported.cell.id} {ported.source.name}: not proven: {error}")
        for (workload, port), hunks in proof.idle(self.session.proofs).items():
            numbers = ", ".join(str(hunk.id) for hunk in hunks)
            self.progress.note(f"{workload}/{port}: no proven cell needs hunk {numbers}")


def run(controlled: Session, arguments: list[str]) -> int:
    """Run a session under pytest.

    Args:
        controlled: the open session.
        arguments: further arguments for pytest (`-k`, `-x`, `--lf`, `--junitxml` ...).

    Returns:
        The exit code, by `matrix.judge`; 130 when interrupted, 2 for arguments that pytest refuses.
    """
    options = controlled.options
    progress = Progress(controlled)
    budget_end = time.monotonic() + 60 * options.budget_min if options.budget_min is not None else None
    words = [
        f"--rootdir={controlled.plan.definition.folder}",
        f"--config-file={Path(__file__).with_name('pytest.ini')}",
        f"--override-ini=cache_dir={options.results.absolute() / '.cache'}",
        "--noconftest",
        "--capture=no",
        "--quiet",
        "-p",
        "matrix.plugin",
        "-p",
        "xdist.plugin",
        *(_beside(options.workers) if options.workers > 1 else []),
        *arguments,
        str(controlled.plan.definition.path),
    ]

    class Setup:
        @pytest.hookimpl(tryfirst=True)
        def pytest_configure(self, config: pytest.Config) -> None:
            config.stash[STATE] = State(controlled.plan, controlled.context(), budget_end, controlled)

    controller = Controller(controlled, progress)
    ended = pytest.main(words, plugins=[Setup(), controller, progress])
    progress.close()
    if controller.trouble is not None:
        print(f"portmatrix: {controller.trouble}", file=sys.stderr)
        code = judge.EXIT_TOOL_ERROR
    else:
        code = _exit_code(int(ended), controlled, progress.stopped, not controller.left)
    progress.summary(controlled.verdicts(), code)
    return code


def _beside(workers: int) -> list[str]:
    """Arguments of pytest-xdist for cells side by side. `-P`: modules in the working directory are the user's."""
    python = shlex.quote(sys.executable)
    return ["--dist=load", "--maxschedchunk=1", f"--tx={workers}*popen//python={python} -P"]


def _exit_code(ended: int, controlled: Session, stopped: bool, complete: bool) -> int:
    """Pytest's exit code as one of ours; a run that came to its end says so in its journal."""
    if ended == pytest.ExitCode.INTERRUPTED and not stopped:
        return judge.EXIT_INTERRUPTED
    if ended == pytest.ExitCode.USAGE_ERROR:
        return judge.EXIT_USAGE
    if ended == pytest.ExitCode.INTERNAL_ERROR:
        print("the tool itself failed; what had been found until then is in the journal", file=sys.stderr)
        return judge.EXIT_TOOL_ERROR
    final = judge.exit_code(controlled.verdicts(), complete)
    if final == judge.EXIT_AS_EXPECTED and controlled.options.prove_changes:
        from matrix.changes import proof

        if proof.idle(controlled.proofs):
            final = judge.EXIT_NOT_AS_EXPECTED
    if complete and not stopped:
        controlled.end(final)
    return final
