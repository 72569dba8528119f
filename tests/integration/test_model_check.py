"""Before `tidegate serve` serves a model, a process of the gateway room checks it."""

from __future__ import annotations

import hashlib
import os
import signal

import pytest

from protocol.config.gateway import GatewayConfig
from protocol.process.exit_codes import ExitCode
from tests.support.processes import is_alive
from tests.support.scripted_engine import scripted_card
from tools.failure import Failure
from tools.models.preflight import ModelCheck, without_trial


def test_the_digest_of_a_tokenizer_that_is_tried_before_is_in_the_config() -> None:
    card = scripted_card()
    config = without_trial(GatewayConfig(port=9001), card)
    digest = hashlib.sha256(card.tokenizer).hexdigest()
    assert config == GatewayConfig(port=9001, tried_tokenizer=digest)


def test_a_wrong_option_is_a_usage_error_with_its_reason() -> None:
    with (
        ModelCheck(GatewayConfig(tool_format="nosuch")) as check,
        pytest.raises(Failure, match="there is no tool format 'nosuch'") as refused,
    ):
        check.run(scripted_card())
    assert refused.value.exit_code == ExitCode.USAGE


def test_a_check_without_a_card_ends_its_process() -> None:
    with pytest.raises(Failure), ModelCheck(GatewayConfig()) as check:  # noqa: PT012
        pid = check.start()
        assert is_alive(pid)
        raise Failure("the model's files are missing")
    assert not is_alive(pid)


def test_a_check_whose_process_is_killed_is_a_failure_with_its_exit_code() -> None:
    said = "checking the model's tokenizer failed: exit code -9"
    with ModelCheck(GatewayConfig()) as check:
        os.kill(check.start(), signal.SIGKILL)
        with pytest.raises(Failure, match=said) as failed:
            check.run(scripted_card())
    assert failed.value.exit_code == ExitCode.FAILED
