"""A module of this folder as a process: commands go in as JSON on stdin, events come out on stdout.

>>> child = ChildProcess("messenger_node", "prefill", "3")
>>> child.wait_for("up")["address"]
>>> child.do(do="allow", chunks=1)                 # its event "did"
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

from .fabrics import LONG


class ChildProcess:
    """The process, and the events that nobody has waited for yet."""

    def __init__(self, module, *args):
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{module}", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.events = queue.SimpleQueue()
        self.passed = []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.events.put({"event": "gone"})

    def wait_for(self, *kinds):
        """The next event of these kinds; others are kept for later."""
        for index, event in enumerate(self.passed):
            if event["event"] in kinds:
                return self.passed.pop(index)
        while True:
            event = self.events.get(timeout=LONG)
            if event["event"] in kinds:
                return event
            assert event["event"] not in ("gone", "crash"), event
            self.passed.append(event)

    def wait_until_up(self):
        """Its event "up", or the process is no more: who constructs it has nothing yet to close."""
        try:
            return self.wait_for("up")
        except BaseException:
            self.close()
            raise

    def do(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.wait_for("did")

    def signal(self, number):
        self.process.send_signal(number)

    def close(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(LONG)
        self.process.stdin.close()
        self.reader.join(LONG)
        self.process.stdout.close()
