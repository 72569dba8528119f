"""Describes the GPUs that NVIDIA's driver shows to this process, without torch.

CUDA_VISIBLE_DEVICES applies, as it does for torch. No context is created on a device, because a
context takes time and device memory.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_ulonglong, c_void_p
from itertools import pairwise

from protocol.tools.start_facts import CudaDriver, GpuFacts

DRIVER, MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
TEXT_BYTES = 96
"""Size of a buffer for a name. NVML's longest name of a device has 96 bytes."""


class _NVMLMemory(ctypes.Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


def read_driver(visible: str | None = None) -> CudaDriver:
    """Return the facts about the driver and its visible devices.

    visible   value of CUDA_VISIBLE_DEVICES, to explain why no device is visible; None: not set
    """
    driver = _library(DRIVER)
    if driver is None:
        return CudaDriver(
            problem=f"NVIDIA's driver is not installed ({DRIVER} was not found)",
            remedy="install the driver; a container also needs access to the GPUs (--gpus all)",
        )
    management = _library(MANAGEMENT)
    if management is not None and management.nvmlInit_v2() != 0:
        management = None
    version, cuda, count = _driver_version(management), _cuda_version(driver), c_int()
    error = driver.cuInit(0) or driver.cuDeviceGetCount(byref(count))
    if error or not count.value:
        problem, remedy = _why_none(error, visible)
        return CudaDriver(version=version, cuda=cuda, problem=problem, remedy=remedy)
    gpus = [_gpu(driver, management, index) for index in range(count.value)]
    return CudaDriver(version=version, cuda=cuda, gpus=gpus)


def _why_none(error: int, visible: str | None) -> tuple[str, str]:
    """Return the reason why no device is visible, and a remedy. `error` is a code of the driver; 0
    if it has found 0 devices."""
    if error not in (0, NO_DEVICE):
        problem = f"NVIDIA's driver failed with error {error}"
        return problem, "check nvidia-smi; after an update of the driver, restart the machine"
    if visible is not None:
        problem = f"no GPU is visible with CUDA_VISIBLE_DEVICES={visible!r}"
        return problem, "unset CUDA_VISIBLE_DEVICES, or name a GPU that nvidia-smi lists"
    return "NVIDIA's driver finds no GPU", "check nvidia-smi"


def _cuda_version(driver: ctypes.CDLL) -> tuple[int, int]:
    """Return the newest version of CUDA that the driver supports."""
    number = c_int()
    driver.cuDriverGetVersion(byref(number))
    return number.value // 1000, number.value % 1000 // 10


def _driver_version(management: ctypes.CDLL | None) -> str:
    text = ctypes.create_string_buffer(TEXT_BYTES)
    if management is None or management.nvmlSystemGetDriverVersion(text, TEXT_BYTES) != 0:
        return ""
    return text.value.decode(errors="replace")


def _gpu(driver: ctypes.CDLL, management: ctypes.CDLL | None, index: int) -> GpuFacts:
    device, total, part = c_int(), c_size_t(), c_int()
    name, capability = ctypes.create_string_buffer(TEXT_BYTES), []
    driver.cuDeviceGet(byref(device), index)
    driver.cuDeviceGetName(name, TEXT_BYTES, device)
    driver.cuDeviceTotalMem_v2(byref(total), device)
    for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR):
        driver.cuDeviceGetAttribute(byref(part), attribute, device)
        capability.append(part.value)
    free = _free_bytes(driver, management, device)
    return GpuFacts(
        name=name.value.decode(errors="replace"),
        capability=(capability[0], capability[1]),
        total_bytes=total.value,
        free_bytes=total.value if free is None else free,
    )


def _free_bytes(driver: ctypes.CDLL, management: ctypes.CDLL | None, device: c_int) -> int | None:
    """Return a device's free memory, or None if it is unknown. Without a context only the
    management library reports it, and that library finds a device by its UUID."""
    uuid = (c_ubyte * 16)()
    if management is None or not hasattr(driver, "cuDeviceGetUuid_v2"):  # since CUDA 11.4
        return None
    if driver.cuDeviceGetUuid_v2(byref(uuid), device) != 0:
        return None
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
    return None


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
