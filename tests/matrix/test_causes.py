"""Every cause that is not silent is provoked here by real scripts on the real frameworks.

Most exceptions are raised many to a process: a script calls one case after the other and writes down what
`inside/worker.py` tells of each. The expected line is the last one of the case, or the one marked `# here`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from matrix import backends, environments, judge
from matrix.failures import CAUSES
from matrix.failures.recognise import Recognised, recognise
from matrix.journal import AttemptRecord, Failure
from tests.matrix.harness import Bench, digits

INSIDE = Path(__file__).parents[2] / "matrix" / "inside"

SILENT = {
    "wrong-device", "idle-devices", "replicated-work", "not-reduced", "not-sharded", "not-compiled", "wrong-result",
    "not-finite", "nondeterministic", "no-progress", "incomplete",
}  # fmt: skip
NEEDS_THE_DEVICE = {"out-of-memory-device"}  # its wordings are in test_failures.py

PROVOKED: set[str] = set()
Test = TypeVar("Test", bound=Callable[..., None])


def provokes(*causes: str) -> Callable[[Test], Test]:
    PROVOKED.update(causes)
    return lambda test: test


def test_every_cause_of_the_table_is_provoked_and_no_other() -> None:
    catalogued = {cause for table in (TORCH, JAX, COMPILED, PLAIN) for cause, _ in table}
    whole = {cause for cause, *_ in CELLS}
    assert (catalogued | whole | PROVOKED | NEEDS_THE_DEVICE) - SILENT == set(CAUSES) - SILENT


# --- many cases in one process -------------------------------------------------------------------------------------

TORCH_BEGIN = """
    import torch, torch.nn as nn, torch.nn.functional as F, numpy as np
    a = torch.ones(3, 4)
    meta = torch.ones(3, 4, device="meta")
