"""Engines of one process over shm that close while they still move something between them: it must survive that.

>>> subprocess.run([sys.executable, "-m", "tests.integration.shm_neighbours", "7", "10"])     # seed and rounds
"""

import random
import sys
import threading
import time

import numpy as np

from fabric_kv.engine import Engine

NUM_PAGES = 2000


def move(dice, engines, nbytes):
    """Something from each to each other one: nobody waits for it. The regions, to be kept meanwhile."""
    memory = [np.zeros((NUM_PAGES, nbytes), np.uint8) for _ in engines]
    regions = [engine.register(pages) for engine, pages in zip(engines, memory, strict=True)]
    pages = np.array(dice.sample(range(NUM_PAGES), NUM_PAGES // 2))
    for source, region in zip(engines, regions, strict=True):
        for target, remote in zip(engines, regions, strict=True):
            if source is target:
                continue
            peer = source.add_peer(target.address)
            what = dice.choice(["write", "read", "send"])
            if what == "write":
                counter = target.counter(unit_bytes=nbytes, expected_units=len(pages))
                source.write_pages(peer, region, remote.remote, pages, pages, page_bytes=nbytes, token=counter.token)
            elif what == "read":
                source.read_pages(peer, region, remote.remote, pages, pages, page_bytes=nbytes)
            else:
                for _ in range(20):
                    source.send(peer, bytes(nbytes))
    return regions


failed = []


def close(engine):
    try:
        engine.close()
    except Exception as error:
        failed.append(error)
        raise


def main():
    dice = random.Random(int(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        engines = [Engine("shm") for _ in range(dice.choice([2, 3, 4]))]
        regions = move(dice, engines, dice.choice([64, 2048, 16384]))
        time.sleep(dice.random() * 0.004)
        dice.shuffle(engines)
        if dice.random() < 0.5:
            for engine in engines:
                close(engine)
        else:
            threads = [threading.Thread(target=close, args=(engine,)) for engine in engines]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        del regions


if __name__ == "__main__":
    main()
    sys.exit(len(failed))
