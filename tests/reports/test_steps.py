"""From one device to N, to M hosts, to another chip."""

from __future__ import annotations

from matrix.journal import Layout
from reports.merge import merge
from reports.steps import Entry, Step, destination, steps
from tests.reports.records import MadeUpRun, attempt, failure, planned

BASELINE = "import torch\nmodel = Model()\n"
PORT = "import torch\nimport torch.distributed as dist\nmodel = Model()\ndist.barrier()\n"


def test_where_a_cell_goes_from_the_device_that_its_baseline_is_for() -> None:
    assert destination(planned(layout="dp2")) == "2 devices (data)"
    assert destination(planned(layout="single")) == "another chip"
    assert destination(planned(layout="single", accelerator="cuda", written_for="cuda")) is None
    hosts = planned().model_copy(update={"layout": Layout(name="h", nodes=2, devices=4, strategy="data")})
    assert destination(hosts) == "2 hosts x 4 (data)"


def test_backends_stand_beside_each_other_and_what_is_alike_is_one_entry() -> None:
    run = MadeUpRun(sources={"gpt/torch/train.py": BASELINE, "gpt/torch/ddp.py": PORT})
    no = failure("idle-devices", "1 did work", source=BASELINE, line=2)
    for accelerator in ("cpu", "cuda"):
        ported = planned("gpt", "torch", accelerator, "dp2")
        run.add(ported, attempt(ported, "fail", failure=no), attempt(ported, role="port"))
        free = planned("gpt", "jax", accelerator, "dp2")
        run.add(free, attempt(free))
    absent = planned("gpt", "torch", "tpu", "dp2")
    run.add(absent, attempt(absent, "unavailable", evidence="none", reason="no TPU"))
    broken = planned("gpt", "torch", "rocm", "dp2")
    run.add(broken, attempt(broken, "fail", failure=no), attempt(broken, "fail", role="port", failure=no))
    (step,) = steps(merge([run.journal()]))
    assert (step.workload, step.to, list(step.by_backend)) == ("gpt", "2 devices (data)", ["torch", "jax"])
    assert [told(entry) for entry in step.by_backend["torch"]] == [
        ("ported", "torch/ddp.py", (2, 0, 2, 2), ("cpu", "cuda")),
        ("unproven", None, None, ("tpu",)),
        ("broken", "torch/ddp.py", (2, 0, 2, 2), ("rocm",)),
    ]
    assert [told(entry) for entry in step.by_backend["jax"]] == [("as-is", "jax/train.py", None, ("cpu", "cuda"))]


def told(entry: Entry) -> object:
    each = entry.changes
    counts = (each.added, each.deleted, each.hunks, each.communication) if each else None
    return entry.state, entry.source, counts, entry.accelerators


def test_a_baseline_at_home_is_no_step() -> None:
    home = planned("gpt", "torch", "cuda", "single", written_for="cuda")
    assert steps(merge([MadeUpRun().add(home, attempt(home)).journal()])) == []
    away = planned("gpt", "torch", "cpu", "single", written_for="cuda")
    found = steps(merge([MadeUpRun().add(away, attempt(away)).journal()]))
    assert found == [Step("gpt", "another chip", {"torch": (Entry("as-is", "torch/train.py", None, ("cpu",)),)})]
