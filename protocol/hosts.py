"""Which addresses only this machine reaches."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach who listens on `host`, or is who speaks from
    it. A name other than localhost may lead anywhere."""
    name = host.strip("[]").rstrip(".").lower()
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
