"""Which NICs and which cores serve which GPU, on every machine.

>>> topology = discover()
>>> for group in topology.groups: print(group.label, [nic.name for nic in group.nics], group.worker_cpus, group.reason)
>>> Engine.from_topology(topology)

Nothing here loads hwloc or CUDA into this process: see ``hwloc_child.py``.
"""

from .discovery import choose, discover
from .distances import Distance, distance, nearest
from .filters import NicFilter
from .machine import read_machine
from .model import Gpu, Machine, Nic, Place
from .result import Group, LeftOut, Rail, Topology

__all__ = [
    "Distance",
    "Gpu",
    "Group",
    "LeftOut",
    "Machine",
    "Nic",
    "NicFilter",
    "Place",
    "Rail",
    "Topology",
    "choose",
    "discover",
    "distance",
    "nearest",
    "read_machine",
]
