"""Groups of neighbouring layers that are counted by themselves, so that decode can tell how far a request is.

>>> layers = LayerGroups((12, 24, 36))
>>> layers.group_of(11), layers.group_of(12), len(layers)
(0, 1, 3)
>>> layers.counter_of(rank=2, layer_group=1)
7

A request has a counter for each decode rank and layer group, rank by rank.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from ..errors import ConfigError

__all__ = ["MAX_LAYER_GROUPS", "LayerGroups"]

MAX_LAYER_GROUPS = 256


class LayerGroups:
    """Where each group ends; the last end is the number of layers.

    Raises
    ------
    ConfigError
        If the ends do not ascend to that number, or are more than 256.
    """

    def __init__(self, ends: Sequence[int], num_layers: int | None = None) -> None:
        self.ends = tuple(ends)
        pairs = itertools.pairwise((0, *self.ends))
        last = self.ends[-1] if self.ends else 0
        if any(a >= b for a, b in pairs) or last != (last if num_layers is None else num_layers) or not last:
            raise ConfigError(f"layer groups that end at {self.ends[:16]} do not divide {num_layers or 'any'} layers")
        if len(self.ends) > MAX_LAYER_GROUPS:
            raise ConfigError(f"{len(self.ends)} layer groups: the limit is {MAX_LAYER_GROUPS}")

    @classmethod
    def of_size(cls, num_layers: int, size: int | None) -> LayerGroups:
        """Groups of ``size`` layers, the last one smaller; one for all without a size."""
        if size is None:
            return cls((num_layers,), num_layers)
        if size < 1:
            raise ConfigError(f"layers_per_group={size} is out of range: it must be at least 1")
        return cls((*range(size, num_layers, size), num_layers), num_layers)

    def __len__(self) -> int:
        return len(self.ends)

    def group_of(self, layer: int) -> int:
        """The group that a layer is in."""
        return bisect.bisect_right(self.ends, layer)

    def counter_of(self, rank: int, layer_group: int) -> int:
        """Which of a request's counters counts what a rank gets of a group."""
        return rank * len(self.ends) + layer_group

    def num_ready(self, waiting: int, num_ranks: int) -> int:
        """Layers from the first on that are complete, where ``waiting`` is a mask of counters that have not fired."""
        ready = 0
        for layer_group, end in enumerate(self.ends):
            if any(waiting >> self.counter_of(rank, layer_group) & 1 for rank in range(num_ranks)):
                break
            ready = end
        return ready
