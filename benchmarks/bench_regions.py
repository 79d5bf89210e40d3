"""What a registration costs, as the number of open ones grows.

    python benchmarks/bench_regions.py --provider tcp --regions 5000

Prints one line a fifth of them: microseconds to register and to close one region, medians. It is flat where they do not
grow from line to line.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from fabric_kv import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="tcp")
    parser.add_argument("--nic", default="127.0.0.1", help="empty: the provider's first")
    parser.add_argument("--regions", type=int, default=5000)
    parser.add_argument("--bytes", type=int, default=65536)
    args = parser.parse_args()
    memory = np.zeros((args.regions, args.bytes), np.uint8)
    with Engine(args.provider, nics=[args.nic] if args.nic else []) as engine:
        regions, spent = [], []
        for row in memory:
            begun = time.perf_counter_ns()
            regions.append(engine.register(row))
            spent.append(time.perf_counter_ns() - begun)
        figures = engine.describe()["groups"][0]
        closing = []
        for region in regions:
            begun = time.perf_counter_ns()
            region.close()
            closing.append(time.perf_counter_ns() - begun)
    step = -(-args.regions // 5)
    print(f"{args.provider}, {args.bytes} bytes each, {figures['registrations']} registrations")
    print("open regions     register us   close us (median; close: as many left)")
    for first in range(0, args.regions, step):
        opening = statistics.median(spent[first : first + step]) / 1e3
        close = statistics.median(closing[args.regions - first - step : args.regions - first] or closing[:step]) / 1e3
        print(f"{first:6d}..{first + step:<6d}  {opening:10.1f} {close:10.1f}")


if __name__ == "__main__":
    main()
