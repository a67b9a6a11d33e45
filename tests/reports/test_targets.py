"""What is known for each target, in the table of the page and of the summary, and in the section of a cell."""

from __future__ import annotations

from pathlib import Path

from matrix.evidence.targets import describe
from matrix.journal import AttemptRecord, Compiled, Function, PlannedCell
from reports.html.sections import Detail, section
from reports.markdown import summary
from reports.merge import merge
from reports.targets import coverage
from tests.reports.records import DAY, MadeUpRun, attempt, failure, planned

STEP = Function(
    name="train_step",
    calls=30,
    devices=4,
    compile_s=12.5,
    collectives={"all-gather": 57, "send": 29},
    peak_bytes=8 << 30,
    argument_bytes=1 << 30,
    flops=1.29e12,
    bytes=25e9,
    scans_counted_once=1,
)


def about(
    cell: PlannedCell, target: str, evidence: str = "compiled", outcome: str = "pass", **more: object
) -> AttemptRecord:
    accelerator = cell.axes["accelerator"]
    made = describe(accelerator, target).model_copy(update={"kind": "TPU v5 lite", "compiler": "libtpu 0.0.42"})
    fields = {"target": made, "compiled": Compiled(functions=[STEP], recompiles=1), "key": f"{cell.cell} {target}"}
    return attempt(cell, outcome, evidence=evidence, **{**fields, **more})


def run() -> MadeUpRun:
    made = MadeUpRun(definition="absent")
    cpu = planned("gpt", "jax", "cpu")
    made.add(cpu, attempt(cpu))
    both = planned("gpt", "jax", "tpu")
    made.add(both, about(both, "v5e:2x2"), about(both, "v5p:4x4x4", attempt=2))
    large = planned("large", "jax", "tpu")
    refusal = failure("out-of-memory-device", "needs 46.16G, exceeds available HBM (15.75G)", "jax/train.py")
    made.add(large, about(large, "v5e:2x2", "compiled", "fail", failure=refusal))
    idle = planned("gpt", "jax", "tpu", "dp2")
    made.add(idle, about(idle, "v5e:2x2", "none", "fail", failure=failure("idle-devices", "1 of 2 did work")))
    rocm = planned("gpt", "jax", "rocm")
    made.add(rocm, about(rocm, "any", "lowered"))
    nothing = planned("gpt", "torch", "rocm")
    made.add(nothing, attempt(nothing, "unavailable", evidence="none", reason="no AMD GPU"))
    return made


def test_each_target_has_its_line_with_what_is_known_there() -> None:
    found = coverage(merge([run().journal()], DAY).rows)
    assert [(each.accelerator, each.target, dict(each.counts)) for each in found] == [
        ("cpu", "", {"executed": 1}),
        ("tpu", "TPU v5e 2x2", {"compiled": 1, "refused": 1, "nothing": 1}),
        ("tpu", "TPU v5p 4x4x4", {"compiled": 1}),
        ("rocm", "", {"lowered": 1, "nothing": 1}),
    ]


def test_a_port_that_is_accepted_counts_above_a_baseline_that_is_refused() -> None:
    made, cell = MadeUpRun(), planned("gpt", "jax", "tpu")
    refusal = failure("unsupported-op", "no sort", "jax/train.py")
    made.add(
        cell,
        about(cell, "v5e:2x2", "compiled", "fail", failure=refusal),
        about(cell, "v5e:2x2", role="port", attempt=2),
    )
    assert dict(coverage(merge([made.journal()], DAY).rows)[0].counts) == {"compiled": 1}


def test_the_summary_has_the_table_only_where_something_was_compiled_for() -> None:
    text = summary(merge([run().journal()], DAY), [])
    assert "### What is known for each target" in text
    assert "| tpu | TPU v5e 2x2 |  | 1 |  |  | 1 | 1 |" in text
    made, cell = MadeUpRun(), planned()
    assert "each target" not in summary(merge([made.add(cell, attempt(cell)).journal()], DAY), [])


def test_the_section_of_a_cell_has_a_line_for_each_function() -> None:
    rows = merge([run().journal()], DAY).rows
    groups = {row.cell: dict(section(row, Detail())) for row in rows}
    title = "Without the accelerator"
    assert title not in groups["gpt/jax/cpu/single"]
    blocks = groups["gpt/jax/tpu/single"][title]
    assert [block[1] for block in blocks if block[0] == "text"] == ["TPU v5e 2x2: compiled", "TPU v5p 4x4x4: compiled"]
    facts = dict(next(block[1] for block in blocks if block[0] == "pairs"))
    assert facts["Compiler"] == "libtpu 0.0.42"
    assert facts["Recompiled"] == "1 time, for other shapes"
    head, lines = next(block[1:] for block in blocks if block[0] == "table")
    assert dict(zip(head, lines[0], strict=True)) == {
        "function": "train_step",
        "calls": "30",
        "devices": "4",
        "peak memory": "8.00 GiB (50.0%)",
        "arguments": "1.00 GiB",
        "collectives": "57 all-gather, 29 send",
        "FLOPs (* bodies of loops counted once)": "1.29 T *",
        "bytes (*)": "23.3 GiB *",
        "compiled in": "12.5 s",
    }
    refused = groups["large/jax/tpu/single"][title]
    assert refused[0] == ("text", "TPU v5e 2x2: fail (needs 46.16G, exceeds available HBM (15.75G))")


def test_the_page_says_that_compiled_is_not_executed(tmp_path: Path) -> None:
    from reports.build import build

    page = build([run().write(tmp_path / "run")], tmp_path / "report").page.read_text()
    assert "What is known for each target" in page
    assert "none of these says that it runs, or how fast" in page
    assert "compiled for TPU v5e 2x2 and TPU v5p 4x4x4, not executed" in page
