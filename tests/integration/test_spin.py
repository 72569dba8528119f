"""A short run of `python -m tests.torture.spin`: no process spins after kills, and no message is
missed."""

from __future__ import annotations

from tests.torture.spin import (
    IDLE_CPU,
    clients_killed,
    engines_killed,
    messages_to_engine,
    messages_to_gateway,
)


def test_an_engine_whose_clients_were_killed_forgets_them_and_is_idle() -> None:
    assert clients_killed(4) < IDLE_CPU


def test_a_gateway_whose_engines_were_killed_serves_with_the_next_and_is_idle() -> None:
    assert engines_killed(4) < IDLE_CPU


def test_no_message_to_a_gateway_is_missed_in_random_bursts() -> None:
    messages_to_gateway(30_000)


def test_an_engine_answers_every_heartbeat_once() -> None:
    messages_to_engine(5_000)
