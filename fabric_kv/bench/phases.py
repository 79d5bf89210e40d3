"""One phase, as both ends run it: prepare, post and count, look at what arrived.

>>> run = PhaseRun(side, phase)              # memory and counters are ready; its tokens go to the other end
>>> run.drive(tokens_of_the_others)          # until everything has gone and come
>>> run.finish()

One thread waits for everything: the engine's events and the control channels, so that an end that dies is noticed while
data is under way. If nothing at all happens for ``timeout_s``, it is over.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

from ..errors import PeerUnreachableError, ProtocolError
from ..regions import CounterToken
from ..transfers import Counter, Transfer
from .flow import Flow
from .ops import MessageSink, Sink, ToldSink, count_wrong_pages, make_post, make_sink
from .side import Side
from .stamps import POISON
from .wire import Finished, FlowFigures, Phase, Sent

__all__ = ["PhaseRun", "Tokens"]

# How often somebody looks whether anything still happens.
_TICK_S = 0.25

# The other end's counters: for our data, and for the word that all it posted has arrived here.
Tokens = tuple[CounterToken | None, CounterToken | None]


class PhaseRun:
    """A phase at one end.

    Parameters
    ----------
    side : Side
    phase : Phase
        As the initiator has announced it; at the initiator, its own.
    """

    def __init__(self, side: Side, phase: Phase) -> None:
        self._side = side
        self._phase = phase
        self._places = side.places(phase.case)
        workload = side.workload
        side.stamp_source(phase.case, self._places, phase.iteration)
        if phase.clear and side.takes:
            for link in side.links:
                link.sink.array[: self._places.nbytes] = POISON
                link.sink.push(self._places.nbytes)
        for link in side.links:
            link.finished = None
        self._sinks: list[Sink] = []
        if side.receives:
            self._sinks = [make_sink(side, self._places, keep=phase.check) for _ in side.links]
            if phase.iterations is not None and workload.op != "read":
                for sink in self._sinks:
                    sink.arm(phase.iterations)
            if workload.op == "send":
                self._take_messages()
        self._acknowledged: Counter | None = None
        if side.posts and workload.op != "read":
            self._acknowledged = side.engine.counter(unit_bytes=1, expected_units=len(side.links))
        self._flow: Flow | None = None
        self._signals: list[Transfer] = []
        self._signalled = [False] * len(self._sinks)
        self._sent_told = False
        self._sent_by = [0] * len(side.links)  # iterations, where the other end says how many there were
        self._cpu_ns = 0
        self._ops = (0, 0)
        self._end_ns = 0

    def tokens(self, index: int) -> Tokens:
        """For the other end of link ``index``."""
        data = self._sinks[index].token if self._sinks else None
        return data, self._acknowledged.token if self._acknowledged is not None else None

    def drive(self, others: Sequence[Tokens], on_progress: Callable[[int], None] | None = None) -> None:
        """Post and count until both are over.

        Parameters
        ----------
        others : sequence of Tokens
            Of the other ends, as the links are.
        on_progress : callable, optional
            Called a few times a second with the iterations that are over.

        Raises
        ------
        PeerUnreachableError
            If another end is gone, or nothing happens for ``timeout_s``.
        TransferError, ProtocolError
            If a transfer fails, or more arrives than was sent.
        """
        side, phase = self._side, self._phase
        if side.posts:
            post = make_post(side, self._places, [data for data, _ in others], phase.iteration)
            self._flow = Flow(post, depth=side.workload.depth, iterations=phase.iterations, seconds=phase.seconds)
        self._ops = self._count_ops()
        self._cpu_ns = time.process_time_ns()
        poll = select.poll()
        engine_fd = side.engine.fileno()
        for fd in (engine_fd, *(link.channel.fileno() for link in side.links)):
            poll.register(fd, select.POLLIN)
        self._read_channels()  # what came together with the last message is here already, and wakes no poll
        seen, deadline, look = -1, 0.0, 0.0
        while not self._over():
            if self._flow is not None:
                self._flow.pump()
            ready = poll.poll(_TICK_S * 1e3)
            side.engine.poll(0.0)
            if any(fd != engine_fd for fd, _ in ready):
                self._read_channels()
            if self._flow is not None:
                self._flow.collect()
            self._tell(others)
            now = time.monotonic()
            if now >= look:
                look = now + _TICK_S
                # Whoever only waits to be told sees nothing happen; the end that posts does, and says if it gives up.
                if (done := self._happened()) != seen or self._only_told():
                    seen, deadline = done, now + side.workload.timeout_s
                if now > deadline:
                    raise PeerUnreachableError(
                        f"nothing has happened for {side.workload.timeout_s:g} s: {self._standing()}. Hint: the other "
                        "end is stopped or cut off; --timeout gives it longer"
                    )
                if on_progress is not None and self._flow is not None:
                    on_progress(self._flow.retired_iterations)
        self._cpu_ns = time.process_time_ns() - self._cpu_ns

    def figures(self) -> FlowFigures | None:
        """What was measured of what we posted."""
        flow = self._flow
        if flow is None:
            return None
        end_ns = self._end_ns if self._acknowledged is not None else flow.end_ns
        return FlowFigures(
            iterations=flow.posted,
            elapsed_ns=max(end_ns - flow.start_ns, 1) if flow.posted else 0,
            post_ns=flow.post_ns,
            latencies=flow.latencies.counts(),
        )

    def finish(self) -> Finished:
        """Look at what arrived, give counters back, and say how it was."""
        wrong = 0
        if self._phase.check:
            for index, link in enumerate(self._side.links):
                sink = self._sinks[index] if self._sinks else None
                used = self._arrived_iterations(index)
                wrong += count_wrong_pages(self._side, link, self._places, sink, self._phase.iteration, used)
        for sink in self._sinks:
            sink.close()
        if self._acknowledged is not None:
            self._acknowledged.release()
        ops, op_bytes = (now - before for now, before in zip(self._count_ops(), self._ops, strict=True))
        return Finished(flow=self.figures(), wrong_pages=wrong, cpu_ns=self._cpu_ns, ops=ops, op_bytes=op_bytes)

    # -- while it runs -------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        flow = self._flow
        if flow is not None and not (flow.retired and (self._acknowledged is None or self._acknowledged.done())):
            return False
        return all(self._signalled) and all(signal.done() for signal in self._signals)

    def _tell(self, others: Sequence[Tokens]) -> None:
        """Acknowledge what is complete, and say how much we have sent where only the clock knew."""
        side, flow = self._side, self._flow
        if self._acknowledged is not None and self._acknowledged.done() and not self._end_ns:
            self._end_ns = time.monotonic_ns()
            self._acknowledged.result(0)
        for index, sink in enumerate(self._sinks):
            if self._signalled[index] or not sink.complete():
                continue
            self._signalled[index] = True
            token = others[index][1]
            if token is not None:
                link = side.links[index]
                self._signals.append(side.engine.signal(link.peer, link.remote_source, token))
        if flow is not None and not self._sent_told:
            by_word = side.workload.op == "read"
            if flow.retired if by_word else (flow.posted_all and self._phase.iterations is None):
                self._sent_told = True
                for link in side.links:
                    link.channel.send(Sent(flow.posted))

    def _read_channels(self) -> None:
        for index, link in enumerate(self._side.links):
            while (message := link.channel.take()) is not None:
                if isinstance(message, Sent) and self._sinks:
                    self._sinks[index].arm(message.iterations)
                    self._sent_by[index] = message.iterations
                elif isinstance(message, Finished) and link.finished is None:
                    link.finished = message
                else:
                    raise ProtocolError(f"{link.channel.who} sent {type(message).__name__} in the middle of a phase")

    def _arrived_iterations(self, index: int) -> int:
        if self._side.workload.op == "read" and self._flow is not None:
            return self._flow.posted
        return self._sent_by[index] if self._phase.iterations is None else self._phase.iterations

    def _only_told(self) -> bool:
        return self._flow is None and all(isinstance(sink, ToldSink) for sink in self._sinks)

    def _happened(self) -> int:
        """A number that grows while anything moves: iterations may take longer than ``timeout_s``, operations not."""
        flow = self._flow
        own: int = flow.posted + flow.retired_iterations if flow is not None else 0
        rails = self._side.engine.describe()["groups"][0]["rails"]
        own += sum(rail["completions"] for rail in rails)
        return own + sum(sink.received() + done for sink, done in zip(self._sinks, self._signalled, strict=True))

    def _standing(self) -> str:
        parts = []
        if self._flow is not None:
            parts.append(f"{self._flow.posted} iterations posted, {self._flow.retired_iterations} ended")
            if self._flow.retired:
                parts.append("the other end has not said that all is there")
        for sink, done, link in zip(self._sinks, self._signalled, self._side.links, strict=False):  # no sinks: no data
            if not done:
                parts.append(f"{sink.received()} units have come from {link.channel.who}, and not all")
        return "; ".join(parts)

    def _count_ops(self) -> tuple[int, int]:
        rails = self._side.engine.describe()["groups"][0]["rails"]
        return sum(rail["ops"] for rail in rails), sum(rail["bytes"] for rail in rails)

    def _take_messages(self) -> None:
        sinks = {
            link.peer.epoch: sink
            for link, sink in zip(self._side.links, self._sinks, strict=True)
            if isinstance(sink, MessageSink)
        }

        def deliver(sender: bytes, payload: bytes) -> None:
            if (sink := sinks.get(sender)) is not None:
                sink.deliver(payload)

        self._side.engine.on_message(deliver)
