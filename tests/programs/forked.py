"""Processes that start at once, forked from one that has imported what ranks import."""

import multiprocessing

# One for all tests: a process has a single such server, which imports what was named before its first fork.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.machines.imported_once"])
