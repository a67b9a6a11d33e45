"""--compile has to compile: Dynamo's counters, after the script has run, show its graphs."""

import shutil
import subprocess
import sys

import pytest

WATCHED = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
from torch._dynamo.utils import counters
print("graphs", counters["stats"].get("unique_graphs", 0), "calls", counters["stats"].get("calls_captured", 0))
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize(("flags", "compiles"), [([], False), (["--compile"], True)])
def test_only_the_flag_compiles_the_digits_model(scripts, flags, compiles):
    pytest.importorskip("torch")
    script = scripts.folder("digits") / "torch" / "train.py"
    command = [sys.executable, "-c", WATCHED, script, "--steps=2", "--log-every=1", *flags]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    _, graphs, _, calls = printed.splitlines()[-1].split()
    assert (int(graphs) > 0, int(calls) > 0) == (compiles, compiles)
