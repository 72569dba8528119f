"""The error of a broken tensor parallel group. Needs no torch."""


class PeerLost(Exception):
    """The connection to another rank broke. The cause is in that rank."""
