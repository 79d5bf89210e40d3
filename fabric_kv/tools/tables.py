"""Tables on a terminal.

>>> print_table("NICs", ["name", "Gbit/s"], [["mlx5_0", "400"]], right=[1])
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..tables import text_table

__all__ = ["print_table"]


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print a table: with rich where it is installed and the output is a terminal, else as plain text.

    Parameters
    ----------
    right : sequence of int
        Columns that rich aligns to the right.
    """
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.markup import escape
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=escape(title), title_justify="left")
            for column, name in enumerate(header):
                table.add_column(escape(name), justify="right" if column in right else "left")
            for row in rows:
                table.add_row(*(escape(cell) for cell in row))
            Console().print(table)
            return
    print(title)
    print(text_table(header, rows).lstrip("\n"))
