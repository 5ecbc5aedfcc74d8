"""Fit of layer costs to the timings of all ranks."""
