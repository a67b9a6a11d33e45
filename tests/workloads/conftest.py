"""How the tests run a workload's scripts: as subprocesses, as a user would."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

WORKLOADS = Path(__file__).parents[2] / "workloads"
RUN_LIMIT = 300  # seconds: ten times the slowest of these runs on two busy cores


class Scripts:
    """The shipped workloads, and a way to run their scripts."""

    def folder(self, workload: str) -> Path:
        return WORKLOADS / workload

    def description(self, workload: str) -> dict:
        return yaml.safe_load((WORKLOADS / workload / "workload.yaml").read_text())

    def tolerance(self, workload: str, precision: str) -> float:
        return float(self.description(workload)["reference"]["tolerance"][precision])

    def reference(self, workload: str) -> dict[str, float]:
        rows = (WORKLOADS / workload / "reference.csv").read_text().splitlines()[1:]
        return {key: float(value) for key, value in (row.split(",") for row in rows)}

    def run(self, script: Path | str, *flags: str, devices: int = 1) -> dict[str, float]:
        """Run a script and return its losses, keyed "1" and so on, and its "eval"."""
        return numbers(self.output(script, *flags, devices=devices))

    def output(self, script: Path | str, *flags: str, devices: int = 1) -> str:
        """What a script (a path, or one relative to the workloads) prints; a failing one fails the test."""
        return output(WORKLOADS / script, flags, devices)


@functools.cache
def output(script: Path, flags: tuple[str, ...], devices: int) -> str:
    framework = script.parent.name
    if not importlib.util.find_spec(framework):
        pytest.skip(f"{framework} is not installed")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable]
    if framework == "jax":
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    elif script.name.startswith("ddp"):
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    process = subprocess.run(
        [*command, script, *flags], env=environment, capture_output=True, text=True, timeout=RUN_LIMIT
    )
    if process.returncode:
        pytest.fail(f"{script} {' '.join(flags)}: exit {process.returncode}\n{process.stderr[-4000:]}", pytrace=False)
    return process.stdout


def numbers(printed: str) -> dict[str, float]:
    pairs = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in printed.splitlines()]
    losses = {pair["step"]: float(pair["loss"]) for pair in pairs if "loss" in pair}
    return losses | {"eval": float(pairs[-1]["eval"])}


@pytest.fixture(scope="session")
def scripts() -> Scripts:
    return Scripts()


@pytest.fixture(scope="session")
def deviation():
    """Of two trajectories, the largest |found - expected| / |expected| over the losses they share."""

    def largest(found: dict[str, float], expected: dict[str, float]) -> float:
        shared = [key for key in found if key in expected and key != "eval"]
        assert shared, "no step in common"
        return max(abs(found[key] - expected[key]) / abs(expected[key]) for key in shared)

    return largest
