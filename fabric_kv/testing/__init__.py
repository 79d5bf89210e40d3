"""An engine without a network, for tests of what is built on engines: seeded, adversarial, and with data that moves.

>>> fabric = MemoryFabric(seed=7)
>>> prefill_engine, decode_engine = fabric.engine(), fabric.engine()
>>> fabric.run()                                   # until nothing is in flight; or fabric.start() for a thread

Everything in flight (each page and row of a write, each completion, counter and message) waits in one pool, and
``step`` picks from it at random: nothing arrives in order, sources are read as late as they may be, and a write that
was cancelled or has failed may still land until its transfer ends. The same seed and the same calls give the same run.
"""

from .engine import MemoryEngine
from .fabric import MemoryFabric

__all__ = ["MemoryEngine", "MemoryFabric"]
