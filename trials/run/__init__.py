"""Starts ranks, gives them work, watches them, and collects what they report."""
