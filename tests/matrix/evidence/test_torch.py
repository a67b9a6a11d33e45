"""PyTorch scripts on an absent CUDA device: traced, refused at the user's line, or why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from matrix.accelerators import cuda, tpu
from tests.matrix.harness import DIGITS, SHIPPED, Bench, digits, edited
from tests.matrix.test_trace_torch import CPU_ONLY

NEXT_TO_LOSS = "    return F.cross_entropy(logits.to(dtype), y, label_smoothing=LABEL_SMOOTHING)\n"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(cuda, "ACCELERATOR", replace(cuda.ACCELERATOR, absent=lambda: "no NVIDIA GPU"))
    monkeypatch.setattr(tpu, "ACCELERATOR", replace(tpu.ACCELERATOR, absent=lambda: "no TPU"))
    return Bench(tmp_path, {"evidence": {"cuda": ["h100", "a100"], "tpu": ["v5e:2x2"]}})


@pytest.mark.parametrize("workload", ["digits-cuda", "resnet", "gpt"])
def test_a_shipped_script_is_traced_once_for_all_gpus_and_its_host_syncs_are_told(bench: Bench, workload: str) -> None:
    cell = bench.cell(workload, accelerator="cuda", steps=30, size="tiny")
    (attempt,) = bench.attempts(cell)
    assert (attempt.outcome, attempt.evidence, attempt.reason) == ("pass", "traced", None)
    assert not attempt.metrics.loss
    text = (SHIPPED / workload / "torch" / "train.py").read_text().splitlines()
    synced = [number for number, line in enumerate(text, 1) if ".item()" in line]
    assert attempt.compiled is not None
    assert attempt.compiled.notes[0].startswith("2 optimizer steps, ")
    assert attempt.compiled.notes[1:] == [
        f"torch/train.py:{synced[0]} waits for the device (item, 2 times)",
        f"torch/train.py:{synced[1]} waits for the device (item, 1 times)",
    ]


def test_a_mask_left_on_the_cpu_is_refused_at_its_line(bench: Bench) -> None:
    text = edited(DIGITS / "torch/train.py", (NEXT_TO_LOSS, "    logits = logits * torch.ones(10)\n" + NEXT_TO_LOSS))
    digits(bench, torch_train=text)
    cell = bench.cell("edited", backend="torch-compile", accelerator="cuda")
    (attempt,) = bench.attempts(cell)
    assert (attempt.outcome, attempt.evidence) == ("fail", "traced")
    assert attempt.failure is not None
    assert attempt.failure.cause == "device-mismatch"
    assert "found at least two devices, cuda:0 and cpu!" in attempt.failure.message
    line = text.splitlines().index("    logits = logits * torch.ones(10)") + 1
    assert attempt.failure.frame == f"torch/train.py:{line}"
    assert attempt.compiled is not None
    assert "traced as it is written: torch.compile did not compile" in attempt.compiled.notes


@CPU_ONLY
def test_a_baseline_for_one_device_leaves_the_other_idle_and_its_port_is_traced_on_both(bench: Bench) -> None:
    cell = bench.cell("digits", layout="dp2", accelerator="cuda", size="tiny")
    baseline, port = bench.attempts(cell)
    assert baseline.failure is not None
    assert (baseline.source, baseline.failure.cause) == ("torch/train.py", "idle-devices")
    assert (port.source, port.outcome, port.evidence) == ("torch/ddp.py", "pass", "traced")


def test_a_script_that_stays_on_the_cpu_is_on_the_wrong_device(bench: Bench) -> None:
    device = 'torch.device(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")'
    digits(bench, torch_train=edited(DIGITS / "torch/train.py", (device, 'torch.device("cpu")')))
    (attempt,) = bench.attempts(bench.cell("edited", accelerator="cuda"))
    assert attempt.failure is not None
    assert (attempt.evidence, attempt.failure.cause) == ("traced", "wrong-device")


HEAD = """
import sys
import torch
model = torch.nn.Linear(2, 1).cuda()
x = torch.ones(4, 2, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
BY_HAND = """
for step in (1, 2):
    loss = model(x).sum()
    loss.backward()
    with torch.no_grad():
        for each in model.parameters():
            each -= 0.1 * each.grad
            each.grad = None
"""
ENDED = "it ended before an optimizer took a step, and no backward pass was done on the device"
NO_STEP = {
    "ends before a step": ("model(x)\nsys.exit()", ENDED),
    "makes data only": ("x + 1", ENDED),
    "steps without gradients": ("model(x); optimizer.step()", "its optimizer's parameters had no gradients"),
    "updates by hand": (BY_HAND, None),
    "infers": ("with torch.no_grad(): model(x)", None),
    "half of it on the CPU": (
        "rest = torch.nn.Linear(9, 9)\noptimizer.add_param_group({'params': rest.parameters()})\n"
        "(model(x).sum().cpu() + rest(torch.ones(9)).sum()).backward()\noptimizer.step()",
        "wrong-device",
    ),
}


@pytest.mark.parametrize("name", NO_STEP)
def test_a_trace_shows_something_only_if_the_device_did_a_step_of_the_job(bench: Bench, name: str) -> None:
    text, why = NO_STEP[name]
    bench.workload("made", {"train.py": HEAD + text}, {"torch": {"baseline": {"file": "train.py"}}})
    (attempt,) = bench.attempts(bench.cell("made", accelerator="cuda"))
    if why is None:
        assert (attempt.outcome, attempt.evidence) == ("pass", "traced"), (attempt.reason, attempt.failure)
    elif attempt.failure is not None:
        assert (attempt.failure.cause, attempt.evidence) == (why, "traced")
    else:
        assert (attempt.outcome, attempt.reason) == ("unavailable", f"could not be traced: {why}")


def test_what_is_no_matter_of_devices_is_no_failure_of_the_device(bench: Bench) -> None:
    text = edited(DIGITS / "torch/train.py", ("    loss.backward()\n", "    loss.backward()\n    assert loss > 9\n"))
    digits(bench, torch_train=text)
    (attempt,) = bench.attempts(bench.cell("edited", accelerator="cuda"))
    line = text.splitlines().index("    assert loss > 9") + 1
    assert (attempt.outcome, attempt.evidence) == ("unavailable", "none")
    assert attempt.reason is not None
    assert attempt.reason.startswith(f"could not be traced: torch/train.py:{line}: AssertionError")


def test_pytorch_has_no_tpu_to_trace(bench: Bench) -> None:
    (attempt,) = bench.attempts(bench.cell("digits", accelerator="tpu"))
    assert attempt.reason == "no TPU; PyTorch itself has no TPU device; torch-xla gives it one"