"""
TORCH: list[tuple[str, str]] = [
    ("missing-package", "import flash_attn_that_nobody_has"),
    ("missing-package", "from torch.utils.tensorboard import SummaryWriter"),
    (
        "missing-package",
        """
        try:
            import apex_that_nobody_has
        except ImportError as error:  # the reason stands in the cause
            raise RuntimeError("install apex") from error
        """.replace("import apex_that_nobody_has", "import apex_that_nobody_has  # here"),
    ),
    (
        "missing-package",
        """
        try:
            import apex_that_nobody_has
        except ImportError:
            raise ImportError("please run: pip install apex")
        """,
    ),
    ("missing-device", "torch.ones(1).cuda()"),
    ("missing-device", "nn.Linear(2, 2).to('cuda:1')"),
    ("missing-device", "torch.ones(1, device='mps')"),
    ("missing-device", "torch.ones(1, device='xla')"),
    ("missing-device", "torch.ones(1, device='xpu')"),
    ("missing-device", "torch.ones(1, device='hpu')"),
    ("missing-device", "torch.ones(1, device='gpu')"),
    ("missing-device", "torch.ones(1, device='tpu:0')"),
    ("missing-device", "torch.cuda.set_device(0)"),
    ("missing-device", "torch.cuda.get_device_properties(0)"),
    ("missing-device", "torch.cuda.Stream()"),
    ("missing-device", "torch.cuda.Event().record()"),
    ("missing-device", "torch.cuda.CUDAGraph()"),
    ("missing-device", "torch.Generator('cuda')"),
    ("missing-device", "torch.accelerator.synchronize()"),
    ("missing-device", "a.pin_memory()"),
    (
        "missing-device",
        "torch.distributed.init_process_group('nccl', rank=0, world_size=1, store=torch.distributed.HashStore())",
    ),
    ("missing-device", "assert torch.cuda.is_available()"),
    ("missing-device", "assert torch.cuda.is_available(), 'CUDA is not available'"),
    ("missing-device", "raise RuntimeError('this script requires a GPU')"),
    ("unsupported-op", "torch.eye(3).to_sparse().cumsum(0)"),
    ("unsupported-op", "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).sort()"),
    ("unsupported-op", "torch.fft.fft(a.to_mkldnn())"),
    ("unsupported-op", "q = torch.randn(1, 1, 4, 4)\n"
     "torch._scaled_dot_product_efficient_attention(q, q, q, None, False)"),
    ("unsupported-dtype", "a @ torch.ones(4, 4, dtype=torch.float64)"),
    ("unsupported-dtype", "nn.Linear(4, 4)(a.double())"),
    ("unsupported-dtype", "nn.Conv2d(1, 1, 1)(torch.randn(1, 1, 4, 4).half())"),
    ("unsupported-dtype", "nn.Embedding(3, 3)(torch.tensor([1.0]))"),
    ("unsupported-dtype", "F.cross_entropy(a, torch.zeros(3, dtype=torch.int32))"),
    ("unsupported-dtype", "torch.ones(3, dtype=torch.long).mean()"),
    ("unsupported-dtype", "torch.ones(3, dtype=torch.long, requires_grad=True)"),
    ("unsupported-dtype", "torch.linalg.inv(torch.eye(2).half())"),
    ("unsupported-dtype", "torch.ones(3).to(torch.float8_e4m3fn) + torch.ones(3).to(torch.float8_e4m3fn)"),
    ("unsupported-dtype", "torch.ones(2, dtype=torch.long).add_(1.5)"),
    ("unsupported-dtype", "a.bfloat16().numpy()"),
    ("unsupported-dtype", "torch.fft.fft(torch.ones(4).half())"),
    ("unsupported-dtype", "nn.LSTM(4, 2)(a.double())"),
    ("unsupported-dtype", "~a"),
    ("device-mismatch", "a + meta"),
    ("device-mismatch", "nn.Linear(4, 4, device='meta')(a)"),
    ("device-mismatch", "torch.cat([a, meta])"),
    ("device-mismatch", "F.cross_entropy(a, torch.zeros(3, dtype=torch.long, device='meta'))"),
    ("device-mismatch", "a.grad = meta"),
    ("device-mismatch", "meta.numpy()"),
    ("type", "nn.Linear(4, 4)(np.ones((3, 4)))"),
    ("type", "F.relu(None)"),
    ("type", "torch.matmul(a, 3)"),
    ("type", "torch.optim.SGD([3], 0.1)"),
    ("type", "torch.tensor([1.0, None])"),
    ("type", "torch.optim.lr_scheduler.StepLR(torch.optim.SGD([a], 0.1), 1, verbose=True)"),
    ("type", "raise TypeError('the config must be a mapping')"),
    ("shape", "a @ a"),
    ("shape", "a + torch.ones(3, 5)"),
    ("shape", "nn.Sequential(nn.Linear(5, 2))(a)"),
    ("shape", "nn.Conv2d(3, 4, 3)(torch.ones(1, 4, 8, 8))"),
    ("shape", "torch.cat([a, torch.ones(3, 5)])"),
    ("shape", "torch.stack([a, torch.ones(2, 2)])"),
    ("shape", "a.view(5, 5)"),
    ("shape", "F.cross_entropy(a, torch.zeros(4, dtype=torch.long))"),
    ("shape", "F.binary_cross_entropy(a.sigmoid(), torch.rand(3, 5))"),
    ("shape", "a.sum(5)"),
    ("shape", "nn.BatchNorm1d(4)(torch.randn(1, 4))"),
    ("shape", "nn.LayerNorm(5)(a)"),
    ("shape", "nn.Linear(2, 2).load_state_dict(nn.Linear(3, 2).state_dict())"),
    ("shape", "torch.einsum('ij,jk->ik', a, a)"),
    ("shape", "nn.MultiheadAttention(5, 2)"),
    ("shape", "torch.linalg.solve(a, a)"),
    ("shape", "torch.tensor([[1, 2], [3]])"),
    ("shape", "np.ones((3, 4)) @ np.ones((3, 4))"),
    ("shape", "np.ones(3) + np.ones(4)"),
    ("removed-api", "torch.symeig(a)"),
    ("removed-api", "torch.gels(a, a)"),
    ("removed-api", "torch._six.string_classes"),
    ("removed-api", "from torch.distributed.pipeline.sync import Pipe"),
    ("removed-api", "from torch import zeroes"),
    ("removed-api", "a.lstsq_of_old()"),
    ("removed-api", "torch.stft(torch.ones(100), 10)"),
    ("removed-api", "np.float(1)"),
    ("out-of-memory-host", "torch.empty(10**13)"),
    ("out-of-memory-host", "np.empty(10**14)"),
    ("out-of-memory-host", "raise MemoryError"),
    ("rendezvous", "torch.distributed.init_process_group('gloo')"),
    (
        "rendezvous",
        "import datetime\n"
        "torch.distributed.init_process_group('gloo', init_method='tcp://127.0.0.1:' + free(), rank=0,"
        " world_size=2, timeout=datetime.timedelta(seconds=1))",
    ),
    (
        "rendezvous",
        "import datetime\n"
        "torch.distributed.TCPStore('127.0.0.1', int(free()), 2, False, timeout=datetime.timedelta(seconds=1))",
    ),
    ("rendezvous", "busy = taken()\ntorch.distributed.TCPStore('127.0.0.1', busy.getsockname()[1], 1, True)"),
    (
        "exception",
        """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, index):
                raise LookupError("no such sample")  # here
        next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))
        """,
    ),
    (
        "shape",
        """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, index):
                return torch.ones(index + 1)
        next(iter(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1)))
        """,
    ),
    ("exception", "torch.ones(3).sum().backward()"),
    ("exception", "nn.Embedding(3, 3)(torch.tensor([7]))"),
    ("exception", "torch.load('nothing.pt')"),
    ("not-finite", "with torch.autograd.detect_anomaly():\n"
     "    torch.sqrt(torch.zeros(1, requires_grad=True) * 0 - 1).sum().backward()"),
]  # fmt: skip

JAX_BEGIN = """
    import jax, jax.numpy as jnp, numpy as np
    from jax import lax
    from jax.sharding import NamedSharding, PartitionSpec as P
    a = jnp.ones((3, 4))
