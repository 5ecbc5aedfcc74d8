"""Results of benchmarks: JSON, rows of a long run, recordings of a terminal."""
