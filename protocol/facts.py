"""Facts about a machine, found by a worker and sent as JSON to `tidegate doctor`.

They are never written back into a config.
"""

from __future__ import annotations

import msgspec


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker found, and what it would choose."""

    #: Version of torch.
    torch: str
    #: "cpu" or "cuda:0".
    device: str
    #: The dtype that `auto` would choose.
    dtype: str
    #: Name of the processor.
    cpu: str
    #: The processor features that matter to our kernels.
    cpu_flags: list[str]
    #: Cores that this process may use.
    cores: int
    #: The value that `--threads 0` would choose.
    threads: int
    #: Free memory of the device, or of this container.
    free_bytes: int
    #: CPU quota of the container, in cores; None if there is none.
    quota: float | None = None
    #: Name of the GPU.
    device_name: str = ""
    #: Identifies the device in devices.py; "" for the CPU.
    device_id: str = ""
