"""Simulated machines that share neither a cost formula nor a schedule simulator with the product."""
