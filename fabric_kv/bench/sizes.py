"""Sizes as they are typed and printed: K, M and G are powers of 1024, as in nccl-tests and perftest.

>>> parse_size("64K"), size_text(65536), sweep(4096, 65536, 4)
(65536, '64K', (4096, 16384, 65536))
"""

from __future__ import annotations

import re

from ..errors import ConfigError

__all__ = ["parse_size", "size_text", "sweep"]

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MAX_SIZES = 64


def parse_size(text: str) -> int:
    """Bytes.

    Raises
    ------
    ConfigError
        If it is no positive number of bytes below 1 TiB.
    """
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = int(match[1]) * _FACTORS[match[2].upper()] if match else 0
    if not 0 < nbytes < 1 << 40:
        raise ConfigError(f"{text!r} is no size: give bytes, or such as 64K, 1M, 2G (powers of 1024; below 1024G)")
    return nbytes


def size_text(nbytes: int) -> str:
    """The shortest way to type it."""
    for unit in "GMK":
        if nbytes and nbytes % _FACTORS[unit] == 0:
            return f"{nbytes // _FACTORS[unit]}{unit}"
    return str(nbytes)


def sweep(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """``begin``, ``begin * factor``, ... up to ``end``, which is the last one only if the factor hits it.

    Raises
    ------
    ConfigError
        If there is none, or more than 64.
    """
    if factor < 2:
        raise ConfigError(f"-f {factor}: the factor between sizes must be 2 or more")
    if begin > end:
        raise ConfigError(f"-b {size_text(begin)} is above -e {size_text(end)}: there is nothing to measure")
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    if len(sizes) > MAX_SIZES:
        raise ConfigError(f"{len(sizes)} sizes from -b to -e: the limit is {MAX_SIZES}")
    return tuple(sizes)
