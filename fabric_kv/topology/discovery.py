"""Finds device groups: which NICs, and which core for the progress thread, for which GPU.

>>> topology = discover()                                    # this machine
>>> topology = discover(provider="tcp")                      # its network devices instead of its RDMA NICs
>>> topology = discover("p5.xml", nics="^rdmap79s0", gpus="3,1", cpus="0-7")    # a recorded machine
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import ConfigError
from .assign import Pick, allowed_cpus, assign, host_share
from .cpus import parse_cpus
from .filters import NicFilter, visible_gpus
from .machine import read_bytes, read_machine
from .model import Machine, Nic
from .override import as_given, read_override, resolve
from .result import LeftOut, Rail, Topology
from .rules import Share, divide, sort_out

__all__ = ["choose", "discover"]


def discover(
    source: str | Path | None = None,
    *,
    provider: str | None = None,
    nics: str | None = None,
    gpus: str | None = None,
    cpus: str | Iterable[int] | None = None,
    override: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Topology:
    """Find out which NICs and which cores serve which GPU.

    Parameters
    ----------
    source : str or Path, optional
        A recorded machine: a file of hwloc's XML (format 2 or 3) or NCCL's topology XML, a folder that stands for
        ``/sys``, or the JSON of :meth:`Topology.to_json`. By default this machine.
    provider : str, optional
        libfabric provider. Without it RDMA NICs are looked for; software providers are used only when named.
    nics : str, optional
        ``=mlx5_0,mlx5_1`` (only these) or ``^mlx5_bond_0`` (all but these); exact, but ``*`` stands for any characters.
        By default ``FABRIC_KV_NICS`` of the environment.
    gpus : str, optional
        GPUs that are used, written as in ``CUDA_VISIBLE_DEVICES``, which is the default.
    cpus : str or ints, optional
        Cpus that may be used. On this machine never more than this thread's affinity, which cgroups limit.
    override : str or Path, optional
        A JSON file that gives the groups. By default ``FABRIC_KV_TOPOLOGY`` of the environment.
    environ : mapping, optional
        The environment; by default ours for this machine, and an empty one for a recorded one, which is another's.

    Returns
    -------
    Topology
        One group for each GPU that this process sees, in that order, or one for the host where it sees none. The same
        machine gives the same answer, and processes with a GPU each get the answers that one process with all GPUs
        would get.

    Raises
    ------
    TopologyError
        If the machine cannot be read, or a filter or the override names what does not exist.
    ConfigError
        If an argument is malformed.
    """
    if environ is None:
        environ = os.environ if source is None else {}
    if source is not None and Path(source).is_file():
        data = read_bytes(Path(source))
        if data.lstrip()[:1] == b"{":
            if nics is not None or gpus is not None or cpus is not None or override is not None:
                raise ConfigError(f"{source} already gives the groups: nics, gpus, cpus and override do not apply")
            return as_given(read_override(data, str(source)), str(source), provider)
    return choose(
        read_machine(source, provider=provider),
        provider=provider,
        nics=nics,
        gpus=gpus,
        cpus=cpus,
        override=override,
        environ=environ,
    )


def choose(
    machine: Machine,
    *,
    provider: str | None = None,
    nics: str | None = None,
    gpus: str | None = None,
    cpus: str | Iterable[int] | None = None,
    override: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Topology:
    """Do what :func:`discover` does with a machine that has been read; the parameters and errors are the same."""
    environ = {} if environ is None else environ
    chosen = NicFilter.parse(environ.get("FABRIC_KV_NICS") if nics is None else nics)
    chosen.check(machine.nics, machine.source)
    visible, warnings = visible_gpus(
        machine,
        environ.get("CUDA_VISIBLE_DEVICES") if gpus is None else gpus,
        by_bus=environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
    )
    allowed = allowed_cpus(
        machine,
        None if cpus is None else parse_cpus(cpus) if isinstance(cpus, str) else frozenset(cpus),
        frozenset(os.sched_getaffinity(0)) if machine.live else None,
    )
    usable, left_out = sort_out(machine, chosen, provider)
    warnings += [f"{nic.label} is asked for, but {reason}" for nic, reason in left_out if chosen.names(nic)]
    path = environ.get("FABRIC_KV_TOPOLOGY") if override is None else override
    if path:
        given = read_override(read_bytes(Path(path)), str(path))
        picks, more = resolve(given, str(path), machine, visible, allowed)
        taken = {nic.label for pick in picks for nic in pick.share.nics}
        left_out = [(nic, f"{path} does not name it") for nic in machine.nics if nic.label not in taken]
        warnings += more
    elif visible:
        shares = dict(zip([gpu.pci for gpu in machine.devices], divide(machine.devices, usable), strict=True))
        picks = [Pick(gpu=gpu, share=shares[gpu.pci]) for gpu in visible]
        left_out += _idle(usable, [pick.share for pick in picks], list(shares.values()))
    else:
        picks = [Pick(gpu=None, share=host_share(usable, bool(machine.gpus)))]
    groups, more = assign(machine, picks, visible, allowed)
    return Topology(
        source=machine.source,
        provider=provider,
        groups=tuple(groups),
        left_out=tuple(LeftOut(nic=Rail.of(nic), reason=reason) for nic, reason in left_out),
        warnings=(*machine.warnings, *warnings, *more),
    )


def _idle(usable: list[Nic], own: list[Share], all_shares: list[Share]) -> list[tuple[Nic, str]]:
    """NICs that could be used, but are not by this process, and why: an idle NIC must not be a riddle."""
    used = {nic.label for share in own for nic in share.nics}
    elsewhere = {nic.label for share in all_shares for nic in share.nics}
    return [
        (nic, "it serves GPUs that this process does not use" if nic.label in elsewhere else "no GPU is nearest to it")
        for nic in usable
        if nic.label not in used
    ]
