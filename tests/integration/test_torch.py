"""torch on the host: tensors over our buffers, and its own tensors as regions, of the dtypes that caches have."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from fabric_kv import ConfigError, Engine, PagePiece
from fabric_kv.buffers import locate
from fabric_kv.memory import BufferServer, HostBuffer, WatchWord, import_buffers

torch: Any = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
LONG = 60.0


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("tcp", nics=["127.0.0.1"]) as engine:
        yield engine


def test_a_tensor_over_a_buffer_is_the_same_memory_and_keeps_it_mapped() -> None:
    buffer = HostBuffer.allocate(5000)
    keys = torch.from_dlpack(buffer).view(torch.bfloat16).view(25, 100)
    assert keys.data_ptr() == buffer.address
    keys[24] = 1.5
    assert buffer.array[-2:].tobytes() == b"\xc0\x3f"
    part = keys[3]
    del keys
    with pytest.raises(ConfigError, match="in use"):
        buffer.close()
    part.fill_(2)  # it is there
    del part
    buffer.close()


def test_a_tensor_outlives_its_buffers_object() -> None:
    tensor = torch.from_dlpack(HostBuffer.allocate(5000))
    gc.collect()
    assert int(tensor.fill_(1).sum()) == 5000


def test_a_tensor_over_an_imported_buffer() -> None:
    with (
        HostBuffer.allocate(4096) as buffer,
        BufferServer(f"@fabric_kv-test-{os.getpid()}-torch", {"kv": buffer}) as server,
    ):
        imported = import_buffers(server.path, timeout_s=LONG)
        tensor = torch.from_dlpack(imported["kv"]).view(torch.float16)
        tensor.fill_(1)
        assert buffer.array[:2].tobytes() == b"\x00\x3c"
        with pytest.raises(ConfigError, match="in use"):
            imported.close()
        del tensor
        imported.close()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "uint8", "bool"])
def test_pages_move_between_tensors_of_any_dtype(engine: Engine, name: str) -> None:
    pages, dtype = 12, getattr(torch, name)
    shape = (pages, 2, 4, 8)
    values = torch.randint(0, 2 if name == "bool" else 256, (pages, 64 * dtype.itemsize), dtype=torch.uint8)
    source = values.clone().view(dtype).view(shape)
    target = torch.zeros(shape, dtype=torch.uint8).to(dtype).permute(0, 2, 1, 3)  # the same range, in another order
    with engine.register(source) as src, engine.register(target) as dst:
        assert (src.nbytes, dst.nbytes) == (values.nbytes, values.nbytes)
        page = src.nbytes // pages
        counter = engine.counter(unit_bytes=page, expected_units=pages)
        order = list(range(pages))
        engine.write_pages(
            engine.add_peer(engine.address), src, dst.remote, order, order[::-1], page_bytes=page, token=counter.token
        ).result(LONG)
        counter.result(LONG)
    arrived = target.permute(0, 2, 1, 3).contiguous().view(torch.uint8).view(values.shape)
    assert torch.equal(arrived.flip(0), values)


def test_a_region_holds_its_tensor(engine: Engine) -> None:
    tensor = torch.zeros(4096, dtype=torch.bfloat16)
    held = weakref.ref(tensor)
    region = engine.register(tensor)
    assert engine.register(tensor).remote == region.remote, "the same tensor is one registration"
    del tensor
    gc.collect()
    assert held() is not None
    region.close()
    del region
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(4, 4)[:, :2], "not contiguous"),
        (lambda: torch.zeros(4).expand(4, 4), "not contiguous"),
        (lambda: torch.zeros(0), "empty"),
        (lambda: torch.zeros(4, requires_grad=True), "detach"),
        (lambda: torch.zeros(4, device="meta"), "Tensor cannot be exported by DLPack"),
        (lambda: torch.zeros(4).to_sparse(), "Tensor cannot be exported by DLPack"),
    ],
)
def test_tensors_that_are_no_plain_range_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        locate(make())


def test_layers_go_while_torch_computes_the_next() -> None:
    """As examples/cuda_watch.py, on the CPU."""
    layers, pages, page = 4, 8, 16 << 10
    nbytes = layers * pages * page
    with (
        Engine("tcp", nics=["127.0.0.1"]) as engine,
        WatchWord("cpu") as word,
        HostBuffer.allocate(nbytes) as source,
        HostBuffer.allocate(nbytes) as target,
    ):
        src, dst = source.region(engine), target.region(engine)
        peer, watch = engine.add_peer(engine.address), engine.watch(word.array)
        cache = torch.from_dlpack(source).view(torch.bfloat16).view(layers, -1)
        order = range(pages)
        pieces = [
            PagePiece(src, at, page, dst.remote, at, page, page, order, order, layer=layer + 1)
            for layer in range(layers)
            for at in [layer * pages * page]
        ]
        counter = engine.counter(unit_bytes=page, expected_units=layers * pages)
        transfer = engine.submit(peer, pieces, token=counter.token, watch=watch, step=1)
        word.set_step(1)
        for layer in range(layers):
            cache[layer].fill_(layer + 1)
            word.bump()
        counter.result(LONG)
        transfer.result(LONG)
        assert torch.equal(torch.from_dlpack(target), torch.from_dlpack(source))
        del cache, watch
        src.close()
        dst.close()
