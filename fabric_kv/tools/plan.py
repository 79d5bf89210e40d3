"""``fabric-kv-plan``: what it costs to move a model's cache from one placement to another.

::

    fabric-kv-plan --model deepseek-r1 --prefill-tp 8 --decode-tp 8 --isl 4096 --page-size 64 --nic-gbps 400 --nics 8
    fabric-kv-plan --model ./config.json --prefill-tp 8 --decode-tp 4 --order NHD --explain
    fabric-kv-plan --model qwen3-coder-480b --prefill-tp 8 --decode-tp 4 --json

Needs no fabric and allocates no cache: it prints what two engines would agree on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..sharding import (
    PRESETS,
    CacheSpec,
    Placement,
    PlanCost,
    TransferPlan,
    even_stages,
    layout_from_config,
    plan_transfer,
)
from ..sharding.cache import Packing
from ..sharding.layout import DTYPE_BYTES
from .tables import print_table

__all__ = ["main", "read_config"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 2 for a plan that cannot be made."""
    args = _parser().parse_args(argv)
    try:
        plan = _plan(args)
        cost = plan.cost(args.isl, cached=args.cached, source_set=args.source_set, dst_dp=args.decode_rank)
    except ConfigError as error:
        print(f"fabric-kv-plan: {error}", file=sys.stderr)
        return 2
    facts = _facts(args, plan, cost)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    if args.explain:
        print(plan.explain(args.source_set, dst_dp=args.decode_rank) + "\n")
    _print(facts)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fabric-kv-plan", description="Plan the transfer of a KV cache; no fabric needed."
    )
    add = parser.add_argument
    add("--model", required=True, help=f"path of a config.json, or one of: {', '.join(PRESETS)}")
    add("--dtype", default="auto", help=f"of the cache: auto, fp8, fp8_ds_mla, {', '.join(DTYPE_BYTES)}")
    add("--order", choices=["HND", "NHD"], default="HND", help="axis order inside a page (default %(default)s)")
    add("--packing", choices=["adjacent", "separate", "cross_layer"], default="adjacent", help="K and V in a page")
    add("--page-size", type=int, default=16, metavar="TOKENS", help="tokens per page (default %(default)s)")
    for side in ("prefill", "decode"):
        add(f"--{side}-tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
        add(f"--{side}-pp", type=int, default=1, metavar="N", help="pipeline stages (default 1)")
        add(f"--{side}-dp", type=int, default=1, metavar="N", help="data-parallel copies of that grid (default 1)")
        add(f"--{side}-page-size", type=int, metavar="TOKENS", help="where it differs from --page-size")
    add("--isl", type=int, default=4096, metavar="TOKENS", help="input length of the request (default %(default)s)")
    add("--cached", type=int, default=0, metavar="TOKENS", help="of which the decode side holds (default 0)")
    add("--source-set", type=int, default=0, metavar="N", help="source replica set (default 0)")
    add("--decode-rank", type=int, default=0, metavar="N", help="data-parallel copy that receives (default 0)")
    add("--nics", type=int, default=8, metavar="N", help="NICs of each side, shared evenly by its ranks (default 8)")
    add("--nic-gbps", type=float, default=400.0, metavar="GBPS", help="speed of a NIC in Gbit/s (default 400)")
    add("--explain", action="store_true", help="also print which rank feeds which")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def read_config(name: str) -> Any:
    """A preset's or a file's ``config.json``; ConfigError if it is neither."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--model {name!r} is neither a file nor one of {', '.join(PRESETS)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{name}: holds no JSON object")
    return config


def _plan(args: argparse.Namespace) -> TransferPlan:
    if args.nics < 1 or not args.nic_gbps > 0:
        raise ConfigError(f"--nics {args.nics} and --nic-gbps {args.nic_gbps} must be positive")
    config = read_config(args.model)
    specs = []
    for side in ("prefill", "decode"):
        page_tokens = getattr(args, f"{side}_page_size") or args.page_size
        layout = layout_from_config(config, page_tokens=page_tokens, dtype=args.dtype, order=args.order)
        placement = Placement(
            tp_size=getattr(args, f"{side}_tp"),
            pp_layers=even_stages(layout.num_layers, getattr(args, f"{side}_pp")),
            dp_size=getattr(args, f"{side}_dp"),
        )
        packing: Packing = args.packing
        specs.append(CacheSpec.dense(layout, placement, args.isl // page_tokens + 1, packing))
    return plan_transfer(*specs)


def _nic_bytes(rank_bytes: dict[int, int], num_ranks: int, nics: int) -> list[int]:
    """Bytes per NIC, when each rank uses its share of the NICs evenly, or ranks share NICs."""
    load = [0.0] * nics
    for rank, size in rank_bytes.items():
        own = range(rank * nics // num_ranks, max(rank * nics // num_ranks + 1, (rank + 1) * nics // num_ranks))
        for nic in own:
            load[nic] += size / len(own)
    return [round(size) for size in load]


def _facts(args: argparse.Namespace, plan: TransferPlan, cost: PlanCost) -> dict[str, Any]:
    sides = {}
    for side, spec, which in (("prefill", plan.src, "src_rank"), ("decode", plan.dst, "dst_rank")):
        ranks: dict[int, int] = {}
        for pair in cost.pairs:
            rank = getattr(pair, which)
            ranks[rank] = ranks.get(rank, 0) + pair.num_bytes
        placement = spec.placement
        load = _nic_bytes(ranks, placement.num_ranks, args.nics)
        sides[side] = {
            "tp": placement.tp_size,
            "pp": placement.pp_size,
            "dp": placement.dp_size,
            "page_tokens": spec.layout.groups[0].page_tokens,
            "rank_bytes": {str(rank): size for rank, size in sorted(ranks.items())},
            "nic_bytes": load,
            "seconds_at_link_speed": max(load) * 8 / (args.nic_gbps * 1e9),
        }
    return {
        "model": args.model,
        "tokens": args.isl,
        "cached": args.cached,
        "bytes_per_token_and_layer": {
            group.name: group.page_bytes / group.page_tokens for group in plan.src.layout.groups if group.page_tokens
        },
        "state_bytes_per_layer": {
            group.name: group.page_bytes for group in plan.src.layout.groups if not group.page_tokens
        },
        "total_bytes": cost.num_bytes,
        "writes_scattered_pages": cost.max_writes,
        "writes_contiguous_pages": cost.min_writes,
        "mean_bytes_per_write": cost.mean_bytes,
        "unit_bytes": plan.unit_bytes,
        "source_sets": plan.num_source_sets,
        "expected_units": {str(rank): units for rank, units in cost.units.items()},
        **sides,
        "seconds_at_link_speed": max(side["seconds_at_link_speed"] for side in sides.values()),
    }


def _print(facts: dict[str, Any]) -> None:
    rows = [
        ["tokens (cached)", f"{facts['tokens']} ({facts['cached']})"],
        *([f"bytes per token and layer: {k}", f"{v:g}"] for k, v in facts["bytes_per_token_and_layer"].items()),
        *([f"bytes per request and layer: {k}", str(v)] for k, v in facts["state_bytes_per_layer"].items()),
        ["bytes in all", f"{facts['total_bytes']:,}"],
        ["writes, pages scattered", f"{facts['writes_scattered_pages']:,}"],
        ["writes, pages contiguous", f"{facts['writes_contiguous_pages']:,}"],
        ["mean bytes per write", f"{facts['mean_bytes_per_write']:,.0f}"],
        ["unit", f"{facts['unit_bytes']:,} bytes"],
        ["source sets", str(facts["source_sets"])],
        ["units expected by rank", _counts(facts["expected_units"])],
    ]
    for side in ("prefill", "decode"):
        load = facts[side]["nic_bytes"]
        rows.append([f"{side}: bytes per NIC", f"max {max(load):,}, mean {sum(load) / len(load):,.0f}"])
    rows.append(["time at link speed", f"{facts['seconds_at_link_speed'] * 1e3:.3f} ms"])
    title = f"{facts['model']}: " + " -> ".join(
        f"{side} TP{facts[side]['tp']} PP{facts[side]['pp']} DP{facts[side]['dp']}" for side in ("prefill", "decode")
    )
    print_table(title, ["", ""], rows, right=[1])


def _counts(units: dict[str, int]) -> str:
    """``1024`` where all ranks expect the same, else each."""
    if len(set(units.values())) == 1:
        return f"{next(iter(units.values())):,} ({len(units)} ranks)"
    return ", ".join(f"{rank}: {count:,}" for rank, count in units.items()) or "none"


if __name__ == "__main__":
    sys.exit(main())
