"""Recomputation: what layers keep for their backward pass is computed again in it."""
