"""Ranks with faults that a certificate has to find."""
