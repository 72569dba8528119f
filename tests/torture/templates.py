"""Sends hostile chat templates, each several times at once, to a real `tidegate serve` with a tiny
model, and checks that other clients are served meanwhile.

    python -m tests.torture.templates [--template "sorted"] [--at-once 4]

The other clients stream chats, which the model's own template renders, and /livez is requested all
the time. Each template must be refused with an error, no stream may be lost, /livez must answer in
time, and the gateway and its sandbox processes may not grow. The command prints a row for each
template and exits with 1 if there is any complaint. `make torture` runs all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import requests

from gateway.sandbox import process as sandbox_process
from tests.support.hostile_templates import LARGE, REFUSED, SLOW
from tests.support.processes import descendants_of, rss_mib
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_roomy_llama
from tests.torture.table import print_table
from tests.torture.witnesses import Witnessed, Witnesses, run_attacker

MODULE = "tests.torture.templates"
TEMPLATES = SLOW | LARGE | REFUSED
REFUSALS = (400, 429)
FLAT_MIB = 64
"""Most MiB that the gateway, or all of its sandbox processes together, may gain: pools keep
pages."""
NUM_WITNESSES, WITNESS_TOKENS = 2, 50
REQUEST_S = 300.0
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "w1 w2"}]
OWN = "{% for message in messages %}w1 {{ message.content }} {% endfor %}"
"""The model's own template."""
COLUMNS = {
    "template": 36,
    "seconds": 8,
    "answers": 16,
    "/livez ms": 10,
    "gateway MiB": 12,
    "limited MiB": 12,
    "streams": 0,
}


class Answers(msgspec.Struct, frozen=True):
    """The statuses that the attacker received, and the seconds until the last of them."""

    seconds: float
    statuses: list[int]


@dataclass(frozen=True, slots=True)
class TemplateResult:
    """The result of one template.

    failure   why the attacker did not receive all answers; "" if it did
    """

    name: str
    answers: Answers
    failure: str
    witnessed: Witnessed

    def complaints(self, slack: float | None = 1.0) -> list[str]:
        """Return what is wrong. `slack` stretches time limits; None: times are not checked."""
        wrong = [status for status in self.answers.statuses if status not in REFUSALS]
        found = [f"answered with {status}" for status in wrong]
        if self.failure:
            found.append(f"not answered: {self.failure}")
        return found + self.witnessed.complaints(slack)

    def cells(self) -> tuple[str, ...]:
        counts = sorted(Counter(self.answers.statuses).items())
        return (
            self.name,
            f"{self.answers.seconds:.1f}",
            ", ".join(f"{count} x {status}" for status, count in counts),
            f"{self.witnessed.livez_ms:.0f}",
            *self.witnessed.sizes(),
            str(self.witnessed.num_streams),
        )


class TemplateTarget(Server):
    """A server that accepts chat templates in requests. `strike` sends a hostile one while other
    clients stream chats."""

    def __init__(self, folder: Path) -> None:
        model = write_roomy_llama(folder)
        (model / "chat_template.jinja").write_text(OWN)
        super().__init__("--max-slots", "8", "--trust-request-chat-template", model=str(model))

    def __enter__(self) -> Self:
        super().__enter__()
        facts = requests.get(self.url + "/readyz", timeout=5).json()
        self._gateway_pid: int = facts["gateway"]["pid"]
        send("{{ messages[0].content }}", self.port)  # starts the process for such templates
        return self

    def strike(self, name: str, at_once: int) -> TemplateResult:
        witnesses = Witnesses(
            self.url,
            self._gateway_pid,
            self._sizes,
            lambda client: client.stream(
                CHAT, {"messages": MESSAGES, "max_tokens": WITNESS_TOKENS}
            ),
            num_streams=NUM_WITNESSES,
            flat_mib=FLAT_MIB,
        )
        options = ("--template", name, "--at-once", str(at_once), "--port", str(self.port))
        with witnesses as witnessed:
            attacker = run_attacker(MODULE, *options)
        if attacker.failure:
            return TemplateResult(name, Answers(0.0, []), attacker.failure, witnessed)
        answers = msgspec.json.decode(attacker.printed, type=Answers)
        return TemplateResult(name, answers, "", witnessed)

    def _sizes(self) -> dict[str, int]:
        family = descendants_of(self._gateway_pid)
        limited = [pid for pid, line in family if sandbox_process.MODULE in line]
        return {"gateway": rss_mib(self._gateway_pid), "limited": sum(map(rss_mib, limited))}


def send(template: str, port: int) -> int:
    """Send a chat request that contains this template. Return the status of the response."""
    url = f"http://127.0.0.1:{port}{CHAT}"
    body: dict[str, Any] = {"messages": MESSAGES, "chat_template": template, "max_tokens": 1}
    return requests.post(url, json=body, timeout=REQUEST_S).status_code


def send_all(name: str, at_once: int, port: int) -> Answers:
    """Send the hostile template `name` several times at once."""
    started_at = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        statuses = list(pool.map(lambda _: send(TEMPLATES[name], port), range(at_once)))
    return Answers(time.monotonic() - started_at, statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument(
        "--template", choices=TEMPLATES, action="append", help="template to try (default: all)"
    )
    parser.add_argument("--at-once", type=int, default=4, help="number of attacks at the same time")
    parser.add_argument("--slack", type=float, default=1.0, help="factor for all time limits")
    parser.add_argument("--port", type=int, help="attack the server at this port")
    options = parser.parse_args()
    if options.port:
        answers = send_all(options.template[0], options.at_once, options.port)
        print(msgspec.json.encode(answers).decode())
        return 0
    with tempfile.TemporaryDirectory() as folder, TemplateTarget(Path(folder)) as target:
        rows = (target.strike(name, options.at_once) for name in options.template or TEMPLATES)
        return print_table(COLUMNS, rows, options.slack)


if __name__ == "__main__":
    sys.exit(main())
