"""The calls to NVIDIA's driver, answered by a library that is made for the test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from worker.startup import cuda_driver

SOURCE = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
#ifndef DEVICES
#define DEVICES 2
#endif
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 10; return 0; }
int cuDeviceTotalMem_v2(size_t *total, int device) { *total = (device - 9) * 8ull << 30; return 0; }
#ifdef HAS_UUID
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = 16 * i + device - 10;
    return 0;
}
#endif
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = (void *)0x1234567812345678;
    return strcmp(uuid, "MIG-00102030-4050-6070-8090-a0b0c0d0e0f0");
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    memory->total = 8ull << 30, memory->free = 5ull << 30, memory->used = 3ull << 30;
    return handle != (void *)0x1234567812345678;
}
"""


@pytest.fixture
def library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(SOURCE)
    made = tmp_path / "driver.so"
    files = [str(tmp_path / "driver.c"), "-o", str(made)]
    subprocess.run([compiler, "-shared", "-fPIC", *request.param, *files], check=True)
    monkeypatch.setattr(cuda_driver, "DRIVER", str(made))
    monkeypatch.setattr(cuda_driver, "MANAGEMENT", str(made))


@pytest.mark.parametrize("library", [["-DINIT=0", "-DHAS_UUID"]], indirect=True)
@pytest.mark.usefixtures("library")
def test_the_free_memory_is_told_by_uuid_and_is_all_where_it_is_not_known() -> None:
    assert cuda_driver.free_bytes_of_devices() == [5 << 30, 16 << 30]


@pytest.mark.parametrize("library", [["-DINIT=0"]], indirect=True)
@pytest.mark.usefixtures("library")
def test_a_driver_that_knows_no_uuids_tells_the_whole_memory() -> None:
    assert cuda_driver.free_bytes_of_devices() == [8 << 30, 16 << 30]


@pytest.mark.parametrize("library", [["-DINIT=100"], ["-DINIT=0", "-DDEVICES=0"]], indirect=True)
@pytest.mark.usefixtures("library")
def test_a_driver_without_devices_shows_none() -> None:
    assert cuda_driver.free_bytes_of_devices() == []
