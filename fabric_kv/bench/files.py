"""Results as files: JSON with everything, CSV with the rows.

>>> write_json(report, Path("out.json")); read_report(Path("out.json")).rows
"""

from __future__ import annotations

import contextlib
import csv
import sys
from pathlib import Path

import msgspec

from ..errors import ConfigError
from .results import SCHEMA, Report, Row

__all__ = ["check_writable", "read_report", "write_csv", "write_json"]


def check_writable(*paths: Path | None) -> None:
    """Find out before an hour of measuring, not after it.

    Raises
    ------
    ConfigError
        If a file cannot be written.
    """
    for path in paths:
        if path is None or str(path) == "-":
            continue
        try:
            with path.open("a"):
                pass
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_json(report: Report, path: Path) -> None:
    """Everything; ``-`` is stdout."""
    data = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if str(path) == "-":
        sys.stdout.write(data.decode())
    else:
        path.write_bytes(data)


def write_csv(report: Report, path: Path) -> None:
    """The rows, under the names of their fields; ``-`` is stdout."""
    with contextlib.nullcontext(sys.stdout) if str(path) == "-" else path.open("w", newline="") as file:
        writer = csv.DictWriter(file, Row.__struct_fields__)
        writer.writeheader()
        writer.writerows(msgspec.to_builtins(report.rows))


def read_report(path: Path) -> Report:
    """A file of :func:`write_json`.

    Raises
    ------
    ConfigError
        If it is none, or of another schema.
    """
    try:
        data = path.read_bytes()
        schema = msgspec.json.decode(data, type=dict[str, object]).get("schema")
        if schema != SCHEMA:
            raise ConfigError(f"{path} is of schema {schema!r}; this fabric-kv-bench reads {SCHEMA}")
        return msgspec.json.decode(data, type=Report)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} was not written by fabric-kv-bench --json: {error}") from error
