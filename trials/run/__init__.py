"""Ranks of one machine: processes that serve requests, and the pool that starts, watches and ends them."""
