"""See where a PyTorch/XLA script's work is done: what `observe_torch.py` sees, and nothing that XLA would have to run.

Tensors of PyTorch/XLA are lazy: whatever reads one that is pending compiles and runs a graph that the script would not
have had. So values are fetched only of tensors that a device holds already. Under SPMD one process drives all devices
by one tensor each; how it is laid on them is in its sharding, and how the work is, in the graph of the loss: when the
first backward pass begins it is lowered to HLO (text, neither compiled nor run), and the shardings that the script
wrote are followed through it to the matrix products.

Private names used (verified with torch_xla 2.9): `torch_xla._XLAC` and of it `_check_tensor_need_materialization`,
`_get_executed_fallback_ops`, `_get_xla_sharding_spec`, `_get_xla_tensors_hlo`, `_xla_counter_value`,
`_xla_device_kind`, `_xla_get_mat_mul_precision`, `_xla_get_replication_devices_count`, `_xla_get_runtime_devices`,
`_xla_memory_info`, `_xla_metric_data`, `_xla_real_devices`, `_xla_runtime_is_initialized`; and what
`observe_torch.py` uses.
Whatever is missing is reported as not seen.
"""

import math
import os
import re


def load(name):
    """The names that another file of this folder defines."""
    path = os.path.join(os.path.dirname(__file__), name)
    namespace = {"__name__": "<inside>", "__file__": path}
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), namespace)
    return namespace


TORCH = load("observe_torch.py")
PRODUCTS = ("dot", "convolution")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")
SIZES = re.compile(r"\w+\[([\d,]*)\]")
TILES = re.compile(r"devices=\[([\d,]+)\]")


def observe(after_import):
    """Arrange to look once the script imports torch and torch_xla; it need not, and nothing is imported for it."""
    return Observer(after_import)


def tiles(sharding):
    """Into how many different parts a sharding cuts a tensor: `{devices=[2,1]0,1}` -> 2, `{replicated}` -> 1."""
    found = TILES.search(sharding)
    if found is None:
        return 1
    sizes = [int(size) for size in found.group(1).split(",")]
    if "last_tile_dim" in sharding:  # copies of each part, not parts
        sizes.pop()
    return math.prod(sizes)


def work_share(hlo):
    """The share of a graph's matrix products that one device computes, by the shardings written in it.

    A value is cut into as many parts as the most finely cut of what it is made from, unless it has a sharding of its
    own. Products are weighted by their multiplications: for (M, K) x (K, N) the root of MK x KN x MN.

    Returns:
        None when the graph has no product.
    """
    parts, done, total = {}, 0.0, 0.0
    for line in hlo.partition("\nENTRY ")[2].splitlines():
        instruction = INSTRUCTION.match(line)
        if instruction is None:
            continue
        name, kind, operation, rest = instruction.groups()
        names = re.findall(r"%([\w.-]+)", rest)
        written = rest.partition("sharding=")[2]
        parts[name] = tiles(written) if written else max((parts.get(each, 1) for each in names), default=1)
        if operation in PRODUCTS:
            shapes = SIZES.findall(kind + rest.partition(")")[0])
            sizes = [int(size) for each in shapes for size in each.split(",") if size]
            weight = math.prod(sizes) ** 0.5
            total += weight
            done += weight / max(parts.get(each, 1) for each in names)
    return done / total if total else None


