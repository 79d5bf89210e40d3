"""What one end posts in a phase: so many iterations, or for so long, with a limit on what is in flight.

>>> flow = Flow(post, depth=16, iterations=1000, seconds=None)
>>> while not flow.retired: flow.pump(); engine.poll(0.05); flow.collect()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..errors import WouldBlockError
from ..transfers import Transfer
from .latency import Latencies

__all__ = ["Flow"]


class Flow:
    """Posts, and measures what it posts.

    Parameters
    ----------
    post : callable
        Submits the iteration with this number, and returns its transfers.
    depth : int
        Iterations in flight.
    iterations : int, optional
    seconds : float, optional
        One of the two.
    """

    def __init__(
        self,
        post: Callable[[int], Sequence[Transfer]],
        *,
        depth: int,
        iterations: int | None,
        seconds: float | None,
    ) -> None:
        self._post = post
        self._depth = depth
        self._limit = iterations
        self._seconds = seconds
        self._flying: list[tuple[int, Sequence[Transfer]]] = []
        self._stop_ns = 0
        self.posted = 0
        self.retired_iterations = 0
        self.post_ns = 0
        self.start_ns = 0
        self.end_ns = 0
        self.latencies = Latencies()

    @property
    def posted_all(self) -> bool:
        """Whether nothing more will be posted."""
        if self._limit is not None:
            return self.posted >= self._limit
        return self.posted > 0 and time.monotonic_ns() >= self._stop_ns

    @property
    def retired(self) -> bool:
        """Whether everything that was posted has ended here."""
        return not self._flying and self.posted_all

    def pump(self) -> None:
        """Post what may be posted now."""
        while len(self._flying) < self._depth and not self.posted_all:
            start = time.monotonic_ns()
            if not self.posted:
                self.start_ns = start
                if self._seconds is not None:
                    self._stop_ns = start + int(self._seconds * 1e9)
            try:
                transfers = self._post(self.posted)
            except WouldBlockError:
                if not self._flying:
                    raise
                return
            self.post_ns += time.monotonic_ns() - start
            self._flying.append((start, transfers))
            self.posted += 1

    def collect(self) -> None:
        """Take note of what has ended.

        Raises
        ------
        TransferError
            If one has failed.
        """
        if not self._flying:
            return
        now = time.monotonic_ns()
        flying = []
        for start, transfers in self._flying:
            if all(transfer.done() for transfer in transfers):
                for transfer in transfers:
                    transfer.result(0)
                self.latencies.add(now - start)
                self.retired_iterations += 1
                self.end_ns = now
            else:
                flying.append((start, transfers))
        self._flying = flying
