"""Posting prepared writes from any thread without waiting, and keeping those that did not fit for later.

>>> poster.post(submissions)       # on the scheduler's thread: what the engine has no room for is kept
>>> poster.retry()                 # on the actor's thread, when a transfer has ended

One lock guards what the posting threads and the actor share: a request's machine, its open transfers, the backlog.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import FabricKVError, TransferCancelledError, WouldBlockError
from .actor import Actor
from .peers import RETRY_S
from .serve import Serve, ServeEffect, ServeEvent, serve_step
from .sources import SourceCheck, SourcesChangedError
from .state import Posted

if TYPE_CHECKING:
    from ..engine import Engine
    from ..prepared import Watch
    from ..regions import CounterToken, RemoteRegion
    from ..transfers import Peer, Transfer
    from .tail import TailPool
    from .writes import PageLists, RankWrites

__all__ = ["Outflow", "Poster", "Submission", "TailSubmission", "may_still_land"]


class Outflow:
    """The writes of one request; guarded by the poster's lock."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.serve = Serve()
        self.open: set[Transfer] = set()
        self.stopped = False  # At once, before the machine hears of it.
        self.num_waiting = 0  # Of its submissions, in the poster's backlog.

    @property
    def may_post(self) -> bool:
        """Whether anything may still be posted."""
        return not self.stopped and self.serve.may_post


class Submission:
    """Pages for one decode rank; ``layers`` wait until they are done, where there are any.

    ``watch`` and ``step`` are set when the step is opened.
    """

    __slots__ = ("layers", "lists", "outflow", "step", "sums", "token", "watch", "writes")

    def __init__(
        self, outflow: Outflow, writes: RankWrites, lists: PageLists, layers: frozenset[int], token: CounterToken
    ) -> None:
        self.outflow = outflow
        self.writes = writes
        self.lists = lists
        self.layers = layers
        self.token = token
        self.watch: Watch | None = None
        self.step = 0
        self.sums: dict[int, list[int]] = {}  # see SourceCheck


class TailSubmission:
    """The write of one tail; it takes a slot of this side's pool when it is posted."""

    __slots__ = ("dst", "dst_offset", "header", "outflow", "payload", "token")

    def __init__(
        self,
        outflow: Outflow,
        header: bytes,
        payload: NDArray[np.uint8],
        dst: RemoteRegion,
        dst_offset: int,
        token: CounterToken,
    ) -> None:
        self.outflow = outflow
        self.header = header
        self.payload = payload
        self.dst = dst
        self.dst_offset = dst_offset
        self.token = token


S = TypeVar("S", Submission, TailSubmission)


