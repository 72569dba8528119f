"""One step of this worker, timed by batch size and context length: `python -m worker.benchmark`.

`steps.py` makes the steps and times them, `parts.py` tells where the time of one goes.
"""
