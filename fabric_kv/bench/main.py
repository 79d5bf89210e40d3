"""``fabric-kv-bench``: reads the command line, takes its role, prints and writes what comes out.

>>> main(["--loopback", "--provider", "tcp", "--op", "write", "-b", "4K", "-e", "64K"])
0

Exit status: 0; 1 if a page was wrong, something failed, or another provider than asked was opened; 2 if the command
line is no good; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ..errors import ConfigError, FabricKVError
from .against import measure_against
from .args import Run, parse, peer_command
from .channel import Channel, connect, listen
from .compare import compare
from .files import check_writable, read_report, write_csv, write_json
from .floor import Floor, build_floor
from .greeting import await_initiator
from .initiator import Initiator
from .loopback import LocalTargets
from .machine import describe_machine, describe_topology, describe_versions
from .model import ModelWork
from .opened import is_ip
from .parser import PROG
from .plot import check_plottable, plot
from .prefill_end import PrefillEnd
from .progress import Progress
from .results import Report
from .sizes import size_text
from .table import columns, footer, header, line, messenger_lines, verdict
from .target import serve
from .workload import Fabric

__all__ = ["main"]

_CONNECT_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        run = parse(words)
        with _terminated_like_interrupted():
            if run.compare is not None:
                return _compare(run, run.compare)
            return _be_target(run, words) if run.is_target else _be_initiator(run, words)
    except ConfigError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except FabricKVError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends us as Ctrl-C does: the other end is told, nothing is left behind."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _compare(run: Run, files: tuple[Path, Path]) -> int:
    """Print two runs side by side."""
    before, after = (read_report(path) for path in files)
    if run.plot is not None:
        check_plottable(run.plot)
    print(compare(before, after))
    if run.plot is not None:
        plot([(path.stem, report) for path, report in zip(files, (before, after), strict=True)], run.plot)
    return 0


# -- the target --------------------------------------------------------------------------------------------------------


def _be_target(run: Run, words: Sequence[str]) -> int:
    """Wait for an initiator and take part in its run; strangers are reported and ignored."""
    _pin(run.fabric.cpus)
    say = partial(print, flush=True)
    with listen(run.bind, run.port) as server:
        say(f"# Target on port {run.port}. At the other end:\n#   {peer_command(words, _own_host(run), run.port)}")
        channel = await_initiator(server, lambda why: say(f"# Not a run: {why}"))
    # Nobody listens any more: whoever comes now is refused at once.
    with contextlib.closing(channel):
        say(f"# {channel.who} has connected")
        wrong_pages = serve(channel, run.fabric)
    say(verdict(wrong_pages))
    return 1 if wrong_pages else 0


def _own_host(run: Run) -> str:
    """The address by which others most likely reach us."""
    from .._native import list_offers

    for host in (run.bind, *run.fabric.nics):
        if host and (host == run.bind or is_ip(host)):
            return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel chooses an interface (RFC 5737's TEST-NET-1)
            return str(probe.getsockname()[0])
        except OSError:  # no way out of these networks, but perhaps peers in one of them
            sources = [offer["source"] for offer in list_offers("tcp")]
            return next((ip for ip in sources if ":" not in ip and not ip.startswith("127.")), socket.gethostname())


# -- the initiator -----------------------------------------------------------------------------------------------------


def _be_initiator(run: Run, words: Sequence[str]) -> int:
    """Measure all rows, and print and write them as far as it went."""
    check_writable(run.json, run.csv, run.plot)
    if run.plot is not None:
        check_plottable(run.plot)
    if run.floor:
        build_floor()
    report = Report(
        command=[PROG, *words],
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=describe_versions(),
        machine=describe_machine(),
        workload=run.workload,
        fabric=run.fabric,
        num_peers=run.num_peers,
        link_gbps=run.link_gbps,
        target_cpus=run.target_cpus,
        topology=describe_topology(run.fabric.provider),
        model=run.model,
        qps=run.qps,
    )
    _pin(run.fabric.cpus)
    with Progress() as progress:
        say: Callable[[str], None] = (lambda _: None) if "-" in (str(run.json), str(run.csv)) else progress.print
        try:
            if run.model is not None:
                _serve_requests(run, run.model, report, progress, say)
                return 0 if report.ok else 1
            with _targets(run) as channels, _initiator(run, channels) as initiator:
                report.rails, report.target_rails = initiator.rails, initiator.target_rails
                say(header(report))
                say(columns(floor=run.floor))
                _measure(run, report, initiator, progress, say)
        except (FabricKVError, KeyboardInterrupt, SystemExit) as error:
            report.error = str(error) if isinstance(error, FabricKVError) else "interrupted"
            raise
        finally:
            if report.rails:
                say(footer(report))
                _write(run, report)
    return 0 if report.ok else 1


def _measure(run: Run, report: Report, initiator: Initiator, progress: Progress, say: Callable[[str], None]) -> None:
    workload = run.workload
    with contextlib.ExitStack() as stack:
        floor = stack.enter_context(_floor(run)) if run.floor else None
        for index, case in enumerate(workload.cases):
            progress.row(
                f"{workload.op} {size_text(case.page_bytes)} x {case.num_pages}",
                workload.iterations if workload.duration_s is None else None,
            )
            measure = partial(initiator.measure, index, progress.update)
            if floor is None:
                row = measure()
            else:
                row = measure_against(
                    floor, case, contiguity=workload.contiguity, depth=workload.depth, measure=measure
                )
            report.rows.append(row)
            report.wrong_pages += row.wrong_pages
            say(line(row, floor=run.floor))


def _floor(run: Run) -> Floor:
    fabric = run.fabric
    pinned = len(fabric.cpus) == len(run.target_cpus) == 1
    cpus = f"{fabric.cpus[0]},{run.target_cpus[0]}" if pinned else "none"
    return Floor(fabric.provider or "", cpus=cpus, source=fabric.nics[0] if fabric.nics else "127.0.0.1")


def _write(run: Run, report: Report) -> None:
    if run.json is not None:
        write_json(report, run.json)
    if run.csv is not None:
        write_csv(report, run.csv)
    if run.plot is not None and report.rows:
        plot([(report.workload.op, report)], run.plot)


@contextlib.contextmanager
def _targets(run: Run) -> Iterator[list[Channel]]:
    """Channels to all targets, which with ``--loopback`` are started, and end, here."""
    if run.loopback:
        with LocalTargets(run.num_peers) as targets:
            yield targets.channels
        return
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(connect(address, run.port, _CONNECT_S))) for address in run.addresses
        ]


def _initiator(run: Run, channels: list[Channel]) -> Initiator:
    return Initiator(channels, run.workload, run.fabric, _target_fabric(run), run.link_gbps)


def _target_fabric(run: Run) -> Fabric:
    """As ours; but a target elsewhere has NICs and cores of its own, and says so on its own command line."""
    return msgspec.structs.replace(run.fabric, nics=run.fabric.nics if run.loopback else (), cpus=run.target_cpus)


def _serve_requests(run: Run, model: ModelWork, report: Report, progress: Progress, say: Callable[[str], None]) -> None:
    """``--op messenger``: this end prefills, the targets decode."""
    workload = run.workload
    with _targets(run) as channels, PrefillEnd(channels, model, run.fabric, _target_fabric(run)) as prefill:
        report.rails, report.target_rails = prefill.rails, prefill.target_rails
        say(header(report))
        progress.row("requests", model.requests * run.num_peers)
        report.messenger = prefill.measure(
            qps=run.qps, warmup=workload.warmup, verify=workload.verify, on_progress=progress.update
        )
        report.wrong_pages = report.messenger["wrong_pages"]
        say(messenger_lines(report))


def _pin(cpus: tuple[int, ...]) -> None:
    """Keep this process, Python's threads as well as the engine's, on these cores."""
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            raise ConfigError(f"--cpus {','.join(map(str, cpus))}: {error.strerror}") from error
