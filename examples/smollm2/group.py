"""The ranks of one engine as processes of their own: they add up their parts over pipes.

>>> pipes = [Pipe() for _ in range(2)]  # of rank 0 with ranks 1 and 2
>>> RankGroup(0, 3, [ours for ours, _ in pipes]).all_reduce(part)  # in rank 0; meanwhile, in rank 2:
>>> RankGroup(2, 3, [pipes[1][1]]).all_reduce(part)

GPUs have NCCL for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from .weights import F32

SILENT_S = 120.0  # a rank that is stopped must not hold the others for ever


class RankLostError(ConnectionError):
    """Another rank has ended, or is silent."""


class RankGroup:
    """Knows the other ranks; every rank has one.

    Parameters
    ----------
    rank, size : int
    pipes : sequence of Connection
        To ranks 1, 2, ... in rank 0; to rank 0 in the others. Nobody else may hold an end: else a rank's end goes
        unnoticed.
    """

    def __init__(self, rank: int, size: int, pipes: Sequence[Connection]) -> None:
        if len(pipes) != (1 if rank else size - 1):
            raise ValueError(f"rank {rank} of {size} was given {len(pipes)} pipes")
        self.rank = rank
        self.size = size
        self._pipes = pipes

    def all_reduce(self, part: F32) -> F32:
        """Add every rank's part, in the ranks' order; the same array in all of them."""
        try:
            if self.rank:
                self._pipes[0].send_bytes(part)
                return self._receive(self._pipes[0], part)
            total = part
            for pipe in self._pipes:
                total = total + self._receive(pipe, part)
            for pipe in self._pipes:
                pipe.send_bytes(total)
        except (EOFError, OSError) as error:
            raise RankLostError(f"rank {self.rank} has lost another one: {error!r}") from error
        return total

    def _receive(self, pipe: Connection, like: F32) -> F32:
        if not pipe.poll(SILENT_S):
            raise TimeoutError(f"nothing has come for {SILENT_S} s")
        got = np.empty_like(like)
        pipe.recv_bytes_into(got.reshape(-1))
        return got
