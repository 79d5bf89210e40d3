"""All that ``scripts/bench`` measures: parts one after the other, then files and tables.

    scripts/bench                         pages, core, calls and scaling, short
    scripts/bench --full --update docs/performance.md
    scripts/bench pages --providers tcp,shm --page-bytes 4096,16384 --repetitions 9

Writes bench.json, bench.md and scaling.svg to ``--out``. Exits with 1 if something could not be measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_calls
import bench_core
import bench_pages
import bench_scaling
from bench_tables import Table, as_markdown, describe_run, machine_text, print_tables, update_document

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pages", "core", "calls", "scaling")
PICTURE = "scaling.svg"


def parse_args() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Measures fabric_kv; docs/performance.md says how."
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)")
    add("--full", action="store_true", help="all page sizes, more repetitions: as docs/performance.md has it")
    add("--providers", type=lambda text: text.split(","), default=list(bench_pages.PROVIDERS), help="of pages")
    add("--page-bytes", type=numbers, help="of pages; default: 4 and 64 KiB, with --full 1 KiB to 1 MiB")
    add("--repetitions", type=int, help="of pages, core and scaling; default: 3, with --full 7")
    add("--out", type=Path, default=ROOT / "build" / "bench", metavar="FOLDER", help="for files (default build/bench)")
    add("--update", type=Path, metavar="DOCUMENT", help="put tables here, and the picture into pictures/ beside it")
    args = parser.parse_args()
    if wrong := [part for part in args.parts if part not in PARTS]:
        parser.error(f"unknown part {wrong[0]!r}: choose from {', '.join(PARTS)}")
    if args.repetitions is not None and args.repetitions < 1:
        parser.error("--repetitions must be 1 or more")
    return args


def main() -> None:
    args = parse_args()
    repetitions = args.repetitions or (7 if args.full else 3)
    sizes = args.page_bytes or (bench_pages.PAGE_BYTES if args.full else bench_pages.SHORT_PAGE_BYTES)
    measures: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "pages": lambda: list(bench_pages.measure(args.providers, sizes, repetitions=repetitions)),
        "core": lambda: bench_core.measure(repetitions=repetitions),
        "calls": lambda: bench_calls.measure(short=not args.full),
        "scaling": lambda: list(bench_scaling.measure(repetitions=repetitions)),
    }
    shown: dict[str, Callable[[list[dict[str, Any]]], list[Table]]] = {
        "pages": lambda results: list(bench_pages.tables(results)),
        "core": lambda results: list(bench_core.tables(results)),
        "calls": lambda results: list(bench_calls.tables(results)),
        "scaling": lambda results: list(bench_scaling.tables(results)),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {}
    markdown, commit = [], describe_run(repetitions)["commit"]  # before --update changes a file
    for part in [part for part in PARTS if part in (args.parts or PARTS)]:
        run = {**describe_run(repetitions), "commit": commit}
        results = measures[part]()
        data[part] = {"run": run, "results": results}
        # As far as it came: what follows may fail.
        (args.out / "bench.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        tables = shown[part](results)
        markdown.append(f"## {part.capitalize()}\n\n{as_markdown(tables, run)}")
        (args.out / "bench.md").write_text("\n".join(markdown))
        print_tables(tables, run)
        if args.update:
            update_document(args.update, part, as_markdown(tables, run))
        if part == "scaling":
            draw(results, machine_text(run), args.out / PICTURE)
            if args.update:
                draw(results, machine_text(run), args.update.parent / "pictures" / PICTURE)


def draw(results: list[dict[str, Any]], machine: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        bench_scaling.draw(results, machine, path)
    except ImportError as error:
        print(f"no picture: {error}; pip install 'fabric_kv[plot]'", file=sys.stderr)


if __name__ == "__main__":
    main()
