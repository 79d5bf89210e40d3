"""A layer's pages go when a captured CUDA graph has computed it: torch, a watch word, no Python in between.

Needs a GPU, torch, and NICs that reach device memory: see docs/hardware.md.

>>> python examples/cuda_watch.py efa
"""

import sys

import torch

from fabric_kv import Engine, EngineOptions, PagePiece
from fabric_kv.memory import DeviceBuffer, WatchWord

LAYERS, PAGES, PAGE = 4, 8, 64 << 10

options = EngineOptions(device_memory=True)
with (
    Engine(sys.argv[1], options=options) as engine,
    WatchWord("cuda:0") as word,
    DeviceBuffer.allocate("cuda:0", LAYERS * PAGES * PAGE) as source,
    DeviceBuffer.allocate("cuda:0", LAYERS * PAGES * PAGE) as target,
):
    src, dst = source.region(engine), target.region(engine)
    peer, watch = engine.add_peer(engine.address), engine.watch(word.array)
    cache = torch.from_dlpack(source).view(LAYERS, PAGES, PAGE)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(LAYERS):
            cache[layer].fill_(layer + 1)  # the layer's attention, in real life
            word.bump(stream.cuda_stream)
    pages = range(PAGES)
    pieces = []
    for layer in range(LAYERS):
        at = layer * PAGES * PAGE
        pieces.append(PagePiece(src, at, PAGE, dst.remote, at, PAGE, PAGE, pages, pages, layer=layer + 1))
    counter = engine.counter(unit_bytes=PAGE, expected_units=LAYERS * PAGES)
    transfer = engine.submit(peer, pieces, token=counter.token, watch=watch, step=1)
    with torch.cuda.stream(stream):
        word.set_step(1, stream.cuda_stream)  # outside the graph, which would say the same step at each replay
        graph.replay()
    counter.result(10)
    print("arrived:", torch.from_dlpack(target).view(LAYERS, -1).float().mean(1).tolist())
    transfer.result(10)
    del cache, watch, graph
    src.close()
    dst.close()
