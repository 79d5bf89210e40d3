"""``fabric-kv-doctor``: what this machine has, what would be chosen, what is wrong, and how to mend it.

::

    fabric-kv-doctor                       # RDMA
    fabric-kv-doctor --provider tcp        # a software provider
    fabric-kv-doctor --json                # to attach to an issue

The exit status is 0 if nothing is wrong, else 1.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Iterable, Sequence

from ..errors import FabricError, FabricKVError
from ..topology import Machine, Topology, choose, read_machine
from . import checks
from .checks import Finding
from .tables import print_table

__all__ = ["examine", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="fabric-kv-doctor", description="Find out what keeps fabric_kv from working.")
    parser.add_argument(
        "--provider", help="libfabric provider to examine; by default RDMA NICs and whatever drives them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    findings = examine(args.provider)
    problems = [finding for finding in findings if finding.level == "problem"]
    if args.json:
        print(json.dumps({"ok": not problems, "findings": [finding._asdict() for finding in findings]}, indent=2))
    else:
        _print(findings, problems)
    return 1 if problems else 0


def examine(provider: str | None = None) -> list[Finding]:
    """All findings, in the order in which they are printed. Raises nothing: what fails becomes a finding."""
    findings = [*checks.versions(), *checks.libfabric()]
    machine, topology, found = _discover(provider)
    findings += found
    rdma = machine is not None and any(nic.kind != "network" for nic in machine.nics)
    if machine is not None:
        findings += checks.nics(machine, topology)
        findings += checks.gpu_direct(machine)
    findings += checks.memlock(rdma=rdma)
    findings += checks.hugepages()
    if rdma:
        findings += checks.rdma_devices()
    findings += checks.ptrace_scope(needed=provider == "shm")
    findings += checks.cpu_set(topology)
    findings += checks.environment()
    if topology is not None:
        findings += _choice(topology)
    return findings


def _discover(provider: str | None) -> tuple[Machine | None, Topology | None, list[Finding]]:
    machine = topology = None
    try:
        machine = read_machine(provider=provider)
        topology = choose(machine, provider=provider, environ=os.environ)
    except FabricKVError as error:
        text, _, hint = str(error).partition("Hint: ")
        fix = hint or "mend what the message names: FABRIC_KV_NICS, FABRIC_KV_TOPOLOGY, CUDA_VISIBLE_DEVICES"
        return machine, None, [Finding("problem", "topology", text.strip(), fix)]
    return machine, topology, [Finding("note", "topology", warning) for warning in topology.warnings]


def _choice(topology: Topology) -> Iterable[Finding]:
    """The groups, and whether they can be opened."""
    for group in topology.groups:
        names = ", ".join(nic.label for nic in group.nics) or "no NIC"
        yield Finding("ok" if group.nics else "note", group.label, f"{names}: {group.reason}")
    try:
        arguments = topology.engine_arguments()
        from ..engine import Engine

        with Engine(**arguments) as engine:
            rails = [rail for group in engine.describe()["groups"] for rail in group["rails"]]
    except FabricKVError as error:
        text, _, hint = str(error).partition("Hint: ")
        yield Finding("problem", "opening", text.strip(), hint or _opening_fix(error))
    else:
        counts = f"{len(rails)} NIC(s) in {len(arguments['groups'])} group(s)"
        yield Finding("ok", "opening", f"{counts} were opened and closed")


def _opening_fix(error: FabricKVError) -> str:
    """What helps where the message itself has no hint."""
    if isinstance(error, FabricError) and error.op == "fi_enable" and error.fi_errno == errno.EINVAL:
        return "unset FI_UNIVERSE_SIZE, or make it smaller: the device's completion queues are shorter than it asks for"
    if isinstance(error, FabricError) and error.fi_errno == errno.ENOMEM:
        return "ulimit -l unlimited; docker run --ulimit memlock=-1"
    return "FI_LOG_LEVEL=warn shows what libfabric says; FABRIC_KV_NICS='^NAME' goes on without this NIC"


def _print(findings: Sequence[Finding], problems: Sequence[Finding]) -> None:
    rows: list[list[str]] = []
    for finding in findings:
        mark = {"ok": "ok", "note": "note", "problem": "PROBLEM"}[finding.level]
        first, *more = finding.text.splitlines() or [""]
        rows.append([mark, finding.what, first])
        rows.extend(["", "", line.strip()] for line in more)
        if finding.fix:
            rows.append(["", "", f"fix: {finding.fix}"])
    print_table("fabric-kv-doctor", ["", "", ""], rows)
    print(f"\n{len(problems)} problem{'' if len(problems) == 1 else 's'}")


if __name__ == "__main__":
    sys.exit(main())
