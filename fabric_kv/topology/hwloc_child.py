"""Reads one topology with pyhwloc and prints it as JSON: a program of its own, which imports no fabric_kv.

::

    python -S hwloc_child.py SITE_PACKAGES < machine.xml
    HWLOC_FSROOT=... python -S hwloc_child.py SITE_PACKAGES --live

Why a process: a broken file crashes hwloc, not us; hwloc's CUDA plugin may initialise CUDA here, not in the engine's
process; and pyhwloc loads its libhwloc 3 with global symbols, which would break libraries built for libhwloc 2.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from typing import Any

# A recording of the largest machines holds a few hundred; beyond these the file is broken or hostile.
MAX_DEVICES = 4096
MAX_ANCHORS = 1024
MAX_DEPTH = 64
MAX_CPUS_TEXT = 1 << 16
MEMORY_BYTES = 2 << 30
OUTPUT_BYTES = 64 << 20
CPU_S = 5
NETWORK, OPENFABRICS = 1 << 4, 1 << 5
KEPT_INFOS = ("NVIDIAUUID", "AMDUUID", "GPUModel")


def load(data: str | None) -> Any:
    """The loaded topology: of an XML text, or of this system."""
    from pyhwloc.topology import Topology, TopologyFlags, TypeFilter

    logging.disable()  # pyhwloc complains of a topology that was never loaded, after the error that says so
    try:
        topology = Topology.from_this_system() if data is None else Topology.from_xml_buffer(data)
        # By default hwloc keeps no I/O devices. It crashes on distances without a name, and we need none.
        topology.set_all_types_filter(TypeFilter.KEEP_ALL)
        topology.set_flags([TopologyFlags.NO_DISTANCES, TopologyFlags.NO_MEMATTRS, TopologyFlags.NO_CPUKINDS])
        return topology.load()
    except ValueError as error:
        what = "it refuses this system" if data is None else "it is no valid XML of hwloc 2 or 3"
        raise ValueError(f"{what} ({error})") from error


def cpus_of(obj: Any) -> str:
    """Cpus of an object, as a list such as 0-47,96-143."""
    text = str(obj.cpuset.to_list_string()) if obj.cpuset is not None else ""
    if len(text) > MAX_CPUS_TEXT:
        raise ValueError("an object lists more cpus than any machine has")
    return text


def describe(topology: Any) -> dict[str, Any]:
    """GPUs, NICs, NUMA nodes and cores, with the way from each device up to the cpus."""
    from pyhwloc.hwobject import ObjType

    anchors: dict[int, dict[str, Any]] = {}

    def anchor(obj: Any) -> int:
        """Index of the first ancestor with cpus: a NUMA node's, a cache's, a package's, or the machine."""
        key = obj.gp_index
        if key not in anchors:
            if len(anchors) >= MAX_ANCHORS:
                raise ValueError(f"devices hang from more than {MAX_ANCHORS} places")
            package = obj if obj.is_package() else obj.get_ancestor_obj_by_type(ObjType.PACKAGE)
            nodes = obj.nodeset.to_list_string() if obj.nodeset is not None else ""
            anchors[key] = {
                "cpus": cpus_of(obj),
                "nodes": nodes if len(nodes) <= MAX_CPUS_TEXT else "",
                "package": package.logical_index if package else None,
            }
        return int(key)

    def above(obj: Any) -> dict[str, Any]:
        bridges: list[str] = []
        host_bridge = None
        parent = obj.parent
        while parent.is_io():
            if parent.is_bridge():
                # Bridges have names of their own: a switch shows no PCI address where the recording left it out.
                if parent.attr.upstream_type == 1:
                    bridges.append(str(parent.gp_index))
                else:
                    host_bridge = str(parent.gp_index)
            if len(bridges) > MAX_DEPTH:
                raise ValueError(f"a device hangs below more than {MAX_DEPTH} bridges")
            parent = parent.parent
        return {"bridges": bridges[::-1], "host_bridge": host_bridge, "anchor": anchor(parent)}

    devices: list[dict[str, Any]] = []
    num_seen = 0
    for obj in topology.iter_pci_devices():
        num_seen += 1
        attr = obj.attr
        infos: dict[str, str] = {}
        rdma = []
        for child in obj.iter_io_children():
            if child.is_os_device():
                own = child.info
                infos |= {name: own[name] for name in KEPT_INFOS if name in own}
                if child.is_osdev_type(OPENFABRICS):
                    ports = [own[key] for key in sorted(own) if key.startswith("Port") and key.endswith("State")]
                    rdma.append({"name": child.name or "", "ports": ports})
        if attr.base_class not in (0x02, 0x03, 0x12) and not rdma:
            continue
        if len(devices) >= MAX_DEVICES:
            raise ValueError(f"more than {MAX_DEVICES} GPUs and NICs")
        devices.append(
            {
                "pci": f"{attr.domain:04x}:{attr.bus:02x}:{attr.dev:02x}.{attr.func:x}",
                "pci_class": f"{attr.base_class:02x}{attr.subclass:02x}",
                "vendor_device": f"{attr.vendor_id:04x}:{attr.device_id:04x}",
                "link": float(attr.linkspeed),
                "rdma": rdma,
                "infos": infos,
                **above(obj),
            }
        )
    nodes = [{"index": node.os_index, "cpus": cpus_of(node)} for node in topology.iter_numa_nodes()]
    cores = [cpus_of(core) for core in topology.iter_cores()] or [cpus_of(cpu) for cpu in topology.iter_cpus()]
    return {
        "devices": devices,
        "anchors": {str(key): value for key, value in anchors.items()},
        "nodes": nodes,
        "cores": cores,
        "cpus": cpus_of(topology.get_root_obj()),
        "num_pci": num_seen,
    }


def main() -> int:
    """Print the topology as JSON, or on stderr why not; status 3 for what hwloc refuses."""
    sys.path.append(sys.argv[1])
    data = None
    if "--live" not in sys.argv:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES, OUTPUT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        data = sys.stdin.buffer.read().decode("utf-8", "replace")
    try:
        result = json.dumps(describe(load(data)))
    except (ValueError, OSError, RuntimeError, MemoryError, NotImplementedError) as error:
        print(str(error) or type(error).__name__, file=sys.stderr)
        return 3
    sys.stdout.write(result)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
