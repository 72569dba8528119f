"""Checks whether only this machine can reach a host."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`: a loopback address, or "localhost".

    Other names are never loopback, because they may resolve to any address.
    """
    name = host.strip("[]").rstrip(".").lower()
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
