"""What is to be measured, as both ends must know it: the operation, the sizes, how often and how many at once.

>>> workload = Workload(op="paged", cases=(Case(4096, 64),))
>>> workload.cases[0].nbytes
262144

All of it is checked when it is made, so that a target allocates no more than the limits say, whoever asks.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .sizes import size_text

__all__ = ["MEMORIES", "OPS", "Case", "Fabric", "Mem", "Op", "Workload"]

Op = Literal["write", "paged", "imm", "read", "send", "messenger"]
OPS: tuple[Op, ...] = ("write", "paged", "imm", "read", "send", "messenger")
Mem = Literal["host", "cuda", "cumem"]
MEMORIES: tuple[Mem, ...] = ("host", "cuda", "cumem")

MAX_CASE_BYTES = 64 << 30
MAX_PAGES = 1 << 22
MAX_MESSAGE_BYTES = 16 << 20  # EngineOptions.max_message_bytes


class Case(msgspec.Struct, frozen=True, array_like=True):
    """One row: what an iteration moves.

    Attributes
    ----------
    page_bytes : int
        Of a page or message; 0 for immediates, which bring no bytes.
    num_pages : int
        Pages, messages or immediates of an iteration.
    """

    page_bytes: Annotated[int, Meta(ge=0, le=MAX_CASE_BYTES)]
    num_pages: Annotated[int, Meta(ge=1, le=MAX_PAGES)]

    @property
    def nbytes(self) -> int:
        """Of an iteration."""
        return self.page_bytes * self.num_pages


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What the initiator asks for.

    Attributes
    ----------
    op : str
        One of :data:`OPS`.
    cases : tuple of Case
        The rows.
    contiguity : int
        Percent of the pages that directly follow their predecessor, at both ends.
    batch : int
        An iteration is one submission of so many lists of pages.
    iterations : int
        Timed ones, for each row; of no meaning with ``duration_s``.
    duration_s : float, optional
        Post for so long instead.
    warmup : int
        Iterations before them that do not count.
    depth : int
        Iterations in flight.
    outwards, inwards : bool
        The initiator posts; the targets post.
    verify : bool
        Whether what arrived is compared with what was sent.
    seed : int
        Of page lists and stamps.
    timeout_s : float
        How long nothing may happen.
    memory_bytes : int
        What iterations in flight may occupy at each end; beyond it they share places.
    """

    op: Op
    cases: Annotated[tuple[Case, ...], Meta(min_length=1, max_length=256)]
    contiguity: Annotated[int, Meta(ge=0, le=100)] = 0
    batch: Annotated[int, Meta(ge=1, le=4096)] = 1
    iterations: Annotated[int, Meta(ge=1, le=10**9)] = 1000
    duration_s: Annotated[float, Meta(gt=0, le=86400)] | None = None
    warmup: Annotated[int, Meta(ge=0, le=10**9)] = 100
    depth: Annotated[int, Meta(ge=1, le=4096)] = 16
    outwards: bool = True
    inwards: bool = False
    verify: bool = True
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 1
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 20.0
    memory_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 256 << 20

    def __post_init__(self) -> None:
        if not (self.outwards or self.inwards):
            raise ConfigError("nobody would post: neither outwards nor inwards")
        for case in self.cases:
            if case.nbytes > MAX_CASE_BYTES and self.op != "messenger":
                raise ConfigError(
                    f"{case.num_pages} pages of {size_text(case.page_bytes)} are {case.nbytes} bytes an iteration: "
                    f"the limit is {size_text(MAX_CASE_BYTES)}"
                )
            if (case.page_bytes == 0) != (self.op == "imm"):
                raise ConfigError(f"--op {self.op} with pages of {case.page_bytes} bytes")
            if case.num_pages % self.batch and self.op != "messenger":
                raise ConfigError(f"{case.num_pages} pages cannot be split into --batch {self.batch} lists evenly")
            if self.op == "send" and case.page_bytes > MAX_MESSAGE_BYTES:
                raise ConfigError(
                    f"--op send: a message of {size_text(case.page_bytes)} is above the engine's limit of "
                    f"{size_text(MAX_MESSAGE_BYTES)}"
                )


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """What one end opens; each end has its own.

    Attributes
    ----------
    provider : str, optional
        libfabric provider; None: any that drives an RDMA NIC.
    nics : tuple of str
        Rails by name; empty: see :func:`fabric_kv.bench.opened.choose_nics`.
    rails : int, optional
        Use so many of them.
    progress : {"adaptive", "spin"}
    cpus : tuple of int
        For the engine's threads; empty: any.
    mem : {"host", "cuda", "cumem"}, optional
        Where pages are; ``cuda``: cuMemAlloc, ``cumem``: a DeviceBuffer. None: as the initiator says.
    gpu : int
        Which one, for those on a GPU, as the process counts them.
    """

    provider: str | None = None
    nics: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    rails: Annotated[int, Meta(ge=1, le=64)] | None = None
    progress: Literal["adaptive", "spin"] = "adaptive"
    cpus: Annotated[tuple[int, ...], Meta(max_length=4096)] = ()
    mem: Mem | None = None
    gpu: Annotated[int, Meta(ge=0, lt=1024)] = 0

    @property
    def on_gpu(self) -> bool:
        """Whether pages are in a GPU's memory."""
        return self.mem in ("cuda", "cumem")
