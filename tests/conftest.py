"""What every test shares: ``--require``, seeds, and Hypothesis without a clock.

>>> scripts/test tests/lab --require rdma      # a skip for want of RDMA becomes a failure
>>> FABRIC_KV_SEED=7 scripts/test              # repeat a run that failed
>>> def test_any_order(seed): Random(seed)...
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Generator

import hypothesis
import pytest

REQUIRABLE = ("gpu", "hugepages", "multinode", "numa", "rdma")
SEED = int(os.environ.get("FABRIC_KV_SEED") or random.SystemRandom().randrange(2**32))

# No deadline: a slow machine is not a bug. The blob repeats a failure found by any seed.
hypothesis.settings.register_profile("fabric_kv", deadline=None, print_blob=True)
hypothesis.settings.load_profile("fabric_kv")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        choices=REQUIRABLE,
        help="a test with this marker fails where it would be skipped; may be given several times",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Whoever runs us in the background of a shell without job control has it ignored, and so would all processes that
    # tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "FABRIC_KV_SEED" in os.environ and config.getoption("--hypothesis-seed", None) is None:
        config.option.__dict__["--hypothesis-seed"] = str(SEED)


def pytest_report_header() -> str:
    return f"FABRIC_KV_SEED={SEED}"


@pytest.fixture
def seed() -> int:
    """The seed of this run, shown with a failure's output."""
    print(f"FABRIC_KV_SEED={SEED}")
    return SEED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    required = [name for name in item.config.getoption("--require") if item.get_closest_marker(name)]
    if report.skipped and required and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"--require {required[0]}: {_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    # A module of the lab that skips itself while it is imported never shows its markers.
    if report.skipped and collector.config.getoption("--require") and "lab" in collector.path.parts:
        report.outcome = "failed"
        report.longrepr = f"--require: the module skips itself: {_reason(report)}"
    return report


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
