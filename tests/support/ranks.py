"""Runs the ranks of a tensor parallel group in threads of this process, with real gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is not in __all__

from tests.support.waiting import HANG_S
from worker.layers.group import Group
from worker.loading.decoder import LoadedModel, load_model
from worker.startup.process_group import GlooGroup

T = TypeVar("T")


def in_ranks(size: int, run: Callable[[Group], T]) -> list[T]:
    """Call `run` in a thread for each rank, with the group as that rank sees it. Return the results
    in the order of the ranks. Raises what the first rank to fail raised."""
    store, results = HashStore(), [Future[T]() for _ in range(size)]

    def start(rank: int) -> None:
        try:
            results[rank].set_result(run(GlooGroup(store, rank, size)))
        except BaseException as error:
            results[rank].set_exception(error)

    for rank in range(size):
        # A rank whose peer has failed waits for it, until this process ends.
        Thread(target=start, args=(rank,), daemon=True).start()
    done, missing = wait(results, timeout=HANG_S, return_when=FIRST_EXCEPTION)
    for result in done:
        result.result()
    assert not missing, f"{len(missing)} of {size} ranks hang"
    return [result.result() for result in results]


def load_share(path: Path, group: Group, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load a rank's share of a model, with torch's kernels."""
    return load_model(path, dtype=dtype, device=torch.device("cpu"), group=group)
