"""Traces, benchmarks and checks of a worker."""
