"""What the attempts of a machine share: the lock of those who measure."""

from __future__ import annotations

from pathlib import Path

import filelock
import pytest

from matrix import attempt


def test_who_waits_for_another_measurement_says_so_and_is_then_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "MEASURE_LOCK", tmp_path / "lock")
    other, said = filelock.FileLock(tmp_path / "lock"), []
    other.acquire()

    def say(text: str) -> None:
        said.append(text)
        other.release()

    with attempt.alone(say), pytest.raises(filelock.Timeout):
        other.acquire(timeout=0)
    assert said == ["waiting until another run on this machine has measured"]
    other.acquire(timeout=0)
    other.release()


def test_a_lock_that_cannot_be_had_is_told_and_the_measurement_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "MEASURE_LOCK", tmp_path)  # a folder: no user can lock it
    said: list[str] = []
    with attempt.alone(said.append):
        assert [text.partition(":")[0] for text in said] == [
            "whether another run measures beside this one is not known"
        ]
