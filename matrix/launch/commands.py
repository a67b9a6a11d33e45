"""The command that starts a source: one process, or torchrun's elastic agent with one process for each device."""

from __future__ import annotations

from collections.abc import Sequence

from matrix.errors import UsageError


def ranks(launch: str | None, devices: int) -> int:
    """How many processes a source runs as."""
    return devices if launch == "torchrun" else 1


def command(launch: str | None, interpreter: str, target: Sequence[str], devices: int) -> list[str]:
    """The words of the command.

    Args:
        launch: `None` for one process, `torchrun` for torch's elastic agent.
        interpreter: the Python that runs it.
        target: the script and its arguments.
        devices: processes for `torchrun`.

    Raises:
        UsageError: a launcher that this version does not have.
    """
    if launch is None:
        return [interpreter, *target]
    if launch == "torchrun":
        # --standalone: a rendezvous of its own on a free loopback port, so that cells never meet.
        agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}", "--max-restarts=0"]
        return [interpreter, *agent, *target]
    raise UsageError(f"unknown launcher '{launch}': valid: torchrun")
