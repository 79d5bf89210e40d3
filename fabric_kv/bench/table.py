"""What is printed: header, a line for each row, footer. Lines that are no row begin with ``#``.

>>> print(header(report)); print(columns()); print(line(row)); print(footer(report))
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from .results import Report, Row
from .sizes import size_text

__all__ = ["COLUMNS", "columns", "footer", "header", "line", "messenger_lines", "verdict"]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


#: Heading, width, and how it is written.
COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("page(B)", 9, lambda row: str(row.page_bytes)),
    ("pages", 7, lambda row: str(row.num_pages)),
    ("bytes", 11, lambda row: str(row.bytes)),
    ("iters", 8, lambda row: str(row.iterations)),
    ("GB/s", 8, lambda row: f"{row.gb_per_s:.3f}"),
    ("Gb/s", 8, lambda row: f"{row.gbit_per_s:.2f}"),
    ("%link", 6, lambda row: _percent(row.link_percent)),
    ("Mpps", 8, lambda row: f"{row.mpages_per_s:.4f}"),
    ("post_avg(us)", 12, lambda row: f"{row.post_avg_us:.2f}"),
    ("t_avg", 9, lambda row: f"{row.t_avg_us:.1f}"),
    ("t_p50", 9, lambda row: f"{row.t_p50_us:.1f}"),
    ("t_p99", 9, lambda row: f"{row.t_p99_us:.1f}"),
    ("t_p99.9", 9, lambda row: f"{row.t_p999_us:.1f}"),
    ("t_max", 9, lambda row: f"{row.t_max_us:.1f}"),
    ("cpu(%)", 6, lambda row: f"{row.cpu_percent:.0f}"),
    ("B/write", 9, lambda row: f"{row.bytes_per_write:.0f}"),
    ("#wrong", 6, lambda row: str(row.wrong_pages)),
)
_FLOOR = ("/floor", 6, lambda row: _ratio(row.floor_ratio))


def header(report: Report) -> str:
    """Versions, what was opened and why, where it is, and every setting."""
    lines = [
        shlex.join(report.command),
        ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        ", ".join(f"{name} {value}" for name, value in report.machine.items()),
    ]
    for whose, rails in (("initiator", report.rails), ("target", report.target_rails)):
        for number, rail in enumerate(rails):
            speed = f", {rail['link_gbps']:g} Gbit/s" if rail["link_gbps"] else ""
            lines.append(
                f"{whose} rail {number}: provider {rail['provider']}, fabric {rail['fabric']}, "
                f"domain {rail['domain']}{speed}"
            )
            lines.append(f"  {rail['mode']}, since {rail['mode_why']}")
    lines += [f"topology: {place}" for place in report.topology]
    lines.append(f"settings: {settings(report)}")
    lines.append("GB/s and Gb/s are decimal (10^9), times are in us; t_* from submission to the end of a transfer here")
    return "\n".join(f"# {text}" for text in lines)


def settings(report: Report) -> str:
    """Every setting, as name=value."""
    workload, fabric = report.workload, report.fabric
    direction = {(True, False): "outwards", (False, True): "reverse", (True, True): "bidir"}
    values: dict[str, Any] = {
        "op": workload.op,
        "direction": direction[workload.outwards, workload.inwards],
        "peers": report.num_peers,
        "depth": workload.depth,
        "batch": workload.batch,
        "contiguity": f"{workload.contiguity}%",
        "iterations": workload.iterations if workload.duration_s is None else f"{workload.duration_s:g}s",
        "warmup": workload.warmup,
        "progress": fabric.progress,
        "provider": fabric.provider or "any-rdma",
        "nics": ",".join(fabric.nics) or "auto",
        "rails": len(report.rails) or fabric.rails or "auto",
        "cpus": ",".join(map(str, fabric.cpus)) or "any",
        "target_cpus": ",".join(map(str, report.target_cpus)) or "any",
        "link_gbps": "auto" if report.link_gbps is None else f"{report.link_gbps:g}",
        "mem": fabric.mem or "host",
        **({"gpu": fabric.gpu} if fabric.on_gpu else {}),
        "memory": size_text(workload.memory_bytes),
        "verify": "on" if workload.verify else "off",
        "seed": workload.seed,
        "timeout": f"{workload.timeout_s:g}s",
    }
    if (model := report.model) is not None:
        for name in ("contiguity", "batch", "depth", "memory"):
            del values[name]
        values |= {
            "model": model.layout.model,
            "prefill_tp": model.prefill_tp,
            "decode_tp": model.decode_tp,
            "page_tokens": ",".join(str(group.page_tokens) for group in model.layout.groups),
            "isl": model.isl,
            "chunk": model.chunk,
            "layerwise": "on" if model.layerwise else "off",
            "compute": f"{model.compute_ms:g}ms",
            "qps": "one-by-one" if report.qps is None else f"{report.qps:g}",
            "slots": model.slots,
            "cache": f"{model.cache_bytes(model.prefill_tp) / 1e9:.3f}GB",
        }
    return " ".join(f"{name}={value}" for name, value in values.items())


def columns(*, floor: bool = False) -> str:
    """The line above the rows; with ``floor`` they end in the share of the floor that was reached."""
    shown = (*COLUMNS, _FLOOR) if floor else COLUMNS
    return "".join(f"{name:>{width + 1}}" for name, width, _ in shown)


def line(row: Row, *, floor: bool = False) -> str:
    """A row."""
    shown = (*COLUMNS, _FLOOR) if floor else COLUMNS
    return "".join(f"{write(row):>{width + 1}}" for _, width, write in shown)


def messenger_lines(report: Report) -> str:
    """Figures of ``--op messenger``, a line each."""
    figures, model = report.messenger or {}, report.model
    if model is None:
        return ""

    def spread(name: str) -> str:
        values = figures[name]
        return "  ".join(f"{which} {values[which]:.3f}" for which in ("avg", "p50", "p99", "max"))

    lines = [
        ("requests", f"{figures['requests']} of {model.isl} tokens in {len(model.chunks())} chunks"),
        ("bytes per request", f"{figures['bytes_per_request']:.0f} ({figures['bytes_per_write']:.0f} per write)"),
        ("compute (ms)", f"{figures['compute_ms']:.3f}"),
        ("prefill begun to ready (ms)", spread("prefill_to_ready_ms")),
        ("TTFT penalty (ms)", spread("ttft_penalty_ms")),
        ("arrival to ready (ms)", spread("latency_ms")),
        ("  of that queued here (ms)", spread("queued_ms")),
        (
            "per-layer transfer" if model.compute_ms > 0 else "whole transfer",
            f"{figures['bare_bytes']} bytes in {figures['bare_us']:.1f} us, {figures['bare_gb_per_s']:.3f} GB/s",
        ),
        ("last layer to ready (us)", f"p50 {figures['tail_us']:.1f}"),
        ("messenger efficiency", _ratio(figures["efficiency"])),
        ("hidden share", "-" if figures["hidden_share"] is None else f"{figures['hidden_share'] * 100:.1f} %"),
        ("while writing (GB/s)", f"{figures['gb_per_s_while_writing']:.3f}"),
    ]
    text = "\n".join(f"{name:28}  {value}" for name, value in lines)
    if figures["transfer_bound"]:
        text += (
            "\n# A layer takes longer to send than to compute: when compute ends more than the last layer is left, and "
            "the efficiency says nothing about the messenger"
        )
    return text


def footer(report: Report) -> str:
    """Whether all is right."""
    if report.error is not None:
        return f"# Ended early: {report.error}"
    return verdict(report.wrong_pages if report.workload.verify else None)


def verdict(wrong_pages: int | None) -> str:
    """How a run ends at all ends; None: nobody looked."""
    if wrong_pages is None:
        return "# Wrong pages : not looked at (--verify)"
    return f"# Wrong pages : {wrong_pages} {'FAILED' if wrong_pages else 'OK'}"
