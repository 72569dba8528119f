"""Sends the results of encoding at the pace at which their clients read."""

from __future__ import annotations

from engine_core.connections.clients import STALLED_S
from engine_core.connections.mailbox import Mailbox
from engine_core.engine import Engine


def send_results(engine: Engine, mailbox: Mailbox, lease_s: float, now: float) -> None:
    """Send the waiting results of each client that has few enough unread bytes.

    A client whose results still wait is dropped if it has read nothing for `lease_s`. If clients
    hold up each other's results, they are dropped after STALLED_S, and so is the client with the
    most unread bytes.
    """
    unsent, clients = engine.encoding.unsent, mailbox.clients
    for client in list(unsent.clients):
        while client in unsent.clients and unsent.fits(client, clients.result_room(client)):
            mailbox.send(client, engine.pop_results(client, clients.result_room(client)))
    late = list(unsent.clients)
    if late and clients.must_large_results_wait:
        late.append(clients.worst_reader(now))
    is_crowded = clients.must_large_results_wait or unsent.are_too_many
    for client in late:
        if clients.is_stalled(client, STALLED_S if is_crowded else lease_s, now):
            mailbox.drop(client, now)
