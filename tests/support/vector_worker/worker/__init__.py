"""Stands in for the package `worker`: a worker whose results of encoding are large.

An engine starts it if the folder above comes first in its PYTHONPATH.
"""
