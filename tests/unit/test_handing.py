"""The values that routers may send in `kv_transfer_params`, and those that are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.formats.choice_parser import TokenPassthroughFactory
from gateway.generation.kv_params import (
    MAX_HANDLE_CHARS,
    KVTransferParams,
    apply_kv_params,
    parse_kv_params,
)
from gateway.generation.request import PromptRequest
from protocol.engine.sampling import SamplingParams
from protocol.wire.errors import InvalidRequest
from tests.support.served import LIMITS

KEEPING = msgspec.structs.replace(LIMITS, kv_lease_s=30.0)
KEEP, GO_ON = {"do_remote_decode": True}, {"do_remote_prefill": True, "handle": "abc"}


def requests_of(num_prompts: int = 1, num_choices: int = 1) -> list[PromptRequest]:
    choices = [SamplingParams(seed=seed) for seed in range(num_choices)]
    return [
        PromptRequest([1, 2, 3], choices, TokenPassthroughFactory([2])) for _ in range(num_prompts)
    ]


@pytest.mark.parametrize(
    ("given", "wish"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_decode": False, "do_remote_prefill": False, "handle": None}, None),
        (KEEP, KVTransferParams(keeps=True)),
        (  # as vLLM's own router asks
            KEEP
            | {"do_remote_prefill": False}
            | dict.fromkeys(["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"]),
            KVTransferParams(keeps=True),
        ),
        (GO_ON, KVTransferParams(handle="abc")),
        (GO_ON | {"do_remote_decode": False}, KVTransferParams(handle="abc")),
    ],
)
def test_parameters_that_do_something_are_parsed(
    given: dict[str, Any] | None, wish: KVTransferParams | None
) -> None:
    assert parse_kv_params(given, KEEPING) == wish


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("remote_host", GO_ON | {"remote_host": "10.0.0.1"}),
        ("remote_port", KEEP | {"remote_port": 5600}),
        ("remote_block_ids", KEEP | {"remote_block_ids": [[1, 2]]}),
        ("remote_engine_id", {"remote_engine_id": ""}),
        ("tp_size", GO_ON | {"tp_size": 0}),
        ("do_remote_decode", {"do_remote_decode": 1}),
        ("do_remote_prefill", KEEP | GO_ON),
        ("handle", {"do_remote_prefill": True}),
        ("handle", {"do_remote_prefill": True, "handle": ""}),
        ("handle", {"handle": "abc"}),
        ("handle", GO_ON | {"handle": {"host": "x"}}),
        ("handle", GO_ON | {"handle": "a" * (MAX_HANDLE_CHARS + 1)}),
    ],
)
def test_clients_name_no_hosts_ports_or_blocks(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_kv_params(given, KEEPING)
    assert caught.value.param == f"kv_transfer_params.{field}"


def test_a_prompt_is_kept_for_as_many_as_it_has_choices() -> None:
    (ask,) = apply_kv_params(
        requests_of(num_choices=3), KVTransferParams(keeps=True), streams=False
    )
    assert (ask.kv_readers, len(ask.choices)) == (3, 1)


def test_every_choice_goes_on_from_the_handle() -> None:
    (ask,) = apply_kv_params(
        requests_of(num_choices=3), KVTransferParams(handle="abc"), streams=True
    )
    assert (ask.kv_handle, ask.kv_readers, len(ask.choices)) == ("abc", 0, 3)


@pytest.mark.parametrize("wish", [KVTransferParams(keeps=True), KVTransferParams(handle="abc")])
def test_a_handle_goes_with_one_prompt(wish: KVTransferParams) -> None:
    with pytest.raises(InvalidRequest, match="one prompt"):
        apply_kv_params(requests_of(num_prompts=2), wish, streams=False)


def test_keeping_kv_cannot_be_combined_with_stream() -> None:
    with pytest.raises(InvalidRequest, match="cannot be combined with stream"):
        apply_kv_params(requests_of(), KVTransferParams(keeps=True), streams=True)


def test_an_engine_that_keeps_nothing_ignores_do_remote_decode() -> None:
    assert parse_kv_params(KEEP, LIMITS) is None
    assert parse_kv_params(GO_ON, LIMITS) == KVTransferParams(handle="abc")
    given = requests_of()
    assert apply_kv_params(given, None, streams=True) == given
