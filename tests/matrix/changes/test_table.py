"""The table of what the shipped ports change, and that the README has it as it is now."""

from __future__ import annotations

from pathlib import Path

import pytest

from matrix import changes, workload
from matrix.changes import table

ROOT = Path(__file__).parents[3]


def jobs() -> list[workload.Workload]:
    return [workload.load(file.parent) for file in workload.SHIPPED.glob(f"*/{workload.FILE}")]


def test_the_table_has_the_counts_of_the_shipped_ports() -> None:
    found = changes.count(ROOT / "workloads/digits/torch/train.py", ROOT / "workloads/digits/torch/ddp.py")
    (row,) = [line for line in table.table().splitlines() if line.startswith("| digits | N devices (data) |")]
    assert f"`torch/ddp.py` | +{found.added} -{found.deleted} | {found.hunks} |" in row
    assert "`jax/sharded.py`" in row
    (xla,) = [line for line in table.table().splitlines() if line.startswith("| digits | another chip (torch-xla) |")]
    assert "`torch/xla.py`" in xla


def test_the_table_in_the_readme_is_not_stale() -> None:
    """`python -m matrix.changes.table README.md` renews it."""
    text = (ROOT / "README.md").read_text()
    shown = text.partition(table.BEGIN)[2].partition(table.END)[0]
    shipped = {port.name for job in jobs() for each in job.implementations.values() for port in each.ports}
    assert {name for name in shipped if f"`{name}`" in shown} == shipped
    assert table.with_table(text) == text


def test_a_table_that_is_stale_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    text = (ROOT / "README.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| digits | N devices (data) |"))
    readme.write_text(text.replace(row, row.replace("+", "+1")))
    assert table.with_table(readme.read_text()) != readme.read_text()
    assert table.main([str(readme)]) == 0
    assert readme.read_text() == text
    readme.write_text("no marks")
    assert table.main([str(readme)]) == 2
    assert "has no lines <!--" in capsys.readouterr().err


def test_only_what_is_between_the_marks_is_renewed() -> None:
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    renewed = table.with_table(text)
    assert renewed == f"before\n{table.BEGIN}\n\n{table.table()}\n\n{table.END}\nafter\n"
    assert table.with_table(renewed) == renewed
    assert table.with_table("no marks\n") == "no marks\n"
