"""Decides whether K/V blocks are freed when the model's window has passed them.

This needs a window in every layer, because all layers share one block table. Other features need
the blocks of a whole prefix, so with them all blocks are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.config.worker import WorkerConfig
from worker.models.spec import ModelFacts


def kv_window(options: WorkerConfig, models: Sequence[ModelFacts]) -> int | None:
    """Return the window before which blocks are freed, in tokens; None if all blocks are kept.

    models   the model, and its draft model if there is one
    """
    return None if reason_to_keep(options) else models[0].window


def reason_to_keep(options: WorkerConfig) -> str:
    """Return the option or feature because of which all blocks are kept; "" if there is none."""
    kept_for = {
        "--draft-model": options.draft_model,
        "--kv-host-gib": options.kv_host_gib,
        "--kv-disk": options.kv_disk,
        "K/V transfer": options.kv_export or options.cluster_key,
    }
    return next((name for name, value in kept_for.items() if value), "")
