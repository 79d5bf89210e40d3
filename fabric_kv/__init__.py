"""RDMA transfer of KV caches between the prefill and the decode side of LLM serving.

>>> import fabric_kv
>>> with fabric_kv.Engine(provider="tcp", nics=["127.0.0.1"]) as engine:
...     print(engine.describe()["groups"][0]["rails"][0]["provider"])

Names are loaded when first used, so importing the package is quick and needs neither libfabric nor CUDA.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Admission as Admission
    from .config import Bounds as Bounds
    from .config import EngineOptions as EngineOptions
    from .engine import Engine as Engine
    from .errors import *  # noqa: F403
    from .prepared import Prepared as Prepared
    from .prepared import PreparedPiece as PreparedPiece
    from .prepared import Watch as Watch
    from .regions import CounterToken as CounterToken
    from .regions import RemoteRegion as RemoteRegion
    from .sharding import CacheSpec as CacheSpec
    from .sharding import KVLayout as KVLayout
    from .sharding import Placement as Placement
    from .sharding import RankMemory as RankMemory
    from .sharding import SourcePicker as SourcePicker
    from .sharding import TransferPlan as TransferPlan
    from .sharding import layout_from_config as layout_from_config
    from .sharding import plan_transfer as plan_transfer
    from .submission import PageList as PageList
    from .transfers import Counter as Counter
    from .transfers import MemoryRegion as MemoryRegion
    from .transfers import PagePiece as PagePiece
    from .transfers import Transfer as Transfer

__version__ = "0.1.0"

_HOME = {
    "Admission": "config",
    "Bounds": "config",
    "CacheSpec": "sharding",
    "Counter": "transfers",
    "CounterToken": "regions",
    "Engine": "engine",
    "EngineOptions": "config",
    "KVLayout": "sharding",
    "MemoryRegion": "transfers",
    "PageList": "submission",
    "PagePiece": "transfers",
    "Placement": "sharding",
    "Prepared": "prepared",
    "PreparedPiece": "prepared",
    "RankMemory": "sharding",
    "RemoteRegion": "regions",
    "SourcePicker": "sharding",
    "Transfer": "transfers",
    "TransferPlan": "sharding",
    "Watch": "prepared",
    "layout_from_config": "sharding",
    "plan_transfer": "sharding",
}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    errors = import_module(".errors", __name__)
    if name in errors.__all__:
        return getattr(errors, name)
    if name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOME, *import_module(".errors", __name__).__all__, "__version__"])
