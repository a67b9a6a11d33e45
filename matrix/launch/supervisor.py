"""Hold one attempt's processes: start them, drain their output, and leave none alive.

Run by path as a process of its own (`python -I -S supervisor.py`), standard library only. It is two processes, a guard
and the supervisor proper. Both are child subreapers, so whatever the attempt starts stays below them, also a process
that makes a session of its own or whose parent dies; when one of the two is killed, the other ends all that is left.
Standard input is the lifeline: the runner sends the order as one JSON line, later `kill`; when the line closes,
because the runner was killed, the supervisor kills as well. On standard output it says, as JSON lines, what it does:
`started` (pid), `exited` (code or signal, peak memory, what went wrong here), then ends.

Order: {"command", "environment", "cwd", "folder", "pipes": [NAME, ...], "keep": bytes per log, "echo": bool}
Each pipe NAME.out in `folder` is drained into NAME.log; `launcher` is the command's own output.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 0.2  # between SIGTERM and SIGKILL: a courtesy to launchers; nothing depends on it
KILL_S = 10.0  # SIGKILL ends anything at once, but a process inside a driver that hangs, or another user's
READ = 1 << 16


class Log:
    """A pipe drained into a file that keeps the first and the last half of `keep` bytes."""

    def __init__(self, folder, name, keep, echo):
        self.path = os.path.join(folder, name + ".out")
        os.mkfifo(self.path, 0o600)
        # Opened for both ends, so that it neither waits for a writer nor ends with one.
        self.pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.file = os.open(os.path.join(folder, name + ".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        self.name, self.half, self.echo = name, keep // 2, echo
        self.written, self.tail, self.dropped = 0, bytearray(), 0
        self.trouble = None

    def drain(self):
        """Read what is there; True when something was."""
        try:
            data = os.read(self.pipe, READ)
        except BlockingIOError:
            return False
        if self.echo:
            with contextlib.suppress(OSError):
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()
        head = data[: max(0, self.half - self.written)]
        if head:
            self.keep(head)
            self.written += len(head)
        self.tail += data[len(head) :]
        if len(self.tail) > 2 * self.half:
            self.dropped += len(self.tail) - self.half
            del self.tail[: -self.half]
        return True

    def close(self):
        while self.drain():
            pass
        if len(self.tail) > self.half:
            self.dropped += len(self.tail) - self.half
            del self.tail[: -self.half]
        if self.dropped:
            self.keep(b"\n[... %d bytes left out ...]\n" % self.dropped)
        self.keep(self.tail)
        os.close(self.file)
        os.close(self.pipe)
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def keep(self, data):
        """Write to the log. A disk that is full must not stall the attempt: it is told at the end."""
        data = memoryview(data)
        try:
            while data:
                data = data[os.write(self.file, data) :]
        except OSError as error:
            self.trouble = f"{self.name}.log cannot be written: {error.strerror}"


def say(**message):
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


def prctl(option, value):
    """Ask the kernel for a process attribute; False where there is no prctl (not Linux)."""
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def children():
    """Process ids of everything below this process, and of what has ended there but is not yet collected."""
    found, todo = [], [os.getpid()]
    every = None if os.path.exists(f"/proc/self/task/{todo[0]}/children") else by_parent()
    while todo:
        parent = todo.pop()
        below = every.get(parent, []) if every is not None else of_threads(parent)
        found += below
        todo += below
    return found


def of_threads(parent):
    """The children of every thread of a process, as the kernel lists them."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{parent}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def by_parent():
    """All processes of the machine by their parent, for kernels that do not list the children of a process."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as file:
            found.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    return found


def kill_all(grace):
    """End every process below this one and reap it; a stopped one too.

    Args:
        grace: seconds between SIGTERM and SIGKILL; 0 for SIGKILL at once.

    Returns:
        How many there were.
    """
    alive = children()
    count = len(alive)
    if alive and grace:
        for pid in alive:
            send(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while children() and time.monotonic() < deadline:
            reap()
            time.sleep(0.01)
    deadline = time.monotonic() + KILL_S
    while (alive := children()) and time.monotonic() < deadline:
        for pid in alive:
            send(pid, signal.SIGKILL)
        reap()
        time.sleep(0.005)
    return count


def send(pid, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def reap():
    """Collect every child that has ended: {pid: (status, usage)}."""
    ended = {}
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status, usage


def start(order, launcher):
    """Fork and execute the command in a session of its own; it dies with this process."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        output = os.open(launcher.path, os.O_WRONLY)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(order["cwd"])
        os.execvpe(order["command"][0], order["command"], order["environment"])
    except OSError as error:
        os.write(2, f"cannot start {order['command'][0]}: {error}\n".encode())
    finally:
        os._exit(127)


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, lambda *_: (kill_all(0), os._exit(1)))
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            if os.getppid() == guard:
                supervise()
        except Exception as error:
            say(event="failed", trouble=f"{type(error).__name__}: {error}")
        os._exit(0)
    os.close(0)
    while (status := reap_one(pid)) is None:
        pass
    kill_all(0)
    os._exit(abs(os.waitstatus_to_exitcode(status)))


def reap_one(pid):
    """Wait for any child; its status when it was `pid`."""
    ended, status = os.wait()
    return status if ended == pid else None


def supervise():
    """Run one order to its end."""
    buffer = b""
    while b"\n" not in buffer:
        data = os.read(0, READ)
        if not data:
            return
        buffer += data
    line, _, buffer = buffer.partition(b"\n")
    order = json.loads(line)
    logs = [Log(order["folder"], name, order["keep"], order["echo"]) for name in order["pipes"]]
    selector = selectors.DefaultSelector()
    os.set_blocking(0, False)
    selector.register(0, selectors.EVENT_READ, None)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    selector.register(wake_read, selectors.EVENT_READ, "child")
    for log in logs:
        selector.register(log.pipe, selectors.EVENT_READ, log)
    pid = start(order, logs[0])
    say(event="started", pid=pid, time=time.monotonic())
    status = usage = None
    killed = b"kill" in buffer
    while status is None and not killed:
        for key, _ in selector.select(timeout=1.0):
            if key.data is None:
                data = os.read(0, READ)
                killed = killed or not data or b"kill" in data
            elif key.data == "child":
                os.read(wake_read, READ)
            else:
                key.data.drain()
        for ended, (code, used) in reap().items():
            if ended == pid:
                status, usage = code, used
    left = kill_all(GRACE_S if status is None else 0)  # a script that ended leaves nothing behind
    for log in logs:
        log.close()
    say(
        event="exited",
        code=os.waitstatus_to_exitcode(status) if status is not None else None,
        killed=killed and status is None,
        left=left,
        trouble=next((log.trouble for log in logs if log.trouble), None),
        peak_memory_bytes=usage.ru_maxrss * 1024 if usage is not None else None,
        time=time.monotonic(),
    )


if __name__ == "__main__":
    main()
