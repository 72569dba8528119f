"""Traces, benchmarks and checks of a running worker."""
