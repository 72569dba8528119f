"""Times one step of this worker by batch size and context length.

Run it with `python -m worker.benchmark`. `steps.py` builds and times the steps; `parts.py`
divides the time of a step among its parts.
"""
