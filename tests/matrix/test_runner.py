"""The runner: from a cell to its attempts."""

import textwrap

from tests.matrix.harness import DIGITS, Bench, digits, edited

SAME_BATCH = ("(turn + 1) * BATCH][rank::world_size]", "(turn + 1) * BATCH]")


def test_a_correct_script_passes_as_it_is(bench: Bench) -> None:
    digits(bench)
    verdict = bench.verdict(bench.cell("edited"))
    assert (verdict.verdict, verdict.why) == ("as-is", "device-agnostic source")


def test_ports_are_tried_after_the_baseline_has_failed(bench: Bench) -> None:
    digits(bench)
    attempts = bench.attempts(bench.cell("edited", layout="dp2"))
    assert [(a.source, a.outcome, a.failure and a.failure.cause) for a in attempts] == [
        ("torch/train.py", "fail", "idle-devices"),
        ("torch/ddp.py", "pass", None),
    ]


SPAWNING = """
    import os
    import runpy
    import socket

    import torch.multiprocessing as mp


    def rank(number, port):
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        runpy.run_path("torch/ddp.py", run_name="__main__")


    if __name__ == "__main__":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(rank, args=(port,), nprocs=2)
"""


def test_a_script_that_spawns_its_ranks_itself_is_watched_in_all_of_them(bench: Bench) -> None:
    digits(bench, torch_train=textwrap.dedent(SPAWNING))
    (attempt,) = bench.attempts(bench.cell("edited", layout="dp2"))
    assert (attempt.source, attempt.outcome, attempt.devices.used) == ("torch/train.py", "pass", 2)


def test_ranks_that_a_script_spawns_with_the_same_batch_are_found_out(bench: Bench) -> None:
    same = edited(DIGITS / "torch" / "ddp.py", SAME_BATCH)
    digits(bench, torch_train=textwrap.dedent(SPAWNING), torch_ddp=same)
    attempt = bench.attempts(bench.cell("edited", layout="dp2"))[0]
    assert attempt.failure is not None
    assert attempt.failure.cause == "replicated-work"


def test_ranks_that_shuffle_the_same_batch_are_found_out_by_its_rows(bench: Bench) -> None:
    shuffled = "(turn + 1) * BATCH][np.random.default_rng(rank).permutation(BATCH)]"
    digits(bench, torch_ddp=edited(DIGITS / "torch" / "ddp.py", (SAME_BATCH[0], shuffled)))
    failure = bench.attempts(bench.cell("edited", layout="dp2"))[-1].failure
    assert failure is not None
    assert (failure.cause, failure.message) == (
        "replicated-work",
        "rank 0 and rank 1 were fed the same rows: 100% of a batch",
    )


def test_a_script_that_trains_past_its_steps_is_not_green(bench: Bench) -> None:
    longer = ("range(1, args.steps + 1)", "range(1, args.steps + 3)")
    digits(bench, torch_train=edited(DIGITS / "torch" / "train.py", longer))
    failure = bench.attempts(bench.cell("edited"))[0].failure
    assert failure is not None
    assert (failure.cause, failure.message) == ("wrong-result", "went on to step 8, although 6 steps were asked for")


def test_settings_can_be_passed_as_keys_and_lines_be_read_by_a_pattern(bench: Bench) -> None:
    train = edited(
        DIGITS / "torch" / "train.py",
        ("args = parser.parse_args()", "import sys\nargs = parser.parse_args([f'--{each}' for each in sys.argv[1:]])"),
        ('print(f"step={step} loss={loss.item():.12g} examples={(step - logged) * BATCH}", flush=True)',
         'print(f"[{step}] {loss.item():.12g} ({(step - logged) * BATCH})", flush=True)'),
    )  # fmt: skip
    folder = digits(bench, torch_train=train)
    text = (folder / "workload.yaml").read_text()
    for setting in ("steps", "size", "seed", "dtype", "log_every"):
        flag = setting.replace("_", "-")
        text = text.replace(f"{setting}: --{flag}", f"{setting}: {flag}=")
    text += r"progress: '^\[(?P<step>\d+)\] (?P<loss>\S+) \((?P<examples>\d+)\)'" + "\n"
    (folder / "workload.yaml").write_text(text)
    (attempt,) = bench.attempts(bench.cell("edited"))
    assert (attempt.outcome, attempt.failure) == ("pass", None)
    assert attempt.metrics.eval is not None