"""
JAX: list[tuple[str, str]] = [
    ("missing-package", "import flax_that_nobody_has"),
    ("missing-device", "jax.devices('gpu')"),
    ("missing-device", "jax.devices('cuda')"),
    ("missing-device", "jax.devices('tpu')"),
    ("missing-device", "jax.jit(lambda x: x, backend='gpu')(a)"),
    ("missing-device", "jax.make_mesh((4,), ('data',))"),
    ("missing-device", "assert jax.device_count() == 8"),
    ("missing-device", "assert jax.default_backend() == 'gpu', 'no GPU found'"),
    ("unsupported-op", "x = jnp.ones((1, 3, 4))\ny = jnp.ones((1, 3, 1))\njax.nn.scaled_matmul(x, x, y, y)"),
    (
        "unsupported-op",
        "q = jnp.ones((1, 4, 1, 8), jnp.bfloat16)\njax.nn.dot_product_attention(q, q, q, implementation='cudnn')",
    ),
    (
        "unsupported-op",
        """
        from jax.experimental import pallas as pl
        def kernel(x, o):
            o[...] = x[...]
        pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((3,), jnp.float32))(jnp.ones(3))
        """,
    ),
    ("unsupported-op", "jax.ffi.ffi_call('nobody', jax.ShapeDtypeStruct((3,), jnp.float32))(jnp.ones(3))"),
    ("unsupported-dtype", "lax.add(jnp.ones(3), jnp.ones(3, int))"),
    ("unsupported-dtype", "jnp.ones(3, int) & jnp.ones(3)"),
    ("unsupported-dtype", "jnp.linalg.cholesky(jnp.eye(3, dtype=jnp.bfloat16))"),
    (
        "unsupported-dtype",
        """
        @jax.jit
        def f(x):
            y = x + 1
            return lax.linalg.cholesky(y)  # here
        f(jnp.eye(3, dtype=jnp.float16))
        """,
    ),
    ("unsupported-dtype", "jnp.ones(3, jnp.float8_e4m3fn) + jnp.ones(3)"),
    ("unsupported-dtype", "jax.grad(lambda x: x * 1.0)(3)"),
    ("unsupported-dtype", "-jnp.ones(3, bool)"),
    (
        "device-mismatch",
        "x, y = (jax.device_put(a, device) for device in jax.devices()[:2])\njax.jit(lambda x, y: x + y)(x, y)",
    ),
    ("device-mismatch", "x, y = (jax.device_put(a, device) for device in jax.devices()[:2])\nx + y"),
    ("type", "jnp.sum([1, 2])"),
    ("type", "a + None"),
    ("type", "jnp.sin('x')"),
    ("type", "a[0] = 1"),
    ("type", "jax.jit(lambda x: object())(a)"),
    ("type", "jax.jit(lambda x, n: x, static_argnums=1)(a, np.ones(3))"),
    ("shape", "a @ a"),
    ("shape", "a + jnp.ones((3, 5))"),
    ("shape", "a.reshape(5, 5)"),
    ("shape", "jnp.concatenate([a, jnp.ones((2, 2))])"),
    ("shape", "jnp.einsum('ij,jk->ik', a, a)"),
    ("shape", "jax.vmap(lambda x, y: x + y)(jnp.ones(3), jnp.ones(4))"),
    ("shape", "lax.scan(lambda c, x: (c[:1], x), jnp.ones(3), jnp.ones(3))"),
    ("shape", "jax.grad(lambda x: x)(a)"),
    ("shape", "a.at[0].set(jnp.ones(7))"),
    ("shape", "lax.conv(jnp.ones((1, 3, 4, 4)), jnp.ones((1, 2, 3, 3)), (1, 1), 'SAME')"),
    ("shape", "mesh = jax.make_mesh((2,), ('d',))\njax.device_put(jnp.ones(3), NamedSharding(mesh, P('d')))"),
    (
        "shape",
        """
        @jax.jit
        def loss(w, x):
            h = x @ w  # here
            return h.sum()
        jax.value_and_grad(loss)(jnp.ones((5, 2)), a)
        """,
    ),
    (
        "shape",
        """
        import equinox as eqx
        eqx.filter_jit(eqx.nn.Linear(3, 2, key=jax.random.key(0)))(jnp.ones(4))
        """,
    ),
    ("removed-api", "jax.tree_map(lambda x: x, a)"),
    ("removed-api", "jax.xla_computation(lambda x: x)"),
    ("removed-api", "from jax import linear_util"),
    ("removed-api", "from jax.config import config"),
    ("removed-api", "from jax.experimental.maps import xmap"),
    ("removed-api", "jax.ops.index_update(a, 0, 1)"),
    ("removed-api", "jnp.trapz(a)"),
    ("removed-api", "a.device_buffer"),
    ("removed-api", "jax.random.KeyArray"),
    ("compile-error", "jax.jit(lambda x: 1 if x > 0 else 2)(1.0)"),
    ("compile-error", "jax.jit(lambda n: jnp.ones(n))(3)"),
    ("compile-error", "jax.jit(lambda x: x[x > 0])(a)"),
    ("compile-error", "jax.jit(lambda x: np.asarray(x))(a)"),
    ("compile-error", "jax.jit(lambda x: float(x.sum()))(a)"),
    ("compile-error", "jax.jit(lambda n: sum(range(n)))(3)"),
    ("compile-error", "jax.jit(lambda x, n: x[:n])(a, 2)"),
    ("out-of-memory-host", "jnp.ones(10**13)"),
    (
        "exception",
        """
        def broken(x):
            return 1 / 0  # here
        jax.block_until_ready(jax.pure_callback(broken, jax.ShapeDtypeStruct((), jnp.float32), a))
        """,
    ),
    ("exception", "jnp.ones(3).delete() or jax.tree.map(lambda x, y: x, {'a': 1}, {'b': 1})"),
    ("not-finite", "jax.config.update('jax_debug_nans', True)\njnp.log(-1.0)"),
]

COMPILED: list[tuple[str, str]] = [
    (
        "compile-error",
        """
        @torch.compile(fullgraph=True, backend="eager")
        def f(x):
            print("a graph break")  # here
            return x * 2
        f(torch.ones(3))
        """,
    ),
    (
        "compile-error",
        """
        @torch.compile(fullgraph=True, backend="eager")
        def f(x):
            if x.sum() > 2:  # here
                return x
            return x * 2
        f(torch.ones(3))
        """,
    ),
    (
        "compile-error",
        """
        def backend(graph, inputs):
            raise NotImplementedError("this vendor cannot sin")  # here
        torch.compile(torch.sin, backend=backend)(torch.ones(3))
        """,
    ),
    (
        "shape",
        """
        @torch.compile(backend="eager")
        def f(x):
            y = x + 1
            return y @ x  # here
        f(torch.ones(3, 4))
        """,
    ),
    (
        "unsupported-dtype",
        """
        @torch.compile(backend="eager")  # here
        def f(x):  # of a graph that has been compiled torch knows no more than its function
            return x @ x.double()
        f(torch.ones(3, 3))
        """,
    ),
    (
        "exception",
        """
        @torch.compile(backend="eager")
        def f(x):
            if x.shape[0] == 3:
                raise KeyError("no such layer")  # here
            return x
        f(torch.ones(3))
        """,
    ),
    (
        "compile-error",
        """
        torch._inductor.config.cpp.cxx = (None, "/nonexistent")
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
        """,
    ),
]

PLAIN_BEGIN = """
    import json, os, socket, ssl, subprocess, urllib.request
    from pathlib import Path
    import helper
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("never mind")
    class Own(ValueError):
        pass
    class Leaves(SystemExit):
        pass
