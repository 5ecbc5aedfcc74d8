"""Offloading: what layers keep for their backward pass waits for it in the host's memory."""
