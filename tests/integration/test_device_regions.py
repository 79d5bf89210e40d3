"""Device memory registered and written into by an engine, over stand-ins for CUDA's driver and for libfabric.

It proves nothing about hardware: what is looked at is what libfabric is given, and that pages arrive across seams.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_kv import _native

from ..cuda_standin import build, build_fabric_standin

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: pip install 'fabric_kv[cuda]'")
ROOT = Path(__file__).parents[2]

PROGRAM = """
import ctypes, gc, os, sys
from pathlib import Path
import numpy as np
cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from fabric_kv import Engine, EngineOptions
from fabric_kv.memory import DeviceBuffer, HostBuffer

cuda.cuInit(0)
cuda.standin_set_attribute(118, 0)        # writes come in no order ...
cuda.standin_set_attribute(117, 1)        # ... and the host may flush them
options = EngineOptions(device_memory=True)
handle = 1 << 16
with Engine("tcp", nics=["127.0.0.1"], options=options) as here, \\
     Engine("tcp", nics=["127.0.0.1"], options=options) as there:
    rail = here.describe()["groups"][0]["rails"][0]
    print("rail", rail["device_memory"], rail["dmabuf"])
    source = HostBuffer.allocate(3 * handle)
    target = DeviceBuffer.allocate("cuda:1", 3 * handle, handle_bytes=handle)
    rng = np.random.default_rng(5)
    source.array[:] = rng.integers(0, 256, source.nbytes, np.uint8)
    src, dst = source.region(here), target.region(there)
    print("ends", dst.remote.segment_ends)
    page = 24 * 1024                      # every third one lies across two handles
    counter = there.counter(unit_bytes=4096, expected_units=8 * 6)
    peer = here.add_peer(there.address)
    here.write_pages(peer, src, dst.remote, range(8), range(7, -1, -1), page_bytes=page, token=counter.token).result(30)
    counter.result(30)
    print("flushes", cuda.standin_calls(b"cuFlushGPUDirectRDMAWrites"))
    got = np.frombuffer(target.read(0, 8 * page), np.uint8).reshape(8, page)
    assert (got[::-1] == source.array[: 8 * page].reshape(8, page)).all()
    cuda.standin_fail(b"cuFlushGPUDirectRDMAWrites", 999, 0)
    unseen = there.counter(unit_bytes=4096, expected_units=1)
    here.write(peer, src, 0, dst.remote, 0, 4096, token=unseen.token).result(30)
    print("unseen", type(unseen.exception(30)).__name__)
    cuda.standin_fail(b"cuFlushGPUDirectRDMAWrites", 999, 0)
    read = there.read(there.add_peer(here.address), dst, 0, src.remote, 0, 4096)
    print("unread", type(read.exception(30)).__name__)
    again = target.region(there)          # the same buffer: the same registration
    print("same", again.remote == dst.remote)
    bare = there.register((target.address + 100, handle, "cuda"))
    print("bare", bare.remote.segment_ends, bare.remote.rails != dst.remote.rails)
    itself = there.add_peer(there.address)
    fds = len(os.listdir("/proc/self/fd"))
    for attempt in (lambda: there.register((target.address, 3 * handle, "cuda:1")), lambda: dst.remote_for(itself)):
        cuda.standin_fail(b"cuMemGetHandleForAddressRange", 999, 1)
        try:
            attempt()
        except Exception as error:
            print("failed", type(error).__name__, len(os.listdir("/proc/self/fd")) - fds)
    direct = there.register(target)
    own = dst.remote_for(there.add_peer(here.address))
    print("own", own.segment_ends == dst.remote.segment_ends, own.rails != dst.remote.rails)
    counter = there.counter(unit_bytes=4096, expected_units=6)
    here.write_pages(peer, src, own, [2], [0], page_bytes=page, token=counter.token).result(30)
    counter.result(30)
    print("arrived", target.read(0, page) == source.array[2 * page : 3 * page].tobytes())
    try:
        target.close()
    except Exception as error:
        print("open", str(error)[str(error).index("registered"):][:25])
    for region in (again, dst, bare, src, direct):
        region.close()
    cuda.standin_fail(b"", 0, 0)
    log = ctypes.CDLL(os.environ["FABRIC_KV_LIBFABRIC_HOME"] + "/libfabric.so.1").not_a_fabric_log
    log.restype = ctypes.c_char_p
    print(log().decode(), end="")
