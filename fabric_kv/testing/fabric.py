"""What is in flight between the engines of one test, and what goes wrong with it, from one seed.

>>> fabric = MemoryFabric(seed=7)
>>> fabric.fail_writes = 1
>>> while fabric.step(): ...                       # one thing arrives, any one

Whatever draws from the seed does so through here, and whatever changes a thing in flight holds its lock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from ..config import EngineOptions
from .engine import MemoryEngine

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Event", "MemoryFabric"]

Event: TypeAlias = Callable[[], object]


class MemoryFabric:
    """The pool of what is in flight between the engines of one test.

    Parameters
    ----------
    seed : int
        Decides every order and every coin.

    Attributes
    ----------
    fail_writes : int
        So many of the next pieces of writes end in an error; each of them may or may not land later.
    lose_counts : int
        So many of the next pieces that land are not counted, as where an immediate is lost.
    early_writes : int
        So many of the next pieces are reported as done although they have not landed; they do in :meth:`land_early`.
    hold_writes : bool
        While True nothing of a write moves: it is accepted and stays in flight.
    drop_messages : float
        Share of control messages that get lost on the way, in silence, as no reliable provider would.
    duplicate_messages : float
        Share of control messages that arrive twice.
    prove_fences : float
        Share of fences that are proven, by keys that are taken back.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.fail_writes = 0
        self.lose_counts = 0
        self.early_writes = 0
        self.hold_writes = False
        self.drop_messages = 0.0
        self.duplicate_messages = 0.0
        self.prove_fences = 0.0
        self.engines: dict[bytes, MemoryEngine] = {}
        self._events: list[Event] = []
        self._held: list[Event] = []
        self._early: list[Event] = []
        self._calls: list[Event] = []  # Into user code, at the end of a step.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._stopping = False

    def engine(self, options: EngineOptions = EngineOptions()) -> Engine:
        """A new engine. It offers what the messenger uses of Engine, and is typed as one."""
        made = MemoryEngine(self, options)
        self.engines[made.epoch] = made
        return cast("Engine", made)

    def kill(self, engine: Engine) -> None:
        """End an engine's process: it does nothing any more, but what it has in flight may still land."""
        victim = self.engines[engine.epoch]
        victim.dead = True
        self.lose(engine)

    def lose(self, engine: Engine) -> None:
        """Tell everyone who monitors the engine that it has fallen silent."""
        for other in self.engines.values():
            if engine.epoch in other.monitored and not other.dead:
                other.monitored.discard(engine.epoch)
                self.add(partial(other.tell_lost, engine.epoch))

    def hold_up(self, engine: Engine) -> None:
        """Tell an engine that what it has in flight now is held up; ``hold_writes`` makes it true."""
        self.engines[engine.epoch].tell_held_up()

    def land_early(self) -> None:
        """Let what was reported as done before it had landed arrive, sometime from now on."""
        with self._changed:
            early, self._early = self._early, []
            for event in early:
                self.add(event)

    # --- The pool -----------------------------------------------------------------------------------------------------

    def add(self, event: Event, *, write: bool = False) -> None:
        """Put something in flight."""
        with self._changed:
            (self._held if write and self.hold_writes else self._events).append(event)
            self._changed.notify()

    def call_soon(self, call: Event) -> None:
        """Run user code at the end of this step, or of the next one."""
        self._calls.append(call)

    def step(self) -> bool:
        """Let one thing arrive, any one; False if nothing is in flight."""
        with self._changed:
            if not self.hold_writes and self._held:
                self._events += self._held
                self._held.clear()
            if self._events:
                index = self.random.randrange(len(self._events))
                self._events[index], self._events[-1] = self._events[-1], self._events[index]
                self._events.pop()()
            elif not self._calls:
                return False
            calls, self._calls = self._calls, []
        for call in calls:  # Without the lock: user code may wait for a thread that wants it.
            call()
        return True

    def run(self, limit: int = 1_000_000) -> int:
        """Let everything arrive, up to ``limit`` things; how many there were."""
        count = 0
        while count < limit and self.step():
            count += 1
        return count

    def start(self) -> None:
        """Let things arrive on a thread of their own, until ``stop``."""
        self._thread = threading.Thread(target=self._pump, name="memory-fabric", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is in flight stays there."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(10.0)

    def _pump(self) -> None:
        while not self._stopping:
            if not self.step():
                with self._changed:
                    # Bounded, so that a change of hold_writes is noticed.
                    self._changed.wait(0.01)

    def coin(self, share: float) -> bool:
        """True with probability ``share``."""
        return self.random.random() < share