class Observer(TORCH["Observer"]):
    def __init__(self, after_import):
        super().__init__(after_import)
        self.finders.append(after_import("torch_xla", self.install_xla))
        self.xla = None
        self.private = None
        self.share = None  # of the work, that a device does
        self.state = None  # hash of the parameters after the first step

    def install_xla(self, xla):
        self.xla = xla
        self.private = xla._XLAC

    def spmd(self):
        """Whether one process drives all devices by one tensor."""
        return self.xla is not None and self.xla.runtime.is_spmd()

    def look(self, outputs):
        super().look(outputs)
        torch = self.torch
        if self.depth or self.calls > 2 or self.xla is None or torch._C._len_torch_dispatch_stack():
            return
        if self.calls == 2 and self.alone():
            leaves = [variable for leaf in self.leaves.values() if (variable := leaf.variable()) is not None]
            self.state = TORCH["digest"]([self.fetch(each) for each in leaves[: TORCH["LEAVES"]]])
            self.enough()  # of all ranks before any of them can show a loss that ends the attempt
        # What Dynamo gave to XLA in several devices' name is not asked: torch_xla 2.9 may crash writing that out.
        if self.calls == 1 and self.spmd() and not self.graphs():
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            lazy = [each for each in outputs if isinstance(each, torch.Tensor) and each.device.type == "xla"]
            self.share = work_share(self.private._get_xla_tensors_hlo(lazy))

    def alone(self):
        """Whether this is one of several ranks, and XLA in it knows of no other."""
        distributed = self.torch.distributed
        ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        return ranks > 1 and self.private._xla_get_replication_devices_count() == 0

    def fetch(self, tensor):
        if tensor.device.type != "xla":
            return super().fetch(tensor)
        if self.spmd() or self.private._check_tensor_need_materialization([tensor])[0]:
            return None
        with self.torch.no_grad():
            return tensor.cpu()

    def storage(self, tensor):
        if tensor.device.type != "xla":
            return super().storage(tensor)
        return id(tensor if tensor._base is None else tensor._base)

    def names(self, device):
        """The devices that one of PyTorch's stands for, in XLA's words (`CPU:0`)."""
        if self.spmd():
            return self.private._xla_get_runtime_devices()
        return self.private._xla_real_devices([str(device)])

    def held(self, tensor):
        if tensor.device.type != "xla":
            return super().held(tensor)
        size = tensor.numel() * tensor.element_size()
        if self.spmd():
            size //= tiles(self.private._get_xla_sharding_spec(tensor))
        return dict.fromkeys(self.names(tensor.device), size)

    def spread(self, work):
        done = {}
        for device, elements in work.items():
            if device.type != "xla":
                done[device] = elements
                continue
            share = 1.0 if self.share is None or not self.spmd() else self.share
            for name in self.names(device):
                done[name] = done.get(name, 0) + elements * share
        return done

    def device(self, device):
        if not isinstance(device, str):
            return super().device(device)
        platform, _, index = device.partition(":")
        platform = platform.lower()
        return {
            "platform": platform,
            "through": "xla",
            "index": int(index),
            "runtime": "cuda" if platform == "cuda" else None,
            "id": f"xla {device}",
            "kind": platform if self.spmd() else self.private._xla_device_kind(str(self.xla.device())),
        }

    def seen(self):
        found = super().seen()
        if found["framework"] is None or self.xla is None:
            return found
        spmd = self.spmd()
        return found | {
            "spmd": spmd,
            "work_share": self.share,
            "shapes_over": len(self.names(None)) if spmd else 1,
            "state": self.state,
        }

    def matmul_precision(self):
        found = super().matmul_precision()
        return found if self.xla is None else found | {"xla": self.private._xla_get_mat_mul_precision()}

    def compiled(self):
        found = super().compiled()
        if self.xla is None:
            return found
        done = self.private._xla_counter_value("DynamoExtractCompiledGraph") or 0
        return found | {"compiler": "openxla", "compiled": done}

    def compilations(self):
        """How many graphs XLA compiled, and in how many seconds."""
        found = self.private._xla_metric_data("CompileTime") if self.xla is not None else None
        return (found[0], found[1] / 1e9) if found else (0, 0.0)

    def graphs(self):
        return self.compilations()[0]

    def final(self):
        found = super().final()
        if self.xla is None or not self.private._xla_runtime_is_initialized():
            return found
        try:
            peak = self.private._xla_memory_info(str(self.xla.device())).get("peak_bytes_used")
        except RuntimeError:  # not every device counts
            peak = None
        fallen = {name: self.private._xla_counter_value(name) for name in self.private._get_executed_fallback_ops()}
        return found | {"compile_s": self.compilations()[1], "device_peak_bytes": peak or None, "fallbacks": fallen}
