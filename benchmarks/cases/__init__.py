"""Problems and workloads that benchmarks share."""
