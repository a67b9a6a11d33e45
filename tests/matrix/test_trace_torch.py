"""Ordinary scripts are traced clean on a device that is not there; a tensor left on the CPU is found at its line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from matrix.attempt import WORKER
from matrix.backends import INSIDE
from matrix.failures import recognise

SCRIPTS = Path(__file__).parent / "traced"
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
    return events["traced"] | {"output": ran.stdout, "code": ran.returncode} | {
        name: events[name] for name in ("exception", "exit") if name in events
    }


def marked(text: str, mark: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(mark)]


def lines(places: list[dict[str, Any]]) -> list[int]:
    return sorted({place["line"] for place in places})


@pytest.mark.parametrize("name", ["classifier", "language", "recurrent", "adversarial", "indexing", "parallel"])
def test_an_ordinary_script_is_clean_and_its_host_syncs_are_at_the_lines_that_wait(tmp_path: Path, name: str) -> None:
    text = (SCRIPTS / f"{name}.py").read_text().replace("if dist.get_rank() == 0:\n            print", "if True:\n            print")
    found = trace(tmp_path, text, ranked=name == "parallel")
    assert "exception" not in found
    assert found["unable"] is None
    assert found["steps"] == 2
    assert set(found["parameters"]) == {"cuda"}
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
    "labels": Mistake("classifier", "y.cuda(non_blocking=True)", "y", "loss = criterion"),
    "the model": Mistake("classifier", "model.cuda()  # after", "# after", "loss = criterion"),
    "labels in the evaluation": Mistake("classifier", "== y.cuda()).sum()", "== y).sum()", "right += "),
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
    "positions": Mistake("language", "tokens.shape[1], device=tokens.device", "tokens.shape[1]", "self.place(places)"),
    "what is no buffer": Mistake(
        "language", 'self.register_buffer("scale", torch.full((width,), 2.0))', "self.scale = torch.ones(width)", "* self.scale"
    ),
    "a sum": Mistake("language", "total = torch.zeros((), device=device)", "total = torch.zeros(())", "total += loss"),
    "a state made once": Mistake(
        "recurrent", "(torch.zeros(1, 4, 8, device=device),", "(torch.zeros(1, 4, 8),", "self.second(packed, state)"
    ),
    "lengths": Mistake(
        "recurrent",
        "pack_padded_sequence(y, lengths,",
        "pack_padded_sequence(y, lengths.to(device),",
        "packed = ",
        "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor",
    ),
    "a generator": Mistake(
        "adversarial",
        "torch.Generator(device=device)",
        "torch.Generator()",
        "generator=noise",
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "a generator of the device": Mistake(
        "adversarial",
        "order = torch.Generator()",
        "order = torch.Generator(device)",
        "generator=order",
        "Expected a 'cpu' device type for generator but found 'cuda'",
    ),
    "targets": Mistake(
        "adversarial", "ones, zeros = torch.ones(8, 1, device=device)", "ones, zeros = torch.ones(8, 1)", "critic(batch), ones"
    ),
    "a table": Mistake(
        "indexing",
        "table.to(device)[labels]",
        "table[labels]",
        "table[labels]",
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    ),
    "values for indices": Mistake("indexing", "scores[rows] = torch.tensor(0.5)", "scores[rows] = torch.ones(3, 4)", "ones(3, 4)"),
    "the start of a list": Mistake("indexing", "picked.mean()", "torch.cat([torch.tensor([]), picked[0]]).mean()", "loss = F.mse"),
    "a stacked number": Mistake("indexing", "picked.mean()", "torch.stack([torch.tensor(0.0), picked.mean()]).mean()", "loss = F.mse"),
    "a limit": Mistake("indexing", "picked.mean()", "picked.clamp(min=torch.tensor(0.0)).mean()", "loss = F.mse"),
    "an optimizer's state": Mistake(
        "indexing",
        "    optimizer.step()",
        "    for each in optimizer.state.values():\n        each['exp_avg'] = each['exp_avg'].cpu()\n    optimizer.step()",
        "optimizer.step()",
        "same device",
    ),
    "a collective of NCCL": Mistake(
        "parallel", "loss.detach().clone()", "loss.detach().cpu()", "dist.all_reduce(mean)", "No backend type associated with device type cpu"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
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
