"""Knows before it runs: time and memory of a plan from profiled layers."""