for engine in (here, Engine("tcp", nics=["127.0.0.1"], options=options)):
    engine.close()
    try:
        target.region(engine)
    except Exception as error:
        print("closed", type(error).__name__)
target.close()
source.close()
held = (ctypes.c_long * 6)()
cuda.standin_held(held)
print("held", list(held))
"""


def run(folder: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    cuda = build("not_a_gpu.c", "libcuda.so.1", folder)
    return run_python(folder, "-c", program, str(cuda), **environment)


def run_python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    build_fabric_standin(folder)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "FABRIC_KV_LIBFABRIC_HOME": str(folder),
            "REAL_LIBFABRIC": _native.library()[0],
        }
        | environment,
    )


@pytest.mark.parametrize(
    ("version", "refuses", "kind"), [("1.20", "", "dmabuf"), ("1.20", "dmabuf", "hmem"), ("1.19", "", "hmem")]
)
def test_each_handle_is_registered_and_pages_cross_the_seams(
    tmp_path: Path, version: str, refuses: str, kind: str
) -> None:
    done = run(tmp_path, PROGRAM, STANDIN_FABRIC_VERSION=version, STANDIN_REFUSES=refuses)
    assert done.returncode == 0, done.stderr
    handle = 1 << 16
    offset = 100 if kind == "dmabuf" else 0
    assert done.stdout.splitlines() == [
        f"rail True {version == '1.20'}",
        f"ends {(handle, 2 * handle, 3 * handle)}",
        "flushes 1",
        "unseen DeviceError",
        "unread DeviceError",
        "same True",
        f"bare {(handle - 100, handle)} True",
        *["failed DeviceError 0"] * 2,
        "own True True",
        "arrived True",
        "open registered by 3 region(s)",
        *[f"{kind} cuda:1 {handle}+0"] * 3,
        f"{kind} cuda:1 {handle - 100}+{offset}",
        f"{kind} cuda:1 100+0",
        *[f"{kind} cuda:1 {handle}+0"] * 3,  # once more for one peer, as the first time
        "closed ClosedError",
        "closed ClosedError",
        "held [0, 0, 0, 1, 0, 0]",  # the context is kept
    ]


REPLACED = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from fabric_kv import ConfigError, Engine, EngineOptions
from fabric_kv.memory import DeviceBuffer
from fabric_kv.memory.driver import load_driver

page = DeviceBuffer.allocate(0, 1).info.page_bytes
whole, halves = (DeviceBuffer.allocate(0, 2 * page, handle_bytes=size) for size in (2 * page, page))
driver = load_driver()
address = int(driver.call("cuMemAddressReserve", 2 * page, page, 0, 0))
driver.call("cuMemMap", address, 2 * page, 0, whole._handles[0], 0)
with Engine("tcp", nics=["127.0.0.1"], options=EngineOptions(device_memory=True)) as engine:
    region = engine.register((address, 2 * page, "cuda:0"))
    driver.call("cuMemUnmap", address, 2 * page)
    for at, handle in enumerate(halves._handles):
        driver.call("cuMemMap", address + at * page, page, 0, handle, 0)
    try:
        region.remote_for(engine.add_peer(engine.address))
    except ConfigError as error:
        print(error)
    print(engine.describe()["groups"][0]["peer_registrations"])
"""


def test_other_memory_in_a_regions_place_is_not_given_to_a_peer(tmp_path: Path) -> None:
    done = run(tmp_path, REPLACED, STANDIN_FABRIC_VERSION="1.20", STANDIN_REFUSES="")
    assert done.returncode == 0, done.stderr
    words, registrations = done.stdout.splitlines()
    assert "what lies there now is something else" in words
    assert registrations == "0"


