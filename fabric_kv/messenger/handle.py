"""What ``submit`` returns: a future of one request, for threads, callbacks, asyncio and polling.

>>> handle = decode.submit(peer, request)
>>> result = handle.result(timeout=30.0)           # or: result = await handle
>>> handle.poll() is RequestState.READY            # never blocks; a small int
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from numpy.typing import NDArray

from ..errors import ConfigError, TransferTimeoutError
from ..futures import Completion
from .state import RequestState

if TYPE_CHECKING:
    from .actor import Actor

__all__ = ["RequestHandle", "RequestResult"]


class RequestResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request whose pages are all here.

    Attributes
    ----------
    request_id : str
    tail : dict of str to ndarray, or None
        Copies of what the prefill side's ``finish`` sent, in the tail pool's dtypes and shapes.
    source_set : int
        The replica set of the prefill side that sent the pages.
    submitted_s, accepted_s, ready_s : float
        When each was seen, on this process's ``time.monotonic()``; ``accepted_s`` is NaN if Accept came after the data.
    """

    request_id: str
    tail: dict[str, NDArray[Any]] | None
    source_set: int
    submitted_s: float
    accepted_s: float
    ready_s: float


class RequestHandle(Completion[RequestResult]):
    """One submitted request.

    Its pages belong to the messenger until ``done()``. Then they hold the cache, if ``result()`` returns; else the
    error's ``pages_clean`` says whether they may be reused. Threads: any. Done callbacks run on the messenger's thread
    or the engine's dispatcher and must not block. Cancelling a task that awaits a handle leaves the request alone: call
    ``cancel``.

    ``result()`` raises RequestRejectedError, RequestFailedError, RequestTimeoutError, RequestCancelledError,
    RequestStalledError or PeerLostError as the request ended, ClosedError if the messenger was closed first, and
    TransferTimeoutError if its own ``timeout`` passed: the request then goes on. Without a timeout the wait is bounded
    by the request's deadline and ``Bounds.cancel_s``.
    """

    def __init__(
        self,
        request_id: str,
        actor: Actor,
        *,
        cancel: Callable[[], None],
        received: Callable[[], int],
        layers_ready: Callable[[], int],
        total: int,
        on_callback_error: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self._actor = actor
        self._cancel = cancel
        self._received = received
        self._layers_ready = layers_ready
        self._total = total
        self._on_callback_error = on_callback_error
        self._state = RequestState.SENT

    def __repr__(self) -> str:
        return f"<RequestHandle {self.request_id!r} {self._state.name}>"

    def poll(self) -> RequestState:
        """The state now: a small int; from ``RequestState.READY`` on it is final. Never blocks."""
        return self._state

    def progress(self) -> tuple[int, int]:
        """Units that have arrived so far on all ranks, and the total; a unit is the plan's ``unit_bytes``."""
        ready = self._state is RequestState.READY
        return self._total if ready else min(self._received(), self._total), self._total

    def layers_ready(self) -> int:
        """Layers from the first on whose pages are all here, on all ranks, whatever becomes of the rest.

        It grows by groups of the messenger's ``layers_per_group``. Never blocks.
        """
        return self._layers_ready()

    def cancel(self) -> None:
        """Ask the prefill side to stop. The request ends once it has confirmed, or ``Bounds.cancel_s`` has passed.

        Returns at once; a request that has ended stays as it is.
        """
        self._cancel()

    def _wait(self, timeout: float | None) -> None:
        if self._actor.is_current and not self.done():
            raise ConfigError(f"request {self.request_id!r}: the messenger's own thread would wait for itself")
        super()._wait(timeout)

    def _count_callback_error(self) -> None:
        self._on_callback_error()

    def _timeout_error(self, timeout: float | None) -> Exception:
        return TransferTimeoutError(f"request {self.request_id!r} has not ended within {timeout} s and goes on")

    # The messenger's side; on its thread only.

    def _set_state(self, state: RequestState) -> None:
        self._state = state

    def _end(self, state: RequestState, outcome: RequestResult | BaseException) -> None:
        self._state = state
        if isinstance(outcome, RequestResult):
            self._succeed(outcome)
        else:
            self._fail(outcome)
