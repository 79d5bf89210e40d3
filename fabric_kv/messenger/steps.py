"""Forward steps under way: which layers of each are done, as a word that the engine's writes wait for.

>>> steps.open(step, watch, submissions)       # each of their layers waits until it is done
>>> steps.layer_done(step, layer=0)            # the engine posts layer 0, with no Python in between

Each step has a word of its own: several may be under way, and layers of one may finish in any order. The word counts
layers from the first on, so that a layer is written once it and all before it that hold something to write are done.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .posting import Outflow, Submission

if TYPE_CHECKING:
    from ..prepared import Watch

__all__ = ["Steps"]


class _Open:
    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.layers: dict[Outflow, set[int]] = {}  # with something to write
        self.left: dict[int, int] = {}  # layers that are not done yet -> of how many requests


class Steps:
    """Steps by number. Threads: any; a lock of its own, so that a layer that is done never waits for others to post."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._steps_of: dict[Outflow, set[int]] = {}  # of those that are open
        self.last_number = 0

    @property
    def num_open(self) -> int:
        """Steps that have layers with something to write."""
        return len(self._open)

    def new_number(self) -> int:
        """The next step's number."""
        with self._lock:
            self.last_number += 1
            return self.last_number

    def open(self, step: int, watch: Watch, submissions: Iterable[Submission]) -> None:
        """From now on ``layer_done`` moves the watch that these submissions wait for."""
        open_ = _Open(watch)
        for submission in submissions:
            open_.layers.setdefault(submission.outflow, set()).update(submission.layers)
        for layer in itertools.chain(*open_.layers.values()):
            open_.left[layer] = open_.left.get(layer, 0) + 1
        with self._lock:
            if open_.left:
                self._open[step] = open_
                for outflow in open_.layers:
                    self._steps_of.setdefault(outflow, set()).add(step)

    def layer_done(self, step: int, layer: int) -> bool:
        """Let what waits for a layer go; False if nothing does."""
        with self._lock:
            open_ = self._open.get(step)
            if open_ is None or layer not in open_.left:
                return False
            del open_.left[layer]
            self._advance(step, open_)
            return True

    def forget(self, outflow: Outflow) -> None:
        """Drop a request that ended: nobody need report the layers that it alone had."""
        with self._lock:
            for step in self._steps_of.pop(outflow, ()):
                open_ = self._open[step]
                for layer in open_.layers.pop(outflow):
                    num_requests = open_.left.get(layer, 0)
                    if num_requests == 1:
                        del open_.left[layer]
                    elif num_requests:
                        open_.left[layer] = num_requests - 1
                self._advance(step, open_)

    def _advance(self, step: int, open_: _Open) -> None:
        if open_.left:
            open_.watch.set(step, min(open_.left))
        else:
            # All that is left of the step may go.
            open_.watch.set(step + 1, 0)
            del self._open[step]
            for outflow in open_.layers:
                steps = self._steps_of[outflow]
                steps.discard(step)
                if not steps:
                    del self._steps_of[outflow]
