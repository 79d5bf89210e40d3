"""One after the other: what a messenger's state is changed by, from an inbox of commands and a heap of timers.

>>> actor = Actor("fabric_kv-decode"); actor.start()
>>> actor.post(lambda: print("on the actor's thread"))
>>> actor.post_now(lambda: print("here and now, if nothing else runs"))
>>> actor.stop(timeout=1.0)

Everything that happens to a messenger, be it a message, a fired counter, a user's call or a deadline, runs here one
after the other, so its state needs no locks. Whoever runs commands has the *turn*: the actor's own thread, or one that
would have to wake it, which takes longer than most commands. :class:`ManualActor` has no thread and a clock that tests
turn by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ..errors import ConfigError, InternalError
from ..futures import is_interrupt

__all__ = ["Actor", "ManualActor", "Timer"]

T = TypeVar("T")
Command = Callable[[], None]

_log = logging.getLogger("fabric_kv.messenger")

# The longest sleep without a timer. Only a bound: commands wake the thread at once.
_IDLE_S = 60.0


class Timer:
    """A command that will run once, unless cancelled before (on the actor's thread)."""

    __slots__ = ("_actor", "command")

    def __init__(self, actor: Actor, command: Command) -> None:
        self._actor = actor
        self.command: Command | None = command

    def cancel(self) -> None:
        """Do nothing when due."""
        if self.command is not None:
            self.command = None
            self._actor._num_cancelled += 1


class Actor:
    """Runs commands one at a time, in the order of their arrival.

    Threads: ``post``, ``post_now``, ``call`` and ``stop`` from any; ``after`` and ``aside`` in a command. Commands must
    not block; what they raise is logged and counted in ``num_errors``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: deque[Command] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # Wakes the thread to look at the inbox.
        self._turn = threading.Lock()  # Who has it runs commands, and owns the timers.
        self._runner: int | None = None  # The thread that has it.
        self._timers: list[tuple[float, int, Timer]] = []
        self._num_cancelled = 0  # Timers in the heap that will do nothing.
        self._sequence = itertools.count()
        self._thread: threading.Thread | None = None
        self._asides: list[threading.Thread] = []
        self._stopping = False
        self._ended = False
        self.num_errors = 0

    def survives(self, error: BaseException) -> bool:
        """Whether it goes on when a command, or a caller's code in one, raises this: whatever it is, but for Ctrl-C."""
        return not is_interrupt(error)

    def now(self) -> float:
        """Seconds on the clock of the timers."""
        return time.monotonic()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is a command: then nothing else runs until it returns."""
        return self._runner == threading.get_ident()

    def post(self, command: Command) -> None:
        """Run ``command`` soon. After the end of the thread it runs on the caller's, still one at a time."""
        self._inbox.append(command)
        if self._ended:
            self._run_late()
        else:
            self._bell.put(None)

    def post_now(self, command: Command) -> None:
        """Run ``command`` here, after all that came before it; soon, if commands run on another thread now."""
        self._inbox.append(command)
        if self._ended:
            self._run_late()
        elif self._turn.acquire(blocking=False):
            try:
                self._run_commands()
            finally:
                self._turn.release()
                if self._inbox:  # It came too late to be seen, or a KeyboardInterrupt was first.
                    self._bell.put(None)
        else:
            self._bell.put(None)  # Who has the turn may have looked at the inbox for the last time.

    def call(self, function: Callable[[], T], timeout: float) -> T:
        """Run ``function`` as a command and return what it returns or raises.

        Raises
        ------
        InternalError
            If the thread does not get to it within ``timeout`` seconds: some callback blocks it.
        """
        if self.is_current:
            return function()
        done = threading.Event()
        outcome: list[T] = []
        errors: list[BaseException] = []

        def command() -> None:
            try:
                outcome.append(function())
            except BaseException as error:  # noqa: BLE001  (it is raised where call() was called)
                errors.append(error)
            done.set()

        self.post(command)
        if not done.wait(timeout):
            raise InternalError(f"thread {self._name} did not answer within {timeout:g} s. Hint: a callback blocks it")
        if errors:
            raise errors[0]
        return outcome[0]

    def after(self, delay_s: float, command: Command) -> Timer:
        """Run ``command`` in ``delay_s`` seconds."""
        if self._num_cancelled > 64 and 2 * self._num_cancelled > len(self._timers):
            # Deadlines lie far ahead and most are cancelled: without this the heap would keep them all.
            self._timers = [entry for entry in self._timers if entry[2].command is not None]
            heapq.heapify(self._timers)
            self._num_cancelled = 0
        timer = Timer(self, command)
        entry = (self.now() + delay_s, next(self._sequence), timer)
        heapq.heappush(self._timers, entry)
        if self._timers[0] is entry and threading.current_thread() is not self._thread:
            self._bell.put(None)  # The thread sleeps for longer than that.
        return timer

    def aside(self, function: Callable[[], T], then: Callable[[T | BaseException], None]) -> None:
        """Run what blocks, within a bound of its own, on another thread, then ``then`` with its outcome on this one."""

        def run() -> None:
            outcome: T | BaseException
            try:
                outcome = function()
            except BaseException as error:  # noqa: BLE001  (it is handed over)
                outcome = error
            self.post(lambda: then(outcome))

        thread = threading.Thread(target=run, name=f"{self._name}-aside", daemon=True)
        self._asides = [other for other in self._asides if other.is_alive()]
        self._asides.append(thread)
        thread.start()

    def stop(self, timeout: float) -> None:
        """Run what is in the inbox, then end the thread; timers that are not due are dropped."""
        if self.is_current:
            raise ConfigError(f"thread {self._name} cannot wait for its own end")
        for thread in self._asides:
            thread.join(timeout)
        self.post(self._begin_stop)
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise InternalError(f"thread {self._name} did not end within {timeout:g} s")

    def _begin_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            with self._turn:
                wait_s = self._until_next_timer()
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=wait_s)
            with self._turn:
                self._run_commands()
                self._run_due_timers()
        self._ended = True
        self._run_late()

    def _run_late(self) -> None:
        if not self.is_current:  # Else whoever posts is a late command, and the loop below gets to it.
            with self._turn:
                self._run_commands()

    def _run_commands(self) -> int:
        """Run what is in the inbox; how many commands that was. The caller has the turn."""
        count = 0
        self._runner = threading.get_ident()
        try:
            while self._inbox:
                self._execute(self._inbox.popleft())
                count += 1
        finally:
            self._runner = None
        return count

    def _until_next_timer(self) -> float:
        while self._timers and self._timers[0][2].command is None:
            heapq.heappop(self._timers)
            self._num_cancelled -= 1
        return min(_IDLE_S, max(0.0, self._timers[0][0] - self.now())) if self._timers else _IDLE_S

    def _run_due_timers(self) -> None:
        now = self.now()
        self._runner = threading.get_ident()
        try:
            self._run_timers_until(now)
        finally:
            self._runner = None

    def _run_timers_until(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            command, timer.command = timer.command, None
            if command is None:
                self._num_cancelled -= 1
            else:
                self._execute(command)

    def _execute(self, command: Command) -> None:
        try:
            command()
        except BaseException as error:  # One bad command must not end the thread.
            if not self.survives(error):
                raise
            self.num_errors += 1
            _log.exception("a command on thread %s failed", self._name)


class ManualActor(Actor):
    """An actor without a thread, for tests: commands wait until ``run`` and time passes only in ``advance``.

    Simulations that share one clock pass the same one-element list as ``clock``.
    """

    def __init__(self, name: str = "manual", clock: list[float] | None = None) -> None:
        super().__init__(name)
        self._clock = [0.0] if clock is None else clock

    def survives(self, error: BaseException) -> bool:
        """What stops a test (pytest.fail) stops its actor, too."""
        return isinstance(error, Exception | SystemExit | asyncio.CancelledError)

    def now(self) -> float:
        """Seconds on the shared clock."""
        return self._clock[0]

    def start(self) -> None:
        """Nothing to start."""

    @property
    def is_current(self) -> bool:
        """False: nothing waits for a manual actor, so nothing can deadlock."""
        return False

    def post_now(self, command: Command) -> None:
        """Wait like all others, until it is drawn."""
        self.post(command)

    def call(self, function: Callable[[], T], timeout: float) -> T:
        """Run ``function`` here and now."""
        return function()

    def aside(self, function: Callable[[], T], then: Callable[[T | BaseException], None]) -> None:
        """Run ``function`` here and now, and ``then`` as a command."""
        outcome: T | BaseException
        try:
            outcome = function()
        except Exception as error:  # noqa: BLE001  (as in Actor)
            outcome = error
        self.post(lambda: then(outcome))

    def stop(self, timeout: float) -> None:
        """Run what is in the inbox; later commands run where they are posted."""
        while self.run():
            pass
        self._ended = True

    def run(self, limit: int | None = None) -> int:
        """Run up to ``limit`` waiting commands and all due timers; how many commands ran."""
        count = 0
        while self._inbox and (limit is None or count < limit):
            self._execute(self._inbox.popleft())
            count += 1
        self._run_due_timers()
        return count

    @property
    def next_timer(self) -> float | None:
        """When the next timer is due, on the shared clock."""
        self._until_next_timer()
        return self._timers[0][0] if self._timers else None
