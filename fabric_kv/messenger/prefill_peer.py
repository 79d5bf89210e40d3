"""Prefill engines as the decode side knows them: the handshake, and what is open towards each.

>>> peer = decode.connect(address, timeout=5.0)      # PeerUnreachableError, PlanError
>>> peer.alive, peer.plan.explain()
"""

from __future__ import annotations

import concurrent.futures
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..config import Bounds
from ..errors import ClosedError, ConfigError, FabricKVError, PeerUnreachableError, PlanError, ProtocolError
from ..regions import EngineAddress
from ..sharding import CacheSpec, SourcePicker, TransferPlan, plan_transfer
from . import wire
from .actor import Actor, Timer
from .base import ANSWER_S, Messenger
from .layers import LayerGroups
from .peers import RETRY_S, Link, check_setup

if TYPE_CHECKING:
    from ..engine import Engine
    from ..regions import RemoteRegion
    from ..transfers import MemoryRegion, Peer
    from .requests import Fetching
    from .tail import TailPool

__all__ = ["DecodePeers", "PrefillPeer"]


class _Waiter(NamedTuple):
    """One call of ``connect`` and its bound."""

    future: concurrent.futures.Future[PrefillPeer]
    timer: Timer


class PrefillPeer:
    """A prefill engine that has answered a handshake. Another incarnation of it is another peer.

    Attributes
    ----------
    epoch : bytes
        The incarnation.
    plan : TransferPlan
        How its cache maps onto this side's.
    degraded : str or None
        Why the last request that should have brought pages did not; None again when one has. Heartbeats say only that
        its process lives.
    """

    plan: TransferPlan
    _picker: SourcePicker

    def __init__(self, owner: DecodePeers, link: Link, hello: wire.Hello) -> None:
        self._owner = owner
        self.epoch: bytes = link.peer.epoch
        self._link = link
        self._hello: wire.Hello | None = hello  # To be said once more if it is lost.
        self._session = hello.session
        self._next_generation = hello.session
        self._open: dict[int, Fetching] = {}
        self._gone: str | None = None  # Why no request can be sent any more.
        self.degraded: str | None = None
        self._waiters: list[_Waiter] = []
        self._greeted = False

    @property
    def alive(self) -> bool:
        """Whether requests can be submitted to it: it has neither been lost nor said goodbye."""
        return self._greeted and self._gone is None

    def __repr__(self) -> str:
        return f"<PrefillPeer {self.epoch.hex()[:8]} {'alive' if self.alive else self._gone or 'not greeted'}>"


