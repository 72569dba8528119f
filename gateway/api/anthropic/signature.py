"""The signature of a thinking block: a digest of its text, or the text itself in opaque form.

Clients drop thinking without a signature, and send a signature back unchanged. If a client asks for
blocks without their text, the signature is the only way in which the text can come back with the
next request, so that the model reads its own reasoning between the steps of an agent. Nothing is
encrypted, and a digest is never checked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

from protocol.wire.errors import InvalidRequest

SIGNATURE_BYTES = 32
_SEALED = "tidegate1."
"""Start of a signature that holds a text. A digest has no dot."""
MAX_SEALED_BYTES = 1 << 18
"""Most bytes of a text that a signature holds: about 60,000 tokens. Every later request of the
conversation has the signature, so a longer text is not kept."""


class BlockSignature:
    """Builds the signature of one block from the pieces of its text.

    seals  the signature holds the text
    """

    def __init__(self, *, seals: bool) -> None:
        #: Whether the text was too long to be kept.
        self.is_too_long = False
        self._seals = seals
        self._digest = hashlib.blake2b(digest_size=SIGNATURE_BYTES, person=b"tidegate")
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def push(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self._digest.update(data)
        if not self._seals or self.is_too_long:
            return
        self._num_bytes += len(data)
        self._pieces.append(data)
        if self._num_bytes > MAX_SEALED_BYTES:
            self.is_too_long = True
            self._pieces.clear()

    def finish(self) -> str:
        if self._seals and not self.is_too_long:
            return _SEALED + base64.b64encode(b"".join(self._pieces)).decode()
        return base64.b64encode(self._digest.digest()).decode()


def sealed_text(signature: str, at: str) -> str:
    """Return the text in a signature; "" if it holds none. Raise InvalidRequest, naming the path
    `at`, if it holds one that this server did not write."""
    if not signature.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_SEALED), validate=True).decode()
    except (ValueError, binascii.Error):
        raise InvalidRequest.at(at, "must be a value that this server wrote") from None
