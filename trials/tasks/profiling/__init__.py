"""Timing of single layers, links, updates and loading on the ranks."""
