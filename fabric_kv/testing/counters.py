"""The completion counters of one engine without a network, as the C++ core keeps them: slots, generations, units.

>>> counters = Counters(limit=16, announce=lambda counter, error: ...)
>>> counter = counters.take(engine, unit_bytes=64, expected_units=2, group=0)
>>> counters.count(counter.token, 128)              # both units have arrived: it is announced

Whoever calls holds the fabric's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ProtocolError, WouldBlockError
from ..regions import CounterToken
from ..transfers import Counter

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Counters", "Slot"]

Announce: TypeAlias = Callable[[Counter, ProtocolError | None], object]


class Slot:
    """One counter's place. Free without a counter; poisoned where units of it may still arrive after its release."""

    def __init__(self, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.generation = 0
        self.expected: int | None = None
        self.received = 0
        self.counter: Counter | None = None
        self.poisoned = False


class Counters:
    """The slots of one engine.

    Parameters
    ----------
    limit : int
        How many slots there are.
    announce : (counter, error) -> object
        Called once a counter has what it expects, or more than that.
    """

    def __init__(self, limit: int, announce: Announce) -> None:
        self.slots: list[Slot] = []
        self.stale_units = 0
        self._free: list[int] = []
        self._limit = limit
        self._announce = announce

    @property
    def num_in_use(self) -> int:
        """Slots that are neither free nor poisoned."""
        return sum(slot.counter is not None and not slot.poisoned for slot in self.slots)

    def take(self, engine: Engine, unit_bytes: int, expected_units: int | None, group: int) -> Counter:
        """A free slot's counter."""
        if self._free:
            index = self._free.pop(0)
        elif len(self.slots) < self._limit:
            index = len(self.slots)
            self.slots.append(Slot(unit_bytes))
        else:
            raise WouldBlockError("all counters are in use", limit=self._limit)
        slot = self.slots[index]
        slot.unit_bytes, slot.expected, slot.received = unit_bytes, expected_units, 0
        slot.counter = Counter(engine, CounterToken(index, slot.generation, unit_bytes, group))
        if expected_units == 0:
            self._announce(slot.counter, None)
        return slot.counter

    def arm(self, counter: Counter, expected_units: int) -> None:
        """Set the total; what has arrived before counts."""
        slot = self.slots[counter.token.slot]
        slot.expected = expected_units
        if slot.received == expected_units:
            self._announce(counter, None)

    def received(self, counter: Counter) -> int:
        """Units that have arrived so far."""
        return 0 if counter._released else self.slots[counter.token.slot].received

    def count(self, token: CounterToken, nbytes: int) -> None:
        """Data has arrived."""
        slot = self.slots[token.slot] if token.slot < len(self.slots) else None
        if slot is None or slot.counter is None or slot.generation != token.generation:
            self.stale_units += 1
            return
        before = slot.received
        slot.received += -(-nbytes // token.unit_bytes)
        if slot.expected is None or slot.received < slot.expected:
            return
        if slot.received == slot.expected:
            self._announce(slot.counter, None)
        elif before <= slot.expected:
            self._announce(slot.counter, ProtocolError("more units arrived than were expected"))

    def release(self, counter: Counter, quiescent: bool | None) -> None:
        """Free the slot, or poison it where units may still arrive."""
        slot = self.slots[counter.token.slot]
        fired = counter.done() and counter.exception(0) is None
        if fired or quiescent:
            slot.counter = None
            slot.generation = (slot.generation + 1) % 32
            self._free.append(counter.token.slot)
        else:
            slot.poisoned = True
