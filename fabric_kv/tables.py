"""Tables for people, in plain text.

>>> print(text_table(["field", "prefill", "decode"], [["page_tokens", "16", "64"]]))
  field        prefill  decode
  page_tokens  16       64
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["text_table"]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns; indented, so that a table stands out inside an error message."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        ("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))).rstrip()
        for line in lines
    )
