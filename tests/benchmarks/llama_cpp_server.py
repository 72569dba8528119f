"""Sends completions to llama.cpp's own server. Its environment needs only xllamacpp, whose packages
contain the compiled server.

stdin: {"model": path, "requests": [bodies of /completion]}. stdout: a line of JSON for each, with
the candidates for the first token: [[id, probability after sampling, or else log probability]].
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import xllamacpp  # type: ignore[import-not-found]

CONTEXT_TOKENS = 1024


def started(model: str) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel = CONTEXT_TOKENS, 1
    params.cpuparams.n_threads = min(2, os.cpu_count() or 1)
    params.warmup = False
    return xllamacpp.Server(params)


def candidates(answer: dict[str, Any]) -> list[tuple[int, float]]:
    """Return the candidates of an answer. Raises ValueError if the server refused the request."""
    if "error" in answer:
        raise ValueError(answer["error"]["message"])
    first = answer["choices"][0]["logprobs"]["content"][0]
    if "top_probs" in first:
        return [(each["id"], each["prob"]) for each in first["top_probs"]]
    return [(each["id"], each["logprob"]) for each in first["top_logprobs"]]


def main() -> None:
    asked = json.load(sys.stdin)
    server = started(asked["model"])
    for body in asked["requests"]:
        print(json.dumps(candidates(server.handle_completions(body))), flush=True)


if __name__ == "__main__":
    main()
