"""The options of the command line, as ``--help`` shows them.

>>> make_parser().parse_args(["--loopback"])
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ConfigError
from ..sharding import PRESETS
from .channel import DEFAULT_PORT
from .sizes import parse_size
from .workload import MEMORIES, OPS

__all__ = ["PROG", "make_parser"]

PROG = "fabric-kv-bench"

_EPILOG = """\
examples:
  fabric-kv-bench --loopback --provider tcp                       both ends here, paged writes
  fabric-kv-bench                                                 on one host: prints the command for the other
  fabric-kv-bench 10.0.0.5 --op write -b 4K -e 16M                on the other
  fabric-kv-bench 10.0.0.5 10.0.0.6 -R                            both send to us
  fabric-kv-bench --loopback --provider tcp --model qwen3-8b --isl 1024 --chunk 256 --layerwise
  fabric-kv-bench --compare before.json after.json                rows side by side, with ratios

K, M and G in sizes are powers of 1024; GB/s and Gb/s are decimal. docs/bench.md explains every column."""


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def make_parser() -> argparse.ArgumentParser:
    """The parser; :func:`fabric_kv.bench.args.parse` checks what it gives."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Measure KV transfers between processes or hosts, and check what arrives.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add: Any = parser.add_argument
    add("addresses", nargs="*", metavar="ADDRESS", help="the targets: host, host:port, [IPv6]:port; none: be a target")
    add("--version", action="version", version=f"{PROG} {__version__}")

    add = parser.add_argument_group("roles").add_argument
    add("--loopback", action="store_true", help="start the targets here as well")
    add("--peers", type=int, metavar="N", help="so many targets (with addresses: one each)")
    add("-p", "--port", type=int, default=DEFAULT_PORT, help="of the target (default %(default)s)")
    add("--bind", default="", metavar="HOST", help="address that a target listens on (default: all)")
    add("-R", "--reverse", action="store_true", help="the targets post to the initiator: many to one")
    add("--bidir", action="store_true", help="both post at once")

    add = parser.add_argument_group("work").add_argument
    add("--op", choices=OPS, help="operation (default paged; with --model messenger)")
    add("-b", "--begin", type=_size, metavar="SIZE", help="smallest page or message; see --page-size")
    add("-e", "--end", type=_size, metavar="SIZE", help="largest")
    add("-f", "--factor", type=int, metavar="N", help="from one size to the next (default 4)")
    add("--page-size", type=_size, metavar="SIZE", help="fixed; -b and -e are then bytes of an iteration")
    add("--pages", type=int, metavar="N", help="pages of a list (default: 64 for paged, else 1)")
    add("--batch", type=int, default=1, metavar="N", help="lists of an iteration, one submission (default 1)")
    add("--contiguity", type=int, default=0, metavar="0..100", help="percent of pages beside the last (default 0)")
    add("-n", "--iterations", type=int, metavar="N", help="timed iterations of a row (default: 1000; paged: 200)")
    add("-w", "--warmup", type=int, metavar="N", help="iterations before (default: a tenth)")
    add("-D", "--duration", type=float, metavar="S", help="seconds for a row, instead of -n")
    add("--depth", type=int, default=16, metavar="N", help="iterations in flight (default %(default)s; 1: latency)")
    add("--verify", action=argparse.BooleanOptionalAction, help="compare all bytes (default: for short runs)")
    add("--seed", type=int, default=1, help="of page lists and contents (default %(default)s)")
    add("--timeout", type=float, default=20.0, metavar="S", help="how long nothing may happen (default %(default)g)")
    add("--memory", type=_size, default=256 << 20, metavar="SIZE", help="for pages in flight (default 256M)")

    add = parser.add_argument_group("messenger: prompts that this end prefills for targets that decode").add_argument
    add("--model", metavar="NAME", help=f"config.json, or one of: {', '.join(PRESETS)} (default qwen3-8b)")
    add("--prefill-tp", type=int, metavar="N", help="tensor-parallel ranks here (default 1)")
    add("--decode-tp", type=int, metavar="N", help="and there (default 1)")
    add("--page-tokens", type=int, metavar="N", help="tokens of a page (default 16)")
    add("--isl", type=int, metavar="TOKENS", help="length of a prompt (default 1024)")
    add("--chunk", type=int, metavar="TOKENS", help="of a forward step (default: the prompt)")
    add("--layerwise", action="store_true", help="send each layer as it is done; else all once the prompt is through")
    add("--compute-ms-per-layer", type=float, metavar="MS", help="for a layer of a chunk; it only sleeps (default 0)")
    add("--qps", type=float, metavar="X", help="requests a second of all decode sides, Poisson (default: one by one)")
    add("--decoders", type=int, metavar="N", help="the same as --peers")

    add = parser.add_argument_group("fabric, of this end").add_argument
    add("--provider", metavar="NAME", help="libfabric provider (default: any RDMA NIC's; tcp, shm only if named)")
    add("--nics", metavar="A,B", help="rails by name or address (default: nearest; over sockets, this connection's)")
    add("--rails", type=int, metavar="N", help="the first so many of them")
    add("--progress", choices=["spin", "adaptive"], default="adaptive", help="engine threads (default %(default)s)")
    add("--cpus", metavar="LIST", help="run on these, such as 0-3,8")
    add("--target-cpus", metavar="LIST", help="with --loopback: the targets run on these")
    add("--mem", choices=MEMORIES, help="pages are on the host (default), or on a GPU: cuMemAlloc, or cuMem to share")
    add("--gpu", type=int, default=0, metavar="N", help="with --mem cuda or cumem (default %(default)s)")
    add("--link-gbps", type=float, metavar="X", help="speed of a rail in Gbit/s, for %%link, where nobody knows it")

    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="write everything here ('-': to stdout, in place of the table)")
    add("--csv", type=Path, metavar="FILE", help="write the rows here ('-': likewise)")
    add("--plot", type=Path, metavar="FILE", help="draw throughput and latency: .png, .svg or .pdf")
    add("--floor", action="store_true", help="in turn with a bare libfabric loop, and the ratio beside each row")
    add("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two files of --json, side by side")
    return parser
