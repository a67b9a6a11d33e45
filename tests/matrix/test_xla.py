"""PyTorch/XLA on PJRT's CPU: the ports pass, what is untrue is red with its cause, and watching brings on nothing."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from matrix.attempt import WORKER
from matrix.backends import INSIDE
from matrix.environments import Interpreter
from tests.matrix.harness import DIGITS, XLA, Bench, interpreter
from tests.matrix.variants import DDP, Edits, attempt, explain, told, written

PORT = DIGITS / "torch" / "xla.py"
SPMD = DIGITS / "torch" / "xla_spmd.py"
MARK = '    xs.mark_sharding(x, mesh, ("data", None))\n'

needs_xla = pytest.mark.skipif(
    not interpreter("torch-xla").path, reason=f"no torch_xla here: name an interpreter that has it in {XLA}"
)


# --- the shipped ports ---


@needs_xla
@pytest.mark.parametrize("layout", ["single", "dp2"])
@pytest.mark.parametrize("workload", ["digits", "digits-cuda", "resnet", "gpt"])
def test_a_workload_runs_by_its_port(bench: Bench, workload: str, layout: str) -> None:
    attempts = bench.attempts(bench.cell(workload, "torch-xla", layout))
    ignores = ("fail", "missing-device" if workload == "digits-cuda" else "wrong-device")
    assert [told(each) for each in attempts] == [ignores, ("pass", None)], explain(attempts[-1])
    assert attempts[-1].source == ("torch/xla.py" if layout == "single" else "torch/xla_spmd.py")
    assert attempts[-1].devices.used == attempts[-1].devices.expected
    assert attempts[-1].precision == "ieee-f32"
    assert list(attempts[-1].devices.detail["0"]["fallbacks"]) == ["aten::_local_scalar_dense"]


@needs_xla
@pytest.mark.parametrize("workload", ["digits", "gpt"])
def test_a_workload_runs_through_openxla(bench: Bench, workload: str) -> None:
    attempts = bench.attempts(bench.cell(workload, "torch-xla-compile"))
    assert [told(each) for each in attempts] == [("fail", "wrong-device"), ("pass", None)], explain(attempts[-1])


@needs_xla
def test_openxla_does_not_train_under_spmd(bench: Bench) -> None:
    """Why no port serves it: with torch_xla 2.9 each device trains on its own part, and only the losses say so."""
    text = written(SPMD, ("torch.compile(model)", 'torch.compile(model, backend="openxla")'))
    record = attempt(bench, text, "torch-xla-compile", "dp2")
    assert told(record) == ("fail", "wrong-result"), explain(record)


@needs_xla
def test_a_running_variance_that_xla_keeps_is_off(bench: Bench) -> None:
    """Why resnet's ports have a batch normalisation of their own."""
    folder = DIGITS.parent / "resnet"
    text = (folder / "torch" / "xla.py").read_text().replace("= BatchNorm(", "= nn.BatchNorm2d(")
    bench.workload(
        "biased",
        {"torch/train.py": text},
        {"torch": {"baseline": {"file": "torch/train.py"}}},
        (folder / "reference.csv").read_text(),
        {"ieee-f32": 3e-6},
        {"data": folder / "data"},
        arguments={"steps": "--steps", "log_every": "--log-every"},
    )
    record = bench.attempts(bench.cell("biased", "torch-xla", steps=30, log_every=10))[-1]
    assert told(record) == ("fail", "wrong-result"), explain(record)
    assert record.failure
    assert record.failure.message.startswith("eval 1.6209")


def test_torchtpu_drives_nothing_but_tpus(bench: Bench) -> None:
    bench.interpreters["torch-tpu"] = Interpreter(None, absent="torch-tpu is not installed")
    for accelerator, reason in (
        ("cpu", "torch-tpu drives tpu, not cpu"),
        ("tpu", "no TPU: no device node /dev/accel0"),
    ):
        (record,) = bench.attempts(bench.cell("digits", "torch-tpu", accelerator=accelerator))
        assert (record.outcome, record.evidence) == ("unavailable", "none")
        assert record.reason
        assert record.reason.startswith(reason)


# --- what is untrue ---


@needs_xla
def test_a_script_that_ignores_xla_is_on_the_wrong_device(bench: Bench) -> None:
    record = attempt(bench, written(DIGITS / "torch" / "train.py"), "torch-xla")
    assert told(record) == ("fail", "wrong-device"), explain(record)
    assert record.failure
    assert record.failure.message == "the cell's device is cpu through xla, but the parameters were held on cpu 100%"


@needs_xla
def test_xla_is_the_wrong_device_for_a_cell_of_eager_pytorch(bench: Bench) -> None:
    bench.interpreters["torch"] = interpreter("torch-xla")
    record = attempt(bench, written(PORT), "torch")
    assert told(record) == ("fail", "wrong-device"), explain(record)


