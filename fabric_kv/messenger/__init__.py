"""Requests, chunks, layers and tails: from a prompt that decode submits to the pages that have arrived.

>>> from fabric_kv.messenger import Chunk, DecodeMessenger, PrefillMessenger, Reject, Request, TailPool
>>> handle = decode.submit(decode.connect(prefill_address), Request(request_id="a", tokens=tokens, pages=[pages]))
>>> handle.result()
"""

from .decode import DecodeMessenger
from .handle import RequestHandle, RequestResult
from .poison import PoisonedPages
from .prefill import PrefillMessenger
from .prefill_peer import PrefillPeer
from .requests import Request
from .scheduler import Chunk, PrefillRequest, Reject, RequestKey, Scheduler
from .state import RequestState
from .tail import TailPool

__all__ = [
    "Chunk",
    "DecodeMessenger",
    "PoisonedPages",
    "PrefillMessenger",
    "PrefillPeer",
    "PrefillRequest",
    "Reject",
    "Request",
    "RequestHandle",
    "RequestKey",
    "RequestResult",
    "RequestState",
    "Scheduler",
    "TailPool",
]
