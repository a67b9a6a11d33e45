"""How much of a machine the workloads use: the share of the framework's own float32 matmul peak, torch beside JAX.

    python benchmarks/workloads.py [--size small] [--processes 3] [gpt resnet digits]

In one run: the peak is the best rate of a product of two square float32 matrices, of several sizes; the FLOPs of a
step are counted by torch.utils.flop_counter (matrix products, convolutions and attention; a step of two less a step of
one, so that set-up and evaluation drop out) and are the same for both frameworks, which do the same mathematics; the
time of a step is the median of processes, each the median of its steady intervals. Where a framework reaches less than
70 %, JAX's own profiler is asked where the time goes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENOUGH = 0.70  # of the peak
STEPS, LOG_EVERY = 22, 2  # of a process: ten intervals after the first

PEAK = """
import time
{imports}
best = 0.0
for n in (512, 1024, 1536, 2048):
    {make}
    for _ in range(8):
        begin = time.perf_counter()
        {product}
        best = max(best, 2 * n**3 / (time.perf_counter() - begin))
print(best)
"""
PEAKS = {
    "torch": PEAK.format(imports="import torch", make="a, b = torch.rand(n, n), torch.rand(n, n)", product="a @ b"),
    "jax": PEAK.format(
        imports="import jax, jax.numpy as jnp\nproduct = jax.jit(jnp.matmul)",
        make="a, b = jax.random.uniform(jax.random.key(0), (2, n, n)); product(a, b).block_until_ready()",
        product="product(a, b).block_until_ready()",
    ),
}
COUNT = """
import contextlib, io, runpy, sys
from torch.utils.flop_counter import FlopCounterMode
script, size = sys.argv[1:]
def flops(steps):
    sys.argv = [script, "--steps", str(steps), "--size", size]
    with FlopCounterMode(display=False) as counter, contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(script, run_name="__main__")
    return counter.get_total_flops()
print(flops(2) - flops(1))
"""
TIME = """
import builtins, json, runpy, sys, time
times, shown = [], builtins.print
def print(*words, **options):
    times.append(time.perf_counter())
builtins.print = print
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
shown(json.dumps(times[:-1]))  # the last line is the evaluation
"""
PROFILE = """
import contextlib, glob, io, json, runpy, sys, tempfile
script, size = sys.argv[1:]
import jax
with tempfile.TemporaryDirectory() as folder:
    sys.argv = [script, "--steps", "12", "--size", size]
    with jax.profiler.trace(folder), contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(script, run_name="__main__")
    found = {}
    for path in glob.glob(folder + "/**/*.xplane.pb", recursive=True):
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                for event in line.events:
                    if any(name == "hlo_op" for name, _ in event.stats):
                        kind = event.name.rsplit(".", 1)[0] if event.name.rsplit(".", 1)[-1].isdigit() else event.name
                        found[kind] = found.get(kind, 0) + event.duration_ns
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["digits", "resnet", "gpt"])
    parser.add_argument("--size", default="small")
    parser.add_argument("--processes", type=int, default=3)
    args = parser.parse_args()
    peak = {framework: float(child(code)) for framework, code in PEAKS.items()}
    for framework, rate in peak.items():
        print(f"{framework}: float32 matmul peak {rate / 1e9:.1f} GFLOP/s", flush=True)
    for workload in args.workloads:
        folder = ROOT / "workloads" / workload
        flops = float(child(COUNT, str(folder / "torch" / "train.py"), args.size))
        for framework in peak:
            train = folder / framework / "train.py"
            seconds = [step_seconds(train, args.size) for _ in range(args.processes)]
            share = flops / statistics.median(seconds) / peak[framework]
            spread = f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f} ms a step, n = {len(seconds)} processes"
            print(f"{workload} --size {args.size}, {framework}: {share:.0%} of the peak ({spread})", flush=True)
            if framework == "jax" and share < ENOUGH:
                print(f"  its profile: {profile(train, args.size)}", flush=True)


def child(code: str, *arguments: str) -> str:
    """What a program prints last, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


def step_seconds(script: Path, size: str) -> float:
    """The median time of a step of one process, from the second progress line on: compilation is over by then."""
    times = json.loads(child(TIME, str(script), "--steps", str(STEPS), "--log-every", str(LOG_EVERY), "--size", size))
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times[1:])) / LOG_EVERY


def profile(script: Path, size: str) -> str:
    """Where the time of a JAX script's operations goes: the five kinds that take most of it."""
    spent = Counter(json.loads(child(PROFILE, str(script), size)))
    total = sum(spent.values())
    return ", ".join(f"{kind} {nanoseconds / total:.0%}" for kind, nanoseconds in spent.most_common(5))


if __name__ == "__main__":
    main()
