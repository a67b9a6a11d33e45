"""The kinds of device: what counts as absent, and which devices are whose."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from matrix.accelerators import available, cuda, first, rocm, tpu

NO_RUNTIME = (("tpu", None), ("cpu", None))


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /dev and /sys for the accelerators to look at."""
    monkeypatch.setattr(cuda, "DEV", tmp_path)
    monkeypatch.setattr(tpu, "DEV", tmp_path)
    monkeypatch.setattr(tpu, "PCI", tmp_path / "pci")
    monkeypatch.setattr(rocm, "KFD", tmp_path / "kfd")
    monkeypatch.setattr(rocm, "TOPOLOGY", tmp_path / "topology")
    return tmp_path


def test_without_device_nodes_all_but_the_cpu_are_absent(dev: Path) -> None:
    assert {name: accelerator.absent() for name, accelerator in available().items()} == {
        "cpu": None,
        "cuda": "no NVIDIA GPU: no device node /dev/nvidia0 (nor /dev/dxg)",
        "rocm": "no AMD GPU: no device node /dev/kfd, or no GPU behind it",
        "tpu": "no TPU: no device node /dev/accel0 (nor a Google device under /dev/vfio)",
    }


def test_nvidia_gpus_are_counted_by_their_nodes(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    assert (cuda.absent(), cuda.count()) == (None, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert cuda.count() == 2
    assert cuda.environment("torch", 1) == {"CUDA_VISIBLE_DEVICES": "2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda.absent() == "CUDA_VISIBLE_DEVICES hides every GPU"


def test_under_wsl_only_the_framework_can_count(dev: Path) -> None:
    (dev / "dxg").touch()
    assert (cuda.absent(), cuda.count()) == (None, None)


def test_amd_gpus_are_the_nodes_with_simd_units(dev: Path) -> None:
    (dev / "kfd").touch()
    for name, simds in (("0", 0), ("1", 304), ("2", 304)):
        (dev / "topology" / name).mkdir(parents=True)
        (dev / "topology" / name / "properties").write_text(
            f"cpu_cores_count 0\nsimd_count {simds}\nmem_banks_count 1\n"
        )
    assert (rocm.absent(), rocm.count()) == (None, 2)


def test_tpus_are_accel_nodes_or_googles_vfio_devices(dev: Path) -> None:
    (dev / "vfio").mkdir()
    for name, vendor in (("0000:00:04.0", "0x1ae0"), ("0000:00:05.0", "0x1ae0"), ("0000:00:06.0", "0x10de")):
        (dev / "pci" / name).mkdir(parents=True)
        (dev / "pci" / name / "vendor").write_text(vendor + "\n")
    assert (tpu.absent(), tpu.count()) == (None, 2)
    (dev / "accel0").touch()
    assert tpu.count() == 1


@pytest.mark.parametrize(
    ("given", "devices", "expected"),
    [(None, 2, "0,1"), ("3,5,7", 2, "3,5"), ("GPU-1a2b", 1, "GPU-1a2b"), ("1,-1,2", 2, "1"), ("", 1, "")],
)
def test_a_cell_sees_the_first_devices_that_the_user_sees(
    monkeypatch: pytest.MonkeyPatch, given: str | None, devices: int, expected: str
) -> None:
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert first("CUDA_VISIBLE_DEVICES", devices) == {"CUDA_VISIBLE_DEVICES": expected}


def test_rocm_is_told_from_cuda_although_frameworks_call_both_the_same() -> None:
    owners = {
        (platform, runtime): [name for name, each in available().items() if each.owns(device)]
        for platform, runtime in itertools.chain(itertools.product(("cuda", "gpu"), ("cuda", "rocm")), NO_RUNTIME)
        for device in [{"platform": platform, "runtime": runtime}]
    }
    assert owners == {
        ("cuda", "cuda"): ["cuda"],
        ("cuda", "rocm"): ["rocm"],
        ("gpu", "cuda"): ["cuda"],
        ("gpu", "rocm"): ["rocm"],
        ("tpu", None): ["tpu"],
        ("cpu", None): ["cpu"],
    }
