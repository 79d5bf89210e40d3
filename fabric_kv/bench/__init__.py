"""``fabric-kv-bench``: measures the engine and the messenger between two or more processes, and checks every byte.

>>> from fabric_kv.bench.main import main
>>> main(["--loopback", "--provider", "tcp", "--op", "paged", "-b", "4K", "-e", "64K"])
0

One process conducts (the *initiator*) and prints; the others (*targets*) do as it says. Both ends of a link run the
same phases (:mod:`.phases`): they prepare memory, one or both post, the receiver counts. docs/bench.md says what is
measured.
"""
