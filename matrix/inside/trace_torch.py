"""Trace a PyTorch script on a CUDA device that is not there: shapes and devices, no values.

An observer for `worker.py`, in three files: here the trace and what is told of it, in `fake_cuda.py` the device, in
`fake_tensors.py` its tensors. An operation that CUDA would refuse for the devices of its tensors raises what PyTorch
raises, at the script's line. Where a value of the device is asked for, a stand-in is given and the line is noted as a
host sync. After the asked number of optimizer steps the script is ended.

Told at the end, as the event `traced`:

    steps, operations   optimizer steps, and operations on the device, that were traced
    devices             indices of those on which a part of a backward pass was done
    forward             likewise a forward pass of a module that asked for no gradient, as inference does
    parameters          bytes of what the optimizers update, by kind of device
    gradients           bytes of the gradients that they are updated with, likewise
    syncs               [{file, line, how, calls}]: where the host waits for a value of the device
    branches            [...]: where a value of the device decides which way the script goes (taken as false)
    sizes               [...]: where a value decides a shape (a mask taken as all true)
    reached             `end`, or `steps`: ended by us after the asked number of them
    unable              why it could not be traced further, and where; null when it could

Private names used, besides those of the other two files: `torch._C._current_graph_task_id`.
"""

import atexit
import collections
import contextlib
import os
import sys
import threading
import warnings

STEPS = 2
MAX_BRANCHES = 1000  # at one line: a loop that waits for a value to change
LIBRARIES = ("site-packages", "dist-packages")


def sibling(name):
    """What the Python file beside this one defines."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    namespace = {"__name__": "<inside>", "__file__": path}
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), namespace)
    return namespace


def by_kind(held):
    """Bytes in all of each kind of device, of pairs of one and bytes."""
    totals = collections.Counter()
    for kind, size in held:
        totals[kind] += size
    return dict(totals)


def observe(after_import):
    return Tracer(after_import)


class Tracer:
    """Puts the fake device under the script's PyTorch, and keeps what is to be told."""

    enough = None  # a trace has to see everything

    def __init__(self, after_import):
        self.fake = sibling("fake_cuda.py")
        self.task, self.emit = {}, None
        self.steps = collections.Counter()
        self.operations = 0
        self.devices, self.forward = set(), set()
        self.parameters, self.gradients = {}, {}
        self.places = {kind: collections.Counter() for kind in ("syncs", "branches", "sizes")}
        self.reached = "end"
        self.unable = None
        self.code = 0
        self.root = os.path.join(os.getcwd(), "")  # the workload's folder
        after_import("torch", self.start)

    def start(self, torch):
        """Called when the script has imported torch."""
        reason = self.fake["untried"](torch)
        if reason is not None:
            self.refuse(reason)
        try:
            self.begin(torch)
        except Exception as error:  # else the script would run on the CPU, untraced
            self.refuse(f"torch {torch.__version__} cannot be traced: {type(error).__name__}: {error}")

    def begin(self, torch):
        target = self.task.get("target", {})
        device = {
            "runtime": target.get("accelerator", "cuda"),
            "name": target.get("about") or "NVIDIA GPU",
            "count": self.task.get("devices", 1),
            "memory_bytes": target.get("memory_bytes") or 80 << 30,
            "capability": self.task.get("capability", (9, 0)),
        }
        print("# traced on a device that is not there: the numbers below are stand-ins, none is a loss", flush=True)
        tensors = sibling("fake_tensors.py")
        mode = tensors["mode_class"](torch, self)()  # before there "is" a GPU: PyTorch asks, to know how careful to be
        mode.__enter__()
        self.fake["install"](torch, device, self.refuse)
        tensors["give_stand_ins"](torch, self)
        tensors["keep_checkpoints"](torch)
        atexit.register(self.leave)
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # copies do, harmlessly
        hooks = sys.modules["torch.optim.optimizer"]
        hooks.register_optimizer_step_pre_hook(self.before_step)
        hooks.register_optimizer_step_post_hook(self.after_step)
        torch.nn.modules.module.register_module_forward_hook(self.after_forward)
        self.torch = torch

    def worked(self, devices):
        """An operation was done on devices of these indices."""
        self.operations += 1
        if self.torch._C._current_graph_task_id() >= 0:  # a backward pass is under way in this thread
            self.devices |= devices

    def after_forward(self, module, arguments, result):
        if not self.torch.is_grad_enabled():
            self.forward |= {each.device.index for each in module.parameters() if each.device.type == "cuda"}

    def before_step(self, optimizer, arguments, named):
        if self.steps[id(optimizer)] >= self.task.get("steps", STEPS):
            self.reached = "steps"
            raise SystemExit(0)
        self.note_gradients(optimizer)  # which a step may set to None

    def after_step(self, optimizer, arguments, named):
        self.steps[id(optimizer)] += 1
        for group in optimizer.param_groups:
            for each in group["params"]:
                self.parameters[id(each)] = each.device.type, each.numel() * each.element_size()
        self.note_gradients(optimizer)  # which a step with a closure makes itself

    def note_gradients(self, optimizer):
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.gradients[id(each)] = each.grad.device.type, each.grad.numel() * each.grad.element_size()

    def note(self, kind, how):
        """Count that something happens at the script's line that is being executed."""
        file, line = self.place()
        self.places[kind][file, line, how] += 1
        if kind == "branches" and self.places[kind][file, line, how] > MAX_BRANCHES:
            self.refuse("a loop waits for a value of the device to change")

    def place(self):
        """File and line of the script's code, or of what it imports from beside it, that is being executed."""
        frame = sys._getframe(1)
        if threading.current_thread() is not threading.main_thread():  # a backward pass has threads of its own
            frame = sys._current_frames().get(threading.main_thread().ident, frame)
        while frame is not None:
            file = frame.f_code.co_filename
            own = file[0] != "<" and os.path.abspath(file).startswith(self.root)
            if own and not any(name in file for name in LIBRARIES):
                return os.path.relpath(file, self.root), frame.f_lineno
            frame = frame.f_back
        return "?", 0

    def refuse(self, reason):
        """End the script: it cannot be traced further."""
        file, line = self.place()
        self.unable = self.unable or (f"{file}:{line}: {reason}" if line else reason)
        raise self.fake["Untraceable"](self.unable)

    def graphs(self):
        return 0

    def seen(self):
        return {}

    def remove(self):
        pass

    def final(self):
        told = {
            kind: [{"file": f, "line": n, "how": how, "calls": c} for (f, n, how), c in sorted(found.items())]
            for kind, found in self.places.items()
        }
        self.emit(
            "traced",
            steps=max(self.steps.values(), default=0),
            operations=self.operations,
            devices=sorted(self.devices),
            forward=sorted(self.forward),
            parameters=by_kind(self.parameters.values()),
            gradients=by_kind(self.gradients.values()),
            reached=self.reached,
            unable=self.unable,
            **told,
        )
        error = sys.exc_info()[1]
        if error is not None:
            code = getattr(error, "code", 1)
            self.code = code if isinstance(code, int) else int(code is not None)
        return {"graphs": 0, "device_peak_bytes": None}

    def leave(self):
        """End the process before Python is taken down, which the threads of a backward pass may not survive."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or replaced by the script
                stream.flush()
        os._exit(self.code)
