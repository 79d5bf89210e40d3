"""The end that conducts: tells the targets what comes, runs the phases of each row, and puts the figures together.

>>> with Initiator(channels, workload, fabric) as initiator:
...     for case in range(len(workload.cases)): row = initiator.measure(case)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from ..errors import ConfigError, FabricError, FabricKVError
from .channel import Channel
from .greeting import exchange_hellos
from .memory import make_memory
from .opened import describe_rails, open_engine, remove_shm_names
from .ops import max_transfers
from .phases import PhaseRun, Tokens
from .results import Row, make_row
from .side import Side
from .wire import Bye, Finished, Go, Opened, Phase, Ready, Setup
from .workload import Fabric, Workload

__all__ = ["SETUP_S", "Initiator", "open_side", "part"]

#: Opening NICs and registering memory may take this long.
SETUP_S = 60.0

#: With --verify each lane is looked at so many times with fresh bytes, beside the check of what was timed.
CHECKED_ROUNDS = 3

# At least so fast are contents made and compared, even on a machine that has other things to do.
_BYTES_PER_S = 50e6

_MAX_TRANSFERS = 1 << 20


def open_side(
    stack: contextlib.ExitStack,
    fabric: Fabric,
    workload: Workload,
    channels: Sequence[Channel],
    index: int | None,
    num_targets: int,
) -> Side:
    """An engine that is closed with the stack, and the memory of this end; ``index`` and ``num_targets`` as of Side."""
    most = max(max_transfers(workload.op, workload.depth, case.num_pages, len(channels)) for case in workload.cases)
    if most > _MAX_TRANSFERS:
        raise ConfigError(
            f"--depth {workload.depth} with so many {'messages' if workload.op == 'send' else 'immediates'} are {most} "
            f"transfers in flight: the limit is {_MAX_TRANSFERS}"
        )
    engine = open_engine(fabric, channels[0].local_host, max_transfers=max(16384, most))
    stack.callback(engine.close)
    return Side(engine, workload, index, num_targets, partial(make_memory, fabric))


class Initiator:
    """Conducts; a context manager that tells the targets how it ended.

    Parameters
    ----------
    channels : sequence of Channel
        To each target; closed by whoever made them.
    workload : Workload
    fabric : Fabric
    target_fabric : Fabric
        What the targets are told to open; what they have been told themselves goes first.
    link_gbps : float, optional
        Of a rail, where neither provider nor kernel know.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        workload: Workload,
        fabric: Fabric,
        target_fabric: Fabric,
        link_gbps: float | None = None,
    ) -> None:
        self._channels = channels
        self._workload = workload
        self._stack = contextlib.ExitStack()
        self._wrong_pages = 0
        self._rounds = 0
        try:
            for channel in channels:
                exchange_hellos(channel)
            for index, channel in enumerate(channels):
                channel.send(Setup(workload, target_fabric, index, len(channels)))
            self.side = open_side(self._stack, fabric, workload, channels, None, len(channels))
            for index, channel in enumerate(channels):
                channel.send(self.side.opened(self.side.link(channel, index)))
            for link in self.side.links:
                self.side.connect(link, link.channel.expect(Opened, SETUP_S))
            self.rails: list[dict[str, Any]] = describe_rails(self.side.engine)
            self._check_providers()
        except BaseException as error:
            self._end(error)
            raise
        speeds = [link_gbps or rail["link_gbps"] for rail in self.rails]
        self.link_gbps = sum(speeds) if all(speeds) else None

    @property
    def target_rails(self) -> list[dict[str, Any]]:
        """What the first target has opened."""
        return self.side.links[0].opened.rails

    def measure(self, case: int, on_progress: Callable[[int], None] | None = None) -> Row:
        """Run the phases of a row: warm-up, the timed one, and with ``verify`` some with fresh bytes each.

        Raises
        ------
        FabricKVError
            If anything fails at any end.
        """
        workload = self._workload
        if workload.warmup:
            self._run(case, workload.warmup, None, 0, clear=False, check=False)
        timed, theirs = self._run(
            case,
            workload.iterations if workload.duration_s is None else None,
            workload.duration_s,
            0,
            clear=workload.verify,
            check=workload.verify,
            on_progress=on_progress,
        )
        wrong = timed.wrong_pages + sum(end.wrong_pages for end in theirs)
        if workload.verify and workload.op != "imm":
            lanes = self.side.places(case).lanes
            for number in range(1, CHECKED_ROUNDS + 1):
                ours, others = self._run(case, lanes, None, number * lanes, clear=False, check=True)
                wrong += ours.wrong_pages + sum(end.wrong_pages for end in others)
        self._wrong_pages += wrong
        return make_row(
            workload.cases[case],
            timed,
            theirs,
            link_gbps=self.link_gbps,
            duplex=workload.inwards and workload.outwards,
            wrong_pages=wrong,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self._end(error)

    def _run(
        self,
        case: int,
        iterations: int | None,
        seconds: float | None,
        iteration: int,
        *,
        clear: bool,
        check: bool,
        on_progress: Callable[[int], None] | None = None,
    ) -> tuple[Finished, list[Finished]]:
        """One phase at all ends: our figures, and theirs."""
        links = self.side.links
        # They may have much memory to fill, or to look at.
        patience_s = self._workload.timeout_s + self.side.places(case).nbytes / _BYTES_PER_S
        phase = Phase(case, iterations, seconds, iteration, clear, check, None, None)
        run = PhaseRun(self.side, phase)
        for index, link in enumerate(links):
            token, done_token = run.tokens(index)
            link.channel.send(Phase(case, iterations, seconds, iteration, clear, check, token, done_token))
        others: list[Tokens] = []
        for link in links:
            ready = link.channel.expect(Ready, patience_s)
            others.append((ready.token, ready.done_token))
        for link in links:
            link.channel.send(Go())
        run.drive(others, on_progress)
        ours = run.finish()
        return ours, [link.finished or link.channel.expect(Finished, patience_s) for link in links]

    def _check_providers(self) -> None:
        for link in self.side.links:
            ours, theirs = self.rails[0]["provider"], link.opened.provider
            if ours != theirs:
                raise FabricError(
                    f"{link.channel.who} has opened provider {theirs}, and we have opened {ours}: they cannot reach "
                    "each other, or not as was asked. Hint: give the same --provider at both ends, and the same "
                    "libfabric",
                    op="open",
                    provider=theirs,
                )

    def _end(self, error: BaseException | None) -> None:
        part(self._channels, error, self._wrong_pages if self._workload.verify else None)
        self._stack.close()
        if error is not None and hasattr(self, "side"):
            for link in self.side.links:
                if hasattr(link, "opened"):
                    remove_shm_names(link.opened.shm_names)


def part(channels: Iterable[Channel], error: BaseException | None, wrong_pages: int | None) -> None:
    """Say goodbye to the targets, or why there is nothing more to come."""
    for channel in channels:
        if error is None:
            with contextlib.suppress(FabricKVError):
                channel.send(Bye(wrong_pages))
        else:
            channel.abort(explain(error))


def explain(error: BaseException) -> str:
    """How the other end is told."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    if isinstance(error, SystemExit):
        return "it was terminated"
    return f"{type(error).__name__}: {error}"
