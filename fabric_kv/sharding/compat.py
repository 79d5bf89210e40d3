"""What two caches must have in common, compared field by field.

>>> check_compatible(prefill_layout, decode_layout)      # PlanError with a table of both sides

Compared once, at the handshake; a pair that passes needs no further checks for each request.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import PlanError
from ..tables import text_table
from .layout import Group, KVLayout
from .placement import Placement

__all__ = ["check_compatible", "compat_fields", "describe_placement", "difference", "format_ranges"]


def compat_fields(layout: KVLayout) -> dict[str, str]:
    """The facts that both sides must agree on, in the order in which they are printed."""
    fields = {"model": layout.model, "num_layers": str(layout.num_layers), "groups": str(len(layout.groups))}
    for group in layout.groups:
        prefix = f"{group.name}."
        fields[prefix + "kind"] = group.kind
        fields[prefix + "layers"] = format_ranges(group.layers)
        fields[prefix + "order"] = group.order
        fields[prefix + "page_tokens"] = str(group.page_tokens)
        fields[prefix + "window"] = str(group.window)
        fields[prefix + "parts"] = ", ".join(part.name for part in group.parts)
        for part in group.parts:
            fields[f"{prefix}{part.name}.dtype"] = part.dtype
            fields[f"{prefix}{part.name}.heads"] = str(part.heads)
            fields[f"{prefix}{part.name}.dim"] = str(part.dim)
            fields[f"{prefix}{part.name}.rows"] = str(part.rows or "one per token")
    return fields


def difference(src: dict[str, str], dst: dict[str, str], wrong: dict[str, str]) -> str:
    """A table of both sides; ``wrong`` maps a field to the reason why it is refused."""
    rows = []
    for name in dict.fromkeys((*src, *dst)):
        reason = f"<- {wrong[name]}" if name in wrong else ""
        rows.append([name, src.get(name, "-"), dst.get(name, "-"), reason])
    return text_table(["field", "prefill", "decode", ""], rows)


def check_compatible(src: KVLayout, dst: KVLayout, src_placement: Placement, dst_placement: Placement) -> None:
    """Raise PlanError, with both sides field by field, unless ``src`` can be mapped onto ``dst``."""
    left, right = compat_fields(src), compat_fields(dst)
    left["placement"], right["placement"] = describe_placement(src_placement), describe_placement(dst_placement)
    wrong: dict[str, str] = {}
    for name in dict.fromkeys((*left, *right)):
        if name == "placement" or left.get(name) == right.get(name):
            continue
        if name == "model" and not (src.model and dst.model):
            continue
        if not name.endswith((".page_tokens", ".order")) or name not in left or name not in right:
            wrong[name] = "differs"
    for side, placement in (("prefill", src_placement), ("decode", dst_placement)):
        if placement.cp_size != 1:
            wrong["placement"] = f"context parallelism (cp_size={placement.cp_size}, {side}) is not supported"
    for a, b in zip(src.groups, dst.groups, strict=False):
        if a.name == b.name:
            _check_group(a, b, src_placement, dst_placement, wrong)
    if wrong:
        word = "field does" if len(wrong) == 1 else "fields do"
        raise PlanError(
            f"cannot map the prefill side's cache onto the decode side's: {len(wrong)} {word} not fit\n"
            + difference(left, right, wrong)
        )


def _check_group(a: Group, b: Group, left: Placement, right: Placement, wrong: dict[str, str]) -> None:
    if a.order != b.order:
        # With one head per rank on both sides the two orders are the same bytes.
        most = max(
            (end - begin)
            for group, placement in ((a, left), (b, right))
            for part in group.parts
            for tp in range(placement.tp_size)
            for begin, end in [placement.heads_of(tp, part.heads)]
        )
        if most > 1:
            wrong[f"{a.name}.order"] = (
                f"{a.order} to {b.order} would permute heads and tokens on the way: not supported"
            )
    fixed = [part.name for part in a.parts if part.rows]
    if a.page_tokens != b.page_tokens and fixed:
        wrong[f"{a.name}.page_tokens"] = f"part {fixed[0]} has no token axis, so that pages must have the same size"


def describe_placement(placement: Placement) -> str:
    """``TP8 PP1 DP1``."""
    text = f"TP{placement.tp_size} PP{placement.pp_size} DP{placement.dp_size}"
    return text + (f" CP{placement.cp_size}" if placement.cp_size != 1 else "")


def format_ranges(layers: Iterable[int]) -> str:
    """``0-29`` or ``5, 11, 17``: runs of neighbours joined."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