WHOLE: dict[str, Edits] = {
    "a batch without a sharding": ((MARK, ""),),
    "a batch that is marked as replicated": ((MARK, MARK.replace('"data", None', "None, None")),),
    "activations that are marked as replicated": (
        (
            "            x = F.silu(layer(x))\n",
            """
            |            x = F.silu(layer(x))
            |            xs.mark_sharding(x, mesh, (None, None))
            |""",
        ),
        ('mesh, ("data", None)', "mesh, (None, None)"),
    ),
}


@needs_xla
@pytest.mark.parametrize("edits", WHOLE.values(), ids=WHOLE)
def test_devices_that_each_do_the_whole_batch_replicate_the_work(bench: Bench, edits: Edits) -> None:
    record = attempt(bench, written(SPMD, *edits), "torch-xla", "dp2")
    assert told(record) == ("fail", "replicated-work"), explain(record)
    assert record.failure
    assert record.failure.message == "each device does 100% of the step's FLOPs; split over 2 it would do 50%"


@needs_xla
def test_without_spmd_a_script_uses_one_device(bench: Bench) -> None:
    record = attempt(bench, written(PORT), "torch-xla", "dp2")
    assert told(record) == ("fail", "idle-devices"), explain(record)


@needs_xla
@pytest.mark.parametrize(
    ("spec", "expected"),
    [("(None, None)", ("fail", "not-sharded")), ('("data", None)', ("pass", None))],
    ids=["copied", "cut"],
)
def test_parameters_are_sharded_where_they_are_marked(bench: Bench, spec: str, expected: Any) -> None:
    mark = f"""
        |for parameter in model.parameters():
        |    if parameter.ndim == 2:
        |        xs.mark_sharding(parameter, mesh, {spec})
        |logged = 0
        |"""
    record = attempt(bench, written(SPMD, ("logged = 0\n", mark)), "torch-xla", "fsdp2")
    assert told(record) == expected, explain(record)


XLA_RANKS: Edits = (
    ("import torch\n", "import torch\nimport torch_xla\n"),
    (
        'torch.device(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")',
        "torch_xla.device()",
    ),
    ('if device.type != "cpu":\n    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))\n', ""),
    ("dist.init_process_group(dist.get_default_backend_for_device(device))\n", 'dist.init_process_group("gloo")\n'),
    ("model = nn.parallel.DistributedDataParallel(model)\n", ""),
    (
        "    optimizer.step()\n",
        """
        |    for parameter in model.parameters():
        |        dist.all_reduce(parameter.grad)
        |        parameter.grad /= world_size
        |    optimizer.step()
        |    torch_xla.sync()
        |""",
    ),
)


@needs_xla
def test_ranks_of_torchrun_that_xla_does_not_know_of_train_alone(bench: Bench) -> None:
    """gloo's all_reduce of XLA's tensors changes nothing, and the script ends with 0."""
    record = attempt(bench, written(DDP, *XLA_RANKS), "torch-xla", "dp2", "torchrun")
    assert told(record) == ("fail", "not-reduced"), explain(record)


LAUNCHED = """
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    def train(rank):
        device = torch_xla.device()
        model = torch.nn.Linear(64, 8).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 7):
            loss = model(torch.randn(16, 64).to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            xm.optimizer_step(optimizer)
            torch_xla.sync()
            print(f"step={step} loss={loss.item()} examples=32", flush=True)

    if __name__ == "__main__":
        torch_xla.launch(train)
    """


@needs_xla
def test_threads_of_torch_xla_launch_wait_for_each_other_for_ever(bench: Bench) -> None:
    """XLA's CPU client gives up after 15 s and aborts the process: two devices of one CPU cannot all-reduce so."""
    record = attempt(bench, LAUNCHED, "torch-xla", "dp2", reference=False)
    assert told(record) == ("fail", "collective-mismatch"), explain(record)
    assert record.failure
    assert "Expected 2 threads to join the rendezvous, but only 1 of them arrived on time" in record.failure.message


@needs_xla
def test_a_switch_that_compiles_nothing_is_not_compiled(bench: Bench) -> None:
    text = written(PORT, ('    model = torch.compile(model, backend="openxla")\n', "    pass\n"))
    record = attempt(bench, text, "torch-xla-compile")
    assert told(record) == ("fail", "not-compiled"), explain(record)


# --- watched equals bare ---

TOLD = """

import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr

executed = "ExecuteReplicated" if xr.is_spmd() else "ExecuteComputation"
print("compiled", metrics.metric_data("CompileTime")[0], metrics.counter_value("UncachedCompile"))
print("executed", metrics.counter_value(executed), metrics.counter_value("MarkStep"))
print("left", torch.autograd._engine_run_backward.__module__)
"""


