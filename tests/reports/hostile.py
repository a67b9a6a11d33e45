"""A run whose every text tries to break out of the page."""

from __future__ import annotations

from matrix.journal import Devices, Expectation, Failure, Layout, Metrics, PlannedCell, ProofRecord, Throughput

from .records import MadeUpRun, attempt, processes

TEXTS = (
    "<script>window.hacked=1</script>",
    "\"><img src=x onerror='window.hacked=2'>",
    "</script><script>window.hacked=3</script>",
    "<!--<script>",
    "]]></style><b-evil onclick=window.hacked=4>",
    "&lt;script&gt;&#x3c;",
    "{{ 7*7 }}{% raw %}",
    "javascript:window.hacked=5",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "right\u202eto left\u2066\u200b\ufeff",
    "null\0byte",
    "=cmd|' /C calc'!A0",
    "lone \udc80 surrogate",
)
ALL = " ".join(TEXTS)
HUGE = 10_000_000


def hostile_run() -> MadeUpRun:
    """Every text at every place, two tracebacks of 10 MB, a log with the same, and paths that lead outside."""
    run = MadeUpRun(
        run="hostile", machine=ALL, definition=ALL, notices=list(TEXTS), selection=ALL,
        host={"cpu": ALL, "os": ALL, "devices": [ALL]}, sources={f"{ALL}/{ALL}": ALL},
    )  # fmt: skip
    run.logs["logs/0.log"] = ALL
    for number, text in enumerate(TEXTS):
        axes = {"workload": text, "backend": text, "accelerator": text, "layout": text, text: text}
        cell = PlannedCell(
            cell=f"{text}/{number}", axes=axes, layout=Layout(name=text), written_for=text,
            expectation=Expectation(cause=text, reason=text, until=None, link=text),
        )  # fmt: skip
        failed = Failure(
            cause=text, message=ALL, signature=text, rank=0, frame=f"{text}:3", excerpt=[(3, ALL)],
            traceback=ALL + "x" * HUGE if number < 2 else ALL, stacks={text: ALL}, followers={text: ALL},
        )  # fmt: skip
        logs = {text: "logs/0.log", "up": "../../../../etc/passwd", text + "2": text}
        metrics = Metrics(loss=[(1, float("nan")), (2, float("inf"))], throughput=Throughput(unit=text, median=1.0))
        common = {
            "source": text, "implementation": text, "logs": logs, "reproduce": ALL, "environment": {text: {text: ALL}},
            "devices": Devices(kind=text, detail={text: {"devices": [{text: ALL}], text: ALL}}), "precision": text,
            "started": text, "reason": ALL,
        }  # fmt: skip
        outcome = ("fail", "error", "unavailable")[number % 3]
        run.add(
            cell,
            attempt(cell, outcome, failure=failed if outcome == "fail" else None, metrics=metrics, **common),
        )
    port = PlannedCell(cell=f"{ALL}/port", axes={**axes, "layout": ALL}, layout=Layout(name=ALL), written_for=ALL)
    run.sources |= {f"{axes['workload']}/{name}": _script(name) for name in ("baseline", ALL)}
    refused = Failure(cause=ALL, message=ALL, signature=ALL)
    run.add(port, attempt(port, "fail", source="baseline", failure=refused), attempt(port, source=ALL, role="port"))
    hunks = [
        {"id": number, "old": (1, 1), "new": (1, 1), "added": 1, "deleted": 1, "verdict": "required", "why": text}
        for number, text in enumerate([ALL, *TEXTS], 1)
    ]
    run.proofs.append(
        ProofRecord.model_validate(
            {"run": run.run, "machine": run.machine, "cell": port.cell, "key": ALL, "source": ALL,
             "baseline": "baseline", "changes": {"added": 1, "deleted": 1, "hunks": 1}, "hunks": hunks,
             "complete": True}
        )
    )  # fmt: skip
    axes = {"workload": ALL, "backend": ALL, "accelerator": ALL, "layout": ALL}
    passing = PlannedCell(cell=f"{ALL}/pass", axes=axes, layout=Layout(name=ALL), written_for=ALL)
    run.add(passing, attempt(passing, source=ALL), *processes(passing, [1.0, 2.0], source=ALL))
    return run


def _script(name: str) -> str:
    """A script that parses, with every text in its code and in its comments."""
    lines = [f"x{number} = {text!r}  # {text}" for number, text in enumerate(TEXTS) if text.isprintable()]
    return "\n".join([*lines, f"name = {name!r}", ""])
