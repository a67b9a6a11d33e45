"""No shipped port has a hunk that its cells do without: each port is run on the CPU without each of its hunks."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from matrix import journal, workload
from matrix.changes import proof
from matrix.journal import ProofRecord
from matrix.workload import Source
from tests.matrix.harness import XLA

ROOT = Path(__file__).parents[2]
BACKENDS = ("jax", "torch")
DEVICES = {"single": 1, "data": 2, "fully-sharded": 2, "tensor": 2, "hybrid": 8}
PASSES_NOWHERE = {("resnet", "torch/ddp.py")}
"""As it should be: its statistics are of one rank's batch (`test_resnet.py`)."""
LIMIT_S = 900  # some ten times what the slowest workload takes on two cores
NAMES = sorted(file.parent.name for file in workload.SHIPPED.glob(f"*/{workload.FILE}"))


def on_the_cpu(port: Source) -> bool:
    """Whether a port serves a backend and an accelerator that every machine with these tests has."""
    return bool(
        {"cpu"} & set(port.serves.get("accelerator", ("cpu",)))
        and set(BACKENDS) & set(port.serves.get("backend", BACKENDS))
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_hunk_of_a_port_is_idle(tmp_path: Path, name: str) -> None:
    job = workload.load(workload.SHIPPED / name)
    frameworks = [each for each in BACKENDS if each in job.implementations]
    if missing := [each for each in frameworks if not importlib.util.find_spec(each)]:
        pytest.skip(f"{missing[0]} is not installed")
    ports: dict[str, set[str]] = {}  # by strategy, since a hunk that one layout does without may be another's
    for port in (port for each in frameworks for port in job.implementations[each].ports if on_the_cpu(port)):
        for strategy in port.serves["strategy"]:
            ports.setdefault(strategy, set()).add(port.name)
    proofs: list[ProofRecord] = []
    said = ""
    for strategy in sorted(ports):
        idle = {port for _, port in proof.idle(proofs)}
        if ports[strategy] <= proven(proofs) - idle:
            continue
        run = prove(tmp_path / strategy, name, frameworks, strategy)
        said += run.stdout + run.stderr
        for file in tmp_path.glob(f"{strategy}/*/journal.jsonl"):
            proofs += journal.read(file).proofs
    assert proof.idle(proofs) == {}, said[-6000:]
    every = set().union(*ports.values())
    assert proven(proofs) == {port for port in every if (name, port) not in PASSES_NOWHERE}, said[-6000:]


@pytest.mark.skipif(XLA not in os.environ, reason=f"no torch_xla here: name an interpreter that has it in {XLA}")
@pytest.mark.parametrize("strategy", ["single", "data"])
@pytest.mark.parametrize("name", NAMES)
def test_no_hunk_of_a_port_for_xla_is_idle(tmp_path: Path, name: str, strategy: str) -> None:
    (port,) = (
        port
        for port in workload.load(workload.SHIPPED / name).implementations["torch"].ports
        if strategy in port.serves["strategy"] and "torch-xla" in port.serves.get("backend", ())
    )
    backend = port.serves["backend"][-1]  # where openxla is served too, nothing that torch-xla needs is idle there
    run = prove(tmp_path / strategy, name, [backend], strategy, "--python", f"{backend}={os.environ[XLA]}")
    (proof_record,) = journal.read(next(tmp_path.glob(f"{strategy}/*/journal.jsonl"))).proofs[-1:]
    verdicts = {hunk.verdict for hunk in proof_record.hunks}
    assert (proof_record.source, proof_record.complete) == (port.name, True), run.stdout + run.stderr
    assert verdicts in ({"required"}, {"required", "performance"}), run.stdout + run.stderr


def proven(proofs: list[ProofRecord]) -> set[str]:
    return {record.source for record in proofs if any(hunk.verdict == "required" for hunk in record.hunks)}


def prove(
    folder: Path, name: str, backends: list[str], strategy: str, *options: str
) -> subprocess.CompletedProcess[str]:
    definition = {
        "matrix": {"workload": [name], "backend": backends, "accelerator": ["cpu"], "layout": [strategy]},
        "layouts": {strategy: {"devices": DEVICES[strategy], "strategy": strategy}} if strategy != "single" else {},
        "run": {"size": "tiny", "steps": 10, "log_every": 1, "timeout": 300},
    }
    folder.mkdir()
    (folder / "ports.yaml").write_text(yaml.safe_dump(definition))
    command = [sys.executable, "-m", "matrix.cli", "run", folder / "ports.yaml", "--results", folder]
    command += ["--no-measure", "--prove-changes", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
