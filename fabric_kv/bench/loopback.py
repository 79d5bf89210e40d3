"""Targets on this machine, as processes of ours: they end with us, whatever becomes of us.

>>> with LocalTargets(2) as targets:
...     targets.channels

Each hangs on a socket that nobody else can reach. It ends when that closes, which the kernel sees to even if we are
killed, and is told by the kernel as well (PR_SET_PDEATHSIG), which reaches it wherever it waits. A terminal's Ctrl-C is
ours alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import Self

from ..errors import FabricKVError
from .channel import Channel

__all__ = ["LocalTargets", "main"]

_PR_SET_PDEATHSIG = 1  # prctl(2)
_END_S = 10.0


class LocalTargets:
    """So many targets; a context manager.

    Parameters
    ----------
    count : int
    """

    def __init__(self, count: int) -> None:
        self.channels: list[Channel] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for index in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                    )
                )
            self.channels.append(Channel(ours, f"target {index} (process {self.processes[-1].pid})"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for channel in self.channels:
            channel.close()
        for process in self.processes:
            process.send_signal(signal.SIGCONT)  # one that was stopped cannot notice that it is over
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_END_S)


def main(fd: int, parent: int) -> int:
    """Be one of them."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1  # it has gone already
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end(_signal: int, _frame: object) -> None:
        # Should closing the engine hang, the alarm ends the process all the same.
        signal.alarm(int(_END_S))
        if os.getppid() == parent:
            sys.exit(128 + signal.SIGTERM)
        # Else our socket is closing as well, and whoever notices that tidies up undisturbed.

    signal.signal(signal.SIGTERM, end)

    from .greeting import exchange_hellos
    from .target import serve

    # What goes wrong is told to the initiator, who has the terminal.
    logging.getLogger("fabric_kv").addHandler(logging.NullHandler())
    logging.getLogger("fabric_kv").propagate = False
    channel = Channel(socket.socket(fileno=fd), "the initiator")
    with contextlib.suppress(FabricKVError):  # the initiator was told, and prints it
        exchange_hellos(channel)
        return 1 if serve(channel, None) else 0
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
