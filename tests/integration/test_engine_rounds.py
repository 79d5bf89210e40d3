"""A peer is killed or stopped at every step of its life, round after round, while another one is served.

>>> FABRIC_KV_ROUNDS=200 scripts/test tests/integration/test_engine_rounds.py     # many
>>> FABRIC_KV_SEED=7 FABRIC_KV_ROUND=31 ...                                       # that round alone

Each round forks a victim, brings it to a step, harms it there, and looks at all that the engine in this process has
said about it: each end once, within its bound. Afterwards nothing of 11 or 201 victims may be left.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fabric_kv.errors import ClosedError, ConfigError, TransferError
from fabric_kv.regions import RemoteRegion
from fabric_kv.transfers import Peer, Transfer

from .engine_peer import CANARY, LONG, stamp
from .fabrics import SLOWER
from .round_house import CONNECT_S, SILENCE_S, WATCHFUL, House, settles
from .round_peer import NBYTES, NUM_PAGES, PAGE, Nursery
from .shm_queue import stop_without_locks

ROUNDS = int(os.environ.get("FABRIC_KV_ROUNDS", "10"))
ONLY = os.environ.get("FABRIC_KV_ROUND")
VERBOSE = ONLY is not None or ROUNDS > 10
WARM_UP = 1  # round, after which nothing may grow any more

# What a busy machine may add to any bound here. Nothing but a hang takes as long.
SLACK_S = 20.0
RSS_SLACK_BYTES = 48 << 20

MESSAGE_BYTES = 1 << 20
NUM_MESSAGES = 8

STEPS = (
    "before it knows us",
    "before anything is sent",
    "in our writes",
    "in its writes",
    "in our message",
    "in its message",
    "in our reads",
    "in its reads",
    "in its close",
    "in its removal",
    "after it came again",
)
# Killed; stopped for ever; stopped until it is given up, then it goes on; stopped for a moment.
HARMS = ("kill", "stop", "pause", "blink")


class Round:
    """One victim, from its birth to its end."""

    def __init__(self, house: House, index: int) -> None:
        self.house, self.index = house, index
        self.engine = house.engine
        self.random = random.Random(f"{house.seed} {house.provider.name} {index}")
        order = random.Random(f"{house.seed} {house.provider.name}").sample(STEPS, len(STEPS))
        self.step = order[index % len(STEPS)]
        self.harm = self.random.choice(HARMS)
        self.stamp = self.random.randrange(1 << 30)
        self.transfers: list[Transfer] = []
        self.removed = False
        self.nothing_is_missing = False  # of what was under way when the victim was harmed
        self.began_s = time.monotonic()

    def __str__(self) -> str:
        return (
            f"FABRIC_KV_SEED={self.house.seed} FABRIC_KV_ROUND={self.index}: "
            f"{self.house.provider.name}, {self.harm} {self.step}"
        )

    def play(self) -> None:
        self.victim = self.house.nursery.peer()
        try:
            self.memory = np.full(NBYTES + 2 * PAGE, CANARY, np.uint8)
            self.region = self.engine.register(self.memory)
            self.source = self.engine.register(np.full(NBYTES, 1, np.uint8))
            self.house.regions.update([self.region, self.source])
            self.counter = self.engine.counter(unit_bytes=PAGE, expected_units=NUM_PAGES + 1)  # one never comes
            self.counter_ends: list[bool] = []
            self.counter.add_done_callback(
                lambda counter: self.counter_ends.append(isinstance(counter.exception(0), ClosedError))
            )
            self.peer = self.meet("open")
            self.prepare_step()
            self.harm_it()
            self.wait_for_end()
            self.part()
            self.check()
        finally:
            self.victim.close()

    # -- up to the step

    def meet(self, command: str) -> Peer:
        provider = self.house.provider
        address = self.victim.call(command, provider.name, provider.peer_nics, **WATCHFUL)
        self.remote, self.sink = map(RemoteRegion.from_bytes, self.victim.call("prepare", self.stamp))
        peer = self.engine.add_peer(address, monitor=True)
        self.known_s = time.monotonic()
        if self.step != "before it knows us":
            self.victim.call("add_peer", self.engine.address, True)
            if self.step != "before anything is sent":
                self.house.greet(self.victim, peer)
        return peer

    def prepare_step(self) -> None:
        """Begin what the harm will interrupt."""
        here, token = self.region.remote.to_bytes(), self.counter.token
        if self.step in ("in our writes", "before it knows us", "in its removal"):
            self.write()
        elif self.step == "in its writes":
            self.victim.call("write_all", here, PAGE, token)
            least = self.random.choice([0, 1, NUM_PAGES // 2])
            self.until(lambda: self.counter.received >= least)
        elif self.step == "in our message":
            self.send()
        elif self.step == "in its message":
            self.victim.call("post_numbered", NUM_MESSAGES, MESSAGE_BYTES)
            least = self.random.choice([0, 0, 1, 4])
            self.until(lambda: len(self.from_victim()) >= least)
        elif self.step == "in our reads":
            self.begin(self.engine.read(self.peer, self.region, PAGE, self.remote, 0, NBYTES))
        elif self.step == "in its reads":
            self.victim.call("read_all", self.source.remote.to_bytes())
        elif self.step == "in its close":
            self.write()
            self.victim.call("write_all", here, PAGE, token)
            self.victim.start("close")
        elif self.step == "after it came again":
            self.write()
            self.former = self.peer
            self.engine.remove_peer(self.former)
            self.peer = self.meet("reopen")
            if self.random.random() < 0.5:
                self.write()
        time.sleep(self.random.choice([0, 0, 0.0005, 0.002, 0.01]))

    def begin(self, *transfers: Transfer) -> None:
        self.transfers += transfers
        self.house.track(*transfers)

    def write(self) -> None:
        for begin in range(0, NBYTES, NBYTES // 4):
            self.begin(self.engine.write(self.peer, self.source, begin, self.sink, begin, NBYTES // 4))

    def send(self) -> None:
        for _ in range(NUM_MESSAGES):
            self.begin(self.engine.send(self.peer, bytes(MESSAGE_BYTES)))

    # -- the step

    def harm_it(self) -> None:
        remove_first = self.random.random() < 0.5
        if self.step == "in its removal" and remove_first:
            self.remove()
        assert self.peer.epoch not in self.house.lost, "it was given up before it was harmed"
        self.harmed_s = time.monotonic()
        if self.harm == "kill":
            self.kill()
        else:
            self.stop()
        if self.step == "in its removal" and not remove_first:
            self.remove()
        elif self.step != "in its removal" and self.harm != "blink" and self.random.random() < 0.5:
            self.write()
            self.send()

    def remove(self) -> None:
        self.engine.remove_peer(self.peer)
        self.removed = True

    def kill(self) -> None:
        if self.victim.alive() and self.house.provider.name == "shm":
            self.stop()
        self.victim.kill()

    def stop(self) -> None:
        """SIGSTOP. On shm not while it holds the lock of a queue: that stops us, too (docs/providers.md)."""
        if self.house.provider.name == "shm":
            stop_without_locks(self.victim.pid, [os.getpid(), self.house.other.pid])
        else:
            self.victim.signal(signal.SIGSTOP)

    def must_be_lost(self) -> bool:
        if self.step in ("before it knows us", "in its close"):  # silent for ever, whatever we do
            return True
        return self.step != "in its removal" and self.harm != "blink"

    def wait_for_end(self) -> None:
        """Serve the other peer until the victim has been given up, or goes on."""
        if self.harm == "blink":
            self.house.serve()
            time.sleep(self.random.uniform(0, 0.2))
            self.victim.signal(signal.SIGCONT)
        for _ in range(3):
            self.house.serve()
        if self.must_be_lost():
            self.until(lambda: self.peer.epoch in self.house.lost, serving=True)
            since = self.known_s + CONNECT_S if self.step == "before it knows us" else self.harmed_s + SILENCE_S
            late_s = self.house.lost[self.peer.epoch] - since
            assert late_s < SLACK_S, f"given up {late_s:.1f} s after its bound"
        if self.harm == "pause":
            self.victim.signal(signal.SIGCONT)
            time.sleep(self.random.uniform(0, 0.05))
            self.house.serve()
        if self.harm == "blink" and self.step not in ("in its removal", "in its close", "before it knows us"):
            self.check_nothing_is_missing()
            self.nothing_is_missing = True

    def check_nothing_is_missing(self) -> None:
        """A peer that was stopped for a moment, and was not given up, has lost nothing."""
        for transfer in self.transfers:
            if transfer.peer is self.peer:
                transfer.result(LONG)
        self.victim.call("wait_transfers")
        if self.step == "in its writes":
            self.until(lambda: self.counter.received == NUM_PAGES)
            assert self.num_pages_here() == NUM_PAGES
        elif self.step == "in our reads":
            assert self.num_pages_here() == NUM_PAGES
        elif self.step == "in its message":
            # What has come of a message in part is forgotten when its sender is given up, on a slow machine also here.
            self.until(lambda: len(self.from_victim()) == NUM_MESSAGES or self.peer.epoch in self.house.lost)
        elif self.step == "in its reads":
            assert self.victim.call("get", 0, NBYTES, "sink") == bytes([1]) * NBYTES

    # -- the end

    def part(self) -> None:
        """Forget it, as the engine's user does, and end the process."""
        for transfer in self.transfers:
            transfer.cancel()
        self.remove()
        self.house.serve()
        received = self.counter.received
        assert not self.counter_ends, "a counter has ended although a unit of it was never sent"
        self.counter.release()
        assert self.counter_ends == [True]
        assert self.num_pages_here() >= received, f"{received} pages were counted, {self.num_pages_here()} are here"
        if self.harm in ("pause", "blink") and self.random.random() < 0.5:
            if self.step != "in its close":
                self.victim.start("close")
            self.victim.finish()
        self.kill()
        if self.house.provider.name != "shm" or self.nothing_is_missing:
            self.until(lambda: not self.house.unended, "not every transfer has ended")

    def check(self) -> None:
        house = self.house
        for transfer in self.transfers:
            if transfer.done():
                assert isinstance(transfer.exception(0), None | TransferError | ClosedError), transfer.exception(0)
        messages = self.from_victim()
        assert len(messages) == len(set(messages)), "a message came twice"
        for message in messages:
            assert message == message[:1] * MESSAGE_BYTES, "a message is not what was sent"
        house.messages.clear()
        self.check_memory()
        for epoch in {self.peer.epoch, getattr(self, "former", self.peer).epoch}:
            lost = house.callbacks["lost", epoch]
            assert lost <= 1
            assert lost == 1 or epoch != self.peer.epoch or not self.must_be_lost()
            del house.callbacks["lost", epoch]
        for region in (self.region, self.source):
            try:
                region.close()
            except ConfigError:
                assert house.unended
                house.in_use.append(region)
        house.check_ends()
        if not settles(lambda: not house.unended):
            # shm gives nothing back that was posted after what a dead peer has not answered (docs/providers.md).
            house.close()
            house.open()

    def check_memory(self) -> None:
        assert np.all(self.memory[:PAGE] == CANARY)
        assert np.all(self.memory[-PAGE:] == CANARY)
        if self.step not in ("in its writes", "in our reads", "in its close"):
            assert np.all(self.memory == CANARY), "something was written that nobody had asked for"
        house = self.house
        assert np.all(house.memory[2 * PAGE :] == CANARY)

    def num_pages_here(self) -> int:
        area = self.memory[PAGE:-PAGE].reshape(NUM_PAGES, PAGE)
        return int(np.all(area == stamp(self.stamp, NBYTES).reshape(NUM_PAGES, PAGE), axis=1).sum())

    def from_victim(self) -> list[bytes]:
        return [payload for sender, payload in self.house.messages if sender == self.peer.epoch and payload != b"hello"]

    def until(self, condition: Callable[[], bool], what: str = "", *, serving: bool = False) -> None:
        deadline = time.monotonic() + LONG
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(what or "nothing happens")
            if serving:
                self.house.serve()
            time.sleep(0.02 if serving else 0.0005)


