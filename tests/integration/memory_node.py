"""The processes of test_memory_processes: ranks that own buffers, and one with the engine that moves their pages.

>>> ChildProcess("memory_node", "rank", path, "7")
>>> ChildProcess("memory_node", "engine", "tcp", source_path, target_path)
"""

import gc
import hashlib
import json
import os
import sys
import threading
from copy import copy
from pathlib import Path

import numpy as np

from fabric_kv import Engine, FabricKVError, RemoteRegion
from fabric_kv.memory import BufferServer, HostBuffer, import_buffers

from .fabrics import LONG, nics_of

LAYERS, PAGES, PAGE = 3, 24, 10_000


def left_open():
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return [len(os.listdir("/proc/self/fd")), maps.count("memfd:fabric_kv"), threading.active_count()]


def digests(buffers):
    return [
        [hashlib.sha256(page).hexdigest() for page in buffer.array.reshape(PAGES, PAGE)] for buffer in buffers.values()
    ]


def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)


class Rank:
    """Owns a buffer a layer."""

    def __init__(self, path, seed):
        rng = np.random.default_rng(int(seed))
        self.buffers = {f"layer{i}": HostBuffer.allocate(PAGES * PAGE) for i in range(LAYERS)}
        for buffer in self.buffers.values():
            buffer.array[:] = rng.integers(0, 256, PAGES * PAGE, np.uint8)
        self.server = BufferServer(path, self.buffers, label=f"rank {seed}")
        self.server.on_importer_gone = lambda pid: say("importer_gone", pid=pid)
        say("up", pid=os.getpid(), left=left_open())

    def digests(self):
        return digests(self.buffers)

    def left(self):
        self.server.wait_importers(0, LONG)
        return left_open()


class Mover:
    """Imports both ranks' buffers and writes from the one's to the other's."""

    def __init__(self, provider, source, target):
        Engine(provider, nics=nics_of(provider)).close()  # libraries open what they keep
        self.before = left_open()
        self.here, self.there = (Engine(provider, nics=nics_of(provider)) for _ in range(2))
        self.ranks = {
            "source": import_buffers(source, timeout_s=LONG),
            "target": import_buffers(target, timeout_s=LONG),
        }
        for name, rank in self.ranks.items():
            rank.on_lost(lambda error, name=name: say("lost", who=name, reason=error.reason, text=str(error)))
        self.src = [buffer.region(self.here) for buffer in self.ranks["source"].values()]
        self.dst = [buffer.region(self.there) for buffer in self.ranks["target"].values()]
        self.peer = self.here.add_peer(self.there.address)
        say("up", pid=os.getpid())

    def move(self, order):
        # Both ends are ours: what is lost on either side must not go on.
        for region in self.dst:
            if region.lost is not None:
                raise copy(region.lost)
        counter = self.there.counter(unit_bytes=PAGE, expected_units=LAYERS * PAGES)
        for src, dst in zip(self.src, self.dst, strict=True):
            remote = RemoteRegion.from_bytes(dst.remote.to_bytes())
            pages = list(range(PAGES))
            self.here.write_pages(self.peer, src, remote, order, pages, page_bytes=PAGE, token=counter.token).result(
                LONG
            )
        counter.result(LONG)
        counter.release()

    def again(self, who):
        for buffer in self.ranks[who].values():
            buffer.region(self.here)

    def close(self):
        self.here.close()
        self.there.close()
        del self.src, self.dst
        gc.collect()
        for rank in self.ranks.values():
            rank.close()
        del rank, self.ranks, self.peer, self.here, self.there
        return [self.before, left_open()]


def main():
    node = {"rank": Rank, "engine": Mover}[sys.argv[1]](*sys.argv[2:])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            say("did", value=getattr(node, command.pop("do"))(**command))
        except FabricKVError as error:
            say("did", error=type(error).__name__, reason=getattr(error, "reason", None), text=str(error))


if __name__ == "__main__":
    main()
