"""Wordings that cannot be provoked without the hardware, what must not be recognised, and signatures."""

from __future__ import annotations

from typing import Any

import pytest

from matrix.failures import CAUSES, signature
from matrix.failures.recognise import recognise, users
from matrix.failures.wordings import BY_FRAMEWORK, BY_SCRIPT, BY_TYPE, WRAPPERS

ROOT = "/home/me/w"
USER = {"file": "/home/me/w/train.py", "line": 7, "function": "main", "module": "__main__"}


def link(kind: str, message: str, raised: bool = False, **more: Any) -> dict[str, Any]:
    """An exception as the worker tells it: C code called in line 7 raised it, or a `raise` that stands there."""
    return {"type": kind, "bases": [kind, "Exception"], "message": message, "frames": [USER], "raised": raised, **more}


# As torch 2.13 (CUDA, ROCm, MPS, XLA) and JAX 0.10 (CUDA, ROCm, TPU) word them.
WORDINGS = [
    ("out-of-memory-device", "torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a"),
    ("out-of-memory-device", "torch.OutOfMemoryError", "HIP out of memory. Tried to allocate 20.00 GiB."),
    ("out-of-memory-device", "RuntimeError", "CUDA error: out of memory"),
    (
        "out-of-memory-device",
        "RuntimeError",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    ("out-of-memory-device", "RuntimeError", "MPS backend out of memory (MPS allocated: 9.05 GB)"),
    (
        "out-of-memory-device",
        "jax.errors.JaxRuntimeError",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 42949672960 bytes.",
    ),
    (
        "out-of-memory-device",
        "jax.errors.JaxRuntimeError",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20G of 15G",
    ),
    (
        "out-of-memory-host",
        "jax.errors.JaxRuntimeError",
        "RESOURCE_EXHAUSTED: Out of memory allocating 40000000000 bytes.",
    ),
    (
        "out-of-memory-host",
        "RuntimeError",
        "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's workers are "
        "out of shared memory.",
    ),
    ("out-of-memory-host", "OSError", "[Errno 12] Cannot allocate memory"),
    (
        "missing-device",
        "RuntimeError",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    ),
    ("missing-device", "RuntimeError", "No CUDA GPUs are available"),
    ("missing-device", "RuntimeError", "No HIP GPUs are available"),
    ("missing-device", "torch.AcceleratorError", "CUDA error: invalid device ordinal"),
    ("missing-device", "torch.AcceleratorError", "HIP error: invalid device ordinal"),
    ("missing-device", "RuntimeError", "CUDA error: no CUDA-capable device is detected"),
    (
        "missing-device",
        "RuntimeError",
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
    ),
    ("missing-device", "ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
    (
        "missing-device",
        "RuntimeError",
        "Unable to initialize backend 'cuda': no supported devices found for platform CUDA",
    ),
    (
        "missing-device",
        "RuntimeError",
        "Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed: No device",
    ),
    (
        "missing-device",
        "ValueError",
        "compiling computation that requires 8 logical devices, but only 1 XLA devices are available (num_replicas=8)",
    ),
    ("broken-install", "RuntimeError", "The NVIDIA driver on your system is too old (found version 11040)."),
    (
        "broken-install",
        "torch.AcceleratorError",
        "CUDA error: no kernel image is available for execution on the device",
    ),
    ("broken-install", "RuntimeError", "hipErrorNoBinaryForGpu: Unable to find code object for all current devices!"),
    ("broken-install", "RuntimeError", "operator torchvision::nms does not exist"),
    ("broken-install", "ImportError", "libcudnn.so.9: cannot open shared object file: No such file or directory"),
    ("broken-install", "ImportError", "/x/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommInitRankScalable"),
    ("broken-install", "jax.errors.JaxRuntimeError", "FAILED_PRECONDITION: DNN library initialization failed."),
    (
        "broken-install",
        "RuntimeError",
        "jaxlib version 0.11.0 is newer than and incompatible with jax version 0.10.2. Please update your jax",
    ),
    (
        "device-mismatch",
        "RuntimeError",
        "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other tensors on cuda:0",
    ),
    (
        "device-mismatch",
        "RuntimeError",
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    ),
    (
        "device-mismatch",
        "RuntimeError",
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    ),
    (
        "device-mismatch",
        "RuntimeError",
        "Input type (torch.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same",
    ),
    ("device-mismatch", "TypeError", "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy"),
    (
        "device-mismatch",
        "RuntimeError",
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    ),
    ("device-mismatch", "RuntimeError", "Expected a 'cuda' device type for generator but found 'cpu'"),
    ("device-mismatch", "RuntimeError", "Tensors must be CUDA and dense"),
    ("device-mismatch", "RuntimeError", "No backend type associated with device type cpu"),
    ("device-mismatch", "ValueError", "Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"),
    ("device-mismatch", "ValueError", "Received incompatible devices for jitted computation. Got argument x of f with"),
    ("unsupported-dtype", "RuntimeError", "Input type (c10::Half) and bias type (float) should be the same"),
    (
        "unsupported-dtype",
        "RuntimeError",
        "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    ),
    ("unsupported-dtype", "NotImplementedError", "\"addmm_impl_cpu_\" not implemented for 'Half'"),
    (
        "unsupported-dtype",
        "RuntimeError",
        "Current CUDA Device does not support bfloat16. Please switch dtype to float16.",
    ),
    (
        "unsupported-dtype",
        "TypeError",
        "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.",
    ),
    ("unsupported-dtype", "RuntimeError", "expected scalar type Float but found Half"),
    (
        "unsupported-dtype",
        "jax.errors.JaxRuntimeError",
        "UNIMPLEMENTED: While rewriting computation to not contain X64 element types, XLA encountered an HLO",
    ),
    (
        "unsupported-op",
        "NotImplementedError",
        "The operator 'aten::_linalg_eigh' is not currently implemented for the MPS device.",
    ),
    (
        "unsupported-op",
        "NotImplementedError",
        "Could not run 'aten::_foo' with arguments from the 'CUDA' backend. This could be because",
    ),
    ("unsupported-op", "RuntimeError", "FlashAttention only supports Ampere GPUs or newer."),
    ("unsupported-op", "RuntimeError", "No available kernel. Aborting execution."),
    (
        "unsupported-op",
        "RuntimeError",
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_deterministic_",
    ),
    ("unsupported-op", "NotImplementedError", "MLIR translation rule for primitive 'eig' not found for platform cuda"),
    (
        "unsupported-op",
        "jax.errors.JaxRuntimeError",
        "UNIMPLEMENTED: No registered implementation for custom call to lapack_sgeev for platform ROCM",
    ),
    (
        "collective-mismatch",
        "torch.distributed.DistBackendError",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1)",
    ),
    (
        "collective-mismatch",
        "RuntimeError",
        "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete",
    ),
    (
        "collective-mismatch",
        "RuntimeError",
        "DDP expects same model across all ranks, but Rank 0 has 4 params, while rank 1 has inconsistent 6 params.",
    ),
    (
        "rendezvous",
        "torch.distributed.DistNetworkError",
        "The client socket has timed out after 60000ms while trying to connect to (node-0, 29500).",
    ),
    (
        "rendezvous",
        "torch.distributed.DistNetworkError",
        "The client socket has failed to connect to any network address of (node-0, 29500). errno: 111 - Connection",
    ),
    (
        "rendezvous",
        "torch.distributed.DistStoreError",
        "Timed out after 31 seconds waiting for clients. 1/2 clients joined.",
    ),
    (
        "rendezvous",
        "torch.distributed.DistNetworkError",
        "The server socket has failed to listen on any local network address. port: 29500, name: EADDRINUSE",
    ),
    (
        "rendezvous",
        "jax.errors.JaxRuntimeError",
        "DEADLINE_EXCEEDED: Barrier timed out. Id: PjRT_Client_Connect. This usually happens because a task triggered",
    ),
    ("network", "OSError", "We couldn't connect to 'https://huggingface.co' to load the files"),
    ("compile-error", "triton.compiler.errors.CompilationError", "at 3:4: tl.dot(a, b)"),
    ("compile-error", "torch._inductor.exc.CppCompileError", "C++ compile error"),
    ("compile-error", "torch._dynamo.exc.BackendCompilerFailed", "backend='inductor' raised: KeyError: 'x'"),
    (
        "compile-error",
        "jax.errors.JaxRuntimeError",
        "INTERNAL: Mosaic failed to compile TPU kernel: unsupported layout",
    ),
    (
        "compile-error",
        "jax.errors.JaxRuntimeError",
        "INTERNAL: ptxas exited with non-zero error code 65280: ptxas fatal",
    ),
    ("crash", "RuntimeError", "DataLoader worker (pid 12) is killed by signal: Segmentation fault."),
    ("rank-died", "RuntimeError", "DataLoader worker (pid 12) is killed by signal: Killed."),
    ("removed-api", "AttributeError", "jax.core.Primitive was removed in JAX v0.9.0; use jax.extend.core.Primitive"),
    ("exception", "RuntimeError", "CUDA error: device-side assert triggered"),
    ("exception", "IndexError", "index out of range in self"),
    ("exception", "FileNotFoundError", "[Errno 2] No such file or directory: 'no CUDA GPUs are available'"),
    ("exception", "KeyError", "'Expected all tensors to be on the same device'"),
]


@pytest.mark.parametrize(("cause", "kind", "message"), WORDINGS, ids=[f"{c}-{m[:50]}" for c, _, m in WORDINGS])
def test_what_frameworks_say_of_devices_that_are_not_here_is_recognised(cause: str, kind: str, message: str) -> None:
    found = recognise([link(kind, message)], ROOT)
    assert (found.cause, found.frame) == (cause, ("train.py", 7))


@pytest.mark.parametrize("message", [m for c, k, m in WORDINGS if k in ("RuntimeError", "ValueError")])
def test_the_same_words_raised_by_the_script_itself_are_its_own(message: str) -> None:
    cause = recognise([link("RuntimeError", message, raised=True)], ROOT).cause
    assert cause == "exception" or (cause == "missing-device" and ("GPU" in message or "CUDA" in message))


def test_every_rule_names_a_cause_of_the_table() -> None:
    assert {rule.cause for table in (BY_TYPE, BY_FRAMEWORK, BY_SCRIPT, WRAPPERS) for rule in table} <= set(CAUSES)


def test_an_accident_in_a_handler_hides_what_was_handled() -> None:
    handled = link("RuntimeError", "No CUDA GPUs are available", relation="context")
    assert recognise([link("NameError", "name 'x' is not defined"), handled], ROOT).cause == "exception"
    assert recognise([link("Trouble", "set up failed", raised=True), handled], ROOT).cause == "missing-device"


def test_the_message_has_neither_native_stacks_nor_hints() -> None:
    text = "The server socket has failed: EADDRINUSE\nException raised from makeWithPort at x.cpp:1:\nframe #0: 0x7f"
    found = recognise([link("torch.distributed.DistNetworkError", text)], ROOT)
    assert found.message == "torch.distributed.DistNetworkError: The server socket has failed: EADDRINUSE"


def test_the_line_is_taken_from_a_stack_that_the_message_quotes() -> None:
    text = 'Unsupported\n\nfrom user code:\n   File "/home/me/w/model.py", line 30, in forward\n    y = x.item()\n'
    found = recognise([link("torch._dynamo.exc.Unsupported", text)], ROOT)
    assert (found.cause, found.frame) == ("compile-error", ("model.py", 30))


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("/home/me/w/torch/train.py", "torch/train.py"),
        ("/home/me/w/.venv/lib/python3.11/site-packages/torch/nn.py", None),
        ("/home/me/other/train.py", None),
        ("<string>", None),
    ],
)
def test_the_users_code_is_what_lies_in_the_folder_and_was_not_installed(file: str, place: str | None) -> None:
    assert users(file, ROOT) == place


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "mat1 and mat2 shapes cannot be multiplied (3x4 and 3x4)",
            "mat1 and mat2 shapes cannot be multiplied (64x8 and 9x1)",
        ),
        ("<object at 0x7f00aa>", "<object at 0x11>"),
        ("[Errno 2] No such file: '/tmp/a/run-1/x.pt'", "[Errno 2] No such file: '/home/b/x.pt'"),
        ("got shape (3, 4)", "got shape (3, 4, 5)"),
        ("took 1.5e-3 s", "took 20 s"),
        ("commit 4f2a9c01d7", "commit 99aa00bb11"),
    ],
)
def test_numbers_folders_and_addresses_do_not_tell_failures_apart(one: str, other: str) -> None:
    assert signature("exception", one, "train.py:3") == signature("exception", other, "train.py:3")


def test_names_lines_and_causes_tell_failures_apart() -> None:
    known = [
        signature("exception", "no kernel for float16", "train.py:3"),
        signature("exception", "no kernel for float64", "train.py:3"),
        signature("exception", "no kernel for conv2d", "train.py:3"),
        signature("exception", "no kernel for conv3d", "train.py:3"),
        signature("exception", "no kernel for float16", "train.py:4"),
        signature("unsupported-op", "no kernel for float16", "train.py:3"),
        signature("exception", "and/or is no path", "train.py:3"),
        signature("exception", "or is no path", "train.py:3"),
    ]
    assert len(set(known)) == len(known)


def test_a_huge_message_is_recognised_and_signed_at_once() -> None:
    text = "No CUDA GPUs are available " + "/x" * 100_000
    assert recognise([link("RuntimeError", text)], ROOT).cause == "missing-device"
    assert len(signature("missing-device", text, None)) == 12
