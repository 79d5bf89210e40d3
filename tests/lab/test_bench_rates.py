"""``fabric-kv-bench`` between network namespaces whose links the kernel limits (tc tbf): it must find their rates."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from fabric_kv.bench.results import Report

ROOT = Path(__file__).resolve().parents[2]
LONG = 60.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-m", "fabric_kv.bench"]
ATTEMPTS = 3  # other work may keep a run from its link; the best shows what there is

pytestmark = pytest.mark.multinode

Lab = Callable[[Sequence[int]], None]


def command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def namespaces() -> tuple[str, str]:
    return f"fkv{os.getpid()}a", f"fkv{os.getpid()}b"


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Make two namespaces with a link for each rate in Mbit/s: 10.99.k.1 and 10.99.k.2."""
    if "multinode" not in request.config.getoption("--require"):
        pytest.skip("measures rates, which other work on the machine spoils: --require multinode")
    for program in "ip", "tc":
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing: apt-get install iproute2")
    ours, theirs = namespaces()

    def make(rates: Sequence[int]) -> None:
        try:
            for name in ours, theirs:
                command("ip", "netns", "add", name)
                command("ip", "-n", name, "link", "set", "lo", "up")
            for rail, rate in enumerate(rates):
                link = ["link", "add", f"v{rail}", "netns", ours, "type", "veth", "peer", "name", f"v{rail}"]
                command("ip", *link, "netns", theirs)
                for end, name in enumerate((ours, theirs), 1):
                    command("ip", "-n", name, "addr", "add", f"10.99.{rail}.{end}/24", "dev", f"v{rail}")
                    command("ip", "-n", name, "link", "set", f"v{rail}", "up")
                    shape = ["root", "tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "50ms"]
                    command("tc", "-n", name, "qdisc", "add", "dev", f"v{rail}", *shape)
        except OSError as error:
            pytest.skip(f"no network namespaces with limited links: {error}")

    yield make
    for name in ours, theirs:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LONG)


def measure(num_rails: int, link_mbps: int, seconds: float) -> Report:
    """One run from the first namespace to the second."""
    ours, theirs = (["ip", "netns", "exec", name, *COMMAND, "--provider", "tcp"] for name in namespaces())
    nics = [",".join(f"10.99.{rail}.{end}" for rail in range(num_rails)) for end in (1, 2)]
    target = subprocess.Popen([*theirs, "--nics", nics[1]], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert target.stdout
        assert any(re.search(r"^#   fabric-kv-bench 10\.99\.0\.2", line) for line in target.stdout)
        work = ["--op", "write", "-b", "64K", "--depth", "16", "-D", str(seconds), "--nics", nics[0]]
        options = [*work, "--link-gbps", str(link_mbps / 1e3), "--json", "-"]
        done = subprocess.run(
            [*ours, "10.99.0.2", *options], capture_output=True, text=True, timeout=LONG, env=ENVIRONMENT
        )
        assert done.returncode == 0, done.stderr
        target.communicate(timeout=LONG)
    finally:
        target.kill()
        target.communicate()
    return msgspec.json.decode(done.stdout, type=Report)


def best_percent(num_rails: int, link_mbps: int, enough: float, seconds: float = 0.7) -> float:
    """Of several runs; stops at the first that is good enough, and no run may be above what the links carry."""
    best = 0.0
    for _ in range(ATTEMPTS):
        percent = measure(num_rails, link_mbps, seconds).rows[0].link_percent
        assert percent is not None
        assert percent < 105  # a bucket of 64 KiB is full at the start
        best = max(best, percent)
        if best >= enough:
            break
    return best


@pytest.mark.parametrize("num_rails", [1, 2])
def test_the_rate_of_the_links_is_found(lab: Lab, num_rails: int) -> None:
    lab([100] * num_rails)
    assert best_percent(num_rails, 100, 90) >= 90


def test_a_slow_rail_does_not_hold_the_fast_one_back(lab: Lab) -> None:
    """100 and 25 Mbit/s: in percent of twice 100, at least 85 % of their sum."""
    lab([100, 25])
    enough = 0.85 * 125 / 200 * 100
    # What the kernel still holds for the slow rail at the end counts: for long, not at all.
    assert best_percent(2, 100, enough, seconds=3.0) >= enough