@needs_xla
@pytest.mark.parametrize(
    ("script", "flags"), [(PORT, []), (PORT, ["--compile"]), (SPMD, [])], ids=["one device", "openxla", "two devices"]
)
def test_a_watched_script_prints_compiles_and_runs_what_it_does_by_hand(
    tmp_path: Path, script: Path, flags: list[str]
) -> None:
    (tmp_path / "data").symlink_to(DIGITS / "data")
    (tmp_path / "torch").mkdir()
    copy = tmp_path / "torch" / "train.py"
    copy.write_text(script.read_text() + TOLD)
    arguments = ["--steps", "6", "--log-every", "1", *flags]
    settings = {
        "script": str(copy),
        "arguments": arguments,
        "folder": str(tmp_path),
        "observer": str(INSIDE / "observe_xla.py"),
        "progress": None,
        "ranked": False,
        "faults": False,
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    variables = {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2" if script is SPMD else "1"}
    printed = []
    for words in ([str(copy), *arguments], [str(WORKER), str(tmp_path / "settings.json")]):
        done = subprocess.run(
            [str(interpreter("torch-xla").path), *words],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    bare, watched = printed
    assert watched == bare
    assert sum("loss=" in line for line in bare) == 6
    assert "left torch.autograd.graph" in bare
    reports = [json.loads(line) for line in (tmp_path / "rank-0.events").read_text().splitlines()]
    assert [report.get("trouble") for report in reports if report["event"] == "seen"] == [None]
    end = next(report for report in reports if report["event"] == "end")
    assert list(end["fallbacks"]) == ["aten::_local_scalar_dense"]


# --- shardings, without torch_xla ---

READ = runpy.run_path(str(INSIDE / "observe_xla.py"))


@pytest.mark.parametrize(
    ("sharding", "parts"),
    [
        ("{devices=[2,1]0,1}", 2),
        ("{devices=[4,2]<=[8]}", 8),
        ("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", 2),
        ("{replicated}", 1),
        ("", 1),
    ],
)
def test_a_sharding_cuts_a_tensor_into_parts(sharding: str, parts: int) -> None:
    assert READ["tiles"](sharding) == parts


HLO = """HloModule IrToHlo.9

%Add.1 (x.2: f32[], y.3: f32[]) -> f32[] {{
  ROOT %add.4 = f32[] add(f32[] %x.2, f32[] %y.3)
}}

ENTRY %IrToHlo.9 (p0.1: f32[8,16], p1.2: f32[16,4]) -> (f32[8,4]) {{
  %p0.1 = f32[8,16]{{1,0}} parameter(0), sharding={data}
  %p1.2 = f32[16,4]{{1,0}} parameter(1), sharding={{replicated}}
  %norm.2 = (f32[8,16]{{1,0}}, f32[8]{{0}}) batch-norm-training(f32[8,16]{{1,0}} %p0.1), epsilon=1e-05
  %tanh.3 = f32[8,16]{{1,0}} get-tuple-element((f32[8,16]{{1,0}}, f32[8]{{0}}) %norm.2), index=0
  %kept.4 = f32[8,16]{{1,0}} custom-call(f32[8,16]{{1,0}} %tanh.3), custom_call_target="Sharding", sharding={inner}
  %dot.5 = f32[8,4]{{1,0}} dot(f32[8,16]{{1,0}} %{fed}, f32[16,4]{{1,0}} %p1.2), lhs_contracting_dims={{1}}
  %dot.6 = f32[8,4]{{1,0}} dot(f32[8,16]{{1,0}} %{fed}, f32[16,4]{{1,0}} %p1.2), lhs_contracting_dims={{1}}
  ROOT %tuple.7 = (f32[8,4]{{1,0}}) tuple(f32[8,4]{{1,0}} %dot.5)
}}
"""
CUT, WHOLE_SPEC = "{devices=[2,1]0,1}", "{replicated}"


@pytest.mark.parametrize(
    ("data", "inner", "fed", "share"),
    [
        (CUT, CUT, "tanh.3", 0.5),
        (WHOLE_SPEC, WHOLE_SPEC, "tanh.3", 1.0),
        (CUT, WHOLE_SPEC, "kept.4", 1.0),
        (WHOLE_SPEC, CUT, "kept.4", 0.5),
    ],
)
def test_the_share_of_the_work_follows_from_the_shardings_that_are_written(
    data: str, inner: str, fed: str, share: float
) -> None:
    assert READ["work_share"](HLO.format(data=data, inner=inner, fed=fed)) == share


def test_a_graph_without_a_product_has_no_share() -> None:
    assert READ["work_share"]("HloModule a\n\nENTRY %a () -> f32[] {\n  ROOT %c.1 = f32[] constant(1)\n}\n") is None
