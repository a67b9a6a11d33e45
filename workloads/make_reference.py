"""Write a workload's reference.csv from its float64 runs, and measure the tolerances that other precisions need.

    python workloads/make_reference.py workloads/digits [--torch-python PYTHON] [--jax-python PYTHON]

Refuses, and writes nothing, when the frameworks' float64 trajectories are further apart than AGREEMENT. What it
measures goes beside the reference as tolerance.csv; the tolerances in workload.yaml are set by hand from that.
"""

import argparse
import csv
import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import yaml

AGREEMENT = 1e-9  # largest relative distance between the frameworks' float64 trajectories
DEFAULT_SEED = 0  # the reference is for this seed and the scripts' default size
HEADROOM = 3  # suggested tolerance over the largest measured deviation: other chips add up in another order
PACKAGES = {"torch": ["torch", "numpy"], "jax": ["jax", "equinox", "optax", "numpy"]}
MEASURED = {
    "float32": "ieee-f32",
    "bfloat16": "bf16",
}  # the precision that a --dtype means on the machines this runs on

Trajectory = dict[str, str]  # "1" ... and "eval" -> the number as printed, in order


def run(python: str, script: Path, steps: int, seed: int, dtype: str) -> Trajectory:
    """Run a script on one device and return every number that it printed; raises CalledProcessError if it fails."""
    flags = [f"--steps={steps}", f"--seed={seed}", f"--dtype={dtype}", "--log-every=1"]
    process = subprocess.run([python, script, *flags], stdout=subprocess.PIPE, text=True, check=True)
    trajectory: Trajectory = {}
    for line in process.stdout.splitlines():
        pairs = dict(re.findall(r"(\w+)=(\S+)", line))
        if "loss" in pairs:
            trajectory[pairs["step"]] = pairs["loss"]
        elif "eval" in pairs:
            trajectory["eval"] = pairs["eval"]
    expected = [str(step) for step in range(1, steps + 1)] + ["eval"]
    if list(trajectory) != expected:
        raise SystemExit(f"{script}: printed {len(trajectory)} numbers, expected {steps} losses and an eval")
    return trajectory


def deviation(found: Trajectory, reference: Trajectory) -> tuple[float, str]:
    """The largest |found - reference| / |reference|, and the step at which it is."""
    distances = ((abs(float(found[k]) - float(v)) / abs(float(v)), k) for k, v in reference.items())
    return max(distances, key=lambda distance: distance[0])


def evaluation(pythons: dict[str, str], scripts: dict[str, Path], steps: int) -> tuple[str, str]:
    """The row of the evaluation of a run that ends after `steps`, on which all frameworks agree."""
    found = {f: run(pythons[f], script, steps, DEFAULT_SEED, "float64")["eval"] for f, script in scripts.items()}
    first = next(iter(found.values()))
    for framework, value in found.items():
        if abs(float(value) - float(first)) > AGREEMENT * abs(float(first)):
            raise SystemExit(f"{framework}: eval after {steps} steps is {value}, expected {first}. Nothing written.")
    return f"eval@{steps}", first


def baseline(workload: Path, implementation: dict, python: str) -> Path:
    """The baseline's script; where it cannot run here, the first port for one device that can."""
    ports = [port for port in implementation.get("ports", []) if "launch" not in port]
    for source in [implementation["baseline"], *ports]:
        script = workload / source["file"]
        trial = subprocess.run([python, script, "--steps=1"], capture_output=True, text=True)
        if trial.returncode == 0:
            return script
        reason = trial.stderr.strip().rpartition("\n")[2]
        print(f"{script}: does not run here ({reason})", file=sys.stderr)
    raise SystemExit(f"{workload}: no script for one device runs with {python}")


def versions(python: str, framework: str) -> str:
    ask = "import sys, importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in sys.argv[1:]), sep='; ')"
    process = subprocess.run([python, "-c", ask, *PACKAGES[framework]], stdout=subprocess.PIPE, text=True, check=True)
    return process.stdout.strip()


def machine() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path, help="a folder with a workload.yaml")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--jax-python", default=sys.executable, help="interpreter that has jax")
    parser.add_argument("--steps", type=int, default=400, help="steps of the reference")
    parser.add_argument(
        "--evaluate-after", type=int, nargs="*", default=[10, 30, 120], help="shorter runs whose evaluation is kept"
    )
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds to measure deviations over")
    parser.add_argument("--only-measure", action="store_true", help="leave reference.csv as it is")
    args = parser.parse_args()
    pythons = {"torch": args.torch_python, "jax": args.jax_python}

    description = yaml.safe_load((args.workload / "workload.yaml").read_text())
    scripts = {
        framework: baseline(args.workload, implementation, pythons[framework])
        for framework, implementation in description["implementations"].items()
    }

    rows = []
    for seed in range(DEFAULT_SEED, DEFAULT_SEED + args.seeds):
        exact = {f: run(pythons[f], script, args.steps, seed, "float64") for f, script in scripts.items()}
        reference_of, reference = next(iter(exact.items()))
        for framework, trajectory in exact.items():
            distance, step = deviation(trajectory, reference)
            if distance > AGREEMENT:
                raise SystemExit(
                    f"seed {seed}: {framework} is {distance:.1e} from {reference_of} at step {step}; "
                    f"float64 must agree to {AGREEMENT}. Nothing written: look for a formula that differs."
                )
            if framework != reference_of:
                rows.append((framework, f"float64, to {reference_of}", seed, distance, step))
        if seed == DEFAULT_SEED and not args.only_measure:
            final = ("eval", reference["eval"])
            losses = [(step, loss) for step, loss in reference.items() if step != "eval"]
            earlier = [evaluation(pythons, scripts, steps) for steps in args.evaluate_after if steps < args.steps]
            with (args.workload / "reference.csv").open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([("step", "loss"), *losses, *earlier, final])
        for framework, script in scripts.items():
            for dtype, precision in MEASURED.items():
                found = run(pythons[framework], script, args.steps, seed, dtype)
                rows.append((framework, precision, seed, *deviation(found, exact[framework])))
        print(f"seed {seed}: " + ", ".join(f"{f} {p} {d:.1e}" for f, p, s, d, _ in rows if s == seed), flush=True)

    today = datetime.date.today().isoformat()
    with (args.workload / "tolerance.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["framework", "precision", "seeds", "steps", "deviation", "at", "machine", "date", "versions"])
        for framework, precision in dict.fromkeys((f, p) for f, p, *_ in rows):
            of = [(distance, step) for f, p, _, distance, step in rows if (f, p) == (framework, precision)]
            distance, step = max(of)
            about = [machine(), today, versions(pythons[framework], framework)]
            writer.writerow([framework, precision, args.seeds, args.steps, f"{distance:.2e}", step, *about])
    for precision in MEASURED.values():
        worst = max(distance for _, p, _, distance, _ in rows if p == precision)
        print(f"{precision}: at most {worst:.1e}; suggested tolerance {HEADROOM * worst:.0e}")


if __name__ == "__main__":
    main()
