"""The tensor-parallel ranks of one side: processes that compute and own their caches, which the engine's process moves.

>>> with Ranks("prefill", 3, config, weights_path) as ranks, Engine("tcp", nics=["127.0.0.1"]) as engine:
...     regions = [[cache.region(engine)] for cache in ranks.caches]
...     watch = engine.watch(ranks.word)
...     hidden, last_layer_s = ranks.forward(step, tokens, begin, pages)  # the engine sends each layer meanwhile

A rank allocates its cache and serves it; the engine's process imports it and gives orders over a pipe. Rank 0 says how
far a step is by a word of shared memory, which the engine looks at by itself: no message, and no Python, per layer.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from smollm2 import Config, Llama, PagedCache, RankGroup, Weights, argmax, checksums
from smollm2.cache import Pages
from smollm2.weights import F32

from fabric_kv import CacheSpec, KVLayout, Placement, SharingError
from fabric_kv.memory import BufferServer, HostBuffer, ImportedBuffers, WatchWord, import_buffers

PAGE_TOKENS = 16
NUM_PAGES = 256
ANSWER_S = 240.0  # for a process to start, or to answer; one that dies is noticed at once, and one that is stopped soon
END_S = 60.0  # for it to end by itself
BEAT_S = 0.25  # from one sign of a rank's life to the next
STILL_S = 15  # without one it counts as stopped


@contextmanager
def child(name: str, target: Callable[..., object], *args: Any) -> Iterator[tuple[int, Connection]]:
    """Run ``target(pipe, *args)`` in a process that ends when our end of the pipe does; yield its pid and our end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), name=name)
    # What is ignored stays so in the child: Ctrl-C goes to all of us, and the pipes' ends take the children along.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
        theirs.close()
    try:
        yield process.pid or 0, ours
    finally:
        ours.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()


class _Side(NamedTuple):
    name: str
    tp_size: int
    config: Config
    weights_path: str
    path: str  # of rank 0's buffers, but for its number


class _Pulse:
    """Whether a rank's process moves: it beats, whatever it computes, until it is stopped or ends."""

    def __init__(self, beat: HostBuffer) -> None:
        self._beat = beat
        self._seen = -1
        self._looked_s = time.monotonic()
        self._num_still = 0

    def is_still(self) -> bool:
        """Whether it has not beaten for STILL_S seconds, in each of which it was looked at.

        Counted in looks: where the whole machine has slept, much time has passed and nobody is to blame.
        """
        now_s, beats = time.monotonic(), int(np.asarray(self._beat).view(np.uint64)[0])
        if beats != self._seen:
            self._seen, self._looked_s, self._num_still = beats, now_s, 0
        elif now_s - self._looked_s >= 1:
            self._looked_s, self._num_still = now_s, self._num_still + 1
        return self._num_still >= STILL_S


def _go_on_beating(word: NDArray[np.uint64]) -> None:
    while True:
        word[0] += 1
        time.sleep(BEAT_S)


class _Rank:
    """What a rank's process does when it is asked."""

    def __init__(self, model: Llama, group: RankGroup, cache: PagedCache, word: WatchWord) -> None:
        self._model, self._group, self._cache, self._word = model, group, cache, word

    def forward(
        self, step: int, tokens: Sequence[int] | NDArray[np.int64], start: int, pages: Pages
    ) -> tuple[F32, float]:
        last_layer_s = 0.0

        def layer_done(_layer: int) -> None:
            nonlocal last_layer_s
            self._word.bump()
            last_layer_s = time.monotonic()

        self._word.set_step(step)
        hidden = self._model.forward(tokens, start, [self._cache], pages, layer_done, self._group)
        return hidden[-1], last_layer_s

    def next_token(self, token: int, position: int, pages: Pages) -> int:
        hidden, _ = self.forward(0, [token], position, pages)
        return argmax(self._model.logits(hidden)) if self._group.rank == 0 else -1

    def checksums(self, pages: Pages, num_tokens: int) -> NDArray[np.uint32]:
        return checksums([self._cache], pages, num_tokens)


def _serve(pipe: Connection, side: _Side, number: int, neighbours: list[Connection]) -> None:
    """A rank's process: as long as its engine's process and the other ranks live."""
    config, tp_size = side.config, side.tp_size
    weights = import_buffers(side.weights_path, timeout_s=ANSWER_S)["weights"]
    model = Llama(config, Weights.from_flat(config, np.asarray(weights).view(np.float32)))
    buffer = HostBuffer.allocate(PagedCache.nbytes_of(config, tp_size, NUM_PAGES, page_tokens=PAGE_TOKENS))
    cache = PagedCache(config, tp_size, NUM_PAGES, page_tokens=PAGE_TOKENS, buffer=buffer.view)
    word = WatchWord("cpu")
    rank = _Rank(model, RankGroup(number, tp_size, neighbours), cache, word)
    beat = HostBuffer.allocate(8)
    threading.Thread(target=_go_on_beating, args=(beat.array.view(np.uint64),), daemon=True).start()
    shared = {"cache": buffer, "word": word.buffer, "beat": beat}
    with BufferServer(f"{side.path}{number}", shared, label=f"{side.name} rank {number}", timeout_s=ANSWER_S):
        with suppress(EOFError, OSError):
            pipe.send("serving")
            while True:
                name, args = pipe.recv()
                pipe.send(getattr(rank, name)(*args))
        with suppress(OSError):
            pipe.poll(ANSWER_S)  # if a neighbour is gone: the engine's process finds out which, and ends the others


