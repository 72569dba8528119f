"""Uploads that never end. tests/integration/batches has those that do."""

from __future__ import annotations

import gevent
import pytest
from gunicorn.http.errors import NoMoreData
from werkzeug.exceptions import RequestTimeout

from gateway.api.batches import uploads
from gateway.api.batches.uploads import read_upload


class SlowBody:
    """A body whose letters arrive one by one, until it breaks off."""

    def __init__(self, num_letters: int) -> None:
        self.num_left = num_letters

    def read(self, size: int, /) -> bytes:
        gevent.sleep(0)  # lets the timeout end it
        if not self.num_left:
            raise NoMoreData
        self.num_left -= 1
        return b"x"


class NoFile:
    def begin(self, filename: str) -> None:
        raise AssertionError("the body has no file")

    def write(self, piece: bytes) -> None:
        raise AssertionError("the body has no file")


def test_an_upload_that_arrives_letter_by_letter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_S", 0.05)
    body = SlowBody(1 << 40)
    with pytest.raises(RequestTimeout, match="took longer"):
        read_upload(body, "multipart/form-data; boundary=b", 1 << 20, NoFile())
    assert body.num_left
