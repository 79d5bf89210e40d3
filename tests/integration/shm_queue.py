"""The locks of shm queues, which libfabric 1.17 keeps in shared memory: whoever is killed with one stops their owners.

>>> with held_lock(name): ...                             # as a peer that was killed does for ever
>>> stop_without_locks(process.pid, [os.getpid()])       # and now it may be killed: nobody waits for what it held
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fabric_kv import _native

from .engine_peer import wait_for

# struct smr_region in libfabric 1.17's include/ofi_shm.h: the lock that whoever writes to a queue takes, a
# pthread_spinlock_t of glibc on x86-64: 1 is free, 0 and below is taken. After it, a flag that makes the owner look.
LOCK_AT, SIGNAL_AT = 24, 28

SHARED = Path("/dev/shm")


def knows_locks() -> bool:
    """Whether the lock is where we think."""
    return _native.library()[1].startswith("1.17") and platform.machine() == "x86_64"


def read_lock(queue: Path) -> int:
    with queue.open("rb", buffering=0) as file:
        value: int = struct.unpack("i", os.pread(file.fileno(), 4, LOCK_AT))[0]
        return value


@contextmanager
def held_lock(name: str) -> Iterator[None]:
    """Hold the lock of a queue, as a peer does for ever that is killed with it."""
    with (SHARED / name).open("r+b", buffering=0) as queue:

        def put(value: int, at: int = LOCK_AT) -> None:
            os.pwrite(queue.fileno(), struct.pack("i", value), at)

        def take() -> bool:
            put(0)  # in vain where the engine has it and is about to release it
            time.sleep(0.05)
            put(1, SIGNAL_AT)
            return read_lock(SHARED / name) <= 0

        assert wait_for(take)
        try:
            yield
        finally:
            put(1)


def stays_taken(queue: Path) -> bool:
    """Whether nobody releases the lock: others and its owner take it for moments. A queue that is gone has none."""
    with contextlib.suppress(FileNotFoundError):
        for _ in range(5):
            if read_lock(queue) > 0:
                return False
            time.sleep(0.001)
        return True
    return False


def stop_without_locks(victim: int, pids: Iterable[int]) -> None:
    """SIGSTOP a process at a moment when it holds the lock of no queue of these processes, nor that of its own.

    Its own is where they post what they have for it. It holds that lock while it copies what others have posted.
    """
    queues = [queue for pid in (victim, *pids) for queue in SHARED.glob(f"{pid}-*")]

    def stop() -> bool:
        os.kill(victim, signal.SIGSTOP)
        stat = Path(f"/proc/{victim}/stat")
        assert wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] in "TZX")
        if not knows_locks() or not any(stays_taken(queue) for queue in queues):
            return True
        os.kill(victim, signal.SIGCONT)
        return False

    deadline = time.monotonic() + 60
    while not stop():
        assert time.monotonic() < deadline, "it always holds a lock"
        time.sleep(0.002)
