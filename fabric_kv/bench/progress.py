"""A progress bar on a terminal, and nothing at all elsewhere.

>>> with Progress() as progress:
...     progress.row("paged 4K", total=200); progress.update(17)
"""

from __future__ import annotations

import sys
from typing import Any, Self

__all__ = ["Progress"]


class Progress:
    """On stderr, below the rows, gone at the end; needs rich (the extra ``cli``)."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return
            parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Bar(
                *parts,
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,  # rows go to stdout, wherever that leads
                redirect_stderr=False,
            )

    def row(self, label: str, total: int | None) -> None:
        """Begin a row of so many iterations; None: nobody knows."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(label, total=total)

    def update(self, done: int) -> None:
        """So many iterations of it are over."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)

    def print(self, text: str) -> None:
        """Print a line to stdout, above the bar if that is a terminal too."""
        shared = self._bar is not None and sys.stdout.isatty()
        if shared:
            self._bar.stop()
        print(text, flush=True)
        if shared:
            self._bar.start()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
