"""iWARP devices are refused: their writes carry no immediate, although ``verbs;ofi_rxm`` offers them.

>>> scripts/rdma-lab run --insmod siw.ko --rdma siw -- .venv/bin/python -m pytest tests/lab/test_iwarp.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fabric_kv import Engine
from fabric_kv.errors import FabricError

from ..integration.fabrics import LONG

# "4: RNIC": Documentation/ABI/stable/sysfs-class-infiniband.
FOUND = Path("/sys/class/infiniband").glob("*/node_type")
DEVICES = sorted(path.parent.name for path in FOUND if path.read_text().startswith("4:"))
pytestmark = pytest.mark.skipif(
    not DEVICES, reason="no iWARP device: scripts/rdma-lab run --insmod siw.ko --rdma siw (docs/lab.md)"
)


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_on_iwarp_is_refused_with_the_reason(device: str) -> None:
    with pytest.raises(FabricError, match=rf"(?s){device}.*cannot write with an immediate.*iWARP"):
        Engine("verbs", nics=[device])


def test_the_provider_alone_is_refused_as_well() -> None:
    with pytest.raises(FabricError, match="iWARP"):
        Engine("verbs")


def test_topology_leaves_it_out_with_a_reason() -> None:
    done = subprocess.run([sys.executable, "-m", "fabric_kv.tools.topo"], capture_output=True, text=True, timeout=LONG)
    for device in DEVICES:
        assert device in done.stdout + done.stderr
