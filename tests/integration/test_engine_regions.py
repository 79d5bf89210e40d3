"""Registrations: the same memory twice, overlaps, addresses that are there again for something else, and the count."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from fabric_kv import (
    ClosedError,
    ConfigError,
    Engine,
    EngineOptions,
    FabricError,
    MemoryRegion,
    RegistrationError,
    SharingError,
)
from fabric_kv.memory import HostBuffer

PAGE = 4096


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("tcp", nics=["127.0.0.1"]) as engine:
        yield engine


def figures(engine: Engine) -> tuple[int, int, int]:
    group = engine.describe()["groups"][0]
    return group["regions"], group["registrations"], group["registered_bytes"]


def write(here: Engine, there: Engine, dst: MemoryRegion, offset: int, value: int) -> None:
    """Write a page and see it land."""
    source = np.full(PAGE, value, np.uint8)
    with here.register(source) as src:
        counter = there.counter(unit_bytes=PAGE, expected_units=1)
        peer = here.add_peer(there.address)
        here.write(peer, src, 0, dst.remote, offset, PAGE, token=counter.token).result(20)
        counter.result(20)


def test_the_same_memory_again_is_one_registration(engine: Engine) -> None:
    values = np.zeros(4 * PAGE, np.uint8)
    none = figures(engine)
    first = engine.register(values)
    second = engine.register(values[:])  # another array, the same memory of the same owner
    assert figures(engine) == (none[0] + 2, none[1] + 1, none[2] + values.nbytes)
    assert first.remote == second.remote
    write(engine, engine, first, 0, 1)
    first.close()
    assert figures(engine) == (none[0] + 1, none[1] + 1, none[2] + values.nbytes)
    write(engine, engine, second, PAGE, 2)
    assert (values[:PAGE] == 1).all()
    assert (values[PAGE : 2 * PAGE] == 2).all()
    with pytest.raises(ClosedError, match="deregistered"):
        engine.write(engine.add_peer(engine.address), first, 0, second.remote, 0, PAGE)
    second.close()
    assert figures(engine) == none


def test_a_region_that_was_dropped_counts_no_more(engine: Engine) -> None:
    values = np.zeros(PAGE, np.uint8)
    none = figures(engine)
    first, second = engine.register(values), engine.register(values)
    del first
    assert figures(engine) == (none[0] + 1, none[1] + 1, none[2] + PAGE)
    del second
    assert figures(engine) == none


def test_overlapping_regions_have_their_own_bounds_and_ends(engine: Engine) -> None:
    with Engine("tcp", nics=["127.0.0.1"]) as there:
        values = np.zeros(4 * PAGE, np.uint8)
        none = figures(there)
        lower, upper = there.register(values[: 3 * PAGE]), there.register(values[PAGE:])
        assert figures(there) == (none[0] + 2, none[1] + 2, none[2] + 6 * PAGE)
        lower.close()
        write(engine, there, upper, 0, 7)
        assert (values[PAGE : 2 * PAGE] == 7).all()
        write(engine, there, upper, 2 * PAGE, 8)
        assert (values[3 * PAGE :] == 8).all()
        assert figures(there) == (none[0] + 1, none[1] + 1, none[2] + 3 * PAGE)


def test_a_bare_address_is_registered_anew_each_time(engine: Engine) -> None:
    memory = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    none = figures(engine)
    regions = [engine.register((address, PAGE, "cpu")) for _ in range(3)]
    assert figures(engine) == (none[0] + 3, none[1] + 3, none[2] + 3 * PAGE)
    assert len({region.remote.rails for region in regions}) == 3


def test_an_address_that_is_there_again_has_another_registration(engine: Engine) -> None:
    """The old region is kept, as by a transfer in flight, and its memory is not."""
    memory = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    class Array:
        """Lives at that address, whoever owns it."""

        def __init__(self) -> None:
            self.__array_interface__ = {"shape": (PAGE,), "typestr": "|u1", "data": (address, False), "version": 3}

    first = np.asarray(Array())
    old = engine.register(first)
    second = np.asarray(Array())  # as if it were allocated after the first was freed
    new = engine.register(second)
    assert first.ctypes.data == second.ctypes.data
    assert old.remote != new.remote
    assert engine.register(second).remote == new.remote


def test_memory_is_not_unmapped_under_a_region(engine: Engine) -> None:
    buffer = HostBuffer.allocate(PAGE)
    region, again = buffer.region(engine), buffer.region(engine)
    assert again.remote == region.remote
    region.close()
    with pytest.raises(ConfigError, match=r"registered by 1 region\(s\)"):
        buffer.close()
    again.close()
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.region(engine)


def test_a_buffer_closes_once_its_engine_has(engine: Engine) -> None:
    buffer = HostBuffer.allocate(PAGE)
    with Engine("tcp", nics=["127.0.0.1"]) as other:
        region, direct = buffer.region(other), other.register(buffer)
        with pytest.raises(ConfigError, match=r"registered by 2 region\(s\)"):
            buffer.close()
    buffer.close()
    assert region.closed
    assert direct.closed


def test_what_a_region_costs_does_not_grow_with_their_number(engine: Engine) -> None:
    """Counted in what the engine and the process keep, not in time: benchmarks/bench_regions.py measures."""
    count = 5000
    values = np.zeros(count * PAGE, np.uint8)
    write(engine, engine, engine.register(values), 0, 1)  # connects
    gc.collect()  # engines of other tests, which would close meanwhile
    none, descriptors = figures(engine), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        regions = [engine.register(values[i * PAGE : (i + 1) * PAGE]) for i in range(count)]
        assert figures(engine) == (none[0] + count, none[1] + count, none[2] + values.nbytes)
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        again = [engine.register(values[i * PAGE : (i + 1) * PAGE]) for i in range(count)]
        assert figures(engine) == (none[0] + 2 * count, none[1] + count, none[2] + values.nbytes)
        for region in regions[::2]:
            region.close()
        write(engine, engine, again[0], 0, 9)
        assert values[0] == 9
        del region, regions, again
        assert figures(engine) == none


def test_device_memory_names_provider_nic_and_the_option(engine: Engine) -> None:
    with pytest.raises(RegistrationError, match=r"cuda:0 .*tcp.*without device memory.*device_memory=True") as refused:
        engine.register((1 << 40, PAGE, "cuda:0"))
    assert refused.value.nic


def test_a_provider_without_device_memory_is_refused_at_open() -> None:
    """Or it is granted: libfabric's tcp has it where it was built with CUDA."""
    with contextlib.ExitStack() as opened:
        try:
            engine = opened.enter_context(Engine("tcp", options=EngineOptions(device_memory=True)))
        except FabricError as error:
            refusal = str(error)
        else:
            assert engine.describe()["groups"][0]["rails"][0]["device_memory"]
            return
    assert "provider 'tcp' offers no endpoint that reaches device memory" in refusal


def test_a_buffer_is_free_though_a_counter_that_failed_is_there(engine: Engine) -> None:
    buffer = HostBuffer.allocate(PAGE)
    counter = engine.counter(unit_bytes=1)
    counter.release()

    def handle() -> None:
        array = buffer.array
        with contextlib.suppress(ClosedError):
            counter.result(0)
        assert array.nbytes == PAGE

    handle()
    buffer.close()
    assert counter.done()


def test_why_a_region_is_lost_is_told_by_errors_of_their_own(engine: Engine) -> None:
    region = engine.register(np.zeros(PAGE, np.uint8))
    assert region.lost is None
    region._lost = SharingError("the owner is gone", path="/run/kv", reason="gone")
    first, second = region.lost, region.lost
    assert isinstance(first, SharingError)
    assert (str(first), first.path, first.reason) == ("the owner is gone", "/run/kv", "gone")
    assert first is not second
    peer = engine.add_peer(engine.address)
    with pytest.raises(SharingError, match="the owner is gone") as caught:
        engine.write(peer, region, 0, region.remote, 0, 8)
    assert caught.value is not region._lost
