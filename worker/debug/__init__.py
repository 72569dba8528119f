"""Traces and measurements of a running worker."""
