"""Programs that measure Tidegate: `python -m tests.benchmarks.NAME`. Most of them have `--help`.

Each starts the processes that it needs, prints figures, and needs no pytest. Some modules are only
parts of these programs, as their docstrings say.
"""
