"""A scheduler for measurements of the messenger alone."""

from __future__ import annotations

import queue

from fabric_kv.errors import FabricKVError
from fabric_kv.messenger import PrefillRequest, RequestKey

__all__ = ["IdleScheduler"]


class IdleScheduler:
    """A scheduler that computes nothing: `requests` has what arrived."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[PrefillRequest] = queue.SimpleQueue()

    def on_request(self, request: PrefillRequest) -> None:
        self.requests.put(request)

    def on_released(self, key: RequestKey) -> None:
        pass

    def on_failed(self, key: RequestKey, error: FabricKVError) -> None:
        raise error
