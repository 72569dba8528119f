"""Loads and unloads adapters while the worker computes.

A thread reads the files, so steps do not wait for a disk. The loop adds an adapter to the table
between two steps, and reports it to the engine after that.
"""

from __future__ import annotations

import contextlib
import logging
import os
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Self

import torch

from protocol.wire.errors import ErrorInfo, InvalidRequest, UnknownModel
from protocol.worker.steps import AdapterLoad, AdapterReport, AdapterUnload
from worker.errors import UnusableModel
from worker.lora.adapter import Adapter
from worker.lora.errors import MissingAdapter
from worker.lora.table import AdapterTable

log = logging.getLogger(__name__)

AdapterMessage = AdapterLoad | AdapterUnload


class AdapterService:
    """Carries out the engine's commands about adapters. Use it as a context manager.

    table   its `files` are not None
    """

    def __init__(self, table: AdapterTable) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._table = table
        self._jobs: SimpleQueue[AdapterLoad | None] = SimpleQueue()
        self._loaded: SimpleQueue[tuple[AdapterLoad, Adapter | ErrorInfo]] = SimpleQueue()
        self._freed: SimpleQueue[AdapterReport] = SimpleQueue()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        os.close(self.fd)

    def apply(self, message: AdapterMessage) -> None:
        """Start to load an adapter, or unload one at once. `report` returns the answer. Raises
        ValueError if the engine unloads what is not loaded."""
        if isinstance(message, AdapterUnload):
            self._table.remove(message.row, message.generation)
            log.info("adapter row %d is free", message.row)
            self._freed.put(AdapterReport(row=message.row, generation=message.generation))
            os.eventfd_write(self.fd, 1)
            return
        if self._thread is None:
            self._thread = Thread(target=self._run, name="adapter reader", daemon=True)
            self._thread.start()
        self._jobs.put(message)

    def report(self) -> AdapterReport | None:
        """Return the next answer, or None if there is none now; call it until it returns None. If
        an adapter has been read, add it to the table first."""
        with contextlib.suppress(Empty):
            return self._freed.get_nowait()
        # Clear the descriptor first: an adapter that is read after this makes it readable again.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        try:
            message, found = self._loaded.get_nowait()
        except Empty:
            return None
        row, generation = message.row, message.generation
        if isinstance(found, ErrorInfo):
            return AdapterReport(row=row, generation=generation, error=found)
        self._table.add(row, generation, found)
        log.info(
            "adapter row %d holds %s: rank %d, %.1f MiB",
            *(row, message.path, found.rank, found.num_bytes / (1 << 20)),
        )
        return AdapterReport(row=row, generation=generation, digest=found.digest, rank=found.rank)

    def _run(self) -> None:
        while (message := self._jobs.get()) is not None:
            self._loaded.put((message, self._read(message)))
            os.eventfd_write(self.fd, 1)

    def _read(self, message: AdapterLoad) -> Adapter | ErrorInfo:
        """Return an adapter, or the error that its client gets."""
        assert self._table.files is not None
        try:
            return self._table.files.read(message.path)
        except MissingAdapter as error:
            return UnknownModel(error.message, param="lora_path").info()
        except UnusableModel as error:
            return InvalidRequest(error.message, param="lora_path").info()
        except (MemoryError, torch.OutOfMemoryError):
            return InvalidRequest("not enough memory for this adapter", param="lora_path").info()
        except Exception:
            # A damaged file can raise errors of the libraries that read it.
            log.exception("the adapter at %s could not be read", message.path)
            text = "the adapter could not be read; the worker's log has the reason"
            return InvalidRequest(text, param="lora_path").info()
