"""``fabric-kv-topo``: which NICs and which core would serve which GPU, and why.

::

    fabric-kv-topo                                          # this machine
    fabric-kv-topo --from p5.48xlarge.xml --gpus 3          # a recorded one: hwloc or NCCL XML, a copy of /sys
    fabric-kv-topo --json > groups.json                     # edit, then: export FABRIC_KV_TOPOLOGY=groups.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError, TopologyError
from ..tables import text_table
from ..topology import Machine, Nic, Topology, choose, discover, distance, read_machine
from .tables import print_table

__all__ = ["main"]

LEGEND = """\
  PIX   through one PCI switch           PHB   through a PCI host bridge, usually the CPU's
  PXB   through several PCI switches     NODE  through several host bridges of one NUMA node
                                         SYS   between NUMA nodes"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 2 if there is no answer."""
    args = _parser().parse_args(argv)
    try:
        machine, topology = _look(args)
    except (ConfigError, TopologyError) as error:
        print(f"fabric-kv-topo: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(topology.to_json())
        return 0
    if machine is not None:
        print_matrix(machine)
        print_nics(machine, topology)
    print_groups(topology)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fabric-kv-topo", description="Show which NICs and cores serve which GPU.")
    add = parser.add_argument
    add("--from", dest="source", metavar="FILE", help="a recorded machine: hwloc or NCCL XML, a copy of /sys, our JSON")
    add("--provider", help="libfabric provider; tcp and the like make network devices the NICs")
    add("--nics", metavar="LIST", help="=mlx5_0,mlx5_1 or ^mlx5_bond_0 (default: FABRIC_KV_NICS)")
    add("--gpus", metavar="LIST", help="as CUDA_VISIBLE_DEVICES, which is the default")
    add("--cpus", metavar="LIST", help="cpus that may be used, such as 0-47,96-143 (default: this process's)")
    add("--override", metavar="FILE", help="JSON that gives the groups (default: FABRIC_KV_TOPOLOGY)")
    add("--json", action="store_true", help="print JSON; the form of an override file")
    return parser


def _look(args: argparse.Namespace) -> tuple[Machine | None, Topology]:
    given = {"provider": args.provider, "nics": args.nics, "gpus": args.gpus, "cpus": args.cpus}
    if args.source is not None and Path(args.source).is_file():
        with Path(args.source).open("rb") as file:
            if file.read(4096).lstrip()[:1] == b"{":
                return None, discover(args.source, override=args.override, **given)
    machine = read_machine(args.source, provider=args.provider)
    environ = os.environ if args.source is None else {}
    return machine, choose(machine, override=args.override, environ=environ, **given)


def print_matrix(machine: Machine) -> None:
    """Distances between all devices, like ``nvidia-smi topo -m``."""
    devices = [(f"GPU{index}", gpu.place) for index, gpu in enumerate(machine.gpus)]
    devices += [(f"NIC{index}", nic.place) for index, nic in enumerate(machine.nics)]
    rows = []
    for name, place in devices:
        cells = ["X" if other == name else relation(distance(place, to).relation) for other, to in devices]
        numa = "?" if place.numa is None else str(place.numa)
        rows.append([name, *cells, place.cpus or "?", numa])
    if rows:
        # Always plain: with 40 devices it is wider than a terminal, and rich would squeeze the columns.
        print(machine.source)
        print(text_table(["", *(name for name, _ in devices), "CPU affinity", "NUMA"], rows))
        print(f"\n{LEGEND}\n")


def relation(name: str) -> str:
    """As nvidia-smi prints it: it does not tell the sockets of one machine from its NUMA nodes."""
    return "SYS" if name == "SOCKET" else name


def print_nics(machine: Machine, topology: Topology) -> None:
    """The devices behind the short names, and why a NIC is left out."""
    why = {(left.nic.name, left.nic.pci): left.reason for left in topology.left_out}
    rows = [[f"GPU{index}", gpu.pci, gpu.model or gpu.vendor_device, ""] for index, gpu in enumerate(machine.gpus)]
    for index, nic in enumerate(machine.nics):
        reason = why.get((nic.name, nic.pci))
        rows.append([f"NIC{index}", nic.pci or "-", describe_nic(nic), f"not used: {reason}" if reason else ""])
    if rows:
        print_table("Devices", ["", "PCI", "what", ""], rows)
        print()


def describe_nic(nic: Nic) -> str:
    """Name, speed, port and what libfabric calls it."""
    parts = [nic.name or "unnamed", nic.kind]
    if nic.link_gbps:
        parts.append(f"{nic.link_gbps:g} Gbit/s")
    if nic.port != "unknown":
        parts.append(f"port {nic.port}")
    if nic.provider:
        parts.append(f"{nic.provider} {nic.domain}")
    return ", ".join(parts)


def print_groups(topology: Topology) -> None:
    """The choice and its reasons."""
    rows = []
    for group in topology.groups:
        numa = "?" if group.numa is None else str(group.numa)
        nics = ", ".join(nic.label for nic in group.nics) or "none"
        rows.append([group.label, nics, numa, group.worker_cpus or "any", group.reason])
    print_table("Groups", ["", "NICs", "NUMA", "core", "why"], rows)
    for warning in topology.warnings:
        print(f"warning: {warning}")


if __name__ == "__main__":
    sys.exit(main())
