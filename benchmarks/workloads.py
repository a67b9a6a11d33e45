"""How much of a machine the workloads use: the share of the framework's own float32 matmul peak, torch beside JAX.

    python benchmarks/workloads.py [--size small] [--processes 3] [gpt resnet digits]

In one run: the peak is the rate at which a framework multiplies two square float32 matrices, the median of some
products, at the best of several sizes. Each process measures it before and after its training and takes the mean, since
a shared machine is not equally fast all day. The FLOPs of a step are counted by torch.utils.flop_counter (matrix
products, convolutions and attention; two steps less one, so that set-up and evaluation drop out) and are the same for
both frameworks, which do the same mathematics; the time of a step is the median of a process's steady intervals. What
is printed is the median of processes. Where JAX reaches less than 70 %, its own profiler is asked where the time goes.
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
import statistics, time
{imports}
def peak():
    best = 0.0
    for n in (512, 1024, 1536, 2048):
        {make}
        {product}
        rates = []
        for _ in range(max(8, 4 * (1024 // n) ** 3)):
            begin = time.perf_counter()
            {product}
            rates.append(2 * n**3 / (time.perf_counter() - begin))
        best = max(best, statistics.median(rates))
    return best
"""
PEAKS = {
    "torch": PEAK.format(imports="import torch", make="a, b = torch.rand(n, n), torch.rand(n, n)", product="a @ b"),
    "jax": PEAK.format(
        imports="import jax, jax.numpy as jnp\nproduct = jax.jit(jnp.matmul)",
        make="a, b = jax.random.uniform(jax.random.key(0), (2, n, n))",
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
before = peak()
builtins.print = print
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
shown(json.dumps([times[:-1], (before + peak()) / 2]))  # the last line is the evaluation
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
    for workload in args.workloads:
        folder = ROOT / "workloads" / workload
        flops = float(child(COUNT, str(folder / "torch" / "train.py"), args.size))
        for framework in PEAKS:
            train = folder / framework / "train.py"
            runs = [timed(framework, train, args.size) for _ in range(args.processes)]
            shares = sorted(flops / seconds / peak for seconds, peak in runs)
            share = statistics.median(shares)
            seconds, peak = (statistics.median(values) for values in zip(*runs, strict=True))
            print(
                f"{workload} --size {args.size}, {framework}: {share:.0%} of the peak "
                f"({shares[0]:.0%} to {shares[-1]:.0%}, n = {len(runs)} processes; "
                f"{seconds * 1e3:.1f} ms a step, {flops / seconds / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s)",
                flush=True,
            )
            if framework == "jax" and share < ENOUGH:
                print(f"  its profile: {profile(train, args.size)}", flush=True)


def child(code: str, *arguments: str) -> str:
    """What a program prints last, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


def timed(framework: str, script: Path, size: str) -> tuple[float, float]:
    """The median seconds of a step of one process, from the second progress line on, when compilation is over; the peak
    around it, in FLOP/s."""
    settings = "--steps", str(STEPS), "--log-every", str(LOG_EVERY), "--size", size
    times, peak = json.loads(child(PEAKS[framework] + TIME, str(script), *settings))
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times[1:])) / LOG_EVERY, peak


def profile(script: Path, size: str) -> str:
    """Where the time of a JAX script's operations goes: the five kinds that take most of it."""
    spent = Counter(json.loads(child(PROFILE, str(script), size)))
    total = sum(spent.values())
    return ", ".join(f"{kind} {nanoseconds / total:.0%}" for kind, nanoseconds in spent.most_common(5))


if __name__ == "__main__":
    main()