"""
HELPER = """
    def deeper():
        raise ValueError("from the helper")
    def sized():
        return memoryview(b"abc").cast("I")
"""
PLAIN: list[tuple[str, str]] = [
    ("network", "socket.create_connection(('127.0.0.1', int(free())))"),
    ("network", "urllib.request.urlopen('http://127.0.0.1:' + free())"),
    ("network", "socket.getaddrinfo('no-such-host.invalid', 80)"),
    ("network", "urllib.request.urlopen('http://no-such-host.invalid')"),
    ("network", "quiet = taken()\nsocket.create_connection(quiet.getsockname()).close()\n"
     "urllib.request.urlopen('http://127.0.0.1:%d' % quiet.getsockname()[1], timeout=0.2)"),
    ("exception", "raise ValueError('shape mismatch in config')"),
    ("exception", "raise ValueError('the size of tensor a (3) must match the size of tensor b')"),
    ("exception", "raise RuntimeError('rendezvous of the two plots')"),
    ("exception", "raise RuntimeError('Connection refused by the user')"),
    ("exception", "{}['device']"),
    ("exception", "raise KeyError('No CUDA GPUs are available')"),
    ("exception", "open('cuda/no such device')"),
    ("exception", "raise OSError(28, 'No space left on device')"),
    ("exception", "json.loads('{shape: mismatch}')"),
    ("exception", "b'\\xff'.decode()"),
    ("exception", "int('float16 not implemented')"),
    ("exception", "subprocess.run(['false'], check=True)"),
    ("exception", "os.write(os.pipe()[0], b'x')"),
    ("exception", "undefined_name"),
    ("exception", "'text'.no_such_method"),
    ("exception", "from helper import no_such_name"),
    ("exception", "1 / 0"),
    ("exception", "next(iter(()))"),
    ("exception", "raise Own('of the user: dtype not supported')"),
    ("exception", "raise Broken"),
    ("exception", "raise KeyboardInterrupt"),
    ("exception", "raise Leaves('caught here')"),
    ("exception", "raise ValueError('x' * 10_000_000)"),
    ("exception", "raise ValueError('\\ud800 a lone surrogate')"),
    ("exception", "raise ValueError(b'\\xff\\x00')"),
    ("exception", "helper.sized"[:0] + "assert False, 'sizes must match'"),
    ("exception", "def again():\n    again()  # here\nagain()"),
    ("exception", "try:\n    1 / 0\nexcept ZeroDivisionError:\n    undefined_name"),
    ("type", "len(3)"),
    ("type", "None + 1"),
    ("type", "print(no_such_argument=1)"),
    ("not-finite", "raise FloatingPointError('loss is nan')"),
    ("not-finite", "raise RuntimeError('Loss is nan, stopping')"),
    ("missing-package", "import no_such_package.part"),
    ("missing-package", "import importlib.metadata\nimportlib.metadata.version('no-such-distribution')"),
]  # fmt: skip


class Told:
    """What a catalogue's process told of each case."""

    def __init__(self, folder: Path, begin: str, cases: list[tuple[str, str]], **variables: str):
        self.root = str(folder)
        text = textwrap.dedent(begin) + textwrap.dedent("""
            import socket, sys
            def free():
                with socket.socket() as listener:
                    listener.bind(("127.0.0.1", 0))
                    return str(listener.getsockname()[1])
            def taken():
                listener = socket.socket()
                listener.bind(("127.0.0.1", 0))
                listener.listen()
                return listener
        """)
        self.lines: list[int] = []
        for number, (_, code) in enumerate(cases):
            body = textwrap.dedent(code).strip("\n").splitlines()
            start = text.count("\n") + 2
            marked = [at for at, line in enumerate(body) if line.endswith("# here")]
            self.lines.append(start + (marked[0] if marked else len(body) - 1))
            text += f"def case_{number}():\n" + textwrap.indent("\n".join(body), "    ") + "\n"
        text += textwrap.dedent(f"""
            if __name__ == "__main__":
                import json
                sys.path.append({str(INSIDE)!r})
                import worker
                for number in range({len(cases)}):
                    try:
                        globals()["case_%d" % number]()
                    except BaseException as error:
                        told = worker.describe(error)["chain"]
                    else:
                        told = []
                    with open("told", "a") as file:
                        file.write(json.dumps(told) + "\\n")
        """)
        (folder / "cases.py").write_text(text)
        (folder / "helper.py").write_text(textwrap.dedent(HELPER))
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
            variables.setdefault(name, "")
        environment = {name: value for name, value in {**os.environ, **variables}.items() if value}
        subprocess.run([sys.executable, "cases.py"], cwd=folder, env=environment, timeout=500, capture_output=True)
        self.told = [json.loads(line) for line in (folder / "told").read_text().splitlines()]

    def case(self, number: int) -> tuple[Recognised, int]:
        assert self.told[number], "it raised nothing"
        return recognise(self.told[number], self.root), self.lines[number]


