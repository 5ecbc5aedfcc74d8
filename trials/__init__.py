"""Execution of a plan on real processes, for a few steps (a trial) or for whole epochs (the full training)."""
