"""Samples calls of custom tools at a high temperature, from a real server with the default model,
and parses the text of each with Python's Lark.

    python -m tests.torture.custom_tools [--answers 1000] [--at-once 16] [--temperature 1.5]

Every complete call must have a text that its tool's grammar admits. A call that the token limit or
a stop ended in the middle must be marked as incomplete. The command prints a row for each grammar
and API, and exits with 1 if there is any complaint. `make torture` runs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import lark
import requests

from tests.support.custom_tools import ARITHMETIC, JSON, SHORT_PATCH, custom_tool
from tests.support.server import Server
from tests.torture.table import print_table

GRAMMARS: Mapping[str, tuple[str, str]] = {
    "patch": (SHORT_PATCH, "Add a file hello.txt that has the line hi."),
    "sum": (ARITHMETIC, "Write 3 plus 4, times 5."),
    "value": (JSON, "Write a small JSON object."),
}
PARSERS = {name: lark.Lark(source) for name, (source, _) in GRAMMARS.items()}
APIS = ("chat", "responses")
MAX_TOKENS = (40, 400)
"""Limits in turn: with the small one, most calls are cut off in the middle."""
COLUMNS = {"grammar": 10, "API": 12, "answers": 8, "complete": 9, "incomplete": 11, "wrong": 0}


@dataclass(frozen=True)
class CustomCall:
    """The call of an answer. `is_marked` is whether the answer says that it is complete."""

    text: str
    is_marked: bool


@dataclass
class GrammarRow:
    """A row of the table."""

    grammar: str
    api: str
    answers: int = 0
    complete: int = 0
    wrong: list[str] = field(default_factory=list)

    def cells(self) -> tuple[str, ...]:
        numbers = (self.answers, self.complete, self.answers - self.complete, len(self.wrong))
        return self.grammar, self.api, *map(str, numbers)

    def complaints(self, slack: float) -> list[str]:
        return self.wrong[:5]

    def count(self, call: CustomCall) -> None:
        """Count an answer. A text that the grammar admits may still have been cut off, because more
        could follow."""
        self.answers += 1
        self.complete += call.is_marked
        if call.is_marked and not admits(self.grammar, call.text):
            self.wrong.append(f"a complete call has the text {call.text!r}")


def admits(name: str, text: str) -> bool:
    try:
        PARSERS[name].parse(text)
    except lark.exceptions.LarkError:
        return False
    return True


class CustomToolClient:
    """Sends requests that require a call of a custom tool."""

    def __init__(self, url: str, temperature: float) -> None:
        self._url = url
        self._temperature = temperature

    def call(self, api: str, name: str, seed: int) -> CustomCall:
        source, question = GRAMMARS[name]
        tool = custom_tool(name, "lark", source)
        body: dict[str, Any] = {
            "temperature": self._temperature,
            "seed": seed,
            "parallel_tool_calls": False,
        }
        most = MAX_TOKENS[seed % len(MAX_TOKENS)]
        if api == "chat":
            return self._chat({**body, "max_tokens": most}, question, tool)
        return self._response({**body, "max_output_tokens": most}, question, tool)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = requests.post(f"{self._url}{path}", json=body, timeout=600)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def _chat(self, body: dict[str, Any], question: str, tool: dict[str, Any]) -> CustomCall:
        name = tool["custom"]["name"]
        body |= {
            "messages": [{"role": "user", "content": question}],
            "tools": [tool],
            "tool_choice": {"type": "custom", "custom": {"name": name}},
        }
        choice = self._post("/v1/chat/completions", body)["choices"][0]
        calls = choice["message"].get("tool_calls") or [{"custom": {"input": ""}}]
        is_marked = choice["finish_reason"] == "tool_calls"
        return CustomCall(calls[0]["custom"]["input"], is_marked)

    def _response(self, body: dict[str, Any], question: str, tool: dict[str, Any]) -> CustomCall:
        custom = tool["custom"]
        grammar = custom["format"]["grammar"]
        flat = {**custom, "type": "custom", "format": {"type": "grammar", **grammar}}
        body |= {
            "input": question,
            "tools": [flat],
            "tool_choice": {"type": "custom", "name": custom["name"]},
            "store": False,
        }
        response = self._post("/v1/responses", body)
        items = [item for item in response["output"] if item["type"] == "custom_tool_call"]
        if not items:
            return CustomCall("", is_marked=False)
        assert (items[0]["status"] == "completed") == (response["status"] == "completed")
        return CustomCall(items[0]["input"], items[0]["status"] == "completed")


def rows(options: argparse.Namespace) -> Iterator[GrammarRow]:
    pairs = list(product(GRAMMARS, APIS))
    wanted = -(-options.answers // len(pairs))
    with (
        Server("--max-slots", str(options.at_once)) as server,
        ThreadPoolExecutor(options.at_once) as threads,
    ):
        client = CustomToolClient(server.url, options.temperature)
        for name, api in pairs:
            row = GrammarRow(name, api)
            for start in range(options.first, options.first + 20 * wanted, options.at_once):
                seeds = range(start, start + options.at_once)
                for call in threads.map(partial(client.call, api, name), seeds):
                    row.count(call)
                if row.complete >= wanted:
                    break
            else:
                row.wrong.append(f"only {row.complete} of {wanted} calls were complete")
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--answers", type=int, default=1000, help="number of complete calls")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.5)
    return print_table(COLUMNS, rows(parser.parse_args()), 1.0)


if __name__ == "__main__":
    sys.exit(main())
