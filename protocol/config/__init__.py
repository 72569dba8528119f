"""The configs: one frozen struct per process, which declares the type, default, bounds and help of
each field.

`tidegate serve` generates its options from these declarations, so flags, help and documentation
cannot drift from the code. Fields with `wiring=True` connect processes, are set by code, and
become no option. Facts found at start (number of blocks, real context length) are not stored in a
config: they are sent in `steps.WorkerReady` and `messages.Welcome`.

    base.py     `about`, which describes a field, and the fields that several configs share
    worker.py   the worker: model, device, memory
    engine.py   the engine: scheduling, drafting, K/V transfer; includes its worker's config
    gateway.py  the gateway: HTTP, authentication, API limits, storage
    serve.py    the supervisors: `tidegate serve` and `tidegate engine`
"""
