"""Simulation of a plan's steps: the pipeline's schedule, what it waits for, and the parts of its time."""
