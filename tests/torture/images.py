"""Attacks with images: small files that would need much memory or time, damaged files, too many of
them, nonsense in place of base64, URLs of hosts that nobody may reach through the server, and hosts
that misbehave.

    python -m tests.torture.images [--attack "50 megapixels"] [--at-once 16]

The server is `tidegate serve` with a tiny model that reads images, and it may load images from a
host whose address is not public. What is checked, and printed, is that of
tests/torture/attacks.py. `make torture` runs all attacks;
tests/integration/images/test_image_requests.py sends a few of them to a gateway, and
tests/integration/images/test_decoding.py has the files.

The hosts need addresses that count as public, so everything runs in a network of its own
(own_network.py). If none can be made, a line says so, and the hosts are left out.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from gateway.images.limits import MAX_IMAGE_BYTES, MAX_IMAGES
from tests.support.hostile_images import HOSTILE, animation, black_png
from tests.support.http import exchange
from tests.support.processes import Program
from tests.torture import image_hosts, own_network
from tests.torture.attacks import BODY_BYTES, Attack, AttackResult, AttackTarget, run

MODULE = "tests.torture.images"
CHAT = "/v1/chat/completions"
LOCAL_HOSTS = ("169.254.169.254", "127.0.0.1", "localhost")
"""Hosts from which the server may load images, as an operator might write them by mistake."""
ROOM = BODY_BYTES - 4096
KEPT_MIB = 32
"""Memory of the server for preprocessed images, much less than a gateway process may gain."""
MAX_TRIES = 50
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class ImageAttack:
    """A chat request with images.

    urls      returns the URLs of the images
    why       a part of the error; "": any, or none
    statuses  the response must have one of them
    """

    urls: Callable[[], Sequence[str]]
    why: str = ""
    statuses: tuple[int, ...] = (400,)

    def send(self, port: int, address: str) -> None:
        self.status(port, address)

    def status(self, port: int, _address: str) -> int:
        """Send the request, and return the status of its response."""
        parts: list[Any] = [{"type": "image_url", "image_url": url} for url in self.urls()]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        status, _, answer = exchange(port, CHAT, body)
        assert status in self.statuses, (status, answer[:300])
        if status == 400:
            error = json.loads(answer)["error"]
            assert error["param"].startswith("messages"), error
            assert self.why in error["message"], error
        return status


@dataclass(frozen=True, slots=True)
class Alternating:
    """An attack whose response changes. It is sent until each of its statuses has been seen."""

    attack: ImageAttack

    def send(self, port: int, address: str) -> None:
        seen: set[int] = set()
        for _ in range(MAX_TRIES):
            seen.add(self.attack.status(port, address))
            if seen == set(self.attack.statuses):
                return
        raise AssertionError(f"{MAX_TRIES} responses have the statuses {seen}")


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def of_file(file: bytes, why: str = "", statuses: tuple[int, ...] = (400,)) -> ImageAttack:
    return ImageAttack(lambda: [data_url(file)], why, statuses)


def of_url(url: str, why: str) -> ImageAttack:
    return ImageAttack(lambda: [url], why)


def new_pixels(number: int, width: int, height: int) -> Callable[[], Sequence[str]]:
    """Return a function that returns the URLs of images that nobody has sent before."""
    return lambda: [
        data_url(black_png(width, height, number=next(_numbers))) for _ in range(number)
    ]


NOT_PUBLIC = "an address that is not on the internet"
NOT_ALLOWED = "this server loads no images from"
COSTLY = (200, 429)
"""Statuses of images that are read, unless too many of them wait."""
IMAGE_ATTACKS: dict[str, Attack] = {
    "an animation": of_file(animation(100), statuses=(200,)),
    "an animated WebP": of_file(animation(100, "WEBP"), statuses=(200,)),
    **{name: of_file(*found) for name, found in HOSTILE.items()},
    "50 megapixels": ImageAttack(new_pixels(1, 7000, 7000), statuses=COSTLY),
    "100 images": ImageAttack(new_pixels(MAX_IMAGES, 1, 1), statuses=(200, 400, 429)),
    "10,000 images": ImageAttack(
        lambda: [data_url(black_png(1, 1))] * 10_000, f"at most {MAX_IMAGES} images"
    ),
    "deep data: URLs": of_url("data:" * (ROOM // 5), "data:<media type>;base64,"),
    "options of a data: URL": of_url(f"data:image/png{';x' * (ROOM // 2)};base64,AA==", "must be"),
    "a long media type": of_url(f"data:image/{'x' * (ROOM - 99)};base64,AA==", "must be"),
    "no base64": of_url(f"data:image/png;base64,{'!' * (ROOM - 99)}", "not valid base64"),
    "no ASCII": of_url(f"data:image/png;base64,{'é' * (ROOM // 6 - 99)}", "not ASCII"),
    "blanks": of_url(f"data:image/png;base64,{' ' * (ROOM - 99)}", "no bytes"),
    "zeros in base64": of_url(f"data:image/png;base64,{'A' * (ROOM - 100)}", "not an image"),
    "the metadata of a cloud": of_url("http://169.254.169.254/latest/meta-data", NOT_PUBLIC),
    "this machine": of_url("http://localhost/a.png", NOT_PUBLIC),
    "this machine by its number": of_url("http://127.0.0.1:80/a.png", NOT_PUBLIC),
    "an address as one number": of_url("http://2130706433/a.png", NOT_ALLOWED),
    "another port": of_url("http://localhost:22/a.png", NOT_ALLOWED),
    "another host": of_url("https://example.com/a.png", NOT_ALLOWED),
    "a file": of_url("file:///etc/passwd", "must be a data: URL"),
    "a long URL": of_url(f"http://{'x' * (ROOM - 99)}/", "more than 8,192 characters"),
}


def of_hosts(why: str, *names: str, statuses: tuple[int, ...] = (400,)) -> ImageAttack:
    """Return an attack with an image at one of the hosts in turn."""
    hosts = itertools.cycle(names)
    return ImageAttack(lambda: [f"http://{next(hosts)}.test/"], why, statuses)


TOO_SLOW = "was not loaded within 10 s"
TOO_LARGE = f"more than {MAX_IMAGE_BYTES:,} bytes"
HOST_ATTACKS: dict[str, Attack] = {
    "a good host": of_hosts("", "good", statuses=(200,)),
    "to another host": of_hosts("redirects to another host", "to-another"),
    "to this machine": of_hosts("redirects to another host", "to-this-machine", "to-metadata"),
    "redirects in circles": of_hosts("redirects too often", "in-circles"),
    "a name that changes": Alternating(of_hosts(NOT_PUBLIC, "changing", statuses=(200, 400))),
    "a half public name": of_hosts(NOT_PUBLIC, "half-public"),
    "a name without address": of_hosts("could not be loaded", "unknown"),
    "a silent name server": of_hosts(TOO_SLOW, "nameless"),
    "slow hosts": of_hosts(TOO_SLOW, "silent", "slow-head", "slow-body"),
    "a body without end": of_hosts(TOO_LARGE, "endless", statuses=(400, 429)),
    "a huge body": of_hosts(TOO_LARGE, "announced"),
    "heads without end": of_hosts(TOO_SLOW, "many-heads"),
    "chunks of one byte": of_hosts(TOO_SLOW, "small-chunks"),
    "trailers without end": of_hosts(TOO_SLOW, "many-trailers"),
}
"""Attacks with the hosts of image_hosts.py."""


class HostsTarget(AttackTarget):
    """A server to attack, and the hosts from which it loads images, in a network of its own."""

    def __enter__(self) -> Self:
        self._hosts = Program(["-P", "-m", image_hosts.MODULE], has_stdin=True)
        try:
            self._hosts.line_with(image_hosts.READY)
            return super().__enter__()
        except BaseException:
            self._hosts.__exit__(None, None, None)
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            super().__exit__(*exception)
        finally:
            self._hosts.__exit__(*exception)

    def strike(self, name: str, at_once: int) -> AttackResult:
        before = len(self._hosts.out)
        result = super().strike(name, at_once)
        reached = [line for line in self._hosts.out[before:] if image_hosts.REACHED in line]
        return replace(result, failure=f"this machine was {reached[0]}") if reached else result


def make_target(folder: Path) -> AttackTarget:
    """Return the server to attack. Its model is written to `folder`."""
    from tests.support.image_checkpoint import write_smolvlm  # attackers start without torch

    has_hosts = own_network.is_inside()
    names = (*LOCAL_HOSTS, *(image_hosts.HOSTS if has_hosts else ()))
    allowed = [word for name in names for word in ("--image-urls", name)]
    kept = "--preprocessed-images-mib", str(KEPT_MIB)
    kind = HostsTarget if has_hosts else AttackTarget
    return kind(write_smolvlm(folder), *kept, *allowed, module=MODULE)


def main() -> int:
    if own_network.is_inside():
        return run(__doc__ or "", IMAGE_ATTACKS | HOST_ATTACKS, make_target)
    if not any(word.startswith("--port") for word in sys.argv):  # this is no attacker's process
        why = own_network.why_not()
        if not why:
            own_network.enter([sys.executable, "-P", "-m", MODULE, *sys.argv[1:]])
        print(f"left out: {len(HOST_ATTACKS)} attacks, which need a network of their own: {why}")
    return run(__doc__ or "", IMAGE_ATTACKS, make_target)


if __name__ == "__main__":
    sys.exit(main())
