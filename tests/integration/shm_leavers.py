"""An engine over shm that closes while its answer to another one of the process waits behind that of a stopped process.

>>> subprocess.run([sys.executable, "-m", "tests.integration.shm_leavers"])     # it must survive that
"""

import os
import signal
import time

import numpy as np

from fabric_kv.engine import Engine
from fabric_kv.regions import RemoteRegion

from .engine_peer import PeerProcess
from .fabrics import LONG
from .shm_queue import stop_without_locks

NBYTES = 16384  # is copied by whoever takes it out, and answered


def main():
    leaver, stays = Engine("shm"), Engine("shm")
    source, target = stays.register(np.ones(NBYTES, np.uint8)), leaver.register(np.zeros(NBYTES, np.uint8))
    to_leaver = stays.add_peer(leaver.address)
    leaver.add_peer(stays.address)
    counter = leaver.counter(unit_bytes=NBYTES)
    with PeerProcess() as process:
        to_process = stays.add_peer(process.call("open", "shm"))
        remote = RemoteRegion.from_bytes(process.call("register", NBYTES))
        # With an immediate: others are copied at once.
        places = ((to_process, remote, process.call("count", NBYTES)), (to_leaver, target.remote, counter.token))
        for peer, place, token in places:
            stays.write(peer, source, 0, place, 0, NBYTES, token=token).result(LONG)
        process.harmed = True
        stop_without_locks(process.pid, [os.getpid()])
        transfers = [stays.write(peer, source, 0, place, 0, NBYTES, token=token) for peer, place, token in places]
        time.sleep(0.1)
        leaver.close()
        process.process.send_signal(signal.SIGCONT)
        for transfer in transfers:
            transfer.result(LONG)
    stays.close()


if __name__ == "__main__":
    main()
