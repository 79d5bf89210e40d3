"""How an engine ends: when it is told to, forgotten, or at the interpreter's exit; and what of it a forked child has.

>>> finalizer = close_at_end(engine, native, dispatcher, registry)
>>> finalizer()                                    # what close() does first; the others call it by themselves

In a forked child every engine counts as closed, and nothing of it is touched.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from .errors import StuckError
from .futures import Completion

if TYPE_CHECKING:
    from . import _native
    from .dispatcher import Dispatcher
    from .engine import Engine
    from .registry import Registry

__all__ = ["DRAIN_S", "close_at_end"]

# How long close() lets posted operations end by themselves before it closes the endpoints under them.
DRAIN_S = 1.0

_log = logging.getLogger("fabric_kv")

# All weakly: a closed dispatcher may still refer to its engine, and would keep both for ever as the value of that key.
_engines: weakref.WeakKeyDictionary[Engine, tuple[weakref.finalize[..., Any], weakref.ref[Dispatcher]]]
_engines = weakref.WeakKeyDictionary()


def close_at_end(
    engine: Engine, native: _native.Engine, dispatcher: Dispatcher, registry: Registry
) -> weakref.finalize[..., Any]:
    """The finalizer that closes an engine, once: it is alive for as long as the engine is open."""
    finalizer = weakref.finalize(engine, _close, native, dispatcher, registry)
    _engines[engine] = finalizer, weakref.ref(dispatcher)
    return finalizer


def _close(native: _native.Engine, dispatcher: Dispatcher, registry: Registry) -> None:
    try:
        native.close(DRAIN_S)
    except StuckError as error:
        _log.error("%s", error)
        registry.keep()
    finally:
        dispatcher.stop()


def _abandon_in_child() -> None:
    # Threads and NICs are the parent's: closing them here would wait for ever, or close them over there.
    Completion.abandon_lock()
    for finalizer, ref in _engines.values():
        finalizer.detach()
        if (dispatcher := ref()) is not None:
            dispatcher.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
