"""What is shown of a cell whose accelerator is absent: a toy producer, whose observer needs no framework."""

from __future__ import annotations

import datetime
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from matrix import definition, environments, evidence, judge, plan, runner
from matrix.accelerators import Accelerator, tpu
from matrix.attempt import Context
from matrix.environments import Interpreter
from matrix.evidence import Producer, stage, targets
from matrix.evidence.jax import conclude, concluded
from matrix.journal import AttemptRecord, Target
from matrix.judge import CellVerdict
from matrix.workload import Source

OBSERVER = """
import os, sys, time
class Observer:
    enough = task = emit = None
    def graphs(self): return 0
    def remove(self): pass
    def seen(self):
        devices = self.task["devices"] if "--all" in sys.argv else 1
        chip = lambda n: {"id": f"cpu:{n}", "platform": "cpu", "kind": "toy", "work": 1, "parameter_bytes": 8}
        return {"framework": "torch", "devices": [chip(n) for n in range(devices)], "work_share": 1 / devices}
    def compile(self, name, peak=8):
        target = self.task["target"]["name"]
        self.emit("compiling", name=name)
        if name == "abort": os.abort()
        if name == "killed": os.kill(os.getpid(), 9)
        if name == "sleep": time.sleep(600)
        if name == "hoard": hoard = b"x" * (300 << 20); time.sleep(600)
        if name == f"refused-{target}":
            self.emit("refused", name=name, message="XlaRuntimeError: RESOURCE_EXHAUSTED: Used 20G of 15.75G hbm")
            raise SystemExit(1)
        self.emit("compiled", name=name, kind="toy chip")
        self.functions.append({"name": name, "calls": 2, "peak_bytes": peak, "collectives": {"all-reduce": 1}})
    def final(self):
        if "--broken" in sys.argv: raise KeyError("a name that the framework had")
        return {"graphs": 0, "device_peak_bytes": None, "functions": self.functions, "recompiles": 1, "eager": []}
    functions = []
def observe(after_import):
    import builtins
    builtins.observer = observer = Observer()
    return observer
"""
TRAIN = """
import sys
{before}
for step in (1, 2, 3):
    print(f"step={{step}} loss=1.0 examples=8", flush=True)
"""
PASSES = TRAIN.format(before="observer.compile('step')")


