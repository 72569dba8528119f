"""Inputs of batch runs, and checks of their outputs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COMPLETIONS = "/v1/completions"


def batch_line(custom_id: str, body: dict[str, Any], url: str = COMPLETIONS) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def completion_lines(count: int, *, max_tokens: int = 8) -> list[dict[str, Any]]:
    """Return lines with different prompts of one to five words of the tiny checkpoint."""
    return [
        batch_line(
            f"line-{number}",
            {
                "prompt": " ".join(f"w{3 + (number * 7 + k) % 80}" for k in range(1 + number % 5)),
                "max_tokens": max_tokens,
                "temperature": 0,
            },
        )
        for number in range(count)
    ]


def jsonl(lines: Iterable[Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def results_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def complaints(lines: Iterable[dict[str, Any]], results: Iterable[dict[str, Any]]) -> list[str]:
    """Return what is wrong with the results of the lines: each line needs exactly one, and that
    with status 200."""
    results = list(results)
    counts = Counter(result["custom_id"] for result in results)
    expected = Counter(line["custom_id"] for line in lines)
    found = [f"{name}: {counts[name]} results" for name in expected if counts[name] != 1]
    found += [f"{name}: no such line" for name in counts.keys() - expected.keys()]
    found += [
        f"{result['custom_id']}: {result['response'] or result['error']}"
        for result in results
        if result["response"] is None or result["response"]["status_code"] != 200
    ]
    ids = {result["id"] for result in results}
    if len(ids) != len(results):
        found.append(f"{len(results)} results have {len(ids)} ids")
    return found
