"""The command line: options in perftest's and nccl-tests' manner, checked before anything is opened.

>>> run = parse(["--loopback", "--provider", "tcp", "-b", "4K", "-e", "64K"])
>>> run.workload.cases, run.fabric.provider
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..sharding import layout_from_config, plan_transfer
from ..tools.plan import read_config
from ..topology.cpus import parse_cpus
from .against import check_comparable
from .channel import DEFAULT_PORT, format_address, parse_address
from .model import ModelWork
from .parser import PROG, make_parser
from .sizes import size_text, sweep
from .workload import Case, Fabric, Op, Workload

__all__ = ["Run", "parse", "peer_command"]


# By default what is moved for a row stays below this, and is checked.
_SHORT_BYTES = 16 << 30

# -b, -e, -f, -n of each operation, where the command line has none.
_DEFAULTS: dict[str, tuple[int, int, int, int]] = {
    "paged": (4 << 10, 256 << 10, 4, 200),
    "write": (4 << 10, 4 << 20, 4, 1000),
    "read": (4 << 10, 4 << 20, 4, 1000),
    "send": (64, 64 << 10, 4, 1000),
    "imm": (0, 0, 2, 1000),
    "messenger": (0, 0, 2, 8),
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A command line.

    Attributes
    ----------
    addresses : tuple of str
        The targets'; empty: we are one, or with ``loopback`` both.
    loopback : bool
    compare : tuple of Path, optional
        Two files of ``--json``; nothing is measured.
    num_peers : int
    port, bind : int, str
        Of the target.
    workload : Workload
    fabric : Fabric
    target_cpus : tuple of int
        For targets of ``loopback``.
    link_gbps : float, optional
    json, csv, plot : Path, optional
    floor : bool
    model : ModelWork, optional
        Of ``--op messenger``.
    qps : float, optional
    """

    addresses: tuple[str, ...]
    loopback: bool
    compare: tuple[Path, Path] | None
    num_peers: int
    port: int
    bind: str
    workload: Workload
    fabric: Fabric
    target_cpus: tuple[int, ...]
    link_gbps: float | None
    json: Path | None
    csv: Path | None
    plot: Path | None
    floor: bool
    model: ModelWork | None
    qps: float | None

    @property
    def is_target(self) -> bool:
        """Whether somebody else conducts."""
        return not self.addresses and not self.loopback


