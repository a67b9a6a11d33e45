"""The ends of logs are read from the run's folder only, and never without bound."""

import os
from pathlib import Path

import pytest

from reports.html.logs import LogReader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("do not show")
    return run


def test_a_short_log_is_shown_whole(folder: Path) -> None:
    (folder / "logs" / "0.log").write_text("step=1 loss=2.5\nstep=2 loss=2.4\n")
    assert LogReader().tail(folder, "logs/0.log") == "step=1 loss=2.5\nstep=2 loss=2.4"


def test_of_a_long_log_the_end_is_shown_and_the_rest_counted(folder: Path) -> None:
    (folder / "0.log").write_text("x" * 1000 + "\nlast line\n")
    text = LogReader(per_file=100).tail(folder, "0.log")
    assert text.startswith("[the first 911 bytes left out; the whole is 0.log]\n")
    assert text.endswith("\nlast line")


def test_many_short_lines_are_cut_to_the_last(folder: Path) -> None:
    (folder / "0.log").write_text("".join(f"{n}\n" for n in range(1000)))
    text = LogReader().tail(folder, "0.log")
    assert text.startswith("[the first 800 lines left out; the whole is 0.log]\n800\n")
    assert text.endswith("\n999")


@pytest.mark.parametrize("name", ["../secret.txt", "logs/../../secret.txt", "link", "linked/secret.txt"])
def test_a_path_outside_the_run_is_not_followed(folder: Path, name: str) -> None:
    (folder / "link").symlink_to(folder.parent / "secret.txt")
    (folder / "linked").symlink_to(folder.parent, target_is_directory=True)
    assert LogReader().tail(folder, name) == f"[not read: {name} lies outside the run's folder]"


def test_an_absolute_path_is_not_followed(folder: Path) -> None:
    name = str(folder.parent / "secret.txt")
    assert LogReader().tail(folder, name) == f"[not read: {name} lies outside the run's folder]"


def test_what_is_missing_is_said(folder: Path) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "empty.log").touch()
    read = LogReader().tail
    assert read(folder, "none.log") == "[missing: none.log: No such file or directory]"
    assert read(folder, "nul\0byte").startswith("[missing: nul\\x00byte: ")
    assert read(folder, "loop").startswith("[missing: loop: ")
    assert read(folder, "logs") == "[missing: logs: not a regular file]"
    assert read(folder, "empty.log") == "[empty: empty.log]"


def test_a_pipe_does_not_hang_the_report(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert LogReader().tail(folder, "pipe") == "[missing: pipe: not a regular file]"


def test_bytes_that_are_no_text_and_controls_are_made_visible(folder: Path) -> None:
    (folder / "0.log").write_bytes(b"\xff\x00\x1b[31mred\x1b[0m\x07 10%\r20%\n")
    assert LogReader().tail(folder, "0.log") == "\ufffd\\x00red\\x07 10%\n20%"


def test_the_logs_of_a_report_have_one_room_together(folder: Path) -> None:
    (folder / "0.log").write_text("y" * 60)
    reader = LogReader(per_file=50, room=100)
    shown = [reader.tail(folder, "0.log") for _ in range(3)]
    assert shown[1].endswith("y" * 50)
    assert shown[2] == "[left out: the logs of this report have no more room; the file is 0.log]"
