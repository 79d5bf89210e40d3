"""What a model keeps in its KV cache: groups of layers, and the parts that every page of a group holds.

>>> layout = KVLayout.attention(num_layers=30, kv_heads=3, head_dim=64, page_tokens=16, dtype="float16")
>>> [part.name for part in layout.groups[0].parts]
['K', 'V']

A layout says nothing about ranks (:mod:`fabric_kv.sharding.placement`) or addresses (:mod:`fabric_kv.sharding.cache`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from ..errors import ConfigError

__all__ = ["DTYPE_BYTES", "Group", "GroupKind", "KVLayout", "Order", "Part", "check_range"]

GroupKind = Literal["attention", "sliding", "mla", "indexer", "state"]
Order = Literal["HND", "NHD"]

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

# Layouts arrive from peers, so every number has a limit, far above what models have, that keeps all later work small.
MAX_LAYERS = 4096
MAX_GROUPS = 32
MAX_PARTS = 16
MAX_HEADS = 4096
MAX_PAGE_TOKENS = 65536
MAX_ROW_BYTES = 1 << 30
MAX_PART_BYTES = 1 << 32
MAX_NAME = 128


def check_range(name: str, value: object, low: int, high: int, unit: str = "") -> None:
    """Raise ConfigError, naming the value, the limits and the unit, unless ``value`` is an int in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(
            f"{name}={value!r} is out of range: it must be an integer in [{low}, {high}]{unit and ' ' + unit}"
        )


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= MAX_NAME:
        raise ConfigError(f"{what} {str(name)[:MAX_NAME]!r} must be 1 to {MAX_NAME} printable characters")


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array that every page of a group holds, as [heads, rows, dim]: K, V, a latent, scales, a state.

    Attributes
    ----------
    name : str
        Same on both sides of a transfer, for example ``"K"``.
    heads : int
        Heads in the whole model; tensor parallelism splits this axis. One head is held by every TP rank (MLA).
    dim : int
        Elements of one head in one row.
    dtype : str
        A key of ``DTYPE_BYTES``.
    rows : int
        0: one row for each token of the page. n: n rows whatever the page size: a scale per page, a recurrent state,
        or an opaque chunk per (page, head), which is one row of ``uint8``.
    """

    name: str
    heads: int
    dim: int
    dtype: str
    rows: int = 0

    def __post_init__(self) -> None:
        _check_name("part name", self.name)
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"part {self.name}: dtype={str(self.dtype)[:64]!r} is not one of {sorted(DTYPE_BYTES)}")
        check_range(f"part {self.name}: heads", self.heads, 1, MAX_HEADS)
        check_range(f"part {self.name}: dim", self.dim, 1, MAX_ROW_BYTES // DTYPE_BYTES[self.dtype])
        check_range(f"part {self.name}: rows", self.rows, 0, MAX_PAGE_TOKENS)

    @property
    def row_bytes(self) -> int:
        """Bytes of one head in one row."""
        return self.dim * DTYPE_BYTES[self.dtype]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers whose pages have the same form and the same page list.

    Attributes
    ----------
    name : str
        Same on both sides of a transfer.
    kind : {"attention", "sliding", "mla", "indexer", "state"}
        ``state`` is recurrent or convolution state: one slot per request in place of pages.
    layers : tuple of int
        Global layer indices, ascending. A layer may be in several groups (a latent and its indexer keys).
    page_tokens : int
        Tokens per page; 0 for ``state``.
    parts : tuple of Part
    order : {"HND", "NHD"}
        HND: the rows of a head lie together; NHD: the heads of a row lie together.
    window : int
        ``sliding`` only: tokens that a query sees, its own included. Older pages are never sent.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    page_tokens: int
    parts: tuple[Part, ...]
    order: Order = "HND"
    window: int = 0

    def __post_init__(self) -> None:
        _check_name("group name", self.name)
        where = f"group {self.name}: "
        if self.kind not in ("attention", "sliding", "mla", "indexer", "state"):
            raise ConfigError(f"{where}kind={str(self.kind)[:64]!r} is unknown")
        if self.order not in ("HND", "NHD"):
            raise ConfigError(f"{where}order={str(self.order)[:64]!r} is neither HND nor NHD")
        check_range(f"{where}number of layers", len(self.layers), 1, MAX_LAYERS)
        check_range(f"{where}number of parts", len(self.parts), 1, MAX_PARTS)
        for layer in self.layers:
            check_range(f"{where}layer", layer, 0, MAX_LAYERS - 1)
        if any(a >= b for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise ConfigError(f"{where}layers must be ascending, without repeats")
        if len({part.name for part in self.parts}) != len(self.parts):
            raise ConfigError(f"{where}two parts have the same name: {[part.name for part in self.parts]}")
        state, sliding = self.kind == "state", self.kind == "sliding"
        check_range(
            f"{where}page_tokens",
            self.page_tokens,
            0 if state else 1,
            0 if state else MAX_PAGE_TOKENS,
            "tokens",
        )
        check_range(f"{where}window", self.window, 1 if sliding else 0, 1 << 40 if sliding else 0, "tokens")
        for part in self.parts:
            if state and not part.rows:
                raise ConfigError(f"{where}part {part.name} of a state must say its rows")
            size = part.heads * self.rows_of(part) * part.row_bytes
            check_range(f"{where}part {part.name}: bytes per page", size, 1, MAX_PART_BYTES)

    def rows_of(self, part: Part) -> int:
        """Rows of a part in one page."""
        return part.rows or self.page_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, all heads of the model."""
        return sum(part.heads * self.rows_of(part) * part.row_bytes for part in self.parts)


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The geometry of a model's cache, independent of ranks and addresses; plain data, fit for the wire.

    Attributes
    ----------
    num_layers : int
        Layers of the model; those in no group keep nothing.
    groups : tuple of Group
    model : str
        Name or hash of the weights; compared at handshake when both sides give one.
    """

    num_layers: int
    groups: tuple[Group, ...]
    model: str = ""

    def __post_init__(self) -> None:
        check_range("num_layers", self.num_layers, 1, MAX_LAYERS)
        check_range("number of groups", len(self.groups), 1, MAX_GROUPS)
        if self.model:
            _check_name("model", self.model)
        if len({group.name for group in self.groups}) != len(self.groups):
            raise ConfigError(f"two groups have the same name: {[group.name for group in self.groups]}")
        for group in self.groups:
            check_range(f"group {group.name}: layer", group.layers[-1], 0, self.num_layers - 1)

    @classmethod
    def attention(
        cls,
        *,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        dtype: str = "bfloat16",
        order: Order = "HND",
        scale_dtype: str = "",
        scale_rows: int = 0,
        model: str = "",
    ) -> KVLayout:
        """Full attention in every layer, K and V of the same form: Llama, Qwen3, and most others.

        ``scale_dtype`` adds the parts K_scale and V_scale, one element per head and token, or, with ``scale_rows=1``,
        per head and page.
        """
        parts: tuple[Part, ...] = (Part("K", kv_heads, head_dim, dtype), Part("V", kv_heads, head_dim, dtype))
        if scale_dtype:
            parts += tuple(Part(name, kv_heads, 1, scale_dtype, scale_rows) for name in ("K_scale", "V_scale"))
        group = Group("attention", "attention", tuple(range(num_layers)), page_tokens, parts, order)
        return cls(num_layers, (group,), model)

    def groups_of_layer(self, layer: int) -> tuple[int, ...]:
        """Indices of the groups that a layer belongs to; none for a layer that keeps nothing."""
        check_range("layer", layer, 0, self.num_layers - 1)
        return tuple(index for index, group in enumerate(self.groups) if layer in group.layers)

    def with_page_tokens(self, page_tokens: int) -> KVLayout:
        """The same cache in pages of another size."""
        return self._replace_groups(
            msgspec.structs.replace(group, page_tokens=page_tokens if group.page_tokens else 0) for group in self.groups
        )

    def with_order(self, order: Order) -> KVLayout:
        """The same cache in another axis order."""
        return self._replace_groups(msgspec.structs.replace(group, order=order) for group in self.groups)

    def with_draft(self, draft: KVLayout) -> KVLayout:
        """This cache and that of a draft model, for speculative decoding: the draft's layers come after ours.

        Its groups are named ``draft.<name>``. They may have other heads and page sizes; each has a page list of its own
        in a request. Forward steps number the layers on: the draft's first one is our ``num_layers``. For layers that a
        model drafts with itself see ``mtp_layers`` of ``layout_from_config``.
        """
        shift = self.num_layers
        theirs = tuple(
            msgspec.structs.replace(
                group, name=f"draft.{group.name}", layers=tuple(layer + shift for layer in group.layers)
            )
            for group in draft.groups
        )
        model = f"{self.model}+{draft.model}" if self.model and draft.model else ""
        return KVLayout(shift + draft.num_layers, (*self.groups, *theirs), model)

    def _replace_groups(self, groups: Iterable[Group]) -> KVLayout:
        return KVLayout(self.num_layers, tuple(groups), self.model)
