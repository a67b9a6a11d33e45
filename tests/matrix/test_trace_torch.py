"""Ordinary scripts are traced clean on a device that is not there; a tensor left on the CPU is found at its line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from matrix.attempt import WORKER
from matrix.backends import INSIDE
from matrix.failures import recognise

SCRIPTS = Path(__file__).parent / "traced"
CPU_ONLY = pytest.mark.skipif(
    any(Path(folder, "torch", "lib", "libtorch_cuda.so").exists() for folder in sys.path),
    reason="a build of PyTorch for CUDA asks a driver as soon as cuDNN or DDP comes in: only a CPU build traces those",
)
RANKED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


def trace(folder: Path, text: str, ranked: bool = False, **task: Any) -> dict[str, Any]:
    """Trace a script, and give its last `traced` event, with `exception` and `exit` where there was one."""
    (folder / "train.py").write_text(text)
    rank = RANKED["RANK"] if ranked else "0"
    settings = {
        "script": "train.py",
        "arguments": [],
        "folder": str(folder),
        "observer": str(INSIDE / "trace_torch.py"),
        "progress": None,
        "ranked": ranked,
        "faults": False,
        "task": {"target": {"accelerator": "cuda"}, "devices": 2 if ranked else 1, **task},
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    ran = subprocess.run(
        [sys.executable, str(WORKER), "settings.json"],
        cwd=folder,
        env=os.environ | (RANKED if ranked else {}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = [json.loads(line) for line in (folder / f"rank-{rank}.events").read_text().splitlines()]
    events = {event["event"]: event for event in told}
    assert "blind" not in events, events["blind"]
    assert "traced" in events, ran.stderr
    return (
        events["traced"]
        | {"output": ran.stdout, "code": ran.returncode}
        | {name: events[name] for name in ("exception", "exit") if name in events}
    )


def marked(text: str, mark: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(mark)]


def lines(places: list[dict[str, Any]]) -> list[int]:
    return sorted({place["line"] for place in places})


ORDINARY = [
    "classifier",
    "language",
    pytest.param("recurrent", marks=CPU_ONLY),
    "adversarial",
    "indexing",
    pytest.param("parallel", marks=CPU_ONLY),
]


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_script_is_clean_and_its_host_syncs_are_at_the_lines_that_wait(tmp_path: Path, name: str) -> None:
    text = (
        (SCRIPTS / f"{name}.py")
        .read_text()
        .replace("if dist.get_rank() == 0:\n            print", "if True:\n            print")
    )
    found = trace(tmp_path, text, ranked=name == "parallel")
    assert "exception" not in found
    assert found["unable"] is None
    assert found["steps"] == 2
    assert set(found["parameters"]) == set(found["gradients"]) == {"cuda"}
    assert found["devices"] == [1 if name == "parallel" else 0]
    own = [place for place in found["syncs"] if place["how"] != "GradScaler"]
    if name == "parallel":  # DDP itself copies the order of its buckets to the CPU
        own = [place for place in own if place["how"] != "copy to the CPU"]
    assert lines(own) == marked(text, "# SYNC")


SAME = "Expected all tensors to be on the same device, but found at least two devices"


class Mistake(NamedTuple):
    """An edit of a script, the line at which PyTorch refuses what it leads to, and what it says."""

    script: str
    right: str
    wrong: str
    line: str
    words: str = SAME


MISTAKES = {
    "weights of the loss": Mistake("classifier", "weight=weight.cuda()", "weight=weight", "loss = criterion"),
    "the model": Mistake("language", "model = Model().to(device)", "model = Model()", "self.token(tokens)"),
    "numpy of a device's tensor": Mistake(
        "classifier", ".cpu() for x, _ in", " for x, _ in", "predictions = ", "can't convert cuda:0 device type tensor"
    ),
    "pinning the device's memory": Mistake(
        "classifier",
        "labels = torch.randn(64, 3, 8, 8),",
        "labels = torch.randn(64, 3, 8, 8).cuda(),",
        "for x, y in loader:",
        "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
    ),
    "a mask made in forward": Mistake(
        "language",
        "dtype=torch.bool, device=x.device)",
        "dtype=torch.bool)",
        "scores.masked_fill(mask",
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
    ),
    "what is no buffer": Mistake(
        "language",
        'self.register_buffer("scale", torch.full((width,), 2.0))',
        "self.scale = torch.ones(width)",
        "* self.scale",
    ),
    "a sum": Mistake("language", "total = torch.zeros((), device=device)", "total = torch.zeros(())", "total += loss"),
    "a state made once": Mistake(
        "recurrent",
        "(torch.zeros(1, 4, 8, device=device),",
        "(torch.zeros(1, 4, 8),",
        "self.second(packed, state)",
    ),
    "an optimizer's state": Mistake(
        "indexing",
        "    optimizer.step()",
        "    for each in optimizer.state.values():\n"
        "        each['exp_avg'] = each['exp_avg'].cpu()\n"
        "    optimizer.step()",
        "optimizer.step()",
        "same device",
    ),
    "a collective of NCCL": Mistake(
        "parallel",
        "loss.detach().clone()",
        "loss.detach().cpu()",
        "dist.all_reduce(mean)",
        "No backend type associated with device type cpu",
    ),
}


ASK_A_DRIVER = ("recurrent", "parallel")


@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=CPU_ONLY if MISTAKES[m][0] in ASK_A_DRIVER else ()) for m in MISTAKES]
)
def test_a_tensor_left_behind_is_found_at_its_line_in_pytorchs_words(tmp_path: Path, mistake: str) -> None:
    name, right, wrong, line, words = MISTAKES[mistake]
    text = (SCRIPTS / f"{name}.py").read_text()
    assert text.count(right) == 1
    text = text.replace(right, wrong)
    found = trace(tmp_path, text, ranked=name == "parallel")
    told = recognise.recognise(found["exception"]["chain"], str(tmp_path))
    assert words in told.message
    assert told.cause == "device-mismatch"
    assert told.frame is not None
    assert line in text.splitlines()[told.frame[1] - 1]


@CPU_ONLY
def test_what_cuda_takes_and_refuses_is_taken_and_refused(tmp_path: Path) -> None:
    found = trace(tmp_path, (SCRIPTS / "refusals.py").read_text())
    assert "exception" not in found, found["exception"]["traceback"][-2000:]
    assert found["unable"] is None


def test_numbers_of_the_device_are_never_printed_as_numbers(tmp_path: Path) -> None:
    text = """