REFUSED = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from fabric_kv import Engine, EngineOptions, RegistrationError
from fabric_kv.memory import DeviceBuffer
with Engine("tcp", nics=["127.0.0.1"], options=EngineOptions(device_memory=True)) as engine, \\
     DeviceBuffer.allocate("cuda:1", 1000) as buffer:
    try:
        buffer.region(engine)
    except RegistrationError as error:
        print(error.provider, error)
    print(engine.describe()["groups"][0]["registrations"])
"""


def test_a_provider_that_takes_neither_is_named_with_the_device(tmp_path: Path) -> None:
    done = run(tmp_path, REFUSED, STANDIN_FABRIC_VERSION="1.20", STANDIN_REFUSES="dmabuf hmem")
    assert done.returncode == 0, done.stderr
    words, registrations = done.stdout.splitlines()
    for expected in ("tcp", "FI_HMEM_CUDA", "FI_MR_DMABUF", "1000 bytes on cuda:1"):
        assert expected in words
    assert registrations == "0"


@pytest.mark.parametrize(
    ("refuses", "words"),
    [("", "registered: "), ("dmabuf", "registered: "), ("dmabuf hmem", "refused: ")],
)
def test_the_suite_for_gpus_holds_where_a_provider_reaches_device_memory_and_where_not(
    tmp_path: Path, refuses: str, words: str
) -> None:
    test = "test_device_memory_is_registered_or_the_provider_and_the_device_are_named[tcp]"
    done = run_python(
        tmp_path,
        *("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"),
        f"tests/unit/test_memory_device.py::{test}",
        STANDIN_FABRIC_VERSION="1.20",
        STANDIN_REFUSES=refuses,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert words in done.stdout


STAGED = """
import ctypes, gc, sys
import numpy as np
cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from fabric_kv import ConfigError, Engine, PagePiece, PreparedPiece, RegistrationError
from fabric_kv.memory import DeviceBuffer, HostBuffer

page, pages = 5000, 30
with Engine("tcp", nics=["127.0.0.1"]) as here, Engine("tcp", nics=["127.0.0.1"]) as there:
    source, target = (DeviceBuffer.allocate(device, page * pages) for device in (0, 1))
    data = np.random.default_rng(3).integers(0, 256, (pages, page), np.uint8)
    source.write(0, data.tobytes())
    target.write(0, b"d" * target.nbytes)
    try:
        source.region(here)
    except RegistrationError as error:
        print("unasked", "cuda" in str(error))
    src, dst = source.region(here, staging="host"), target.region(there, staging="host")
    peer = here.add_peer(there.address)
    counter = there.counter(unit_bytes=page, expected_units=4)
    here.write_pages(peer, src, dst.remote, [3, 4, 9, 5], [0, 1, 2, 3], page_bytes=page, token=counter.token).result(30)
    counter.result(30)
    print("before", target.read(0, 4 * page) == b"d" * 4 * page)
    host = here.register(bytearray(2 * page))
    here.read_pages(peer, host, dst.remote, [0, 1], [0, 29], page_bytes=page).result(30)
    print("read", bytes(host._owner[1]) == data[3].tobytes() + b"d" * page)
    # It is sent on before it is unstaged: the device's bytes go, and what has arrived stays.
    counter = here.counter(unit_bytes=page, expected_units=1)
    there.write(there.add_peer(here.address), dst, 0, host.remote, 0, page, token=counter.token).result(30)
    counter.result(30)
    print("sent", bytes(host._owner[1])[:page] == b"d" * page)
    dst.unstage(0, 2 * page)
    dst.unstage(2 * page, 2 * page)
    print("after", target.read(0, 4 * page) == data[[3, 4, 9, 5]].tobytes())
    print("others", target.read(4 * page, 26 * page) == b"d" * 26 * page)
    for engine in (here, there):
        figures = engine.describe()["staging"]
        print(figures["regions"], figures["copies"], figures["bytes"], figures["seconds"] > 0)
    watch = here.watch()
    piece = PagePiece(src, 0, page, dst.remote, 0, page, page, [0], [0], layer=1)
    for refused in (
        lambda: here.submit(peer, [piece], watch=watch, step=1),
        lambda: here.prepare(peer, [PreparedPiece(src, 0, page, dst.remote, 0, page, page)]),
        lambda: here.write_pages(peer, src, dst.remote, [pages], [0], page_bytes=page),
        lambda: dst.unstage(0, page * pages + 1),
        lambda: dst.unstage(-1, 2),
        lambda: here.register(np.zeros(10), staging="host"),
        lambda: here.register((source.address, 100, "cuda:1"), staging="host"),
        lambda: here.register(np.zeros(10)).unstage(0, 1),
    ):
        try:
            refused()
            print("taken")
        except ConfigError as error:
            print("refused", str(error)[-40:].replace("\\n", " "))
    with Engine("tcp", nics=["127.0.0.1"]) as third:
        unclosed = source.region(third, staging="host")
        third.write(third.add_peer(there.address), unclosed, 0, dst.remote, 0, page).result(30)
    unclosed.close()
    held = [source.region(here, staging="host") for _ in range(2)]
    for region in held:
        here.write(peer, region, 0, dst.remote, 0, page).result(30)
    held.pop().close()
    del held, region                       # one closed, one dropped
    src.close()
    dst.close()
    gc.collect()
    print("registrations", here.describe()["groups"][0]["registrations"])
