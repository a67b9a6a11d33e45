"""Code written for one CUDA device: its baseline needs one, its port computes what digits computes."""

import subprocess
import sys

import pytest

SHARED = ["data/digits.csv.gz", "data/README.md", "reference.csv"]


def test_the_baseline_fails_where_there_is_no_cuda_device(scripts):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    script = scripts.folder("digits-cuda") / "torch" / "train.py"
    process = subprocess.run([sys.executable, script, "--steps=1"], capture_output=True, text=True)
    assert process.returncode == 1
    assert "model.cuda()" in process.stderr
    assert process.stdout == ""


def test_the_agnostic_port_follows_the_reference(scripts, deviation):
    found = scripts.run("digits-cuda/torch/agnostic.py", "--steps=12", "--dtype=float64", "--log-every=1")
    assert deviation(found, scripts.reference("digits")) < 1e-9


@pytest.mark.parametrize("file", SHARED)
def test_its_folder_is_self_contained_and_equal_to_that_of_digits(scripts, file):
    assert (scripts.folder("digits-cuda") / file).read_bytes() == (scripts.folder("digits") / file).read_bytes()


@pytest.mark.parametrize(("port", "original"), [("agnostic.py", "train.py"), ("ddp.py", "ddp.py")])
def test_its_ports_are_the_scripts_of_digits(scripts, port, original):
    ported = (scripts.folder("digits-cuda") / "torch" / port).read_text()
    assert ported == (scripts.folder("digits") / "torch" / original).read_text()
