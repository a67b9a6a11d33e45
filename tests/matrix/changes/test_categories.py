"""The category of a changed line, by the API names that it touches."""

from __future__ import annotations

from pathlib import Path

import pytest

from matrix import changes
from matrix.changes import apis, categories
from matrix.changes.apis import (
    CATEGORIES,
    CHECKPOINT,
    COLLECTIVES,
    CONTROL,
    DEVICE,
    IMPORTS,
    LAUNCH,
    OTHER,
    PRECISION,
    SEEDING,
    SHARDING,
    SYNC,
    WRAPPING,
)

WORKLOADS = Path(__file__).parents[3] / "workloads"

IMPORTED = """
import os, torch, jax, optax
import jax.numpy as jnp
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla
import equinox as eqx
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
import torch.distributed.checkpoint as dcp
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.experimental import multihost_utils
from jax.experimental.shard_map import shard_map
model = 1
"""


def lines(before: str, after: str) -> list[tuple[str, bool]]:
    """Category and communication of each added line."""
    found = categories.sort(changes.compare(before, after))
    return [(line.category, line.communication) for each in found for line in each.added]


@pytest.mark.parametrize(
    ("line", "category"),
    [
        ("import torch.distributed.pipelining", IMPORTS),
        ("device = torch.device('cuda')", DEVICE),
        ("device = torch.accelerator.current_accelerator()", DEVICE),
        ("model.cuda()", DEVICE),
        ("model.to('cuda:1')", DEVICE),
        ("torch.cuda.set_device(1)", DEVICE),
        ("x = jax.device_put(x)", DEVICE),
        ("device = torch_xla.device()", DEVICE),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'", DEVICE),
        ("xm.mark_step()", SYNC),
        ("torch_xla.sync()", SYNC),
        ("torch.cuda.synchronize()", SYNC),
        ("loss.block_until_ready()", SYNC),
        ("dist.init_process_group('nccl')", LAUNCH),
        ("rank = dist.get_rank()", LAUNCH),
        ("rank = int(os.environ['RANK'])", LAUNCH),
        ("world = int(os.environ.get('WORLD_SIZE', 1))", LAUNCH),
        ("host = os.getenv('MASTER_ADDR')", LAUNCH),
        ("jax.distributed.initialize()", LAUNCH),
        ("if jax.process_index() == 0: pass", LAUNCH),
        ("torch_xla.launch(main)", LAUNCH),
        ("dist.all_reduce(loss)", COLLECTIVES),
        ("dist.barrier()", COLLECTIVES),
        ("xm.rendezvous('end')", COLLECTIVES),
        ("loss = jax.lax.pmean(loss, 'data')", COLLECTIVES),
        ("multihost_utils.sync_global_devices('end')", COLLECTIVES),
        ("sampler = DistributedSampler(data)", SHARDING),
        ("sampler.set_epoch(epoch)", SHARDING),
        ("x = jax.make_array_from_process_local_data(sharding, x)", SHARDING),
        ("model = DDP(model)", WRAPPING),
        ("model = nn.DataParallel(model)", WRAPPING),
        ("fully_shard(model)", WRAPPING),
        ("mesh = init_device_mesh('cpu', (2,))", WRAPPING),
        ("parallelize_module(model, mesh, plan)", WRAPPING),
        ("sharding = NamedSharding(mesh, P('data'))", WRAPPING),
        ("step = jax.pmap(step)", WRAPPING),
        ("step = shard_map(step, mesh=mesh)", WRAPPING),
        ("x = jax.lax.with_sharding_constraint(x, s)", WRAPPING),
        ("model = eqx.filter_shard(model, s)", WRAPPING),
        ("torch.manual_seed(0)", SEEDING),
        ("key = jax.random.key(0)", SEEDING),
        ("with torch.autocast('cpu', torch.bfloat16): pass", PRECISION),
        ("scaler = torch.amp.GradScaler()", PRECISION),
        ("x = x.astype(jnp.bfloat16)", PRECISION),
        ("torch.set_float32_matmul_precision('high')", PRECISION),
        ("torch.save(model.state_dict(), path)", CHECKPOINT),
        ("dcp.save(state, checkpoint_id=path)", CHECKPOINT),
        ("eqx.tree_serialise_leaves(path, model)", CHECKPOINT),
        ("x = jax.lax.cond(a, f, g, x)", CONTROL),
        ("state, _ = jax.lax.scan(f, state, xs)", CONTROL),
        ("if finished: pass", CONTROL),
        ("updates, state = optimizer.update(gradients, state)", OTHER),
        ("model.to(dtype)", OTHER),
        ("print('cuda is fast')", OTHER),
    ],
)
def test_a_line_belongs_where_its_names_do(line: str, category: str) -> None:
    (found, *_) = lines(IMPORTED, f"{IMPORTED}{line}\n")
    assert found[0] == category


