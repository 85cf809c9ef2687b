"""Help the tests and benchmarks of this engine."""
