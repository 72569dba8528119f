"""Computes logprobs of given tokens with llama.cpp. Its environment needs only llama-cpp-python.

stdin: {"model": path, "tokens": [N ids]} as JSON. stdout: a JSON list with the natural logarithms
of the probabilities of the last N - 1 tokens, each given all tokens before it.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from llama_cpp import Llama  # type: ignore[import-not-found]


def main() -> None:
    asked = json.load(sys.stdin)
    tokens = asked["tokens"]
    model = Llama(asked["model"], n_ctx=len(tokens), logits_all=True, verbose=False)
    model.eval(tokens)
    logits = np.asarray(model.scores[: len(tokens) - 1], dtype=np.float64)  # [N - 1, V]
    logits -= logits.max(axis=1, keepdims=True)
    norms = np.log(np.exp(logits).sum(axis=1))
    chosen = logits[np.arange(len(tokens) - 1), tokens[1:]]
    json.dump((chosen - norms).tolist(), sys.stdout)


if __name__ == "__main__":
    main()
