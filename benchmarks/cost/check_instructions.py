"""Instructions of the engine per page and per immediate, counted by callgrind, against those that are kept.

    scripts/bench --check             exits with 1 when a count has grown by more than 2 %
    scripts/bench --check --keep      keeps today's counts

Counts repeat exactly on one machine with one compiler. They are kept for each compiler; with another one there is
nothing to compare with, which is said and is no failure. What the engine's own figures take (``describe()``) is told
beside them: the difference to a program that counts none.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
KEPT = HERE / "instructions.json"
TOLERANCE = 0.02
SIZES = (20_000, 40_000)  # their difference is free of what happens once

# What is counted: (mode of engine_cost, functions whose instructions count, with those that they call).
COUNTS = {
    "post, per page": ("post", "fkv::Sender::post(long)"),
    "completion, per page": ("post", "fkv::Sender::on_sent*"),
    "immediate": ("imm", "fkv::Receiver::count*"),
}


def instructions(mode: str, function: str, size: int, program: str = "engine_cost") -> int:
    """Collected by one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--toggle-collect={function}"]
        command += [f"--callgrind-out-file={folder}/out", str(HERE / program), mode, str(size)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", run.stderr)
    if found is None or int(found[1]) == 0:
        raise SystemExit(f"callgrind saw nothing of {function}: was it inlined?")
    return int(found[1])


def each(mode: str, function: str, program: str = "engine_cost") -> float:
    """Of one page or immediate."""
    few, many = (instructions(mode, function, size, program) for size in SIZES)
    return round((many - few) / (SIZES[1] - SIZES[0]), 1)


def compiler() -> str:
    run = subprocess.run(
        ["readelf", "-p", ".comment", HERE / "engine_cost"], capture_output=True, text=True, check=True
    )
    found = re.search(r"(GCC|clang).*", run.stdout)
    return found[0].strip() if found else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench --check")
    parser.add_argument("--keep", action="store_true", help="keep today's counts")
    keep = parser.parse_args().keep
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    name, failed = compiler(), False
    now = {}
    for what, (mode, function) in COUNTS.items():
        now[what] = each(mode, function)
        before = kept.get(name, {}).get(what)
        worse = before is not None and now[what] > before * (1 + TOLERANCE)
        failed |= worse
        known = f"kept: {before}" if before is not None else f"nothing kept for {name}"
        print(f"{what}: {now[what]} instructions ({known}){' GREW' if worse else ''}")
    pages = [(what, *COUNTS[what]) for what in COUNTS if what.endswith("per page")]
    figures = sum(now[what] - each(mode, function, "engine_cost_without") for what, mode, function in pages)
    print(f"of these a page's figures: {figures:.1f} instructions of {sum(now[what] for what, *_ in pages):.1f}")
    if keep:
        KEPT.write_text(json.dumps(kept | {name: now}, indent=1) + "\n")
    return failed and not keep


if __name__ == "__main__":
    sys.exit(main())
