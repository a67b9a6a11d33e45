"""The frameworks' API names, each in one category of changes: the table that says what a changed line is for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

IMPORTS = "imports"
COLLECTIVES = "collectives and barriers"
SHARDING = "data sharding"
LAUNCH = "process group and launch"
WRAPPING = "model wrapping and sharding annotations"
CHECKPOINT = "checkpoint"
SEEDING = "seeding"
PRECISION = "precision"
SYNC = "step and sync marking"
DEVICE = "device placement"
CONTROL = "control-flow rewrite"
OTHER = "other"
CATEGORIES = (
    IMPORTS, COLLECTIVES, SHARDING, LAUNCH, WRAPPING, CHECKPOINT, SEEDING, PRECISION, SYNC, DEVICE, CONTROL, OTHER,
)  # fmt: skip
"""In the order of precedence."""
COMMUNICATION = frozenset({COLLECTIVES, LAUNCH})
"""A line is communication code if it touches a name of these, whatever its own category is."""


def _names(category: str, prefix: str, names: str = "") -> dict[str, str]:
    return {f"{prefix}.{name}" if prefix else name: category for name in names.split()} or {prefix: category}


# By dotted name; the longest one that begins a name decides. Names as the frameworks' documentation has them.
API: Mapping[str, str] = {
    # --- torch.distributed ---
    **_names(LAUNCH, "torch.distributed"),
    **_names(
        COLLECTIVES,
        "torch.distributed",
        "all_reduce all_reduce_coalesced all_gather all_gather_into_tensor all_gather_object all_gather_coalesced"
        " all_to_all all_to_all_single barrier monitored_barrier batch_isend_irecv broadcast broadcast_object_list"
        " gather gather_object irecv isend recv recv_object_list reduce reduce_op reduce_scatter"
        " reduce_scatter_tensor scatter scatter_object_list send send_object_list P2POp ReduceOp Work"
        " nn.functional nn.all_reduce nn.all_gather _functional_collectives",
    ),
    **_names(
        WRAPPING,
        "torch.distributed",
        "fsdp _composable.fsdp _composable.replicate tensor tensor.parallel pipelining device_mesh DeviceMesh"
        " init_device_mesh algorithms.ddp_comm_hooks algorithms.join optim.ZeroRedundancyOptimizer _tensor",
    ),
    **_names(CHECKPOINT, "torch.distributed", "checkpoint fsdp.StateDictType fsdp.FullStateDictConfig"),
    **_names(WRAPPING, "torch.nn.parallel"),
    **_names(WRAPPING, "torch.nn", "DataParallel SyncBatchNorm"),
    **_names(SHARDING, "torch.utils.data", "distributed DistributedSampler"),
    **_names(LAUNCH, "torch", "multiprocessing.spawn multiprocessing.start_processes distributed.launch"),
    # --- torch ---
    **_names(DEVICE, "torch", "device accelerator cuda xpu mps mtia cpu get_default_device set_default_device Stream"),
    **_names(DEVICE, "torch.backends", "mps cuda"),
    **_names(SYNC, "torch", "cuda.synchronize accelerator.synchronize xpu.synchronize mps.synchronize"),
    **_names(SYNC, "torch", "cuda.Event Event cuda.stream cuda.graph cuda.CUDAGraph compiler cuda.current_stream"),
    **_names(
        SEEDING,
        "torch",
        "manual_seed seed initial_seed Generator random get_rng_state set_rng_state default_generator"
        " cuda.manual_seed cuda.manual_seed_all cuda.set_rng_state cuda.get_rng_state xpu.manual_seed mps.manual_seed"
        " use_deterministic_algorithms backends.cudnn.deterministic backends.cudnn.benchmark",
    ),
    **_names(
        PRECISION,
        "torch",
        "autocast amp cuda.amp float64 float32 float16 bfloat16 half double float float8_e4m3fn float8_e5m2"
        " set_default_dtype get_default_dtype set_float32_matmul_precision get_float32_matmul_precision finfo"
        " backends.cuda.matmul backends.cudnn.allow_tf32 backends.fp32_precision cuda.is_bf16_supported",
    ),
    **_names(CHECKPOINT, "torch", "save load serialization"),
    **_names(CONTROL, "torch", "cond while_loop where ops.higher_order _higher_order_ops"),
    # --- torch_xla ---
    **_names(DEVICE, "torch_xla", "device devices real_devices device_count xla_device core.xla_model runtime"),
    **_names(
        SYNC,
        "torch_xla",
        "sync step wait_device_ops core.xla_model.mark_step core.xla_model.wait_device_ops compile"
        " core.xla_model.add_step_closure core.xla_model.optimizer_step",
    ),
    **_names(
        LAUNCH,
        "torch_xla",
        "launch distributed core.xla_model.get_ordinal core.xla_model.get_local_ordinal core.xla_model.xrt_world_size"
        " core.xla_model.is_master_ordinal runtime.global_ordinal runtime.local_ordinal runtime.world_size"
        " runtime.process_index runtime.process_count core.xla_model.master_print",
    ),
    **_names(
        COLLECTIVES,
        "torch_xla.core.xla_model",
        "all_reduce all_gather all_to_all reduce_scatter rendezvous mesh_reduce reduce_gradients collective_permute"
        " broadcast_master_param collective_broadcast REDUCE_SUM",
    ),
    **_names(SHARDING, "torch_xla.distributed", "parallel_loader spmd.ShardingSpec"),
    **_names(WRAPPING, "torch_xla.distributed", "fsdp spmd spmd.mark_sharding spmd.Mesh xla_sharding"),
    **_names(WRAPPING, "torch_xla.experimental", "spmd_fully_sharded_data_parallel xla_sharding"),
    **_names(WRAPPING, "torch_xla.runtime", "use_spmd is_spmd"),
    **_names(SEEDING, "torch_xla", "manual_seed core.xla_model.set_rng_state core.xla_model.get_rng_state"),
    **_names(CHECKPOINT, "torch_xla", "core.xla_model.save utils.serialization experimental.distributed_checkpoint"),
    **_names(PRECISION, "torch_xla", "amp backends.set_mat_mul_precision"),
    # --- jax ---
    **_names(LAUNCH, "jax", "distributed process_index process_count process_indices host_id host_count"),
    **_names(LAUNCH, "jax.lax", "axis_index axis_size"),
    **_names(
        COLLECTIVES,
        "jax.lax",
        "psum pmean pmax pmin psum_scatter all_gather all_to_all ppermute pshuffle pswapaxes pbroadcast pvary pcast"
        " ragged_all_to_all",
    ),
    **_names(
        COLLECTIVES,
        "jax.experimental.multihost_utils",
        "sync_global_devices broadcast_one_to_all process_allgather assert_equal reached_preemption_sync_point",
    ),
    **_names(SHARDING, "jax.experimental.multihost_utils"),
    **_names(
        SHARDING,
        "jax",
        "make_array_from_process_local_data make_array_from_callback make_array_from_single_device_arrays"
        " device_put_sharded device_put_replicated",
    ),
    **_names(
        WRAPPING,
        "jax",
        "sharding make_mesh set_mesh use_mesh pmap shard_map P NamedSharding lax.with_sharding_constraint reshard"
        " lax.pcast experimental.shard_map experimental.mesh_utils experimental.pjit experimental.custom_partitioning"
        " experimental.maps interpreters.pxla",
    ),
    **_names(DEVICE, "jax", "device_put devices local_devices device_count local_device_count default_device Device"),
    **_names(DEVICE, "jax", "device_get default_backend config.jax_platforms config.jax_default_device"),
    **_names(SYNC, "jax", "block_until_ready effects_barrier"),
    **_names(SEEDING, "jax", "random"),
    **_names(
        PRECISION,
        "jax",
        "default_matmul_precision lax.Precision lax.DotAlgorithmPreset enable_x64 experimental.enable_x64"
        " lax.convert_element_type config.jax_enable_x64 config.jax_default_matmul_precision lax.reduce_precision",
    ),
    **_names(PRECISION, "jax.numpy", "float64 float32 float16 bfloat16 finfo float8_e4m3fn float8_e5m2"),
    **_names(
        CONTROL,
        "jax",
        "lax.cond lax.switch lax.scan lax.map lax.fori_loop lax.while_loop lax.associative_scan lax.select"
        " numpy.where vmap experimental.checkify",
    ),
    **_names(CHECKPOINT, "orbax"),
    **_names(CHECKPOINT, "equinox", "tree_serialise_leaves tree_deserialise_leaves"),
    **_names(WRAPPING, "equinox", "filter_shard filter_pmap"),
    **_names(CHECKPOINT, "flax", "training.checkpoints serialization"),
    **_names(WRAPPING, "flax", "linen.with_partitioning linen.with_logical_constraint nnx.with_partitioning jax_utils"),
    **_names(WRAPPING, "flax.nnx", "with_sharding_constraint get_partition_spec pmap shard_map"),
    **_names(SEEDING, "flax.nnx", "Rngs RngStream"),
    **_names(PRECISION, "optax", "apply_if_finite"),
    **_names(CONTROL, "optax", "MultiSteps conditionally_transform"),
    # --- around them ---
    **_names(SEEDING, "numpy.random"),
    **_names(SEEDING, "random", "seed Random"),
    **_names(PRECISION, "ml_dtypes"),
    **_names(LAUNCH, "mpi4py"),
    **_names(WRAPPING, "deepspeed"),
    **_names(WRAPPING, "accelerate.Accelerator"),
}

METHODS: Mapping[str, str] = {
    **_names(DEVICE, "", "cuda cpu xpu mps npu is_cuda get_device to_empty pin_memory addressable_shards"),
    **_names(SYNC, "", "block_until_ready synchronize mark_step"),
    **_names(PRECISION, "", "bfloat16 half float double astype"),
    **_names(CHECKPOINT, "", "state_dict load_state_dict"),
    **_names(SHARDING, "", "set_epoch"),
    **_names(WRAPPING, "", "no_sync register_comm_hook set_requires_gradient_sync"),
    **_names(SEEDING, "", "manual_seed"),
}
"""Of a method, whose object's type is not known, where its last name says enough."""