del src, dst, piece, watch, refused, unclosed
gc.collect()
source.close()
target.close()
"""


def test_staging_in_host_memory_is_asked_for_and_its_cost_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, STAGED)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:8] == [
        "unasked True",
        "before True",
        "read True",
        "sent True",
        "after True",
        "others True",
        "1 3 170000 True",  # all of it at registration; pages 3 to 5 are one copy
        "1 4 175000 True",
    ]
    assert len(lines) == 17
    # That of `host`, which was never closed.
    assert lines.pop() == "registrations 1"
    assert any("is on cuda:0, not on cuda:1" in line for line in lines)
    assert all(line.startswith("refused") for line in lines[8:]), lines[8:]


LIMITED = """
import os, sys
import numpy as np
from fabric_kv import Engine, RegistrationError
from fabric_kv.memory import HostBuffer

mib, page, pages = 1 << 20, 300_000, 18
with Engine("tcp", nics=["127.0.0.1"]) as engine, HostBuffer.allocate(page * pages) as source, \\
     HostBuffer.allocate(page * pages) as target:
    group = lambda: engine.describe()["groups"][0]["registrations"]
    source.array[:] = np.random.default_rng(3).integers(0, 256, source.nbytes, np.uint8)
    os.environ["STANDIN_MAX_MR"] = str(mib)
    src, dst = source.region(engine), target.region(engine)
    ends = (0, *dst.remote.segment_ends)
    print("parts", len(ends) - 1, max(np.diff(ends)) <= mib, ends[-1] == target.nbytes)
    counter = engine.counter(unit_bytes=page, expected_units=pages)
    engine.write_pages(
        engine.add_peer(engine.address), src, dst.remote, range(pages), range(pages)[::-1], page_bytes=page,
        token=counter.token,
    ).result(30)
    counter.result(30)
    print("arrived", (target.array.reshape(pages, page)[::-1] == source.array.reshape(pages, page)).all())
    src.close()
    dst.close()
    before = group()
    os.environ["STANDIN_MORE_MRS"] = "3"
    try:
        source.region(engine)
    except RegistrationError as error:
        print("count", f"{before + 3} registrations are open" in str(error), f"of {mib} bytes" in str(error), error)
    print("left", group() - before)
    del os.environ["STANDIN_MORE_MRS"]
    os.environ["STANDIN_MAX_MR"] = str(mib // 2)          # below what regions are cut to
    try:
        source.region(engine)
    except RegistrationError as error:
        print("size", "max_registration_bytes" in str(error), error)
    print("left", group() - before)
"""


def test_a_nics_limits_on_registrations_are_split_by_size_and_named_by_count(tmp_path: Path) -> None:
    done = run(tmp_path, LIMITED)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["parts 6 True True", "arrived True"]
    assert lines[2].startswith("count True True "), lines
    assert "Hint: register whole caches" in lines[2]
    assert lines[3] == lines[5] == "left 0"
    assert lines[4].startswith("size True "), lines
    assert f"{(1 << 20)} bytes" in lines[4]