def catalogue(begin: str, cases: list[tuple[str, str]], **variables: str) -> Any:
    @pytest.fixture(scope="module")
    def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
        return Told(tmp_path_factory.mktemp("cases"), begin, cases, **variables)

    return told


torch_told = catalogue(TORCH_BEGIN, TORCH)
jax_told = catalogue(JAX_BEGIN, JAX, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
compiled_told = catalogue(TORCH_BEGIN, COMPILED)
plain_told = catalogue(PLAIN_BEGIN, PLAIN)


def names(cases: list[tuple[str, str]]) -> list[str]:
    return [f"{number}-{code.strip().splitlines()[-1][:40]}" for number, (_, code) in enumerate(cases)]


def check(told: Told, cases: list[tuple[str, str]], number: int) -> None:
    found, line = told.case(number)
    assert (found.cause, found.frame) == (cases[number][0], ("cases.py", line)), found.message


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("number", range(len(TORCH)), ids=names(TORCH))
def test_what_torch_says_is_recognised_with_the_users_line(torch_told: Told, number: int) -> None:
    check(torch_told, TORCH, number)


@pytest.mark.xdist_group("jax")
@pytest.mark.parametrize("number", range(len(JAX)), ids=names(JAX))
def test_what_jax_says_is_recognised_with_the_users_line(jax_told: Told, number: int) -> None:
    check(jax_told, JAX, number)


@pytest.mark.xdist_group("compiled")
@pytest.mark.parametrize("number", range(len(COMPILED)), ids=names(COMPILED))
def test_a_compiler_is_blamed_for_what_it_refuses_not_for_what_the_code_does(compiled_told: Told, number: int) -> None:
    check(compiled_told, COMPILED, number)


@pytest.mark.parametrize("number", range(len(PLAIN)), ids=names(PLAIN))
def test_what_a_script_says_itself_is_not_taken_for_a_frameworks_word(plain_told: Told, number: int) -> None:
    check(plain_told, PLAIN, number)


def test_the_message_is_the_one_that_shows_the_cause(torch_told: Told, jax_told: Told) -> None:
    def message(told: Told, cases: list[tuple[str, str]], word: str) -> str:
        return told.case(next(n for n, (_, code) in enumerate(cases) if word in code))[0].message

    assert message(torch_told, TORCH, "install apex") == "ModuleNotFoundError: No module named 'apex_that_nobody_has'"
    assert message(torch_told, TORCH, "no such sample") == "LookupError: no such sample"
    assert message(jax_told, JAX, "1 / 0") == "ZeroDivisionError: division by zero"
    assert message(jax_told, JAX, "tree_map") == "AttributeError: module 'jax' has no attribute 'tree_map'"


# --- whole cells ---------------------------------------------------------------------------------------------------

POOL = """\
import concurrent.futures
def f(x):
    raise LookupError("in a worker")
with concurrent.futures.ProcessPoolExecutor(1) as pool:
    list(pool.map(f, [1]))
"""
# cause, script, backend, line in train.py (None: none), words of the message
CELLS: list[tuple[str, str, str, int | None, str]] = [
    ("missing-package", "import torch\nimport apex_that_nobody_has\n", "torch", 2, "No module named 'apex_that_"),
    ("missing-device", "import torch\nx = torch.ones(3)\nx.cuda()\n", "torch", 3, "Error: "),
    ("missing-device", "import jax\njax.devices('gpu')\n", "jax", 2, "Unknown backend: 'gpu'"),
    ("rendezvous", "import jax\njax.distributed.initialize()\n", "jax", 2, "coordinator_address should be defined"),
    ("rendezvous", "import jax\njax.distributed.initialize('127.0.0.1:1', 2, 1, initialization_timeout=3)\n",
     "jax", 2,
     "ended by SIGABRT: Terminating process because the JAX distributed service"),
    ("exception", POOL, "torch", 3, "LookupError: in a worker"),
    ("shape", "import jax.numpy as jnp\nx = jnp.ones((3, 4))\nx @ x\n", "jax", 3, "contracting dimensions"),
    ("exception", "def f():\n    raise ValueError('shape mismatch in config')\nf()\n", "torch", 2, "shape mismatch"),
    ("exception", "class Own(Exception):\n    pass\nraise Own('mine')\n", "torch", 3, "__main__.Own: mine"),
    ("exception", "raise ExceptionGroup('many', [KeyError('one'), ValueError('b')])\n", "torch", 1, "KeyError: 'one'"),
    ("exception", "class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E\n", "torch", 4, "raised Zero"),
    ("exception", "raise ValueError('x' * 10_000_000)\n", "torch", 1, "ValueError: xxx"),
    ("exception", "raise ValueError('\\ud800')\n", "torch", 1, "ValueError: "),
    ("exception", "raise ValueError(b'\\xff\\x00')\n", "torch", 1, "ValueError: b'\\xff\\x00'"),
    ("exception", "raise KeyboardInterrupt\n", "torch", 1, "KeyboardInterrupt"),
    ("exception", "def f():\n    f()\nf()\n", "torch", 2, "RecursionError: maximum recursion depth"),
    ("exception", "x = 1\nif x\n    pass\n", "torch", 2, "SyntaxError: expected ':'"),
    ("exception", "x = 1\n    y = 2\n", "torch", 2, "IndentationError: unexpected indent"),
    ("exception", "import broken_helper\n", "torch", 1, "ZeroDivisionError: division by zero"),
    ("exit", "import sys\nsys.exit(3)\n", "torch", 2, "exit code 3"),
    ("exit", "import sys\nprint('last words', file=sys.stderr)\nsys.exit(4)\n", "torch", 3, "exit code 4: last words"),
    ("exit", "import sys\nsys.exit('no data there')\n", "torch", 2, "exit code 1: no data there"),
    ("exit", "class Leaves(SystemExit):\n    pass\nraise Leaves(7)\n", "torch", 3, "exit code 7"),
    ("exit", "import os\nos._exit(3)\n", "torch", None, "exit code 3, without an exception"),
    ("exit", "import argparse\nargparse.ArgumentParser().parse_args(['--no'])\n", "torch", 2, "arguments: --no"),
    ("crash", "import ctypes\ndef f():\n    ctypes.string_at(0)\nf()\n", "torch", 3, "was ended by SIGSEGV"),
    ("crash", "import os\n\nos.abort()\n", "torch", 3, "the process was ended by SIGABRT"),
    ("rank-died", "import os\nos.kill(os.getpid(), 9)\n", "torch", None, "the process was killed (SIGKILL)"),
    ("rank-died", "import os\nos.kill(os.getpid(), 15)\n", "torch", None, "the process was killed (SIGTERM)"),
    ("out-of-memory-host", "import numpy\nnumpy.ones(10**14)\n", "torch", None, "Unable to allocate"),
]  # fmt: skip


def cell(bench: Bench, script: str, backend: str = "torch", launch: str | None = None, **run: Any) -> AttemptRecord:
    """The last attempt of a workload whose only script is this one."""
    baseline = {"file": "train.py", **({"launch": launch} if launch else {})}
    helper = "x = 1\n1 / 0\n"
    bench.workload(
        "w", {"train.py": script, "broken_helper.py": helper}, {backend.split("-")[0]: {"baseline": baseline}}
    )
    return bench.attempts(bench.cell("w", backend, "dp2" if launch else "single", **run))[-1]


def failure(attempt: AttemptRecord) -> Failure:
    assert attempt.failure is not None, (attempt.outcome, attempt.reason)
    return attempt.failure


@pytest.mark.parametrize(
    ("cause", "script", "backend", "line", "words"), CELLS, ids=[f"{c}-{n}" for n, (c, *_) in enumerate(CELLS)]
)
def test_a_cell_fails_with_its_cause_its_message_and_the_users_line(
    bench: Bench, cause: str, script: str, backend: str, line: int | None, words: str
) -> None:
    attempt = cell(bench, script, backend)
    found = failure(attempt)
    assert (attempt.outcome, found.cause) == ("fail", cause), found.message
    assert words in found.message
    assert len(found.message) <= 2_000
    if "broken_helper" in script:
        assert found.frame == "broken_helper.py:2"
    elif line is not None:
        assert found.frame == f"train.py:{line}"
        assert line in [number for number, _ in found.excerpt]
    attempt.model_dump_json()  # whatever a script says can be written down


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"x = 1\n\0\n", "null bytes"), (b"x = 1\ny = '\xff'\n", "utf-8")],
    ids=["null bytes", "not UTF-8"],
)
def test_a_script_that_python_cannot_read_is_an_exception(bench: Bench, content: bytes, words: str) -> None:
    folder = bench.workload("w", {"train.py": ""}, {"torch": {"baseline": {"file": "train.py"}}})
    (folder / "train.py").write_bytes(content)
    found = failure(bench.attempts(bench.cell("w"))[-1])
    assert found.cause == "exception"
    assert words in found.message.lower()


