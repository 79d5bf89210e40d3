"""Which NICs a provider has here, and how long things may take; RDMA devices come in by themselves where there are any.

>>> nics_of("tcp", 2)
['127.0.0.1', '127.0.0.2']
>>> pytest.fixture(params=with_rdma("tcp", "shm"))
>>> Engine("tcp", options=EngineOptions(**patient(heartbeat_interval_s=0.1, heartbeat_misses=8)))
"""

import os
from pathlib import Path

# In the guest of scripts/rdma-lab processors and NICs are emulated: bounds there are so much longer, and data less.
SLOWER = 16 if "RDMA_LAB" in os.environ else 1
# Nothing takes that long unless it hangs. No test relies on it in order to pass.
LONG = 60.0 * min(SLOWER, 4)


def patient(**bounds):
    """Bounds of an engine or a messenger, those in seconds as long as this machine needs them."""
    return {name: value * SLOWER if name.endswith("_s") else value for name, value in bounds.items()}


def rdma_devices():
    """InfiniBand and RoCE devices with a port that is up."""
    found = Path("/sys/class/infiniband").glob("*/node_type")
    adapters = sorted(path.parent for path in found if path.read_text().startswith("1:"))
    return [d.name for d in adapters if any("ACTIVE" in port.read_text() for port in d.glob("ports/*/state"))]


def nics_of(provider, count=1):
    """That many NICs. Skips the test where there are fewer RDMA devices."""
    if provider == "shm":
        return []
    if provider != "verbs":
        return [f"127.0.0.{1 + i}" for i in range(count)]  # all the loopback
    devices = rdma_devices()
    if len(devices) < count:
        import pytest

        pytest.skip(f"{count} RDMA devices are needed, there are {' '.join(devices) or 'none'}")
    return devices[:count]


def with_rdma(*providers):
    """Parameters of a fixture: these providers, and verbs where there is a device for it."""
    import pytest  # processes that test nothing themselves import this module, too

    verbs = [pytest.param("verbs", marks=pytest.mark.rdma)] if rdma_devices() else []
    return [*providers, *verbs]