import torch
loss = torch.randn(3, device="cuda").sum()
print(f"step=1 loss={loss.item():.4f}", f"loss={loss.item() / 3 + 1}", f"loss={loss:.4f}", loss, loss.tolist())
print(sum([loss.item(), loss.item()]) / 2, round(loss.item(), 4), {"loss": loss.item()})
"""
    found = trace(tmp_path, text)
    assert re.findall(r"\d+", found["output"]) == ["1", "0"]  # the step, and the index of the device
    assert lines(found["syncs"]) == [4, 5]


UNTRACEABLE = {
    "a loop that waits": ("while not x.norm() < 1: x = x / 2", "a loop waits for a value of the device to change"),
    "a size that nothing stands in for": ("torch.unique(x)", "what aten._unique2.default gives depends on values"),
    "a graph of kernels": ("torch.cuda.CUDAGraph()", "CUDA graphs replay work"),
}


@pytest.mark.parametrize("what", UNTRACEABLE)
def test_what_cannot_be_traced_is_said_with_its_line(tmp_path: Path, what: str) -> None:
    line, words = UNTRACEABLE[what]
    text = f"import torch\nx = torch.randn(4).cuda()\ntry:\n    {line}\nexcept Exception:\n    pass\n"
    found = trace(tmp_path, text)
    assert found["unable"].startswith("train.py:4: ")
    assert words in found["unable"]
    assert found["exception"]["chain"][0]["type"].endswith("Untraceable")


def test_an_unknown_version_of_torch_is_not_traced(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '1.0.0'\n")
    found = trace(tmp_path, "import torch\n")
    assert found["unable"] == "train.py:1: not verified with torch 1.0.0"


def test_a_script_without_a_number_of_steps_is_ended_after_two(tmp_path: Path) -> None:
    text = """
import torch
model = torch.nn.Linear(2, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10**9):
    model(torch.ones(4, 2, device="cuda")).sum().backward()
    optimizer.step()
    print("step", step)
"""
    found = trace(tmp_path, text)
    assert (found["steps"], found["reached"], found["code"]) == (2, "steps", 0)
    assert found["output"].splitlines()[1:] == ["step 0", "step 1"]
