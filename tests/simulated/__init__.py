"""One simulated platform, without processes, for tests and benchmarks."""
