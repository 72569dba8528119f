"""An engine_core process with a real worker and a tiny model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.sdk.client import Client
from tests.support.processes import Program
from tests.support.tiny_checkpoint import write_tiny_llama

START_S = 60.0


@contextmanager
def tiny_engine(
    *, context_tokens: int = 400, model: Path | None = None, **config: Any
) -> Iterator[tuple[Program, str]]:
    """Start an engine, and yield its process and its address once it is ready.

    model    None: a tiny Llama of `context_tokens` positions
    config   fields of EngineConfig
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run").mkdir(mode=0o700)
        address = config.setdefault("address", f"ipc://{folder}/run/engine.sock")
        model = model or write_tiny_llama(folder, max_position_embeddings=context_tokens)
        worker = {"model": str(model), "dtype": "float32", "poison_slots": "wild", "threads": 1}
        worker |= {"address": f"ipc://{folder}/run/engine.sock.worker"}
        worker |= {"max_slots": 8, "kv_blocks": max(129, context_tokens // 16 + 2)}
        settings = {"max_waiting": 64, "lease_s": 60, "worker": worker} | config
        with Program(["-P", "-m", "engine_core", "--config", json.dumps(settings)]) as program:
            Client(address, wait_s=START_S, cluster_key=config.get("cluster_key", "")).close()
            yield program, address
