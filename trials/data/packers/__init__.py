"""Packers: which samples share a pack. One module each, found by name."""

from typing import TYPE_CHECKING, Protocol

from trials import plugins

if TYPE_CHECKING:  # so that the names of the packers can be listed without numpy
    from trials.arrays import Ints
    from trials.plan import Packed


class Packer(Protocol):
    """What a packer's module offers."""

    RELAXES: bool
    """Whether `qv_min` and `qt_min` of the packing change the result."""

    def pack(self, units: "Ints", tokens: "Ints", packing: "Packed", seed: int) -> "tuple[Ints, Ints]":
        """Return (items in order of packs [items], starts [packs + 1]).

        `units` and `tokens` are the sizes of the items, int64 [items]; each item fits into a pack. The result names
        every item once, by its position: pack i is `items[starts[i] : starts[i + 1]]`, holds at least one item and
        stays within `packing.qv` and `packing.qt`. Equal arguments give equal packs on every machine, because each rank
        computes them for itself.
        """


PACKERS: plugins.Plugins[Packer] = plugins.Plugins(__name__)
