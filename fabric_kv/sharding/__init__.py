"""Cache geometry, and plans that map any cache onto any other: pure functions, without a fabric.

>>> layout = layout_from_config(json.load(open("config.json")), page_tokens=16)
>>> spec = CacheSpec.from_arrays(layout, Placement(tp_size=2), arrays, axes="LKPHND")     # one array per rank
>>> plan = plan_transfer(spec, other_spec)         # PlanError if they do not fit; print(plan.explain())

``layout`` says what a model keeps, ``placement`` which rank holds what, ``places`` and ``cache`` where it lies, and
``plan`` what goes where. Needs numpy and msgspec only: no libfabric, no engine.
"""

from __future__ import annotations

from .cache import CacheSpec, RankMemory
from .layout import Group, KVLayout, Part
from .models import PRESETS, layout_from_config
from .pages import PageMap
from .placement import Placement, SourcePicker, even_stages
from .places import AXES, Placed, Strided, offset_in
from .plan import PageWrite, TransferPlan, plan_transfer
from .report import PlanCost

__all__ = [
    "AXES",
    "PRESETS",
    "CacheSpec",
    "Group",
    "KVLayout",
    "PageMap",
    "PageWrite",
    "Part",
    "Placed",
    "Placement",
    "PlanCost",
    "RankMemory",
    "SourcePicker",
    "Strided",
    "TransferPlan",
    "even_stages",
    "layout_from_config",
    "offset_in",
    "plan_transfer",
]
