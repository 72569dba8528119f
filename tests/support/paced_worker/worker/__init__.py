"""Stands in for the package `worker`: a worker that computes nothing, but takes known times.

An engine starts it if the folder above comes first in its PYTHONPATH.
"""
