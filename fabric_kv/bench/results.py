"""What a run has measured: plain data, as ``--json`` writes it and ``--compare`` reads it.

>>> report = msgspec.json.decode(path.read_bytes(), type=Report)
>>> report.rows[0].gb_per_s

GB are 10^9 bytes, Gb 10^9 bits; times are in microseconds unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .latency import Latencies
from .model import ModelWork
from .wire import Finished, FlowFigures
from .workload import Case, Fabric, Workload

__all__ = ["SCHEMA", "Report", "Row", "make_row"]

SCHEMA = 1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One size.

    Attributes
    ----------
    page_bytes, num_pages, bytes : int
        Of an iteration; towards each peer.
    iterations : int
        Of each end that posts.
    elapsed_s : float
        From the first post until the receivers' word that everything is there; the longest of all that post.
    gb_per_s, gbit_per_s, mpages_per_s : float
        All ends that post together.
    link_percent : float, optional
        Of what the initiator's links carry, in both directions with ``--bidir``; None where their speed is unknown.
    post_avg_us : float
        Until a submission returns.
    t_avg_us, t_p50_us, t_p99_us, t_p999_us, t_max_us : float
        From before a submission until all of its transfers have ended.
    cpu_percent, target_cpu_percent : float
        Of one core: the initiator's process; the targets' on average.
    bytes_per_write : float
        Mean size of the operations that NICs were given.
    wrong_pages : int
    floor_gb_per_s, floor_ratio : float, optional
        The bare libfabric loop in the same minute, and what we reach of it: the median of the pairs.
    """

    page_bytes: int
    num_pages: int
    bytes: int
    iterations: int
    elapsed_s: float
    gb_per_s: float
    gbit_per_s: float
    link_percent: float | None
    mpages_per_s: float
    post_avg_us: float
    t_avg_us: float
    t_p50_us: float
    t_p99_us: float
    t_p999_us: float
    t_max_us: float
    cpu_percent: float
    target_cpu_percent: float
    bytes_per_write: float
    wrong_pages: int
    floor_gb_per_s: float | None = None
    floor_ratio: float | None = None


class Report(msgspec.Struct, kw_only=True):
    """A run.

    Attributes
    ----------
    schema : int
        Of this form; another number has other fields.
    command : list of str
    started : str
        Date and time, ISO 8601, UTC.
    versions, machine : dict
    workload, fabric : Workload, Fabric
        Every setting.
    rails, target_rails : list of dict
        What each end has opened, and why it works as it does; of the targets, the first one's.
    topology : list of str
        Of the initiator: each rail's place.
    num_peers : int
    link_gbps : float, optional
        Of a rail, where it was given.
    target_cpus : tuple of int
        Of the targets of ``--loopback``.
    rows : list of Row
    wrong_pages : int
    model : ModelWork, optional
    qps : float, optional
    messenger : dict, optional
        Figures of ``--op messenger``, see docs/bench.md.
    error : str, optional
        Why it ended early.
    """

    schema: int = SCHEMA
    command: list[str]
    started: str
    versions: dict[str, str]
    machine: dict[str, str]
    workload: Workload
    fabric: Fabric
    rails: list[dict[str, Any]] = []
    target_rails: list[dict[str, Any]] = []
    topology: list[str] = []
    num_peers: int = 1
    link_gbps: float | None = None
    target_cpus: tuple[int, ...] = ()
    rows: list[Row] = []
    wrong_pages: int = 0
    model: ModelWork | None = None
    qps: float | None = None
    messenger: dict[str, Any] | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything was measured, and every page was right."""
        return self.error is None and not self.wrong_pages

    @property
    def rails_text(self) -> str:
        """What was opened, in a few words."""
        return ", ".join(f"{rail['provider']} {rail['domain']}" for rail in self.rails)


def make_row(
    case: Case,
    ours: Finished,
    theirs: Sequence[Finished],
    *,
    link_gbps: float | None,
    duplex: bool,
    wrong_pages: int,
) -> Row:
    """Put together what all ends have measured of a phase.

    Parameters
    ----------
    ours, theirs
        The initiator's figures, and each target's.
    link_gbps : float, optional
        All of the initiator's rails together.
    duplex : bool
        Whether both directions were used.
    """
    flows: list[tuple[FlowFigures, int]] = [(end.flow, 1) for end in theirs if end.flow is not None]
    if ours.flow is not None:
        flows.append((ours.flow, len(theirs)))
    latencies = Latencies()
    for flow, _ in flows:
        latencies.merge(flow.latencies)
    elapsed_ns = max(flow.elapsed_ns for flow, _ in flows)
    iterations = sum(flow.iterations for flow, _ in flows)
    pages = sum(flow.iterations * peers for flow, peers in flows) * case.num_pages
    gb_per_s = pages * case.page_bytes / elapsed_ns
    summary = latencies.summary()
    ops = ours.ops + sum(end.ops for end in theirs)
    capacity = link_gbps * (2 if duplex else 1) if link_gbps else None
    return Row(
        page_bytes=case.page_bytes,
        num_pages=case.num_pages,
        bytes=case.nbytes,
        iterations=max(flow.iterations for flow, _ in flows),
        elapsed_s=elapsed_ns / 1e9,
        gb_per_s=gb_per_s,
        gbit_per_s=gb_per_s * 8,
        link_percent=gb_per_s * 8 / capacity * 100 if capacity else None,
        mpages_per_s=pages * 1e3 / elapsed_ns,
        post_avg_us=sum(flow.post_ns for flow, _ in flows) / max(iterations, 1) / 1e3,
        t_avg_us=summary.avg_us,
        t_p50_us=summary.p50_us,
        t_p99_us=summary.p99_us,
        t_p999_us=summary.p999_us,
        t_max_us=summary.max_us,
        cpu_percent=ours.cpu_ns / elapsed_ns * 100,
        target_cpu_percent=sum(end.cpu_ns for end in theirs) / len(theirs) / elapsed_ns * 100,
        bytes_per_write=(ours.op_bytes + sum(end.op_bytes for end in theirs)) / ops if ops else 0.0,
        wrong_pages=wrong_pages,
    )
