"""Batch statistics are of one rank's batch unless a port sees to it: the known truth about plain data parallelism."""

EXACT = ("--steps=12", "--dtype=float64", "--log-every=1")


def test_plain_ddp_on_two_ranks_gives_another_trajectory_from_the_first_step_on(scripts, deviation):
    found = scripts.run("resnet/torch/ddp.py", *EXACT, devices=2)
    reference = scripts.reference("resnet")
    first = abs(found["1"] - reference["1"]) / reference["1"]
    assert first > 30 * scripts.tolerance("resnet", "ieee-f32")
    assert deviation(found, reference) > 300 * scripts.tolerance("resnet", "ieee-f32")


def test_plain_ddp_on_one_rank_follows_the_reference(scripts, deviation):
    assert deviation(scripts.run("resnet/torch/ddp.py", *EXACT), scripts.reference("resnet")) < 1e-9


def test_synchronised_statistics_reach_the_running_ones_that_evaluation_uses(scripts):
    synchronised = scripts.run("resnet/torch/ddp_sync_stats.py", *EXACT, devices=2)
    alone = scripts.run("resnet/torch/train.py", *EXACT)
    plain = scripts.run("resnet/torch/ddp.py", *EXACT, devices=2)
    assert abs(synchronised["eval"] - alone["eval"]) < 1e-9
    assert abs(plain["eval"] - alone["eval"]) > 1e-5
