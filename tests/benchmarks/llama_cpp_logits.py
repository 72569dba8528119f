"""Computes logits of given tokens with llama.cpp. Its environment needs only llama-cpp-python.

stdin: a JSON list of {"model": path, "tokens": [N ids], "generate": count}. stdout: a line of JSON
for each: {"logits": [N, V], "generated": [count ids, the likeliest after N tokens]}, or
{"error": text} if llama.cpp refuses the file.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from llama_cpp import Llama  # type: ignore[import-not-found]


def computed(model: str, tokens: list[int], generate: int) -> dict[str, Any]:
    loaded = Llama(model, n_ctx=512, n_batch=512, logits_all=True, verbose=False)
    loaded.eval(tokens)
    logits = np.array(loaded.scores[: len(tokens)], np.float64)
    generated: list[int] = []
    for _ in range(generate):
        generated.append(int(np.argmax(loaded.scores[len(tokens) + len(generated) - 1])))
        loaded.eval(generated[-1:])
    return {"logits": logits.tolist(), "generated": generated}


def main() -> None:
    for asked in json.load(sys.stdin):
        try:
            found = computed(**asked)
        except ValueError as error:  # raised by llama-cpp-python if a file is refused
            found = {"error": str(error)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