@pytest.fixture
def house(provider: Any, seed: int) -> Iterator[House]:
    with Nursery(provider.name) as nursery:
        house = House(provider, nursery, seed)
        yield house
        house.engine.close()
        house.other.close()


@pytest.mark.timeout((60 + 10 * ROUNDS) * min(SLOWER, 4))
def test_a_peer_is_harmed_at_every_step(house: House) -> None:
    before: dict[str, int] = {}
    for index in [int(ONLY)] if ONLY else range(WARM_UP + ROUNDS):
        if index == WARM_UP:
            before = house.left()
        round_ = Round(house, index)
        try:
            round_.play()
        except BaseException as error:
            error.add_note(str(round_))
            raise
        if VERBOSE:
            print(round_, f"{time.monotonic() - round_.began_s:.2f} s", flush=True)
        del round_
    after = house.left()
    print(
        f"{house.provider.name}: before {before}, after {after}, {house.num_served} pages served each way, "
        f"the slowest in {house.longest_s:.3f} s"
    )
    if before:
        growth = after.pop("rss") - before.pop("rss")
        assert growth < RSS_SLACK_BYTES, f"FABRIC_KV_SEED={house.seed}: {growth} bytes more than before"
        assert after == before, f"FABRIC_KV_SEED={house.seed}"
    house.close()
