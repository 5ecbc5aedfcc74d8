"""Parts of `python -m benchmarks.exports`."""
