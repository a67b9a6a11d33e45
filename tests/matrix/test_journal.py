"""A journal holds what happened, whatever happens to it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from matrix import journal
from matrix.errors import ToolError
from matrix.journal import AttemptRecord, EndRecord, JournalError, Metrics, ResumeRecord, RunRecord, Writer, find, read

RUN = RunRecord(run="r", machine="m", started="t", tool="1", definition="d", definition_path="/d.yaml", plan=[])


def attempt(number: int = 1, **more: Any) -> AttemptRecord:
    values: dict[str, Any] = {"run": "r", "machine": "m", "cell": "c", "key": "k", "axes": {"backend": "torch"}}
    return AttemptRecord(**values | {"attempt": number, "outcome": "pass"} | more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def written(path: Path, *records: journal.AnyRecord) -> Path:
    writer = Writer(path)
    for record in records:
        writer.append(record)
    writer.close()
    return path


def test_records_come_back_as_they_were_written(path: Path) -> None:
    metrics = Metrics(loss=[(1, 2.5), (2, math.inf), (3, -math.inf), (4, math.nan)], eval=math.nan)
    made = attempt(metrics=metrics, environment={"odd": "ü\n\x00\u2028", "nan": math.nan}, reason="two\nlines")
    end = EndRecord(ended="t", exit_code=0)
    found = read(written(path, RUN, made, end))
    assert found.run == RUN
    assert found.end == end
    assert not found.partial
    assert repr(found.attempts[0].metrics) == repr(metrics)  # NaN is not equal to itself
    assert found.attempts[0].environment["odd"] == "ü\n\x00\u2028"
    assert found.damaged == []
    assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("cut", [1, 20, 200, 10_000])
def test_a_torn_last_line_loses_only_itself(path: Path, cut: int) -> None:
    written(path, RUN, attempt(1), attempt(2))
    data = path.read_bytes()
    last = len(data.splitlines(keepends=True)[-1])
    path.write_bytes(data[: -min(cut, last - 1)])
    torn = cut > 1
    assert len(read(path).attempts) == (1 if torn else 2)
    assert [line.partition(":")[0] for line in read(path).damaged] == (["line 3"] if torn else [])
    written(path, attempt(3))
    assert [each.attempt for each in read(path).attempts] == ([1, 3] if torn else [1, 2, 3])


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[]",
        b"1",
        b'"text"',
        b"null",
        b'{"kind": "attempt"}',
        b'{"kind": "of a newer version"}',
        b'{"kind": ["list"]}',
        b"[" * 100_000,
        b'{"kind": "attempt", "outcome": "pa',
        b"\x00" * 512,  # what some file systems leave after a crash
    ],
)
def test_a_line_that_cannot_be_read_is_told_and_left_out(path: Path, line: bytes) -> None:
    written(path, RUN, attempt(1))
    path.write_bytes(path.read_bytes() + line + b"\n")
    written(path, attempt(2))
    found = read(path)
    assert [each.attempt for each in found.attempts] == [1, 2]
    assert [each.partition(":")[0] for each in found.damaged] == ["line 3"]


def test_fields_of_a_newer_version_are_read_over_and_kept(path: Path) -> None:
    written(path, RUN)
    raw = json.loads(attempt().model_dump_json(by_alias=True))
    raw |= {"schema": 2, "colour": {"of": "the future"}}
    raw["metrics"]["joules"] = 3.5
    path.write_bytes(path.read_bytes() + json.dumps(raw).encode() + b"\n")
    found = read(path).attempts[0]
    assert found.schema_ == 2
    assert json.loads(found.model_dump_json())["colour"] == {"of": "the future"}
    assert json.loads(found.model_dump_json())["metrics"]["joules"] == 3.5


def test_a_resumed_journal_is_partial_until_its_next_end(path: Path) -> None:
    end = EndRecord(ended="t", exit_code=1)
    resumed = ResumeRecord(started="u", tool="2", selection="backend=torch", plan=[])
    assert read(written(path, RUN, end, resumed)).partial
    found = read(written(path, attempt(), end))
    assert not found.partial
    assert (found.run.tool, found.run.selection, found.run.started) == ("2", "backend=torch", "t")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("", "no run record"),
        ("\n\n", "no run record"),
        ("not a journal\n", "no run record"),
        (attempt().model_dump_json(by_alias=True) + "\n", "the first record is 'attempt', expected 'run'"),
        ((RUN.model_dump_json(by_alias=True) + "\n") * 2, "a second run record"),
    ],
)
def test_a_file_that_is_no_journal_is_told(path: Path, text: str | None, message: str) -> None:
    if text is not None:
        path.write_text(text)
    with pytest.raises(JournalError, match=message):
        read(path.parent)


def test_journals_are_found_by_file_by_folder_and_below(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "journal.jsonl", RUN)
    (tmp_path / "other").mkdir()
    a, b = tmp_path / "a" / "journal.jsonl", tmp_path / "b" / "journal.jsonl"
    assert list(find([tmp_path])) == [a, b]
    assert list(find([b.parent, a])) == [b, a]


# --- what can go wrong while it is written ---


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").symlink_to("/dev/full")
    writer = Writer(tmp_path / "journal.jsonl")
    with pytest.raises(ToolError, match="cannot be written: No space left on device"):
        writer.append(RUN)


def test_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="cannot be written: No such file or directory"):
        Writer(tmp_path / "gone" / "journal.jsonl")


def test_a_journal_that_is_deleted_or_replaced_meanwhile_is_told(path: Path) -> None:
    writer = Writer(path)
    writer.append(RUN)
    path.rename(path.with_suffix(".old"))
    with pytest.raises(ToolError, match="No such file or directory"):
        writer.append(attempt())
    path.touch()
    with pytest.raises(ToolError, match="was replaced"):
        writer.append(attempt())


def test_a_record_is_synced_unless_it_only_says_that_nothing_can_be_executed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(path.read_bytes().count(b"\n")))
    written(path, RUN, attempt(), attempt(outcome="unavailable"), attempt(outcome="fail"))
    assert synced == [1, 2, 4]


def test_text_that_no_encoding_holds_is_written_out_and_numbers_that_json_lacks_survive(path: Path) -> None:
    odd = attempt(outcome="error", reason="name \udcff.py", metrics={"loss": [(1, float("nan"))]})
    written(path, RUN, odd)
    (back,) = read(path).attempts
    assert back.reason == "name \\udcff.py"
    assert back.metrics.loss[0][1] != back.metrics.loss[0][1]
