"""Errors about a translated chat name fields of the client's request."""

from __future__ import annotations

import pytest

from gateway.api.openai.field_paths import translate_errors
from protocol.wire.errors import EngineLost, InvalidRequest, RequestError


def translated(message: str, param: str | None) -> tuple[str, str | None]:
    with (
        pytest.raises(RequestError) as raised,
        translate_errors({"stop": "stop_sequences"}.__getitem__),
    ):
        raise InvalidRequest(message, param=param)
    return raised.value.message, raised.value.param


def test_a_field_name_is_replaced_only_as_a_whole_name() -> None:
    assert translated("stop: five of them; stop takes four", "stop") == (
        "stop_sequences: five of them; stop_sequences takes four",
        "stop_sequences",
    )
    assert translated("stopped by stop_token_ids and x.stop", "stop") == (
        "stopped by stop_token_ids and x.stop",
        "stop_sequences",
    )


def test_an_error_without_a_field_is_unchanged() -> None:
    assert translated("stop", None) == ("stop", None)


def test_an_engine_error_is_unchanged() -> None:
    with pytest.raises(EngineLost, match="stop"), translate_errors(dict[str, str]().__getitem__):
        raise EngineLost("stop")


def test_a_field_of_the_engine_is_replaced_in_param_only_because_its_message_is_in_words() -> None:
    own = {"messages": "input"}.get
    with (
        pytest.raises(RequestError) as raised,
        translate_errors(lambda name: own(name, name), {"prompt": "messages"}),
    ):
        raise InvalidRequest("the prompt is 9 tokens", param="prompt")
    assert (raised.value.message, raised.value.param) == ("the prompt is 9 tokens", "input")