def test_an_endless_recursion_in_c_is_a_crash(bench: Bench) -> None:
    script = """\
        import sys
        sys.setrecursionlimit(10**9)
        class A:
            def __repr__(self):
                return repr(self)
        repr(A())
    """
    assert failure(cell(bench, script)).cause in ("crash", "exception")  # Python 3.12 stops it itself


def test_what_native_code_says_before_it_aborts_gives_the_cause(bench: Bench) -> None:
    script = """\
        import os
        os.write(2, b"terminate called after throwing an instance of 'c10::Error'\\n")
        os.write(2, b"  what():  CUDA out of memory. Tried\\n")
        os.abort()
    """
    found = failure(cell(bench, script))
    assert found.cause == "out-of-memory-device"
    assert found.message == "the process was ended by SIGABRT: CUDA out of memory. Tried"


def test_an_error_in_atexit_is_none_of_the_attempt_as_by_hand(bench: Bench) -> None:
    attempt = cell(bench, "import atexit\natexit.register(lambda: 1 / 0)\nprint('step=1 loss=1')\n")
    assert failure(attempt).cause != "exception"


# --- stuck ---------------------------------------------------------------------------------------------------------


@provokes("hang")
@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("import time\ndef wait():\n    time.sleep(10_000)\nprint('step=1 loss=1')\nwait()\n", 3),
        ("print('step=1 loss=1')\nx = 0\nwhile True: x += 1\n", 3),
        (
            "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print('step=1 loss=1')\ntime.sleep(10_000)\n",
            4,
        ),
        ("import os, signal\nprint('step=1 loss=1')\nos.kill(os.getpid(), signal.SIGSTOP)\n", 3),
        ("import threading\nprint('step=1 loss=1')\nthreading.Lock().acquire() and threading.Event().wait()\n", 3),
    ],
    ids=["sleep", "endless loop", "ignores SIGTERM", "stopped", "waits for an event"],
)
def test_a_hang_shows_where_the_process_stands(bench: Bench, script: str, line: int) -> None:
    found = failure(cell(bench, script, no_progress=4))
    assert (found.cause, found.frame) == ("hang", f"train.py:{line}")
    assert list(found.stacks) == ["0"]
    assert "the last line was step 1" in found.message