class Stage:
    """A workload, an absent TPU, and a toy that stands for its compiler."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        self.targets: list[object] = ["v5e:2x2"]
        self.limits: dict[str, float] = {}
        self.layout = {"devices": 1, "strategy": "single"}
        self.packages = {"torch": "2.0", "toycompiler": "1.5"}
        self.arguments: dict[str, str] = {}
        (folder / "observer.py").write_text(OBSERVER)
        self.producer = Producer(
            name="toy",
            evidence="compiled",
            backends=("torch",),
            accelerators=("tpu",),
            observer=folder / "observer.py",
            conclude=lambda work, seen: concluded(work, seen) or conclude(work, seen),
            compiler="torch",
            packages={"tpu": ("toycompiler",)},
        )
        monkeypatch.setattr(evidence, "available", lambda: (self.producer,))
        monkeypatch.setattr(tpu, "ACCELERATOR", replace(tpu.ACCELERATOR, absent=lambda: "no TPU"))

    def write(self, baseline: str, **ports: str) -> plan.Cell:
        job = self.folder / "workloads" / "job"
        job.mkdir(parents=True, exist_ok=True)
        (job / "train.py").write_text(baseline)
        listed = []
        for name, text in ports.items():
            (job / f"{name}.py").write_text(text)
            strategy = self.layout["strategy"]
            listed.append({"file": f"{name}.py", "arguments": ["--all"], "for": {"strategy": strategy}})
        described = {
            "about": "made for a test",
            "unit": "examples",
            "implementations": {"torch": {"baseline": {"file": "train.py"}, "ports": listed}},
            "arguments": self.arguments,
        }
        (job / "workload.yaml").write_text(yaml.safe_dump(described))
        single = self.layout["devices"] == 1
        text = {
            "matrix": {
                "workload": ["job"],
                "backend": ["torch"],
                "accelerator": ["tpu"],
                "layout": ["single" if single else "many"],
            },
            "layouts": {} if single else {"many": self.layout},
            "evidence": {"tpu": self.targets, **self.limits},
        }
        (self.folder / "toy.yaml").write_text(yaml.safe_dump(text))
        return plan.plan(definition.load(self.folder / "toy.yaml")).cells[0]

    def context(self, **more: object) -> Context:
        here = Interpreter(sys.executable, "current", "3.11", self.packages)
        interpreters = {"torch": here, "torch-tpu": here}
        return replace(Context("run", "machine", self.folder / "run", interpreters, environments.host()), **more)

    def attempts(self, cell: plan.Cell, **more: object) -> list[AttemptRecord]:
        return list(runner.correctness(self.context(**more), cell))


def verdict(cell: plan.Cell, attempts: list[AttemptRecord]) -> CellVerdict:
    return judge.judge([cell.planned()], attempts, datetime.date(2027, 1, 1))[0]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_what_its_compiler_accepts_is_unproven_and_says_so(toy: Stage) -> None:
    cell = toy.write(PASSES)
    made = toy.attempts(cell)
    found = verdict(cell, made)
    assert (found.verdict, found.why) == ("unproven", "compiled for TPU v5e 2x2, not executed")
    assert (found.as_expected, found.executed, found.evidence) == (True, False, "compiled")
    (attempt,) = made
    assert attempt.target is not None
    assert attempt.target.model_dump() == {
        "accelerator": "tpu",
        "name": "v5e:2x2",
        "slices": 1,
        "about": "TPU v5e 2x2",
        "devices": 4,
        "memory_bytes": 16 * 2**30,
        "kind": "toy chip",
        "compiler": "torch 2.0, toycompiler 1.5",
    }
    assert attempt.compiled is not None
    assert attempt.compiled.recompiles == 1
    assert [(each.name, each.calls, each.collectives) for each in attempt.compiled.functions] == [
        ("step", 2, {"all-reduce": 1})
    ]


def test_what_its_compiler_refuses_is_refused_in_the_compilers_words(toy: Stage) -> None:
    cell = toy.write(TRAIN.format(before="observer.compile('refused-v5e:2x2')"))
    found = verdict(cell, toy.attempts(cell))
    assert (found.verdict, found.cause, found.as_expected) == ("refused", "out-of-memory-device", False)
    assert "Used 20G of 15.75G hbm" in found.why
    assert found.why.startswith("when compiled for TPU v5e 2x2: refused-v5e:2x2: ")


def test_a_port_that_is_accepted_makes_up_for_a_baseline_that_is_not(toy: Stage) -> None:
    cell = toy.write(TRAIN.format(before="observer.compile('refused-v5e:2x2')"), port=PASSES)
    made = toy.attempts(cell)
    assert [(each.source, each.outcome) for each in made] == [("train.py", "fail"), ("port.py", "pass")]
    assert verdict(cell, made).why == "compiled for TPU v5e 2x2 by port.py (+1 -1), not executed"


def test_a_cell_is_refused_as_soon_as_one_target_is(toy: Stage) -> None:
    toy.targets = ["v5e:2x2", "v6e:2x2"]
    cell = toy.write(TRAIN.format(before="observer.compile('refused-v6e:2x2')"))
    made = toy.attempts(cell)
    assert [each.outcome for each in made] == ["pass", "fail"]
    assert verdict(cell, made).why.startswith("when compiled for TPU v6e 2x2: ")
    cell = toy.write(PASSES)
    assert verdict(cell, toy.attempts(cell)).why == "compiled for TPU v5e 2x2 and TPU v6e 2x2, not executed"


def test_a_compiler_that_aborts_is_a_result_of_the_cell(toy: Stage) -> None:
    cell = toy.write(TRAIN.format(before="observer.compile('abort')"))
    found = verdict(cell, toy.attempts(cell))
    assert (found.verdict, found.cause) == ("refused", "crash")
    assert "the compiler crashed: while abort was compiled, the process was ended by SIGABRT" in found.why


def test_a_compiler_that_the_system_kills_shows_nothing_of_the_program(toy: Stage) -> None:
    cell = toy.write(TRAIN.format(before="observer.compile('killed')"))
    found = verdict(cell, toy.attempts(cell))
    assert found.verdict == "unproven"
    assert found.why == (
        "this machine did not let the compiler end: while killed was compiled, the process was killed (SIGKILL)"
    )


def test_a_host_without_memory_for_the_script_is_no_failure_of_it(toy: Stage) -> None:
    for line, why in (
        ("raise MemoryError()", "out-of-memory-host: MemoryError"),
        ("import os; os.kill(os.getpid(), 9)", "rank-died: the process was killed (SIGKILL)"),
    ):
        (attempt,) = toy.attempts(toy.write(TRAIN.format(before=line)))
        assert attempt.outcome == "unavailable"
        assert attempt.reason == f"on the host it fails before anything is shown: {why}"


def test_an_observer_that_breaks_at_the_end_shows_nothing(toy: Stage) -> None:
    cell = toy.write(TRAIN.format(before="observer.compile('step'); sys.argv.append('--broken')"))
    (attempt,) = toy.attempts(cell)
    assert attempt.outcome == "unavailable"
    assert attempt.reason == "what it did could not be observed: KeyError: 'a name that the framework had'"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("observer.compile('step')\nsys.exit()", "it ended without one progress line"),
        ("observer.compile('step')", "ended after step 3 of 30"),
    ],
)
def test_a_script_that_ends_early_shows_nothing(toy: Stage, text: str, why: str) -> None:
    toy.arguments = {"steps": "--steps"}
    cell = toy.write(TRAIN.format(before=text))
    (attempt,) = toy.attempts(cell)
    assert attempt.outcome == "unavailable"
    assert attempt.reason is not None
    assert attempt.reason.startswith(f"accepted for TPU v5e 2x2, but {why}")


def test_what_does_not_fit_is_refused_with_both_figures(toy: Stage) -> None:
    cell = toy.write(TRAIN.format(before=f"observer.compile('step', {20 * 2**30})"))
    found = verdict(cell, toy.attempts(cell))
    assert (found.verdict, found.cause) == ("refused", "out-of-memory-device")
    assert (
        found.why == "when compiled for TPU v5e 2x2: step needs 20.00 GiB of device memory, TPU v5e 2x2 has 16.00 GiB"
    )


def test_a_source_that_leaves_devices_idle_shows_nothing_and_is_asked_once(toy: Stage) -> None:
    toy.layout = {"devices": 4, "strategy": "data"}
    toy.targets = ["v5e:2x2", "v6e:2x2"]
    cell = toy.write(PASSES)
    made = toy.attempts(cell)
    assert [(each.outcome, each.evidence) for each in made] == [("fail", "none")]
    found = verdict(cell, made)
    assert found.verdict == "unproven"
    assert found.why == "laid out for TPU v5e 2x2: idle-devices: the cell gave 4 devices, 1 did work"
    cell = toy.write(PASSES, port=PASSES)
    made = toy.attempts(cell)
    assert [(each.source, each.outcome) for each in made] == [
        ("train.py", "fail"),
        ("port.py", "pass"),
        ("port.py", "pass"),
    ]


def test_a_script_that_fails_on_the_host_is_no_refusal(toy: Stage) -> None:
    cell = toy.write(TRAIN.format(before="import no_such_package"))
    found = verdict(cell, toy.attempts(cell))
    assert found.verdict == "unproven"
    assert found.why.startswith("on the host it fails before anything is shown: missing-package: ")


def test_nothing_of_a_compiler_outlives_its_time(toy: Stage) -> None:
    toy.limits = {"timeout": 2.0}
    cell = toy.write(TRAIN.format(before="observer.compile('sleep')"))
    found = verdict(cell, toy.attempts(cell))
    assert (found.verdict, found.why) == ("unproven", "no result for TPU v5e 2x2 within 2 s")
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(toy.folder) in " ".join(p.info["cmdline"] or ())]


def test_a_compiler_that_takes_too_much_memory_is_ended(toy: Stage) -> None:
    toy.limits = {"memory_gib": 0.2}
    cell = toy.write(TRAIN.format(before="observer.compile('hoard')"))
    began = time.monotonic()
    found = verdict(cell, toy.attempts(cell))
    assert (found.verdict, found.why) == ("unproven", "no result for TPU v5e 2x2 within 0.2 GiB of this machine")
    assert time.monotonic() - began < toy.context().host["cores"] * 300  # it would sleep for 600 s


def test_without_the_compilers_package_it_says_which_is_missing(toy: Stage) -> None:
    toy.packages = {"torch": "2.0"}
    cell = toy.write(PASSES)
    found = verdict(cell, toy.attempts(cell))
    assert (found.verdict, found.evidence) == ("unproven", "none")
    assert found.why == "no TPU; no compiler for TPU here: toycompiler is not installed"


@pytest.mark.parametrize(
    ("devices", "target", "why"),
    [
        (8, "v5e:2x2", "no TPU; TPU v5e 2x2 has 4 chips, the layout needs 8"),
        (
            4,
            {"chips": "v5e:2x2", "num_slices": 2},
            "no TPU; 2 slices of TPU v5e 2x2 have 8 chips, and a layout of 4 would not use them all",
        ),
    ],
)
def test_a_layout_that_does_not_suit_the_target_is_said(toy: Stage, devices: int, target: object, why: str) -> None:
    toy.layout, toy.targets = {"devices": devices, "strategy": "data"}, [target]
    cell = toy.write(PASSES)
    assert verdict(cell, toy.attempts(cell)).why == why


def test_a_target_is_only_for_the_cells_that_it_names(toy: Stage) -> None:
    toy.targets = [{"chips": "v5e:2x2", "for": {"strategy": "data"}}]
    cell = toy.write(PASSES)
    assert cell.targets == ()
    assert verdict(cell, toy.attempts(cell)).why == "no TPU"


def test_what_is_known_is_not_shown_again(toy: Stage) -> None:
    cell = toy.write(PASSES)
    made = toy.attempts(cell)
    assert toy.attempts(cell, prior=tuple(made)) == []
    toy.packages["toycompiler"] = "1.6"
    assert len(toy.attempts(cell, prior=tuple(made))) == 1


def test_it_is_shown_again_when_what_looks_concludes_or_describes_the_chip_has_changed(
    toy: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = toy.write(PASSES)
    made = tuple(toy.attempts(cell))
    for name, where in (("what looks", "helper.py"), ("what concludes", "rules/rules.py"), ("the chip", "chip.txtpb")):
        (toy.folder / "rules").mkdir(exist_ok=True)
        monkeypatch.setattr(stage, "CONCLUSIONS", toy.folder / "rules")
        monkeypatch.setattr(targets, "gpu_file", lambda chip: toy.folder / "chip.txtpb")
        before = stage._known(toy.context(), cell, *source_and_target(toy, cell))["key"]
        (toy.folder / where).write_text("# anything else\n")
        assert stage._known(toy.context(), cell, *source_and_target(toy, cell))["key"] != before, name
    assert len(toy.attempts(cell, prior=made)) == 1


def source_and_target(toy: Stage, cell: plan.Cell) -> tuple[Source, Producer, Target]:
    source = cell.sources()[0]
    assert source is not None
    return source, toy.producer, cell.targets[0]


def test_the_plan_says_what_will_be_tried(toy: Stage) -> None:
    assert stage.outlook(toy.context(), toy.write(PASSES)) == "compiled for TPU v5e 2x2"
    toy.packages = {"torch": "2.0"}
    assert stage.outlook(toy.context(), toy.write(PASSES)) is None


def test_an_accelerator_that_is_there_is_executed_not_compiled_for(toy: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = toy.write(PASSES)
    there: Accelerator = replace(cell.accelerator, absent=lambda: None, count=lambda: 0)
    made = toy.attempts(replace(cell, accelerator=there))
    assert [(each.outcome, each.reason) for each in made] == [
        ("unavailable", "the layout needs 1 tpu devices, this machine has 0")
    ]
