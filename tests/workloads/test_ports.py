"""No shipped port has a hunk that its cells do without: each port is run on the CPU without each of its hunks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from matrix import journal, workload
from matrix.changes import proof
from matrix.workload import Source

ROOT = Path(__file__).parents[2]
BACKENDS = ("jax", "torch")
DEVICES = {"single": 1, "data": 2, "fully-sharded": 2, "tensor": 2, "hybrid": 4}
PASSES_NOWHERE = {("resnet", "torch/ddp.py")}
"""As it should be: its statistics are of one rank's batch (`test_resnet.py`)."""
LIMIT_S = 900  # some ten times what the slowest workload takes on two cores


def on_the_cpu(port: Source) -> bool:
    """Whether a port serves a backend and an accelerator that every machine with these tests has."""
    return bool(
        {"cpu"} & set(port.serves.get("accelerator", ("cpu",)))
        and set(BACKENDS) & set(port.serves.get("backend", BACKENDS))
    )


@pytest.mark.parametrize("name", sorted(file.parent.name for file in workload.SHIPPED.glob(f"*/{workload.FILE}")))
def test_no_hunk_of_a_port_is_idle(tmp_path: Path, name: str) -> None:
    job = workload.load(workload.SHIPPED / name)
    served = [
        port
        for framework in BACKENDS
        if framework in job.implementations
        for port in job.implementations[framework].ports
        if on_the_cpu(port)
    ]
    ports = {port.name for port in served}
    if missing := [each for each in BACKENDS if each in job.implementations and not importlib.util.find_spec(each)]:
        pytest.skip(f"{missing[0]} is not installed")
    strategies = {strategy for port in served for strategy in port.serves.get("strategy", DEVICES)}
    definition = {
        "matrix": {
            "workload": [name],
            "backend": [each for each in BACKENDS if each in job.implementations],
            "accelerator": ["cpu"],
            "layout": sorted(strategies),
        },
        "layouts": {each: {"devices": DEVICES[each], "strategy": each} for each in strategies - {"single"}},
        "run": {"size": "tiny", "steps": 3, "log_every": 1, "timeout": 300},
    }
    (tmp_path / "ports.yaml").write_text(yaml.safe_dump(definition))
    command = [sys.executable, "-m", "matrix.cli", "run", tmp_path / "ports.yaml", "--results", tmp_path]
    command += ["--no-measure", "--prove-changes"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    records = [record for file in tmp_path.glob("*/journal.jsonl") for record in journal.read(file).proofs]
    assert proof.idle(records) == {}, run.stdout[-4000:]
    proven = {record.source for record in records if any(hunk.verdict == "required" for hunk in record.hunks)}
    assert proven == {port for port in ports if (name, port) not in PASSES_NOWHERE}, run.stdout[-4000:] + run.stderr