class Poster:
    """Hands submissions to the engine, in order of arrival.

    Parameters
    ----------
    on_retired : callable (outflow, error or None)
        Called on the actor's thread when a transfer has ended; the poster then tries its backlog again.
    on_refused : callable (outflow, error)
        Called on the actor's thread when the engine refused a submission for another reason than a full queue.
    sources : SourceCheck, optional
        Asked at the end of each transfer of pages.
    """

    def __init__(
        self,
        actor: Actor,
        engine: Engine,
        tails: TailPool | None,
        on_retired: Callable[[Outflow, BaseException | None], None],
        on_refused: Callable[[Outflow, BaseException], None],
        sources: SourceCheck | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self._actor = actor
        self._engine = engine
        self._tails = tails
        self._on_retired = on_retired
        self._on_refused = on_refused
        self._sources = sources
        # Room that writes leave to control messages: a Cancel must not wait for the very writes that it is to stop.
        self._max_open = max(1, engine.options.max_transfers - max(1, engine.options.max_transfers // 8))
        self._num_open = 0
        self._will_retry = False
        # Of these, what waits for layers takes half at most: what could go now must not wait for layers, too.
        self._max_waiting = max(1, self._max_open // 2)
        self._backlog: deque[Submission] = deque()
        self._ready_backlog: deque[Submission] = deque()  # What waits for no layer.
        self._tail_backlog: deque[TailSubmission] = deque()  # Of its own: a tail may wait for a slot, pages do not.
        self._num_dead = 0  # Submissions in these of requests that were stopped.

    @property
    def num_waiting(self) -> int:
        """Submissions in the backlog."""
        return len(self._backlog) + len(self._ready_backlog) + len(self._tail_backlog) - self._num_dead

    def apply(self, outflow: Outflow, event: ServeEvent) -> tuple[ServeEffect, ...]:
        """Step the request's machine."""
        with self.lock:
            outflow.serve, effects = serve_step(outflow.serve, event)
        return effects

    def post(self, submissions: Iterable[Submission]) -> bool:
        """Post what the engine takes and keep the rest; False if something is kept. Never blocks."""
        with self.lock:
            for item in submissions:
                item.outflow.num_waiting += 1
                self._num_dead += item.outflow.stopped
                (self._ready_backlog if item.watch is None else self._backlog).append(item)
            return self.retry()

    def post_tail(self, submission: TailSubmission) -> bool:
        """Post a tail, or keep it until there is room and a slot; False if something is kept. Never blocks."""
        with self.lock:
            submission.outflow.num_waiting += 1
            self._num_dead += submission.outflow.stopped
            self._tail_backlog.append(submission)
            return self.retry()

    def retry(self) -> bool:
        """Try the backlog again; False if something is left."""
        with self.lock:
            self._post_from(self._ready_backlog, self._post_pages)
            self._post_from(self._backlog, self._post_pages)
            self._post_from(self._tail_backlog, self._post_tail)
            return not self.num_waiting

    def _post_from(self, backlog: deque[S], post: Callable[[S], bool]) -> None:
        while backlog:
            item = backlog[0]
            if not post(item):
                return
            if backlog and backlog[0] is item:  # Else its request was stopped in the middle of that.
                backlog.popleft()
                item.outflow.num_waiting -= 1
                self._num_dead -= item.outflow.stopped

    def stop(self, outflow: Outflow) -> None:
        """Forget what is not posted and cancel what is: each transfer ends when its posted operations are retired."""
        with self.lock:
            # Whoever is about to post for it on another thread then finds that it may not.
            if not outflow.stopped:
                outflow.stopped = True
                self._num_dead += outflow.num_waiting
            # Posting these is skipped. Thrown out when they are the most: one by one, a peer's loss with all its
            # requests would cost the square of their number.
            if self._num_dead > self.num_waiting:
                _keep_live(self._ready_backlog)
                _keep_live(self._backlog)
                _keep_live(self._tail_backlog)
                self._num_dead = 0
            transfers = list(outflow.open)
        for transfer in transfers:
            transfer.cancel()

    def _post_pages(self, item: Submission) -> bool:
        def submit() -> Transfer:
            return item.writes.submit(self._engine, item.outflow.peer, item.lists, item.token, item.watch, item.step)

        if item.watch is not None and self._num_open >= self._max_waiting and item.outflow.may_post:
            return False
        return self._try_post(item.outflow, submit, slot=None, pages=item if self._sources else None)

    def _post_tail(self, item: TailSubmission) -> bool:
        tails = self._tails
        assert tails is not None
        if not item.outflow.may_post:
            return True
        try:
            slot = tails.acquire()
        except WouldBlockError:
            return False
        tails.fill(slot, item.header, item.payload)

        def write() -> Transfer:
            offset, nbytes = slot * tails.slot_bytes, tails.write_bytes
            peer = item.outflow.peer
            return self._engine.write(peer, tails.region, offset, item.dst, item.dst_offset, nbytes, token=item.token)

        return self._try_post(item.outflow, write, slot)

    def _try_post(
        self, outflow: Outflow, call: Callable[[], Transfer], slot: int | None, pages: Submission | None = None
    ) -> bool:
        """False if the engine is full; True if the submission needs no further attempt."""
        if not outflow.may_post:
            self._free_slot(slot)
            return True
        if self._num_open >= self._max_open:
            self._free_slot(slot)
            return False
        try:
            transfer = call()
        except WouldBlockError:
            self._free_slot(slot)
            if not self._num_open:
                # Others have filled the engine, control messages for example: no write of ours will end and tell us.
                self._try_later()
            return False
        except FabricKVError as error:
            self._free_slot(slot)
            self._actor.post(partial(self._on_refused, outflow, error))
            return True
        outflow.serve, _ = serve_step(outflow.serve, Posted())
        outflow.open.add(transfer)
        self._num_open += 1
        transfer.add_done_callback(lambda ended: self._actor.post(partial(self._retired, outflow, slot, pages, ended)))
        return True

    def _try_later(self) -> None:
        if not self._will_retry:
            self._will_retry = True
            self._actor.post(self._set_timer)

    def _set_timer(self) -> None:
        self._actor.after(RETRY_S, self._on_time)

    def _on_time(self) -> None:
        with self.lock:
            self._will_retry = False
            self.retry()

    def _free_slot(self, slot: int | None) -> None:
        if slot is not None and self._tails is not None:
            self._tails.release(slot)

    def _retired(self, outflow: Outflow, slot: int | None, pages: Submission | None, transfer: Transfer) -> None:
        with self.lock:
            outflow.open.discard(transfer)
            self._num_open -= 1
        self._free_slot(slot)
        error = transfer.exception(0)
        if self._sources is not None and pages is not None:
            changed = self._sources.changed(pages) if error is None else None
            error = error if changed is None else SourcesChangedError(changed)
            pages.watch = None  # whoever owns its word may want to unmap that
        self._on_retired(outflow, error)
        self.retry()


def _keep_live(backlog: deque[S]) -> None:
    live = [item for item in backlog if not item.outflow.stopped]
    backlog.clear()
    backlog.extend(live)


def may_still_land(error: BaseException) -> bool:
    """Whether bytes of a failed transfer may yet arrive over there.

    A cancelled transfer has no operation of unknown outcome: those posted have landed, the others never will. One whose
    sources were changed has landed, with whatever was sent. After
    any other error the outcome of the operation that failed is unknown: the sender cannot tell whether its bytes wait
    somewhere on the way.
    """
    return not isinstance(error, TransferCancelledError | SourcesChangedError)
