"""What a worker finds on a machine, and what it would make of it: told as JSON, for `tidegate
doctor`. Nothing is decided here, and nothing of it is written back into a config.
"""

from __future__ import annotations

import msgspec


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """
    torch         its version
    device        "cpu" or "cuda:0", device_name of a GPU; dtype: what `auto` would choose
    device_id     by which its holders are found (devices.py); "" of the CPU
    cpu, cpu_flags   the processor's name; of its features those that matter
    cores, quota  that this process may use; quota: None where no container limits them
    threads       what `--threads 0` would choose
    free_bytes    memory of the device, or of this container
    """

    torch: str
    device: str
    dtype: str
    cpu: str
    cpu_flags: list[str]
    cores: int
    threads: int
    free_bytes: int
    quota: float | None = None
    device_name: str = ""
    device_id: str = ""
