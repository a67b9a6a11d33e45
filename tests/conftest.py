"""Fixtures that several test modules share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.matrix.harness import Bench

# A shell that starts the tests in the background has them ignore Ctrl-C, and whatever they start inherits that.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, default)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
