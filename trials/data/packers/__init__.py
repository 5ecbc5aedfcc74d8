"""Packers: each module has `pack(units, tokens, packing, seed) -> (samples, starts)`.

`units` and `tokens` are int64 arrays of items that each fit into a pack. The result names every item once, by its
position in them: pack i is `samples[starts[i] : starts[i + 1]]`, holds at least one item and stays within both
capacities. Equal arguments give equal packs. `RELAXES` tells whether a pack's `qv_min` and `qt_min` change anything.
"""
