"""Metrics, traces, logs and timings of requests."""
