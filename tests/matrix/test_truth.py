"""The rules of truth, on reports written by hand: one device of 100 parameter bytes is the plain case."""

from __future__ import annotations

from typing import Any

import pytest

from matrix.accelerators import cpu, cuda
from matrix.journal import Layout
from matrix.truth import Finding, Truth, Unseen, check, units_per_step

SINGLE = Layout(name="single")
DP2 = Layout(name="dp2", devices=2, strategy="data")
FSDP2 = Layout(name="fsdp2", devices=2, strategy="fully-sharded")
TP2 = Layout(name="tp2", devices=2, strategy="tensor")


def device(name: str = "cpu", parameters: int = 100, work: float = 1000, **more: Any) -> dict[str, Any]:
    platform = name.partition(":")[0]
    runtime = "cuda" if platform == "cuda" else None
    found = {"platform": platform, "id": name, "kind": platform, "runtime": runtime}
    return {**found, "parameter_bytes": parameters, "work": work, **more}


def rank(*devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    plain = {
        "framework": "torch",
        "host": "a",
        "backward_calls": 2,
        "devices": devices or [device()],
        "parameter_bytes": {"local": 100, "global": 100},
        "plain_parameters": True,
        "parameter_shapes": [[10, 80], [80]],
        "shapes": [],
        "compiled": {"graphs": 0},
    }
    return {**plain, **more}


def held(
    *ranks: dict[str, Any], layout: Layout = SINGLE, on: Any = cpu, compile: bool = False, units: float | None = None
) -> Truth:
    accelerator = on.ACCELERATOR
    reports = dict(enumerate(ranks))
    return check(reports, layout, "torch", accelerator.name, accelerator.owns, compile, units)


def finding(*ranks: dict[str, Any], **more: Any) -> tuple[str, str]:
    problem = held(*ranks, **more).problem
    assert isinstance(problem, Finding), problem
    return problem.cause, problem.message


def unseen(*ranks: dict[str, Any], **more: Any) -> str:
    problem = held(*ranks, **more).problem
    assert isinstance(problem, Unseen), problem
    return problem.message


# --- what was reported ---


def test_one_device_that_does_all_is_true() -> None:
    assert held(rank()) == Truth(None, 1, "cpu")


def test_without_a_report_nothing_is_claimed() -> None:
    assert unseen() == "no process of the cell reported what it did"


def test_a_rank_without_a_report_leaves_the_cell_unseen() -> None:
    assert unseen(rank(), {"host": "a"}, layout=DP2) == (
        "what rank 1 did could not be seen (it ended without a report)"
    )
    assert unseen({"host": "a", "event": "blind", "reason": "KeyError: 'x'"}) == (
        "what rank 0 did could not be seen (KeyError: 'x')"
    )


def test_an_observer_that_broke_after_its_report_leaves_the_cell_unseen() -> None:
    assert unseen(rank(broke=True)) == "not all of what rank 0 did could be seen"
    assert finding(rank(broke=True), on=cuda)[0] == "wrong-device"  # what it did see stands


def test_a_script_that_never_imports_the_framework_is_on_no_device_of_it() -> None:
    assert finding({"framework": None, "host": "a"}) == ("wrong-device", "the script never imported torch")


def test_no_work_and_no_parameters_is_not_a_pass() -> None:
    blank = rank(devices=[], trouble="AttributeError: x")
    assert unseen(blank) == ("no work was seen: no backward pass, no module, no compiled step (AttributeError: x)")


# --- devices ---


def test_parameters_elsewhere_are_on_the_wrong_device() -> None:
    assert finding(rank(), on=cuda) == (
        "wrong-device",
        "the cell's device is cuda, but the parameters were held on cpu 100%",
    )


def test_work_elsewhere_is_on_the_wrong_device_even_with_the_parameters_in_place() -> None:
    there, here = device("cuda:0", 100, 10), device("cpu", 0, 90)
    assert finding(rank(there, here), on=cuda) == (
        "wrong-device",
        "the cell's device is cuda, but the work was done on cpu 90%, cuda:0 10%",
    )


def test_exactly_half_is_not_the_work() -> None:
    assert finding(rank(device("cuda:0", 50, 0), device("cpu", 50, 0)), on=cuda)[0] == "wrong-device"
    assert held(rank(device("cuda:0", 51, 0), device("cpu", 49, 0)), on=cuda).problem is None


def test_rocm_is_not_cuda() -> None:
    assert finding(rank(device("cuda:0", runtime="rocm")), on=cuda) == (
        "wrong-device",
        "the cell's device is cuda, but the parameters were held on cuda:0 (rocm) 100%",
    )


def test_two_ranks_on_one_gpu_use_one_device() -> None:
    ranks = [rank(device("cuda:0"), fingerprint=print_) for print_ in "ab"]
    assert finding(*ranks, layout=DP2, on=cuda) == ("idle-devices", "the cell gave 2 devices, 1 did work")
    assert held(*ranks, layout=DP2, on=cuda).used == 1


def test_equal_names_on_two_hosts_are_two_devices() -> None:
    nodes = Layout(name="n2", nodes=2, strategy="data")
    ranks = [rank(device("cuda:0"), host=host, fingerprint=host) for host in "ab"]
    assert held(*ranks, layout=nodes, on=cuda) == Truth(None, 2, "cuda")


def test_a_device_that_holds_parameters_and_does_nothing_is_idle() -> None:
    both = rank(device("cuda:0", 50, 1000), device("cuda:1", 50, 0))
    assert finding(both, layout=DP2, on=cuda) == ("idle-devices", "the cell gave 2 devices, 1 did work")


@pytest.mark.parametrize(("work", "used"), [(49, 1), (53, 2)])
def test_less_than_a_tenth_of_an_equal_share_is_idle(work: float, used: int) -> None:
    both = rank(device("cuda:0", 100, 1000), device("cuda:1", 0, work))  # equal shares: half of 1000 + work
    assert held(both, layout=DP2, on=cuda).used == used


# --- data-parallel ---


def split(*prints: str | None, **more: Any) -> list[dict[str, Any]]:
    return [rank(fingerprint=each, **more) for each in prints]


def test_equal_gradients_are_replicated_work() -> None:
    assert finding(*split("a", "a"), layout=DP2) == ("replicated-work", "rank 0, rank 1 computed the same gradient")


def test_different_gradients_without_random_numbers_prove_different_data() -> None:
    assert held(*split("a", "b"), layout=DP2).problem is None


def test_different_gradients_with_random_numbers_prove_nothing() -> None:
    assert unseen(*split("a", "b", random=True), layout=DP2) == (
        "whether the batch was split over the 2 devices could not be seen: no tokens= or examples= was printed"
    )
    assert unseen(*split("a", "b", random=True), layout=DP2, units=96) == (
        "whether the batch was split over the 2 devices could not be seen: "
        "its sizes do not show the count of the progress lines"
    )
    assert held(*split("a", "b", random=True, shapes=[[48, 10]]), layout=DP2, units=96).problem is None


def test_equal_inputs_are_replicated_work_however_the_gradients_differ() -> None:
    ranks = split("a", "b", inputs="x", random=True)
    assert finding(*ranks, layout=DP2) == ("replicated-work", "rank 0, rank 1 were fed the same data")


def test_different_inputs_prove_different_data() -> None:
    ranks = [rank(inputs=each, random=True) for each in "xy"]
    assert held(*ranks, layout=DP2).problem is None


def test_the_whole_batch_on_a_device_is_replicated_work() -> None:
    assert finding(*split("a", "b", shapes=[[96], [96, 10]]), layout=DP2, units=96) == (
        "replicated-work",
        "a device processes all 96 units of a step; split over 2 it would process 48",
    )


def test_tokens_are_the_product_of_the_leading_sizes() -> None:
    whole, part = [[16, 32, 65]], [[8, 32, 65]]
    assert finding(*split("a", "b", shapes=whole), layout=DP2, units=512)[0] == "replicated-work"
    assert held(*split("a", "b", shapes=part), layout=DP2, units=512).problem is None


def test_heads_that_look_like_the_batch_do_not_outvote_it() -> None:
    # 4 of 8 sequences of 16 tokens, in 2 heads: 4 * 2 = 8 sequences, 4 * 2 * 16 = 128 tokens
    shapes = [[4, 16, 65], [64, 65], [4, 2, 16, 8]]
    assert held(*split("a", "b", random=True, shapes=shapes), layout=DP2, units=128).problem is None


def test_shapes_of_parameters_say_nothing_of_the_batch() -> None:
    ranks = split("a", "b", random=True, shapes=[[10, 80], [80, 10]])
    assert isinstance(held(*ranks, layout=DP2, units=10).problem, Unseen)


def test_a_share_of_the_flops_above_three_quarters_is_replicated() -> None:
    jax = rank(device("cpu:0"), device("cpu:1"), fingerprint=None, work_share=0.76)
    assert finding(jax, layout=DP2) == (
        "replicated-work",
        "each device does 76% of the step's FLOPs; split over 2 it would do 50%",
    )
    assert held({**jax, "work_share": 0.75}, layout=DP2).problem is None


def test_devices_of_one_process_are_compared_too() -> None:
    jax = rank(device("cpu:0"), device("cpu:1"), work_share=0.5, fed={"cpu:0": "x", "cpu:1": "x"})
    assert finding(jax, layout=DP2) == ("replicated-work", "cpu:0, cpu:1 were fed the same data")
    assert held({**jax, "fed": {"cpu:0": "x", "cpu:1": "y"}}, layout=DP2).problem is None


def test_shapes_over_all_devices_count_for_each_of_them() -> None:
    jax = rank(device("cpu:0"), device("cpu:1"), work_share=0.5, shapes_over=2, shapes=[[192, 10]])
    assert finding(jax, layout=DP2, units=96)[0] == "replicated-work"
    assert held({**jax, "shapes": [[96, 10]]}, layout=DP2, units=96).problem is None


# --- fully-sharded and tensor ---


def shards(local: int, *prints: str, **more: Any) -> list[dict[str, Any]]:
    sizes = {"local": local, "global": 100}
    return [rank(parameter_bytes=sizes, plain_parameters=False, fingerprint=each, **more) for each in prints]


@pytest.mark.parametrize(("local", "cause"), [(50, None), (62, None), (63, "not-sharded"), (100, "not-sharded")])
def test_a_quarter_of_what_sharding_saves_may_be_missing(local: int, cause: str | None) -> None:
    problem = held(*shards(local, "a", "b"), layout=FSDP2).problem  # the limit over 2: 50 + 50 / 4 = 62.5
    assert (problem.cause if isinstance(problem, Finding) else problem) == cause


def test_sharded_ranks_with_the_same_data_replicate_the_work() -> None:
    assert finding(*shards(50, "a", "a"), layout=FSDP2)[0] == "replicated-work"


def test_ranks_whose_parameters_part_are_not_reduced() -> None:
    ranks = [rank(inputs=each, state=each) for each in ("a", "b")]
    cause, message = finding(*ranks, layout=DP2)
    assert cause == "not-reduced"
    assert message.startswith("after a step, ranks 0, 1 hold different parameters")
    assert held(*(rank(inputs=each, state="a") for each in ("a", "b")), layout=DP2).problem is None


def test_tensor_parallel_ranks_share_their_data() -> None:
    assert held(*shards(50, "a", "a"), layout=TP2).problem is None


def test_plain_copies_are_told_from_slices_cut_by_hand() -> None:
    assert finding(rank(fingerprint="a"), rank(fingerprint="a"), layout=TP2) == (
        "not-sharded",
        "a device holds 100% of the parameters' bytes; sharded over 2 it would hold 50%",
    )
    assert unseen(rank(fingerprint="a"), rank(fingerprint="b"), layout=TP2) == (
        "each rank holds plain tensors with gradients of their own: slices cut by hand cannot be told from copies"
    )
    assert finding(rank(fingerprint="a"), rank(fingerprint="b"), layout=FSDP2)[0] == "not-sharded"


def test_parameters_that_were_not_seen_are_not_called_sharded() -> None:
    ranks = [rank(parameter_bytes={"local": 0, "global": 0}) for _ in range(2)]
    assert unseen(*ranks, layout=FSDP2) == "how the parameters were laid on the devices could not be seen"


# --- compilation ---


def compiled(graphs: int = 1, inductor: int = 3, through: int = 100, reached: int = 100, **more: Any) -> dict[str, Any]:
    counts = {"graphs": graphs, "compiler": "Inductor", "compiled": inductor}
    held = {"parameter_bytes": through, "reached_bytes": reached, "guarded_bytes": through}
    return rank(compiled={**counts, **held}, **more)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (compiled(graphs=0), "rank 0: Dynamo captured no graph, everything ran eagerly"),
        (compiled(inductor=0), "rank 0: Dynamo captured 1 graphs, Inductor compiled none"),
        (compiled(through=50), "rank 0: 50% of the parameters' bytes get their gradient from a compiled graph"),
        (
            compiled(through=0, reached=0),
            "rank 0: 0% of the parameters' bytes get their gradient from a compiled graph",
        ),
        (compiled(through=50, backward_calls=0), "rank 0: 50% of the parameters' bytes are used by a compiled graph"),
        (
            compiled(gave_up="forward (train.py:9)"),
            "rank 0: Dynamo compiled forward (train.py:9) again and again, for ever new shapes or values, and gave up: "
            "from then on what it had not met before ran eagerly",
        ),
    ],
)
def test_what_does_not_reach_the_parameters_is_not_compiled(report: dict[str, Any], message: str) -> None:
    assert finding(report, compile=True) == ("not-compiled", message)
    assert held(report).problem is None


def test_most_of_the_parameters_behind_compiled_graphs_are_enough() -> None:
    assert held(compiled(through=51), compile=True).problem is None
    assert held(compiled(through=51, backward_calls=0), compile=True).problem is None


def test_inference_of_which_dynamo_keeps_no_record_is_unseen() -> None:
    report = compiled(backward_calls=0)
    report["compiled"]["guarded_bytes"] = None
    assert unseen(report, compile=True) == "which parameters the compiled graphs use could not be seen"


# --- the count of the progress lines ---


@pytest.mark.parametrize(
    ("lines", "units"),
    [
        ([(1, 96), (2, 96)], 96),
        ([(1, 96), (10, 864)], 96),
        ([(10, 960), (20, 960)], 96),
        ([(0, 96), (10, 960)], 96),
        ([(1, 96)], 96),
        ([(10, 960)], None),  # of how many steps cannot be known
        ([(1, None), (2, None)], None),
        ([(1, None), (2, 96)], 96),
        ([(5, 96), (5, 96), (6, 96)], 96),
        ([], None),
    ],
)
def test_units_of_one_step(lines: list[tuple[int, int | None]], units: float | None) -> None:
    assert units_per_step({"step": step, "units": count} for step, count in lines) == units
