"""Times one step of this worker by batch size and context length.

Run it with `python -m worker.debug.benchmark`. `steps.py` makes the steps and times them;
`parts.py` splits the time of one step into its parts.
"""
