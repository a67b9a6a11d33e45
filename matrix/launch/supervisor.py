"""Hold one attempt's processes: start them, drain their output, and leave none alive.

Run by path as a process of its own (`python -I -S supervisor.py`), standard library only. It is a child subreaper, so
whatever the attempt starts stays below it, also a process that makes a session of its own or whose parent dies.
Its standard input is its lifeline: the runner sends the order as one JSON line, later `kill`; when the line closes,
because the runner was killed, it kills as well. On standard output it says, as JSON lines, what it does:
`started` (pid), `exited` (code or signal, peak memory), then ends.

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
READ = 1 << 16


class Log:
    """A pipe drained into a file that keeps the first and the last half of `keep` bytes."""

    def __init__(self, folder, name, keep, echo):
        self.path = os.path.join(folder, name + ".out")
        os.mkfifo(self.path, 0o600)
        # Opened for both ends, so that it neither waits for a writer nor ends with one.
        self.pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.file = open(os.path.join(folder, name + ".log"), "wb")  # noqa: SIM115 - open as long as the process
        self.name, self.half, self.echo = name, keep // 2, echo
        self.written, self.tail, self.dropped = 0, bytearray(), 0

    def drain(self):
        """Read what is there; True when something was."""
        try:
            data = os.read(self.pipe, READ)
        except BlockingIOError:
            return False
        if self.echo:
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
        head = data[: max(0, self.half - self.written)]
        if head:
            self.file.write(head)
            self.file.flush()
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
            self.file.write(b"\n[... %d bytes left out ...]\n" % self.dropped)
        self.file.write(self.tail)
        self.file.close()
        os.close(self.pipe)
        os.unlink(self.path)


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
    """Process ids of everything below this process."""
    found, todo = [], [os.getpid()]
    while todo:
        parent = todo.pop()
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for task in tasks:
            try:
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    below = [int(pid) for pid in file.read().split()]
            except OSError:
                continue
            found += below
            todo += below
    return found


def kill_all(group, hard=False):
    """End every process below this one and reap it; a stopped one too. Returns how many there were."""
    alive = set(children())
    count = len(alive)
    if alive and not hard:
        for pid in alive:
            send(pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while children() and time.monotonic() < deadline:
            reap()
            time.sleep(0.01)
    while alive := children():
        for pid in alive:
            send(pid, signal.SIGKILL)
        reap()
        time.sleep(0.005)
    if group:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    reap()
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
    signal.signal(signal.SIGTERM, lambda *_: (kill_all(None, hard=True), os._exit(1)))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
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
    killed = False
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
    if status is None:
        left = kill_all(pid)
    else:
        for log in logs:
            while log.drain():
                pass
        left = kill_all(pid, hard=True)  # a script that ended leaves nothing behind
    for log in logs:
        log.close()
    say(
        event="exited",
        code=os.waitstatus_to_exitcode(status) if status is not None else None,
        killed=killed and status is None,
        left=left,
        peak_memory_bytes=usage.ru_maxrss * 1024 if usage is not None else None,
        time=time.monotonic(),
    )


if __name__ == "__main__":
    main()
