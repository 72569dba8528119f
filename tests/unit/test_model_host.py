"""The use of a model by a request: its limits while it waits, and a model that is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.engine.base import NullEngineClient
from gateway.generation.time_limits import TimeLimits
from gateway.model_host import ModelHost
from gateway.model_use import ModelUse
from gateway.sandbox.clients import TemplateProcesses
from protocol.config.gateway import ModelConfig
from protocol.engine.model_card import CardFile, write_card
from protocol.wire.errors import EngineNotReady, QueueTimeout, ServingError, TimedOut
from tests.support.scripted_engine import scripted_card
from tests.support.served import served

NOW = 100.0


@pytest.mark.parametrize(
    ("limits", "until", "kind", "words"),
    [
        (TimeLimits(load_timeout_s=600.0), 700.0, EngineNotReady, "600 s (--load-timeout-s)"),
        (TimeLimits(0.0, 5.0, 600.0), 105.0, QueueTimeout, "the queue_timeout_s of 5 s"),
        (TimeLimits(2.5, 5.0, 600.0), 102.5, TimedOut, "the timeout_s of 2.5 s"),
        (TimeLimits(9.0, 5.0, 3.0), 103.0, EngineNotReady, "3 s (--load-timeout-s)"),
    ],
)
def test_a_wait_ends_with_the_first_of_its_limits(
    limits: TimeLimits, until: float, kind: type[ServingError], words: str
) -> None:
    at, error = limits.load_deadline("small", NOW)
    assert (at, type(error)) == (until, kind)
    assert words in error.message
    assert "small" in error.message


def host_of(folder: Path, **changes: Any) -> ModelHost:
    """Return the host of a model without an engine."""
    file = folder / "model.card"
    write_card(file, CardFile(card=scripted_card(**changes), max_len=512))
    return ModelHost(
        ModelConfig(card=str(file)),
        NullEngineClient(str(file)),
        TemplateProcesses(),
        end_of_service=lambda: None,
        describe_writing=lambda: "",
        on_unservable=lambda error: None,
    )


def test_a_request_is_refused_if_its_model_was_replaced_after_the_lookup(tmp_path: Path) -> None:
    host = host_of(tmp_path, digest="new")
    ModelUse(host.engine, served(scripted_card(digest="new"))).check()
    with pytest.raises(EngineNotReady, match="restarted with another model") as refused:
        ModelUse(host.engine, served(scripted_card(digest="old"))).check()
    assert refused.value.retry_after_s is not None