ENVIRONMENT: Mapping[str, str] = {
    **_names(LAUNCH, "", "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT"),
    **_names(LAUNCH, "", "SLURM_PROCID SLURM_LOCALID SLURM_NTASKS SLURM_NODEID OMPI_COMM_WORLD_RANK"),
    **_names(LAUNCH, "", "JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID COORDINATOR_ADDRESS"),
    **_names(DEVICE, "", "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES JAX_PLATFORMS PJRT_DEVICE"),
    **_names(DEVICE, "", "XLA_FLAGS XLA_PYTHON_CLIENT_PREALLOCATE TPU_VISIBLE_CHIPS XLA_PYTHON_CLIENT_MEM_FRACTION"),
    **_names(PRECISION, "", "XLA_USE_BF16 NVIDIA_TF32_OVERRIDE JAX_ENABLE_X64 JAX_DEFAULT_MATMUL_PRECISION"),
    **_names(SEEDING, "", "CUBLAS_WORKSPACE_CONFIG PYTHONHASHSEED"),
    **_names(LAUNCH, "", "NCCL_DEBUG NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NCCL_IB_DISABLE"),
}

KEPT = frozenset(
    {
        **_names("", "torch", "device accelerator cuda Generator autocast amp"),
        **_names("", "torch.utils.data", "DistributedSampler distributed"),
        **_names(
            "",
            "torch.distributed",
            "get_rank get_world_size get_node_local_rank new_group group is_initialized is_available"
            " get_default_backend_for_device device_mesh init_device_mesh DeviceMesh tensor.Shard tensor.Replicate",
        ),
        **_names("", "torch_xla", "device runtime distributed.spmd.Mesh"),
        **_names("", "torch_xla.core.xla_model", "xla_device get_ordinal xrt_world_size"),
        **_names("", "jax", "sharding make_mesh NamedSharding P process_index process_count lax.axis_index"),
        **_names("", "jax", "devices local_devices device_count local_device_count"),
    }
)
"""What a script keeps under a name of its own, so that the name stands for it from there on. A model or a batch that
went through an API is not among them: every line would touch it."""


def longest(table: Iterable[str], name: str) -> str | None:
    """The longest entry that a dotted name is, or begins with."""
    while name:
        if name in table:
            return name
        name = name.rpartition(".")[0]
    return None


def category_of(name: str) -> str | None:
    """The category of a resolved dotted name; None for one that the table does not have."""
    if name.startswith("environ:"):
        return ENVIRONMENT.get(name.removeprefix("environ:"))
    if name.startswith("."):
        return METHODS.get(name[1:])
    found = longest(API, name)
    return API[found] if found else None
