"""Programs that measure Tidegate: `python -m tests.benchmarks.NAME --help`.

Each starts the processes that it needs, prints figures, and needs no pytest.
"""
