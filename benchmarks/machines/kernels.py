"""Seconds of single layers on a simulated device, kernel by kernel."""

from dataclasses import dataclass

import numpy as np

from benchmarks.machines.dials import Dials
from benchmarks.machines.layers import ELEMENT_BYTES, LayerWork, MatrixProduct
from trials.arrays import Floats

_TILE_ROWS, _TILE_COLUMNS = 128, 256
"""Tile of a matrix product that one multiprocessor computes."""
_FILLING_ROWS = 200.0
"""Rows with which a matrix product reaches half of its speed."""
_FILLING_LENGTH = 400.0
"""Tokens of a sequence with which attention reaches half of its speed."""
_CACHED = 0.4
"""Time of moving values that are in the cache, as a share of that from memory."""
_BACKWARD_KERNELS = 1.6
"""Kernels of a backward pass over those of its forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One simulated device."""

    multiprocessors: int
    flops: float
    """Per second, in matrix products as large as can be."""
    memory_bytes_per_second: float
    cache_bytes: float
    launch_seconds: float
    """Host time for each kernel."""


def drawn_device(seed: int) -> Device:
    """Return a device like an A100 or an H100, the same for the same seed."""
    random = np.random.default_rng([seed, 2])
    scale = float(random.uniform(0.7, 2.0))
    return Device(
        multiprocessors=int(random.integers(90, 145)),
        flops=156e12 * scale,
        memory_bytes_per_second=2.0e12 * scale * float(random.uniform(0.7, 1.2)),
        cache_bytes=float(random.uniform(30e6, 60e6)),
        launch_seconds=float(random.uniform(8e-6, 20e-6)),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSeconds:
    """Seconds of one layer for packs, each [packs]; the host launches while the device computes."""

    forward: Floats
    backward: Floats
    selective: Floats
    """Added by selective recomputation."""
    launch_forward: Floats
    launch_backward: Floats
    launch_selective: Floats


class Kernels:
    """Times of layers on one device. With all dials at 0 they are linear in units, tokens, squares, targets and 1."""

    def __init__(self, device: Device, dials: Dials) -> None:
        self._device, self._dials = device, dials

    def layer(self, work: LayerWork, sizes: Floats) -> LayerSeconds:
        """Return the seconds for packs of these (units, tokens, squares, targets), [packs, 4]."""
        units, tokens, squares, targets = sizes.T
        rows = work.rows_per_unit * units + work.rows_per_token * tokens + work.rows_per_target * targets
        attention = self._attention(work, units, tokens, squares)
        moved = self._moved(work, rows, work.row_values) + self._reading(work)
        forward, backward = moved + attention, 2 * (moved + attention)
        for product in work.products:
            forward = forward + self._product(rows, product.outputs, product.inputs)
            # One product for the gradient of the states, one for that of the weights.
            backward = backward + self._product(rows, product.inputs, product.outputs)
            backward = backward + self._weights_gradient(rows, product)
        launch, launch_again = (
            np.full(len(sizes), self._dials.launch * self._device.launch_seconds * kernels)
            for kernels in (work.kernels, work.again_kernels)
        )
        return LayerSeconds(
            forward=forward,
            backward=backward,
            selective=self._moved(work, rows, work.again_values),
            launch_forward=launch,
            launch_backward=_BACKWARD_KERNELS * launch,
            launch_selective=launch_again,
        )

    def _product(self, rows: Floats, columns: int, depth: int) -> Floats:
        """Return the seconds of [rows, depth] times [depth, columns]."""
        waste = self._waves(rows, columns) * (1 + _FILLING_ROWS / np.maximum(rows, _TILE_ROWS))
        seconds: Floats = 2 * rows * columns * depth / self._device.flops * waste**self._dials.efficiency
        return seconds

    def _weights_gradient(self, rows: Floats, product: MatrixProduct) -> Floats:
        waste = self._waves(np.array(float(product.inputs)), product.outputs)
        waste = waste * (1 + _FILLING_ROWS / np.maximum(rows, _TILE_ROWS))
        seconds: Floats = 2 * rows * product.weights / self._device.flops * waste**self._dials.efficiency
        return seconds

    def _waves(self, rows: Floats, columns: int) -> Floats:
        """Return the work of whole waves of tiles over that of the product, at least 1."""
        tiles = np.ceil(rows / _TILE_ROWS) * np.ceil(columns / _TILE_COLUMNS)
        processors = self._device.multiprocessors
        computed = np.ceil(tiles / processors) * processors * _TILE_ROWS * _TILE_COLUMNS
        ratio: Floats = computed / (np.maximum(rows, 1) * columns)
        return ratio

    def _attention(self, work: LayerWork, units: Floats, tokens: Floats, squares: Floats) -> Floats:
        if work.sequence is None:
            length, total = squares / np.maximum(tokens, 1), squares
        else:
            length, total = np.full(len(units), float(work.sequence)), units * work.sequence**2
        waste = 1 + _FILLING_LENGTH / np.maximum(length, 1)
        seconds: Floats = work.square_flops * total / self._device.flops * waste**self._dials.efficiency
        return seconds

    def _moved(self, work: LayerWork, rows: Floats, row_values: int) -> Floats:
        """Return the seconds of reading and writing `row_values` of each row, less where the cache holds the states."""
        share = rows * work.widest * ELEMENT_BYTES / self._device.cache_bytes
        speed = _CACHED + (1 - _CACHED) * share**2 / (1 + share**2)
        values = rows * row_values * speed**self._dials.cache
        seconds: Floats = values * ELEMENT_BYTES / self._device.memory_bytes_per_second
        return seconds

    def _reading(self, work: LayerWork) -> float:
        """Return the seconds of reading the weights."""
        return work.parameters * ELEMENT_BYTES / self._device.memory_bytes_per_second
