"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix.harness import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
