"""What happened to one request and when: one log line at its end, and the events of those that are open in ``state()``.

>>> timeline = Timeline(actor.now()); timeline.note("Accepted", actor.now())
>>> timeline.text()
'Accepted+1.204'
"""

from __future__ import annotations

import logging
from collections import deque

__all__ = ["Timeline", "log_end"]

_log = logging.getLogger("fabric_kv.messenger.requests")

# The last events of a request; a long prompt has one for each write that ended.
MAX_EVENTS = 32


class Timeline:
    """The last events of a request, in milliseconds since it began. Threads: any may note and read."""

    __slots__ = ("_begun_s", "_events", "num_events")

    def __init__(self, begun_s: float) -> None:
        self._begun_s = begun_s
        self._events: deque[tuple[str, float]] = deque(maxlen=MAX_EVENTS)
        self.num_events = 0

    def note(self, event: str, now_s: float) -> None:
        """Something has happened."""
        self.num_events += 1
        self._events.append((event, now_s))

    def text(self) -> str:
        """The events with their times; the first ones are left out where there were too many."""
        events = list(self._events)
        left_out = ["..."] if self.num_events > len(events) else []
        return ",".join([*left_out, *(f"{event}+{(at - self._begun_s) * 1e3:.3f}" for event, at in events)])

    def total_ms(self, now_s: float) -> float:
        """Milliseconds since the request began."""
        return (now_s - self._begun_s) * 1e3


def log_end(timeline: Timeline, now_s: float, level: int = logging.INFO, **fields: object) -> None:
    """One line of ``key=value`` for a request that has ended."""
    if _log.isEnabledFor(level):
        words = " ".join(f"{key}={value}" for key, value in fields.items())
        _log.log(level, "%s total_ms=%.3f events_ms=%s", words, timeline.total_ms(now_s), timeline.text())
