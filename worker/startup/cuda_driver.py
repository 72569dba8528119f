"""Lists the GPUs that NVIDIA's driver shows to this process, with their free memory, without torch.

CUDA_VISIBLE_DEVICES applies, as it does for torch. No context is created on a device, because a
context takes time and device memory.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_ulonglong, c_void_p
from itertools import pairwise

DRIVER, MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"


class _NVMLMemory(ctypes.Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


def free_bytes_of_devices() -> list[int]:
    """Return the free memory of each visible device in bytes; an empty list if there is no driver.
    If a device's free memory is unknown, its total memory is returned."""
    driver = _library(DRIVER)
    if driver is None or driver.cuInit(0) != 0:
        return []
    count = c_int()
    if driver.cuDeviceGetCount(byref(count)) != 0:
        return []
    management = _library(MANAGEMENT)
    if management is not None and management.nvmlInit_v2() != 0:
        management = None
    return [_free_bytes(driver, management, index) for index in range(count.value)]


def _free_bytes(driver: ctypes.CDLL, management: ctypes.CDLL | None, index: int) -> int:
    device, total, uuid = c_int(), c_size_t(), (c_ubyte * 16)()
    driver.cuDeviceGet(byref(device), index)
    driver.cuDeviceTotalMem_v2(byref(total), device)
    if management is None or not hasattr(driver, "cuDeviceGetUuid_v2"):  # since CUDA 11.4
        return total.value
    if driver.cuDeviceGetUuid_v2(byref(uuid), device) != 0:
        return total.value
    digits = bytes(uuid).hex()
    ends = (0, 8, 12, 16, 20, 32)
    name = "-".join(digits[start:end] for start, end in pairwise(ends))
    for prefix in ("GPU-", "MIG-"):
        handle, memory = c_void_p(), _NVMLMemory()
        by_uuid = c_char_p((prefix + name).encode())
        if management.nvmlDeviceGetHandleByUUID(by_uuid, byref(handle)) != 0:
            continue
        if management.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0:
            return int(memory.free)
    return total.value


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
