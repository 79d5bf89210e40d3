"""The prefill side's dealings with peers: greeting, refusing, losing them.

>>> PrefillMessenger(engine, spec, regions, scheduler).state()["peers"]      # PrefillMessenger builds on this

A peer is known by the epoch of its engine; messages of any other epoch but Hello are counted and dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..config import Admission, Bounds
from ..errors import FabricKVError, ProtocolError
from ..regions import EngineAddress
from ..sharding import CacheSpec
from . import wire
from .actor import Actor
from .base import Messenger
from .peers import Link, check_setup
from .serve import ServeEvent
from .serving import Serving
from .sessions import Refusal, Session
from .state import PeerLost

if TYPE_CHECKING:
    from ..engine import Engine
    from ..transfers import MemoryRegion, Transfer
    from .tail import TailPool

__all__ = ["PrefillSessions"]

_log = logging.getLogger("fabric_kv.messenger")

# Refusals that have not left yet; keeps what strangers can make us hold bounded.
MAX_PARTING = 4096


class PrefillSessions(Messenger):
    """The part of the prefill messenger that finds and loses peers; all on the actor's thread."""

    def __init__(
        self,
        engine: Engine,
        spec: CacheSpec,
        regions: Sequence[Sequence[MemoryRegion]],
        tail: TailPool | None,
        bounds: Bounds,
        admission: Admission,
        actor: Actor | None,
    ) -> None:
        check_setup(engine, spec, regions, tail)
        super().__init__(engine, bounds, actor, "prefill")
        self._spec = spec
        self._regions = [list(rank) for rank in regions]
        self._tails = tail
        self._admission = admission
        self._sessions: dict[bytes, Session] = {}
        self._parting: list[Link] = []  # Links that carry one last message.

    def _apply(self, serving: Serving, event: ServeEvent) -> None:
        raise NotImplementedError

    def _on_hello(self, epoch: bytes, hello: wire.Hello) -> None:
        if hello.peer_epoch != self._engine.epoch:
            self._on_hello_to_another(epoch, hello)
            return
        old = self._sessions.get(epoch)
        if old is not None and hello.session <= max(old.number, old.seen.highest):
            self._counts["late"] += 1  # A duplicate: it was answered. Or a lie: numbers only grow.
            return
        if old is not None:
            # Decode gave the old session up, or it would not have begun a new one.
            self._lose(old, "the decode side began a new session")
        link = None if self._too_many_partings() else self._open_link(epoch, hello.address)
        if link is None:
            return
        try:
            if self._closing:
                raise Refusal("closing", "the prefill side is closing")
            if len(self._sessions) >= self._admission.max_peers:
                raise Refusal(
                    "too_many_peers", f"the prefill side serves {self._admission.max_peers} decode engines already"
                )
            session = Session.greet(hello, link, spec=self._spec, ours=self._regions, tails=self._tails)
        except Refusal as refusal:
            self._counts["refused_hellos"] += 1
            self._part(link, wire.HelloReply(hello.session, refusal.kind, str(refusal)[: wire.MAX_REASON_CHARS]))
            return
        ours = [region.remote for rank in self._regions for region in rank]
        session.find_ways(ours if self._tails is None else [*ours, self._tails.region.remote])
        self._sessions[epoch] = session
        self._connect_rails(session, wire.HelloReply(hello.session, spec=self._spec.to_bytes()))

    def _on_hello_to_another(self, epoch: bytes, hello: wire.Hello) -> None:
        """It went to an engine whose address we have now: the session that its sender has with us goes on."""
        reply = wire.HelloReply(hello.session, "other_incarnation", "the address is that of an engine which is no more")
        session = self._sessions.get(epoch)
        if session is not None:
            session.link.send(reply)
        else:
            link = None if self._too_many_partings() else self._open_link(epoch, hello.address)
            if link is None:
                return
            self._part(link, reply)
        self._counts["refused_hellos"] += 1

    def _connect_rails(self, session: Session, reply: wire.HelloReply) -> None:
        """Open the connections that pages will take, then answer; also where one cannot be opened in time."""
        link = session.link
        open_: set[Transfer] = set()
        try:
            for group, region in session.ways:
                open_.add(self._engine.connect_rails(link.peer, region, group=group))
        except FabricKVError as error:
            _log.warning("cannot connect all NICs to %s beforehand: %s", session.epoch.hex(), error)
        waiting = set(open_)

        def answer() -> None:
            timer.cancel()
            waiting.clear()
            link.send(reply)

        def late() -> None:
            _log.warning("not all NICs could be connected to %s beforehand in time", session.epoch.hex())
            for transfer in waiting:
                transfer.cancel()
            answer()

        def ended(transfer: Transfer) -> None:
            if transfer not in waiting:
                return
            waiting.discard(transfer)
            error = transfer.exception(0)
            if error is not None and self._sessions.get(session.epoch) is session:
                _log.warning("not all NICs can be connected to %s: %s", session.epoch.hex(), error)
            if not waiting:
                answer()

        # Well before the other side gives up waiting for our answer, whatever its bounds are.
        timer = self._actor.after(min(self._bounds.connect_rails_s, self._bounds.handshake_s / 2), late)
        if not waiting:
            answer()
        for transfer in open_:
            transfer.add_done_callback(lambda done: self._actor.post(partial(ended, done)))

    def _open_link(self, epoch: bytes, address: bytes) -> Link | None:
        try:
            named = EngineAddress.from_bytes(address).epoch
            if named != epoch:
                raise ProtocolError(f"it names engine {named.hex()}")
            peer = self._engine.add_peer(address, monitor=True)
        except FabricKVError as error:
            self._counts["malformed"] += 1
            _log.warning("dropped a Hello from %s: its address cannot be used: %s", epoch.hex(), error)
            return None
        return Link(self._actor, self._engine, peer, on_broken=self._on_link_broken, on_idle=self._on_link_idle)

    def _on_other_version(self, epoch: bytes, error: wire.VersionMismatch) -> None:
        """Answer a Hello of another version: our reply's version byte tells the sender what we speak."""
        hello = error.hello
        if hello is None or epoch in self._sessions or self._too_many_partings():
            return
        link = self._open_link(epoch, hello.address)
        if link is not None:
            self._part(link, wire.HelloReply(hello.session, "incompatible", str(error)))

    def _part(self, link: Link, message: wire.Message) -> None:
        """Send one last message to a peer without a session, then forget it."""
        self._parting.append(link)
        link.send(message)

    def _too_many_partings(self) -> bool:
        """Whether refusals pile up that nobody reads: then Hellos are dropped, and their senders time out."""
        if len(self._parting) < MAX_PARTING:
            return False
        self._counts["dropped_hellos"] += 1
        return True

    def _on_link_idle(self, link: Link) -> None:
        if link in self._parting:
            self._parting.remove(link)
            link.close()
            if link.peer.epoch not in self._sessions:
                self._remove_peer(link)
        self._advance_close()

    def _on_link_broken(self, link: Link, reason: str) -> None:
        session = self._sessions.get(link.peer.epoch)
        if session is not None and session.link is link:
            self._lose(session, reason)
        self._on_link_idle(link)

    def _on_peer_lost(self, epoch: bytes, reason: str) -> None:
        session = self._sessions.get(epoch)
        if session is not None:
            self._counts["peers_lost"] += 1
            self._lose(session, reason)
        for link in [link for link in self._parting if link.peer.epoch == epoch]:
            self._on_link_idle(link)

    def _lose(self, session: Session, reason: str) -> None:
        """End a session: its requests end as their writes retire."""
        if self._sessions.get(session.epoch) is session:
            del self._sessions[session.epoch]
        session.link.close()
        for serving in list(session.open.values()):
            self._apply(serving, PeerLost(reason))
        # After the transfers were cancelled: what is posted to a dead peer retires when its connection goes.
        self._remove_peer(session.link)
        self._advance_close()

    def _tell_written(self, session: Session) -> None:
        """Tell decode of which requests all writes have completed, since the last time."""
        written = session.take_written()
        for begin in range(0, len(written), wire.MAX_WRITTEN):
            session.link.send(wire.Written(written[begin : begin + wire.MAX_WRITTEN]))

    def _say_clean(self, session: Session, clean: bool, say: Callable[[bool], None]) -> None:
        """``say`` whether all that was written has landed, once that is so.

        Between several NICs a message may overtake writes that have ended here: it waits until they are flushed. Where
        a flush proves nothing (the NICs keep no order) the answer is no.
        """
        if not clean or not session.flushes:
            say(clean)
            return
        try:
            open_ = {self._engine.flush(session.link.peer, region, group=group) for group, region in session.flushes}
        except FabricKVError as error:
            _log.warning("cannot flush to %s: %s", session.epoch.hex(), error)
            say(False)
            return
        waiting, failed = set(open_), []
        self._num_unsaid += 1

        def ended(flush: Transfer) -> None:
            waiting.discard(flush)
            if flush.exception(0) is not None:
                failed.append(flush)
            if not waiting:
                self._num_unsaid -= 1
                say(not failed)
                self._advance_close()

        for flush in open_:
            flush.add_done_callback(lambda done: self._actor.post(partial(ended, done)))

    def _links(self) -> list[Link]:
        return [*(session.link for session in self._sessions.values()), *self._parting]

    def _send_goodbyes(self) -> None:
        for session in list(self._sessions.values()):
            self._tell_written(session)
            # A Goodbye waits for nothing: where only a flush could prove that all has landed, it does not claim so.
            session.link.send(wire.Goodbye(session.number, quiescent=session.quiescent and not session.flushes))
