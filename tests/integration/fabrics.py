"""Which NICs a provider has here; RDMA devices come in by themselves where there are any, see scripts/rdma-lab.

>>> nics_of("tcp", 2)
['127.0.0.1', '127.0.0.2']
>>> pytest.fixture(params=with_rdma("tcp", "shm"))
"""

import os
from pathlib import Path

import pytest

# In the guest of scripts/rdma-lab processors and NICs are emulated: bounds there are so much longer, and data less.
SLOWER = 16 if "RDMA_LAB" in os.environ else 1


def rdma_devices():
    """InfiniBand and RoCE devices with a port that is up."""
    found = Path("/sys/class/infiniband").glob("*/node_type")
    adapters = sorted(path.parent for path in found if path.read_text().startswith("1:"))
    return [d.name for d in adapters if any("ACTIVE" in port.read_text() for port in d.glob("ports/*/state"))]


def nics_of(provider, count=1):
    if provider == "shm":
        return []
    names = rdma_devices() if provider == "verbs" else [f"127.0.0.{1 + i}" for i in range(count)]  # all the loopback
    return names[:count]


def with_rdma(*providers):
    """Parameters of a fixture: these providers, and verbs where there is a device for it."""
    verbs = [pytest.param("verbs", marks=pytest.mark.rdma)] if rdma_devices() else []
    return [*providers, *verbs]
