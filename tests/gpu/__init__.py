"""Checks and times everything that runs on a GPU: `python -m tests.gpu`.

docs/contribute/gpu-tests.md lists its stages.

`stages.py` lists what is done. Each stage is a function of a module of its own, runs in a process
of its own (`processes.py`), and yields the rows of the table (`table.py`).
"""
