"""The command `portmatrix`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from matrix import version
from matrix.errors import ToolError, UsageError


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code (see `matrix.judge`)."""
    parser = _parser()
    words = sys.argv[1:] if arguments is None else arguments
    options, rest = parser.parse_known_args(words)
    if rest and options.command != "run":
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    from matrix import judge  # not before the words are understood: `--help` need not wait for pydantic

    try:
        code: int = options.action(options, rest)
        return code
    except UsageError as error:
        print(f"portmatrix: {error}", file=sys.stderr)
        return judge.EXIT_USAGE
    except ToolError as error:
        print(f"portmatrix: {error}", file=sys.stderr)
        return judge.EXIT_TOOL_ERROR
    except KeyboardInterrupt:
        return judge.EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output has gone
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="portmatrix",
        description="Does this training code run on other hardware, what has to change, and how fast is it there?",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, action: object) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        made.set_defaults(action=action)
        return made

    def common(made: argparse.ArgumentParser) -> None:
        made.add_argument("definition", help="a YAML file, or a shipped one: smoke, cpu, nightly, absent, xla")
        made.add_argument("--select", default="", metavar="AXIS=VALUE,...", help="only these cells, exact by axis")
        made.add_argument(
            "--python", action="append", default=[], metavar="BACKEND=PATH", help="the interpreter of a backend"
        )

    made = command("plan", "Show every cell, and what can be shown of it here.", _plan)
    common(made)
    made.add_argument("--format", choices=["table", "json", "github"], default="table")

    made = command("run", "Run the cells; arguments that are not listed here go to pytest (-k, -x, --lf ...).", _run)
    common(made)
    made.add_argument("-n", "--workers", default="1", metavar="N", help="cells at a time in the correctness phase")
    made.add_argument("--resume", action="store_true", help="continue the newest run of this definition")
    made.add_argument("--budget", type=float, metavar="MIN", help="start nothing more after so many minutes")
    made.add_argument("--no-measure", action="store_true", help="correctness only: leave out the measurement phase")
    made.add_argument(
        "--prove-changes",
        action="store_true",
        help="run every port that passed without each of its hunks; exit code 1 if no cell needs one of them",
    )
    made.add_argument("--live", action="store_true", help="show the output of the one selected cell")
    made.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="where runs are kept")
    made.add_argument("--report", type=Path, metavar="DIR", help="also write the report of this run, however it ends")

    made = command("report", "Write a page, a summary, JUnit XML and CSV from journals.", _report)
    made.add_argument("results", nargs="+", type=Path, help="journals, runs' folders, or folders of runs")
    made.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    made.add_argument(
        "--exit-code", action="store_true", help="exit as one run that found all this would; otherwise 0 once written"
    )

    made = command("changes", "Show what a port changes against its baseline, without running it.", _changes)
    made.add_argument("baseline", type=Path)
    made.add_argument("port", type=Path)
    made.add_argument("--format", choices=["text", "json", "patch"], default="text")

    made = command("compare", "Compare two sets of results: newly broken, fixed, slower, faster, lost.", _compare)
    made.add_argument("base", type=Path)
    made.add_argument("head", type=Path)

    command("schema", "Print the JSON Schema of a definition, for editors.", _schema)
    command("causes", "List the causes of failure: what happened, and what to do.", _causes)
    return parser


def _workers(text: str) -> int:
    from matrix.environments import cores

    if text == "auto":
        return cores()
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise UsageError(f"-n takes a number of cells at a time or 'auto', got '{text}'")
    return int(text)


def _plan(options: argparse.Namespace, rest: list[str]) -> int:
    from matrix import listing, runner, session
    from matrix.evidence import stage

    asked = session.Options(options.definition, options.select, tuple(options.python))
    planned = session.make_plan(asked)
    if options.format == "github":
        print(json.dumps(listing.as_github(planned)))
        return 0
    context = session.context_without_run(asked, planned)
    notes = {cell.id: runner.obstacle(context, cell) for cell in planned.cells}
    if options.format == "json":
        cells = listing.as_json(planned)
        print(json.dumps([{**cell, "unavailable": notes[cell["cell"]]} for cell in cells], indent=2))
        return 0
    words = {name: f"unproven: {note}" if note else "runs here" for name, note in notes.items()}
    for cell in planned.cells:
        if notes[cell.id] and cell.accelerator.absent() and (shown := stage.outlook(context, cell)):
            words[cell.id] = f"{shown}, not executed: {notes[cell.id]}"
    print(listing.as_table(planned, words))
    for notice in planned.notices:
        print(f"note: {notice}")
    return 0


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    from matrix import plugin, session

    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the user's plugins are for the user's tests
    if options.budget is not None and not options.budget > 0:
        raise UsageError(f"--budget takes a positive number of minutes, got {options.budget:g}")
    asked = session.Options(
        definition=options.definition,
        select=options.select,
        python=tuple(options.python),
        results=options.results,
        resume=options.resume,
        live=options.live,
        measure=not options.no_measure,
        budget_min=options.budget,
        workers=1 if options.live else _workers(options.workers),
        prove_changes=options.prove_changes,
    )
    planned = session.make_plan(asked)
    if asked.live and len(planned.cells) != 1:
        raise UsageError(f"--live shows one cell, and {len(planned.cells)} are selected: narrow it with --select")
    opened = session.Session(asked, planned, session.ask(asked, planned))
    try:
        code = plugin.run(opened, rest)
    finally:
        opened.close()
    if options.report is not None:
        _write_report([opened.folder], options.report)
    return code


def _report(options: argparse.Namespace, rest: list[str]) -> int:
    code = _write_report(options.results, options.output)
    return code if options.exit_code else 0


def _write_report(results: list[Path], output: Path) -> int:
    """Write it; returns the exit code of a run that found all this."""
    from reports.build import build

    try:
        built = build(results, output)
    except OSError as error:
        raise UsageError(f"cannot write the report to {output}: {error.strerror or error}") from None
    print(f"report: {built.page.absolute()}")
    return built.exit_code


def _compare(options: argparse.Namespace, rest: list[str]) -> int:
    from reports.compare import compare

    found = compare([options.base], [options.head])
    print(found)
    return found.exit_code


def _changes(options: argparse.Namespace, rest: list[str]) -> int:
    from matrix import changes
    from matrix.changes import text

    comparison = changes.compare_files(options.baseline, options.port)
    if options.format == "patch":
        sys.stdout.reconfigure(newline="")  # type: ignore[union-attr]  # a patch keeps the line ends of its files
        print(text.as_patch(comparison, options.baseline), end="")
    else:
        show = text.as_json if options.format == "json" else text.as_text
        print(show(comparison, str(options.baseline), str(options.port)))
    return 0


def _schema(options: argparse.Namespace, rest: list[str]) -> int:
    from matrix.definition import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _causes(options: argparse.Namespace, rest: list[str]) -> int:
    from matrix.failures import CAUSES

    width = max(map(len, CAUSES)) + 2
    for cause in CAUSES.values():
        print(f"{cause.id:{width}}{cause.words}\n{'':{width}}{cause.advice}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