def test_a_hang_after_a_thread_failed_tells_of_the_thread(bench: Bench) -> None:
    script = """\
        import queue, threading
        results = queue.Queue()
        loader = threading.Thread(target=lambda: results.put({}["absent"]), daemon=True)
        loader.start()
        loader.join()  # so that the line below does not fall into what it writes
        print("step=1 loss=1")
        results.get()
    """
    found = failure(cell(bench, script, no_progress=4))
    assert (found.cause, found.frame) == ("hang", "train.py:7")
    assert "a thread of rank 0 had failed" in found.message
    assert found.traceback is not None
    assert "KeyError: 'absent'" in found.traceback


@provokes("timeout")
def test_progress_without_end_is_a_timeout(bench: Bench) -> None:
    script = """\
        import itertools, time, torch
        w = torch.ones(1, requires_grad=True)
        for step in itertools.count(1):
            (w * w).sum().backward()
            print(f"step={step} loss=1")
            time.sleep(0.2)
    """
    found = failure(cell(bench, script, timeout=20, no_progress=100))
    assert found.cause == "timeout"
    assert "the last line was step " in found.message


# --- several ranks -------------------------------------------------------------------------------------------------

RANKS = """\
import os, datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
rank = dist.get_rank()
x = torch.ones(2 + 3 * rank)
dist.barrier()
print("step=1 loss=1", flush=True)
"""


def ranks(bench: Bench, code: str, before: str = "", **run: Any) -> Failure:
    return failure(cell(bench, before + RANKS + code, launch="torchrun", **run))


@provokes("collective-mismatch")
def test_ranks_that_reduce_other_shapes_are_a_mismatch(bench: Bench) -> None:
    found = ranks(bench, "dist.all_reduce(x)\n")
    assert (found.cause, found.frame) == ("collective-mismatch", "train.py:7"), found.message


def test_ranks_that_call_other_collectives_are_a_mismatch_named_by_the_debug_mode(bench: Bench) -> None:
    detail = "import os; os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'\n"
    found = ranks(bench, "if rank:\n    dist.all_reduce(x)\nelse:\n    dist.broadcast(x, 0)\n", detail)
    assert found.cause == "collective-mismatch"
    assert "Detected mismatch between collectives on ranks" in found.message
    assert found.frame in ("train.py:9", "train.py:11")
    assert len(found.followers) == 1


def test_a_rank_that_waits_for_one_that_has_ended_is_a_mismatch(bench: Bench) -> None:
    found = ranks(bench, "if rank == 0:\n    dist.barrier()\n")
    assert (found.cause, found.rank, found.frame) == ("collective-mismatch", 0, "train.py:8"), found.message
    assert found.message.startswith("rank 1 had come to its end while rank 0 still waited for it: ")


def test_the_rank_that_raised_first_is_shown_and_the_one_that_lost_it_follows(bench: Bench) -> None:
    found = ranks(bench, "if rank == 1:\n    raise ValueError('one rank only')\ndist.barrier()\n")
    assert (found.cause, found.message, found.rank) == ("exception", "ValueError: one rank only", 1)
    assert found.frame == "train.py:8"
    assert list(found.followers) in ([], ["0"])  # torchrun may end it before it has noticed


@provokes("rank-died")
def test_a_rank_that_was_killed_is_shown_and_the_one_that_lost_it_follows(bench: Bench) -> None:
    found = ranks(bench, "if rank == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()\n")
    assert (found.cause, found.message, found.rank) == ("rank-died", "rank 1 was killed (SIGKILL)", 1)


def test_a_rank_that_left_without_a_word_is_shown_and_the_one_that_lost_it_follows(bench: Bench) -> None:
    found = ranks(bench, "if rank == 1:\n    os._exit(3)\ndist.barrier()\n")
    assert (found.cause, found.rank) == ("exit", 1)
    assert found.message.startswith("exit code 3, without an exception")


def test_a_hang_of_ranks_shows_every_stack_and_the_one_that_is_waited_for(bench: Bench) -> None:
    found = ranks(bench, "import time\nif rank == 0:\n    dist.barrier()\ntime.sleep(10_000)\n", no_progress=25)
    assert (found.cause, found.rank, found.frame) == ("hang", 1, "train.py:10")
    assert sorted(found.stacks) == ["0", "1"]
    assert "barrier" in found.stacks["0"]


def test_a_launcher_whose_port_is_taken_fails_at_rendezvous(bench: Bench) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        script = f"""\
            import torch.distributed as dist
            dist.init_process_group("gloo", init_method="{address}", rank=0, world_size=2)
        """
        found = failure(cell(bench, script))
    assert (found.cause, found.frame) == ("rendezvous", "train.py:2")
    assert "address already in use" in found.message
    assert "frame #" not in found.message


# --- a framework that does not come up ------------------------------------------------------------------------------