class DecodePeers(Messenger):
    """The part of the decode messenger that finds and loses peers."""

    def __init__(
        self,
        engine: Engine,
        spec: CacheSpec,
        regions: Sequence[Sequence[MemoryRegion]],
        tail: TailPool | None,
        bounds: Bounds,
        layers: LayerGroups,
        actor: Actor | None,
    ) -> None:
        check_setup(engine, spec, regions, tail)
        super().__init__(engine, bounds, actor, "decode")
        self._spec = spec
        self._regions = [list(rank) for rank in regions]
        self._tails = tail
        self._layers = layers
        self._peers: dict[bytes, PrefillPeer] = {}
        self._asking: dict[int, PrefillPeer] = {}  # by session: those that have not answered
        self._fencing: dict[bytes, PrefillPeer | None] = {}  # lost; None: by reclaim()
        self._last_number = 0  # The highest generation so far.

    def connect(self, address: bytes, timeout: float | None = None) -> PrefillPeer:
        """Shake hands with a prefill engine. Idempotent: an engine that is connected is returned at once.

        Parameters
        ----------
        address : bytes
            ``Engine.address`` of the prefill side, from wherever addresses are kept.
        timeout : float, optional
            Seconds until it must have answered; ``Bounds.handshake_s`` by default.

        Raises
        ------
        ProtocolError
            If these are no address bytes, or the peer speaks another version.
        PeerUnreachableError
            If it did not answer in time, is another incarnation than the address says, or refuses peers.
        PlanError
            If the two caches cannot be mapped onto each other; shows both, field by field.
        ClosedError
            If this messenger is closing.
        """
        if self._actor.is_current:
            raise ConfigError("connect() was called on the messenger's own thread, which would wait for itself")
        bound = self._bounds.handshake_s if timeout is None else timeout
        # Ended by the actor's timer; the longer wait only guards against a callback that blocks the actor.
        return self._begin_connect(address, bound).result(bound + ANSWER_S)

    def warmup(self, addresses: Iterable[bytes], timeout: float | None = None) -> list[PrefillPeer]:
        """Connect to several prefill engines at once, so that no request has to wait for it.

        Each answers when its NICs have connected to ours (see ``Engine.connect_rails``).

        Parameters
        ----------
        addresses : iterable of bytes
        timeout : float, optional
            Seconds until all must have answered; ``Bounds.handshake_s`` by default.

        Returns
        -------
        list of PrefillPeer
            In the order of ``addresses``.

        Raises
        ------
        ProtocolError, PeerUnreachableError, PlanError, ClosedError
            As ``connect``, for the first that fails; the others are connected then, or go on connecting.
        """
        if self._actor.is_current:
            raise ConfigError("warmup() was called on the messenger's own thread, which would wait for itself")
        bound = self._bounds.handshake_s if timeout is None else timeout
        futures = [self._begin_connect(address, bound) for address in addresses]
        return [future.result(bound + ANSWER_S) for future in futures]

    def _begin_connect(self, address: bytes, bound: float) -> concurrent.futures.Future[PrefillPeer]:
        epoch = EngineAddress.from_bytes(address).epoch
        if epoch == self._engine.epoch:
            raise ConfigError("the address is this engine's own")
        future: concurrent.futures.Future[PrefillPeer] = concurrent.futures.Future()
        self._actor.post(partial(self._connect, address, epoch, bound, future))
        return future

    # --- On the actor's thread ----------------------------------------------------------------------------------------

    def _connect(
        self, address: bytes, epoch: bytes, bound: float, future: concurrent.futures.Future[PrefillPeer]
    ) -> None:
        if self._closing:
            future.set_exception(ClosedError("the messenger is closing"))
            return
        known = self._peers.get(epoch)
        if known is not None:
            if known._gone is not None:
                future.set_exception(_unreachable(address, known._gone))
            elif known._greeted:
                future.set_result(known)
            else:
                self._wait_for_reply(known, address, bound, future)
            return
        if epoch in self._fencing:
            # The fence would take the new session's keys, too.
            if bound > 0:
                again = partial(self._connect, address, epoch, bound - RETRY_S, future)
                self._actor.after(RETRY_S, again)
            else:
                future.set_exception(_unreachable(address, "it was lost, and what it has posted is being fenced off"))
            return
        native: Peer | None = None
        try:
            native = self._engine.add_peer(address, monitor=True)
            hello = wire.Hello(
                session=self._new_session(),
                address=self._engine.address,
                peer_epoch=epoch,
                spec=self._spec.to_bytes(),
                regions=[[self._keys(region, native).to_bytes() for region in rank] for rank in self._regions],
                tail=None if self._tails is None else self._tails.geometry(self._keys(self._tails.region, native)),
                layer_ends=list(self._layers.ends),
            )
        except FabricKVError as error:
            if native is not None:
                self._engine.remove_peer(native)
            future.set_exception(error)
            return
        peer = self._peers[epoch] = self._asking[hello.session] = PrefillPeer(self, self._link_to(native), hello)
        self._wait_for_reply(peer, address, bound, future)
        peer._link.send(hello)

    def _new_session(self) -> int:
        # Not to be guessed: whoever knows the number of a session that is asked for can refuse it.
        self._last_number = max(self._last_number, int(self._actor.now() * 1e9)) + 1 + secrets.randbits(20)
        return self._last_number

    def _link_to(self, peer: Peer) -> Link:
        return Link(
            self._actor,
            self._engine,
            peer,
            on_broken=self._on_link_broken,
            on_idle=lambda _: self._advance_close(),
        )

    def _keys(self, region: MemoryRegion, peer: Peer) -> RemoteRegion:
        """What a peer is told of our memory: keys of its own where these can be taken back from it."""
        return region.remote_for(peer) if self._engine.fence_means == "registrations" else region.remote

    def _wait_for_reply(
        self, peer: PrefillPeer, address: bytes, bound: float, future: concurrent.futures.Future[PrefillPeer]
    ) -> None:
        expired = _unreachable(address, f"it did not answer within {bound:g} s")
        waiter = _Waiter(future, self._actor.after(bound, lambda: self._on_waited(peer, waiter, expired)))
        peer._waiters.append(waiter)

    def _on_waited(self, peer: PrefillPeer, waiter: _Waiter, error: FabricKVError) -> None:
        peer._waiters.remove(waiter)
        if not peer._waiters:
            self._give_up(peer, error)
        waiter.future.set_exception(error)

    def _on_reply(self, peer: PrefillPeer, reply: wire.HelloReply) -> None:
        if peer._greeted or reply.session != peer._session:
            self._counts["late"] += 1
            return
        try:
            if reply.refusal == "incompatible":
                raise PlanError(f"the prefill side {peer.epoch.hex()[:8]} refused the handshake: {reply.reason}")
            if reply.refusal is not None:
                raise PeerUnreachableError(
                    f"the prefill side {peer.epoch.hex()[:8]} refused the handshake: {reply.reason}",
                    peer=peer.epoch.hex(),
                )
            peer.plan = plan_transfer(CacheSpec.from_bytes(reply.spec), self._spec)
            peer.plan.expected_by_group(0, 0, 1, layer_ends=self._layers.ends)  # now, or refused
            peer._picker = SourcePicker(peer.plan.num_source_sets)
        except FabricKVError as error:
            self._give_up(peer, error)
            return
        peer._greeted, peer._hello = True, None
        self._asking.pop(peer._session, None)
        self._answer(peer, None)

    def _on_other_incarnation(self, reply: wire.HelloReply) -> None:
        """Whoever has the address now answers for the engine that had it, and with its own name."""
        asked = self._asking.get(reply.session)
        if asked is None:
            self._counts["late"] += 1
        else:
            self._on_reply(asked, reply)

    def _give_up(self, peer: PrefillPeer, error: FabricKVError) -> None:
        """End a handshake without success; nothing of the peer is kept."""
        if not peer._greeted and self._peers.get(peer.epoch) is peer:
            self._drop(peer, str(error))
            self._answer(peer, error)

    def _answer(self, peer: PrefillPeer, error: FabricKVError | None) -> None:
        waiters, peer._waiters = peer._waiters, []
        for future, timer in waiters:
            timer.cancel()
            if error is None:
                future.set_result(peer)
            else:
                future.set_exception(error)

    def _drop(self, peer: PrefillPeer, reason: str) -> None:
        """Forget a peer: no message comes from it or goes to it any more."""
        peer._gone = reason
        peer._link.close()
        self._asking.pop(peer._session, None)
        if self._peers.get(peer.epoch) is peer:
            del self._peers[peer.epoch]
            self._remove_peer(peer._link)
            if not peer._open and self._engine.fence_means == "registrations":
                # Nothing of it is in flight: only its keys are to be taken back.
                self._fencing[peer.epoch] = None
                fence = partial(self._engine.fence, peer._link.peer, timeout_s=0.0)
                self._actor.aside(fence, lambda _: self._end_reclaim(peer.epoch))

    def _end_reclaim(self, epoch: bytes) -> None:
        self._fencing.pop(epoch, None)

    def _on_link_broken(self, link: Link, reason: str) -> None:
        peer = self._peers.get(link.peer.epoch)
        if peer is None or peer._link is not link:
            return
        if peer._greeted or peer._hello is None or self._closing:
            self._on_peer_lost(peer.epoch, reason)
            return
        # What it went by may be what is left of a connection to an earlier session, and is gone now.
        self._asking.pop(peer._session, None)
        hello, peer._hello = msgspec.structs.replace(peer._hello, session=self._new_session()), None
        peer._session = peer._next_generation = hello.session
        self._asking[hello.session] = peer
        peer._link = self._link_to(link.peer)
        peer._link.send(hello)

    def _on_other_version(self, epoch: bytes, error: wire.VersionMismatch) -> None:
        peer = self._peers.get(epoch)
        if peer is not None:
            self._give_up(peer, ProtocolError(str(error), peer=epoch.hex()))

    def _links(self) -> list[Link]:
        return [peer._link for peer in self._peers.values()]

    def _send_goodbyes(self) -> None:
        for peer in list(self._peers.values()):
            peer._link.send(wire.Goodbye(peer._session, quiescent=True))


def _unreachable(address: bytes, reason: str) -> PeerUnreachableError:
    epoch = EngineAddress.from_bytes(address).epoch.hex()
    return PeerUnreachableError(f"cannot connect to the prefill engine {epoch[:8]}: {reason}", peer=epoch)
