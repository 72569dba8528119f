"""One frozen struct per process: every field described and bounded, defaults written once.

`tidegate serve` generates its options from these declarations (`wiring=True` fields, which only
connect processes, are left out), so flags, help and documentation cannot drift from the code.
What is discovered at run time (how many blocks fit, the real context length) is never written back
here; it travels in `steps.WorkerReady` and `messages.Welcome`.

    base.py     how a field is described, and what several configs have
    worker.py   the process that holds the tensors
    engine.py   the process that decides; it has its workers' config
    gateway.py  the process that speaks HTTP and text
    serve.py    the processes that start and watch the others
"""