def site(python: Path) -> Path:
    return next((python.parents[1] / "lib").glob("python*/site-packages"))


def environment(folder: Path, *packages: str) -> Path:
    """A virtual environment with packages of this one linked in."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    here = Path(pytest.__file__).parents[1]
    for package in packages:
        for path in (here / package, *here.glob(f"{package}-*.dist-info")):
            (site(python) / path.name).symlink_to(path)
    return python


def broken(bench: Bench, backend: str, python: Path) -> AttemptRecord:
    bench.interpreters[backend] = environments.find([backends.available()[backend]], {backend: str(python)})[backend]
    return cell(bench, f"import os\nimport {backend}\n", backend)


@provokes("damaged-cache")
def test_a_library_that_a_killed_compiler_left_unfinished_is_built_again(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    digits(bench)
    planned = bench.cell("edited", "torch-compile", steps=3, log_every=1)
    assert [each.outcome for each in bench.attempts(planned)] == ["pass"]
    built = list((tmp_path / "cache").rglob("*.main.so"))
    assert len(built) > 1
    for library in built:
        library.write_bytes(b"")  # as the linker leaves it when it is killed
    *failed, passed = bench.attempts(planned)
    assert {failure(each).cause for each in failed} == {"damaged-cache"}
    assert passed.outcome == "pass"
    named = [library for library in built if any(str(library) in failure(each).message for each in failed)]
    assert len(named) == len(failed) > 1  # each was removed once
    assert all(library.stat().st_size for library in named)
    judged = judge.judge([planned.planned()], [*failed, passed])[0]
    assert (judged.verdict, judged.as_expected) == ("as-is", True)


@provokes("broken-install")
def test_a_jax_without_jaxlib_is_a_broken_install(bench: Bench, tmp_path: Path) -> None:
    found = failure(broken(bench, "jax", environment(tmp_path / "env", "jax", "numpy", "ml_dtypes", "opt_einsum")))
    assert (found.cause, found.frame) == ("broken-install", "train.py:2")
    assert "jax requires jaxlib to be installed" in found.message


def test_a_jaxlib_too_old_for_its_jax_is_a_broken_install(bench: Bench, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", "jax", "numpy", "ml_dtypes", "opt_einsum")
    (site(python) / "jaxlib").mkdir()
    (site(python) / "jaxlib" / "__init__.py").write_text("")
    (site(python) / "jaxlib" / "version.py").write_text("__version__ = '0.4.1'\n")
    found = failure(broken(bench, "jax", python))
    assert (found.cause, found.frame) == ("broken-install", "train.py:2")
    assert "jaxlib is version 0.4.1" in found.message


def test_a_torch_whose_library_is_gone_is_a_broken_install(bench: Bench, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", "typing_extensions.py")
    here = Path(pytest.__file__).parents[1]
    (site(python) / "torch" / "lib").mkdir(parents=True)
    for path in (here / "torch").iterdir():
        if path.name not in ("lib", "__pycache__"):
            (site(python) / "torch" / path.name).symlink_to(path)
    for path in here.glob("torch-*.dist-info"):
        (site(python) / path.name).symlink_to(path)
    found = failure(broken(bench, "torch", python))
    assert (found.cause, found.frame) == ("broken-install", "train.py:2")
    assert "cannot open shared object file" in found.message


def test_a_jax_that_lacks_a_part_that_it_imports_is_a_broken_install(bench: Bench, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", "jax", "jaxlib", "numpy", "opt_einsum")
    found = failure(broken(bench, "jax", python))
    assert (found.cause, found.frame) == ("broken-install", "train.py:2")
    assert "ml_dtypes" in found.message


# --- the user's line ------------------------------------------------------------------------------------------------


def test_the_line_is_the_helpers_when_it_lies_in_the_workloads_folder(bench: Bench) -> None:
    bench.workload(
        "w",
        {
            "torch/train.py": "import model\nmodel.f()\n",
            "torch/model.py": "def f():\n    import torch\n    torch.ones(2).view(3)\n",
        },
        {"torch": {"baseline": {"file": "torch/train.py"}}},
    )
    found = failure(bench.attempts(bench.cell("w"))[-1])
    assert (found.cause, found.frame) == ("shape", "torch/model.py:3")


def test_the_line_is_the_scripts_when_a_library_elsewhere_fails(bench: Bench, tmp_path: Path) -> None:
    library = tmp_path / "elsewhere" / "library.py"
    library.parent.mkdir()
    library.write_text("def f():\n    return {}['absent']\n")
    script = f"import sys\nsys.path.append({str(library.parent)!r})\nimport library\nlibrary.f()\n"
    found = failure(cell(bench, script))
    assert (found.cause, found.frame, found.message) == ("exception", "train.py:4", "KeyError: 'absent'")


def test_equal_failures_have_one_signature_and_different_ones_do_not(bench: Bench) -> None:
    def signed(script: str) -> str:
        return failure(cell(bench, script)).signature

    first = signed("raise ValueError('sample 17 of /data/a/x.bin is bad at 0x7f12')\n")
    assert first == signed("raise ValueError('sample 4242 of /tmp/x.bin is bad at 0x11aa')\n")
    others = [
        signed("\nraise ValueError('sample 17 of /data/a/x.bin is bad at 0x7f12')\n"),
        signed("raise KeyError('sample 17 of /data/a/x.bin is bad at 0x7f12')\n"),
        signed("raise ValueError('sample 17 of /data/a/y.bin is bad at 0x7f12')\n"),
    ]
    assert len({first, *others}) == 4