class Ranks:
    """The ranks as the engine's process sees them; a context manager that ends them.

    Attributes
    ----------
    caches : list of HostBuffer
        Each rank's cache, mapped here.
    word : ndarray of uint64, shape (1,)
        For ``engine.watch``: how far the step is.
    pids : list of int

    Raises
    ------
    SharingError
        Here and in every method: a rank has ended, is stopped, or does not answer. One that is stopped is killed.
    """

    def __init__(self, name: str, tp_size: int, config: Config, weights_path: str) -> None:
        side = _Side(name, tp_size, config, weights_path, f"@fabric_kv-demo-{os.getpid()}-{name}-rank")
        self._side = side
        with ExitStack() as stack:
            pairs = [multiprocessing.Pipe() for _ in range(tp_size - 1)]
            neighbours = [[ours for ours, _ in pairs], *([theirs] for _, theirs in pairs)]
            members = [
                stack.enter_context(child(f"{name} rank {number}", _serve, side, number, neighbours[number]))
                for number in range(tp_size)
            ]
            for connection in (end for pair in pairs for end in pair):
                connection.close()
            self.pids = [pid for pid, _ in members]
            self._pipes = [pipe for _, pipe in members]
            self._imported: list[ImportedBuffers] = []
            self._pulses: list[_Pulse] = []
            for pipe in self._pipes:  # all of them, before the first is waited for
                stack.callback(pipe.close)
            self._answers()
            for number, pid in enumerate(self.pids):
                buffers = import_buffers(f"{side.path}{number}", pid=pid, timeout_s=ANSWER_S)
                self._imported.append(stack.enter_context(buffers))
                self._pulses.append(_Pulse(buffers["beat"]))
            self.caches = [rank["cache"] for rank in self._imported]
            self._word = self._imported[0]["word"]
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    @property
    def word(self) -> NDArray[np.uint64]:
        return np.asarray(self._word)[:8].view(np.uint64)

    @property
    def spec(self) -> CacheSpec:
        """What a peer must know of the caches."""
        config, tp_size = self._side.config, self._side.tp_size
        layout = KVLayout.attention(
            num_layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_tokens=PAGE_TOKENS,
            dtype="float16",
            model="SmolLM2-135M-Instruct",
        )
        arrays = [
            PagedCache(config, tp_size, NUM_PAGES, page_tokens=PAGE_TOKENS, buffer=np.asarray(cache)).data
            for cache in self.caches
        ]
        return CacheSpec.from_arrays(layout, Placement(tp_size=tp_size), arrays)

    def forward(
        self, step: int, tokens: Sequence[int] | NDArray[np.int64], start: int, pages: Pages
    ) -> tuple[F32, float]:
        """Run a chunk; the last token's hidden state, and when rank 0 said that the last layer was done."""
        answer: tuple[F32, float] = self._ask("forward", step, tokens, start, pages)[0]
        return answer

    def next_token(self, token: int, position: int, pages: Pages) -> int:
        """Run one token, and pick the next one greedily."""
        answer: int = self._ask("next_token", token, position, pages)[0]
        return answer

    def checksums(self, pages: Pages, num_tokens: int) -> NDArray[np.uint32]:
        """Of every page, as the ranks themselves see them; see ``smollm2.checksums``."""
        return np.concatenate(self._ask("checksums", pages, num_tokens), axis=-1)

    def check(self) -> None:
        """Raise if a rank has ended, or is stopped."""
        for rank in self._imported:
            rank.check()
        for number, pulse in enumerate(self._pulses):
            if pulse.is_still():
                os.kill(self.pids[number], signal.SIGKILL)  # it would not end by itself, and is a child of ours
                raise self._lost(number, f"has not moved for {STILL_S} s, as a process that is stopped", "timeout")

    def _ask(self, name: str, *args: Any) -> list[Any]:
        for number, pipe in enumerate(self._pipes):
            try:
                pipe.send((name, args))
            except OSError:
                raise self._lost(number) from None
        return self._answers()

    def _answers(self) -> list[Any]:
        """One of each rank, whichever comes first: so a rank that ends is found while another waits for it."""
        answers: dict[Connection, Any] = {}
        deadline_s = time.monotonic() + ANSWER_S
        while waiting := [pipe for pipe in self._pipes if pipe not in answers]:
            ready = wait(waiting, 1.0)
            if not ready:
                self.check()
                if time.monotonic() < deadline_s:
                    continue
                silent = [self._pipes.index(pipe) for pipe in waiting]
                raise SharingError(
                    f"{self._side.name} ranks {silent} have said nothing for {ANSWER_S} s", reason="timeout"
                )
            for pipe in self._pipes:
                if pipe in ready:
                    try:
                        answers[pipe] = pipe.recv()
                    except (EOFError, OSError):
                        raise self._lost(self._pipes.index(pipe)) from None
        return [answers[pipe] for pipe in self._pipes]

    def _lost(self, number: int, why: str = "has ended", reason: str = "gone") -> SharingError:
        who = f"{self._side.name} rank {number} (process {self.pids[number]})"
        return SharingError(f"{who} {why}", path=f"{self._side.path}{number}", reason=reason)