def parse(argv: Sequence[str] | None = None) -> Run:
    """Read a command line.

    Raises
    ------
    ConfigError
        If its options do not go together.
    SystemExit
        From argparse: for ``--help``, and for what it refuses.
    """
    args = make_parser().parse_args(argv)
    _complete(args)
    _check_roles(args)
    op: Op = args.op
    model = _model(args) if op == "messenger" else None
    cases = _cases(args) if model is None else _cases_of(model)
    iterations = args.iterations or _DEFAULTS[op][3]
    num_peers = args.peers or max(len(args.addresses), 1)
    verify = args.verify
    if verify is None:
        most = max(case.nbytes for case in cases) * iterations * num_peers
        verify = args.duration is None and most <= _SHORT_BYTES
    workload = _validated(
        Workload,
        op=op,
        cases=cases,
        contiguity=args.contiguity,
        batch=args.batch,
        iterations=iterations,
        duration_s=args.duration,
        warmup=max(iterations // 10, 1) if args.warmup is None else args.warmup,
        depth=args.depth,
        outwards=not args.reverse,
        inwards=args.bidir or args.reverse,
        verify=verify,
        seed=args.seed,
        timeout_s=args.timeout,
        memory_bytes=args.memory,
    )
    fabric = _validated(
        Fabric,
        provider=args.provider,
        nics=tuple(args.nics.split(",")) if args.nics else (),
        rails=args.rails,
        progress=args.progress,
        cpus=_cpus(args.cpus),
        # A target is told by the initiator.
        mem=args.mem or ("host" if args.addresses or args.loopback else None),
        gpu=args.gpu,
    )
    if args.floor:
        check_comparable(workload, fabric, loopback=args.loopback, num_peers=num_peers)
    if args.link_gbps is not None and not 0 < args.link_gbps <= 1e6:
        raise ConfigError(f"--link-gbps {args.link_gbps:g} must lie in (0, 10^6]")
    return Run(
        addresses=tuple(args.addresses),
        loopback=args.loopback,
        compare=tuple(args.compare) if args.compare else None,
        num_peers=num_peers,
        port=args.port,
        bind=args.bind,
        workload=workload,
        fabric=fabric,
        target_cpus=_cpus(args.target_cpus),
        link_gbps=args.link_gbps,
        json=args.json,
        csv=args.csv,
        plot=args.plot,
        floor=args.floor,
        model=model,
        qps=args.qps,
    )


_OF_MESSENGER = {
    "model": "qwen3-8b",
    "prefill_tp": 1,
    "decode_tp": 1,
    "page_tokens": 16,
    "isl": 1024,
    "compute_ms_per_layer": 0.0,
}
_NOT_OF_MESSENGER = ("begin", "end", "factor", "page_size", "pages", "duration", "csv", "plot", "rails")


def _complete(args: argparse.Namespace) -> None:
    """Fill in what depends on the operation, and refuse what another one has."""
    given = [name for name in (*_OF_MESSENGER, "chunk", "qps", "decoders") if getattr(args, name) is not None]
    if args.op is None:
        args.op = "messenger" if given or args.layerwise else "paged"
    if args.op != "messenger":
        if given or args.layerwise:
            option = (given or ["layerwise"])[0].replace("_", "-")
            raise ConfigError(f"--{option} is for --op messenger, not {args.op}")
        return
    wrong = [name for name in _NOT_OF_MESSENGER if getattr(args, name) is not None]
    wrong += [name for name in ("reverse", "bidir", "floor") if getattr(args, name)]
    if wrong:
        raise ConfigError(f"--{wrong[0].replace('_', '-')} does not apply to --op messenger")
    for name, value in _OF_MESSENGER.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.qps is not None and not 0 < args.qps <= 1e6:
        raise ConfigError(f"--qps {args.qps:g} must lie in (0, 10^6]")
    if args.decoders is not None:
        if args.peers not in (None, args.decoders):
            raise ConfigError(f"--decoders {args.decoders}, but --peers {args.peers}: they are the same")
        args.peers = args.decoders


def _model(args: argparse.Namespace) -> ModelWork:
    layout = layout_from_config(read_config(args.model), page_tokens=args.page_tokens, model=Path(args.model).name)
    chunk = args.isl if args.chunk is None else args.chunk
    model: ModelWork = _validated(
        ModelWork,
        layout=layout,
        seed=args.seed,
        prefill_tp=args.prefill_tp,
        decode_tp=args.decode_tp,
        isl=args.isl,
        chunk=chunk,
        layerwise=args.layerwise,
        compute_ms=args.compute_ms_per_layer,
        requests=args.iterations or _DEFAULTS["messenger"][3],
        slots=2 if args.qps is None else 4,
        timeout_s=args.timeout,
    )
    plan_transfer(model.spec(model.prefill_tp), model.spec(model.decode_tp))  # refuses what cannot be mapped
    return model


def _cases_of(model: ModelWork) -> tuple[Case, ...]:
    """What is sent of all layers of a prompt, group by group."""
    return tuple(Case(group.page_bytes, len(model.sent(group)) * len(group.layers)) for group in model.layout.groups)


def _check_roles(args: argparse.Namespace) -> None:
    if args.loopback and args.addresses:
        raise ConfigError(f"--loopback starts its own targets: drop it, or {' '.join(args.addresses)}")
    if args.peers is not None and not 1 <= args.peers <= 1024:
        raise ConfigError(f"--peers {args.peers} must lie in [1, 1024]")
    if args.addresses and args.peers not in (None, len(args.addresses)):
        raise ConfigError(f"--peers {args.peers}, but {len(args.addresses)} addresses: give one for each")
    if not args.addresses and not args.loopback and args.peers not in (None, 1):
        raise ConfigError(
            f"--peers {args.peers}: start a target on each host, and give all of their addresses to the initiator"
        )
    if args.bidir and args.reverse:
        raise ConfigError("--bidir posts in both directions already: drop --reverse")
    if args.target_cpus and not args.loopback:
        raise ConfigError("--target-cpus is for targets of --loopback; a target elsewhere has --cpus of its own")
    if str(args.json) == str(args.csv) == "-":
        raise ConfigError("--json - and --csv - both write to stdout: name a file for one of them")
    if not 0 < args.port < 65536:
        raise ConfigError(f"--port {args.port} must lie in [1, 65535]")
    for address in args.addresses:
        parse_address(address, args.port)


def _cases(args: argparse.Namespace) -> tuple[Case, ...]:
    begin, end, factor, _ = _DEFAULTS[args.op]
    pages = args.pages if args.pages is not None else 64 if args.op == "paged" else 1
    if not 1 <= pages <= 1 << 22 or not 1 <= args.batch <= 4096:
        raise ConfigError(f"--pages {pages} must lie in [1, {1 << 22}], --batch {args.batch} in [1, 4096]")
    swept = args.begin is not None or args.end is not None
    if args.op == "imm":
        if swept or args.page_size:
            raise ConfigError("--op imm: immediates bring no bytes; -b, -e and --page-size do not apply")
        return (Case(0, pages * args.batch),)
    if args.page_size and not swept:
        return (Case(args.page_size, pages * args.batch),)
    if swept:
        begin = args.begin if args.begin is not None else min(begin, args.end)
        end = args.end if args.end is not None else begin
    sizes = sweep(begin, end, factor if args.factor is None else args.factor)
    if not args.page_size:
        return tuple(Case(size, pages * args.batch) for size in sizes)
    if args.pages is not None:
        raise ConfigError("--page-size with -b or -e gives the number of pages: drop --pages")
    uneven = [size for size in sizes if size % (args.page_size * args.batch)]
    if uneven:
        raise ConfigError(
            f"{size_text(uneven[0])} an iteration is no multiple of --batch {args.batch} x --page-size "
            f"{size_text(args.page_size)}"
        )
    return tuple(Case(args.page_size, size // args.page_size) for size in sizes)


def _cpus(text: str | None) -> tuple[int, ...]:
    return tuple(sorted(parse_cpus(text))) if text else ()


def _validated(kind: type[Any], **values: Any) -> Any:
    """A struct whose limits are those of its annotations, which msgspec looks at only when it decodes."""
    try:
        return msgspec.convert(msgspec.to_builtins(kind(**values)), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the command line is out of range: {error}") from error


def peer_command(argv: Sequence[str], host: str, port: int) -> str:
    """What to type at the other end of a target that was started with ``argv``."""
    import shlex

    own = {"-p", "--port", "--bind", "--nics", "--cpus", "--gpu", "--json", "--csv", "--plot"}
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word in own:
            skip = True
        elif not any(word.startswith(f"{name}=") for name in own):
            kept.append(word)
    address = host if port == DEFAULT_PORT else format_address(host, port)
    return shlex.join([PROG, address, *kept])