def test_names_that_a_script_keeps_stand_for_what_they_came_from() -> None:
    after = (
        f"{IMPORTED}rank, world_size = dist.get_rank(), dist.get_world_size()\n"
        "first = rank == 0\n"
        "loss = loss / world_size\n"
        "if first:\n    print(loss)\n"
        "batch = batch[rank::world_size]\n"
        "batch.mean()\n"
        "device = torch.device('cpu')\n"
        "batch.to(device)\n"
    )
    assert lines(IMPORTED, after) == [
        (LAUNCH, True),
        (LAUNCH, True),
        (LAUNCH, True),
        (LAUNCH, True),
        (OTHER, False),  # nothing but a print, which was not there before
        (SHARDING, True),  # a rank takes its share of the data by slicing
        (OTHER, False),  # a batch is not what went into it
        (DEVICE, False),
        (DEVICE, False),
    ]


def test_a_line_that_only_moves_belongs_to_the_header_above_it() -> None:
    before = f"{IMPORTED}rank = dist.get_rank()\nprint(x)\n"
    after = f"{IMPORTED}rank = dist.get_rank()\nif rank == 0:\n    print(x)\n"
    (found,) = categories.sort(changes.compare(before, after))
    assert [line.category for line in (*found.added, *found.deleted)] == [LAUNCH, LAUNCH, LAUNCH]
    assert found.communication == 1  # the header


def test_only_what_is_new_in_a_line_counts() -> None:
    before = f"{IMPORTED}device = torch.device('cpu')\nautocast = torch.autocast('cuda', torch.bfloat16)\n"
    after = before.replace("'cuda'", "device.type")
    (found,) = categories.sort(changes.compare(before, after))
    assert [line.category for line in (*found.added, *found.deleted)] == [DEVICE, DEVICE]


def test_imports_of_communication_are_communication_and_those_of_sharding_are_not() -> None:
    after = (
        "import torch.distributed as dist\nfrom torch.distributed.fsdp import fully_shard\n"
        "from jax.sharding import Mesh\nimport os\nfrom torch.distributed import all_reduce\n"
    )
    assert lines("", after) == [(IMPORTS, True), (IMPORTS, False), (IMPORTS, False), (IMPORTS, False), (IMPORTS, True)]


def test_a_name_of_the_script_that_is_called_like_an_api_is_not_one() -> None:
    before = "def all_reduce(x): ...\n"
    assert lines(before, f"{before}all_reduce(loss)\ndist.barrier()\n") == [(OTHER, False), (OTHER, False)]


def test_every_line_is_counted_once() -> None:
    found = categories.sort(
        changes.compare_files(WORKLOADS / "digits/torch/train.py", WORKLOADS / "digits/torch/ddp.py")
    )
    total = categories.total(found)
    assert sum(total.values()) == sum(len(each.added) + len(each.deleted) for each in found)
    assert list(total) == [name for name in CATEGORIES if name in total]
    assert categories.communication(found) == sum(each.communication for each in found) > 0


def test_shipped_jax_ports_have_no_communication_code() -> None:
    for port in WORKLOADS.glob("*/jax/sharded.py"):
        found = categories.sort(changes.compare_files(port.with_name("train.py"), port))
        assert categories.communication(found) == 0


def test_the_table_names_only_known_categories() -> None:
    assert {*apis.API.values(), *apis.METHODS.values(), *apis.ENVIRONMENT.values()} <= set(CATEGORIES)
