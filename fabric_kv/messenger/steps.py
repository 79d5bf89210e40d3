"""Prepared writes of forward steps, until their layers are done.

>>> step = steps.add({0: [submission], 1: [submission]})
>>> steps.take(step, layer=0)          # once; later it is empty
"""

from __future__ import annotations

import itertools

from .posting import Outflow, Submission

__all__ = ["Steps"]


class Steps:
    """Submissions by step and layer. The caller holds the poster's lock."""

    def __init__(self) -> None:
        self._layers: dict[int, dict[int, list[Submission]]] = {}
        self._numbers = itertools.count(1)

    @property
    def num_open(self) -> int:
        """Steps that have layers with something to write."""
        return len(self._layers)

    def add(self, layers: dict[int, list[Submission]]) -> int:
        """Keep a step; its number."""
        step = next(self._numbers)
        if layers:
            self._layers[step] = layers
        return step

    def take(self, step: int, layer: int) -> list[Submission]:
        """Take a layer's submissions out; empty if there are none (left)."""
        layers = self._layers.get(step)
        if layers is None:
            return []
        submissions = layers.pop(layer, [])
        if not layers:
            del self._layers[step]
        return submissions

    def forget(self, outflow: Outflow) -> None:
        """Drop the submissions of a request that ended."""
        for step, layers in list(self._layers.items()):
            for layer, submissions in list(layers.items()):
                left = [submission for submission in submissions if submission.outflow is not outflow]
                if left:
                    layers[layer] = left
                else:
                    del layers[layer]
            if not layers:
                del self._layers[step]
