"""The plans that a search may propose: packing capacities, layouts, and the values of each parameter."""
