"""Compares our distributions with those of llama.cpp's server, on the default model.

    python -m tests.benchmarks.llama_cpp_server_samplers PYTHON [--prompts N]

PYTHON belongs to an environment with xllamacpp (tried with 2026.10.11549), which contains
llama.cpp's server. The server gets N prompts (20) with each setting, and reports the NUM_SHOWN
most likely tokens after sampling (`post_sampling_probs`). Our samplers get the logits that it
reports without samplers. Prints for each setting the largest difference of a probability and how
much the setting changes one, and first the difference of its logits from ours (float32 activations;
llama.cpp rounds them to 8 bits). Exits with 1 if a difference exceeds MAX_DIFFERENCE, or if a
setting changes less.

XTC is compared with probability 1 only, since the random numbers differ. The repetition penalty is
left to `llama_cpp_samplers`: it depends on the signs of logits, which log probabilities lack.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gateway.text.breakers import USUAL_BREAKERS
from gateway.text.tokenizer import Tokenizer
from protocol.engine.sampling import SamplingParams
from tests.benchmarks.llama_cpp_samplers import (
    LLAMA_CPP_ORDER,
    MAX_DIFFERENCE,
    described,
    our_probabilities,
)
from tests.benchmarks.perplexity import PROSE
from tests.support.eager import EagerStepper, load
from tests.support.model import smollm2_gguf

THEIRS = Path(__file__).with_name("llama_cpp_server.py")
PROMPTS = 20
PROMPT_TOKENS = 36
REPEATED_TOKENS = 6
"""A prompt ends with its first tokens again, so that DRY has a repetition to end."""
NUM_SHOWN = 100
ALL_TOKENS = 1000
"""More tokens than a prompt has."""
SETTINGS = [
    *(SamplingParams(top_k=k, samplers=["top_k"]) for k in (1, 5, 40)),
    *(SamplingParams(top_p=p, samplers=["top_p"]) for p in (0.3, 0.8, 0.95)),
    *(SamplingParams(min_p=p, samplers=["min_p"]) for p in (0.02, 0.1, 0.5)),
    *(SamplingParams(typical_p=p, samplers=["typ_p"]) for p in (0.3, 0.7, 0.95)),
    *(SamplingParams(top_n_sigma=n, samplers=["top_n_sigma"]) for n in (0.5, 1.0, 3.0)),
    *(SamplingParams(temperature=t, samplers=["temperature"]) for t in (0.4, 0.8, 1.6)),
    *(
        SamplingParams(
            temperature=t, dynatemp_range=r, dynatemp_exponent=e, samplers=["temperature"]
        )
        for t, r, e in ((1.0, 0.5, 1.0), (0.8, 0.7, 0.4), (1.5, 1.5, 3.0))
    ),
    *(
        SamplingParams(xtc_probability=1.0, xtc_threshold=x, samplers=["xtc"])
        for x in (0.02, 0.1, 0.3)
    ),
    *(
        SamplingParams(
            dry_multiplier=m, dry_base=b, dry_allowed_length=n, samplers=["dry", "temperature"]
        )
        for m, b, n in ((0.8, 1.75, 2), (2.0, 1.2, 1), (0.5, 3.0, 4))
    ),
    *(
        SamplingParams(frequency_penalty=f, presence_penalty=p, samplers=["penalties"])
        for f, p in ((0.7, 0.0), (0.0, 1.1), (0.3, -0.4))
    ),
    SamplingParams(samplers=LLAMA_CPP_ORDER, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    SamplingParams(
        samplers=LLAMA_CPP_ORDER,
        temperature=1.8,
        dynatemp_range=0.5,
        typical_p=0.95,
        min_p=0.01,
        xtc_probability=1.0,
        xtc_threshold=0.05,
        dry_multiplier=0.8,
    ),
    SamplingParams(
        samplers=["min_p", "temperature", "xtc", "top_k"],
        temperature=1.4,
        min_p=0.02,
        xtc_probability=1.0,
        xtc_threshold=0.08,
        top_k=12,
    ),
    SamplingParams(samplers=["top_p", "top_k", "temperature"], top_p=0.7, top_k=9, temperature=0.5),
]


SAME_NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "dynatemp_range"),
    *("dynatemp_exponent", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "frequency_penalty", "presence_penalty"),
)
"""Parameters with the same name and meaning in llama.cpp."""


def prompts_of(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    ids = tokenizer.encode(PROSE.read_text(), False)
    starts = range(0, count * PROMPT_TOKENS, PROMPT_TOKENS)
    pieces = [ids[start : start + PROMPT_TOKENS] for start in starts]
    return [piece + piece[:REPEATED_TOKENS] for piece in pieces]


def body_of(prompt: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """Return llama.cpp's request with these parameters."""
    return {
        **{name: getattr(params, name) for name in SAME_NAMES},
        "top_n_sigma": params.top_n_sigma or -1.0,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": ALL_TOKENS,
        "dry_penalty_last_n": ALL_TOKENS,
        "dry_sequence_breakers": USUAL_BREAKERS,
        "samplers": params.samplers,
        "prompt": prompt,
        "n_predict": 1,
        "n_probs": NUM_SHOWN,
        "post_sampling_probs": True,
    }


def logits_body(prompt: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Return llama.cpp's request for the log probabilities of all tokens without samplers."""
    plain = body_of(prompt, SamplingParams(samplers=[]))
    return {**plain, "n_probs": vocab_size, "post_sampling_probs": False}


def answers(
    python: str, model: Path, bodies: Sequence[dict[str, Any]]
) -> Iterator[list[tuple[int, float]]]:
    """Yield llama.cpp's candidates for the first token of each request."""
    asked = json.dumps({"model": str(model), "requests": bodies})
    command = [python, str(THEIRS)]
    ran = subprocess.run(
        command,
        input=asked,
        text=True,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("[")]
    yield from map(json.loads, lines)


def difference(ours: Tensor, theirs: Sequence[tuple[int, float]]) -> float:
    """Return the largest difference of a probability that llama.cpp shows. If it shows all that it
    has kept, the others are 0."""
    found = ours.clone() if len(theirs) == NUM_SHOWN else torch.zeros_like(ours)
    for token_id, probability in theirs:
        found[token_id] = probability
    return float((ours - found).abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python", help="Python of an environment with xllamacpp")
    parser.add_argument("--prompts", type=int, default=PROMPTS, metavar="N")
    options, model = parser.parse_args(), smollm2_gguf()
    loaded = load(model)
    tokenizer = Tokenizer(loaded.card)
    prompts = prompts_of(tokenizer, options.prompts)
    breakers = tokenizer.breakers(USUAL_BREAKERS)
    # All requests of a prompt follow each other, so that the server computes its tokens once.
    bodies = [
        body
        for prompt in prompts
        for body in (
            logits_body(prompt, loaded.card.vocab_size),
            *(body_of(prompt, params) for params in SETTINGS),
        )
    ]
    received = answers(options.python, model, bodies)
    theirs = torch.full((len(prompts), loaded.card.vocab_size), float("-inf"))
    shown = []
    for row in theirs:
        for token_id, logprob in next(received):
            row[token_id] = logprob
        shown.append([next(received) for _ in SETTINGS])
    stepper = EagerStepper(loaded, prompts)
    ours = torch.stack([rows[-1] for rows in stepper.step(*map(len, prompts))]).log_softmax(-1)
    apart = (ours - theirs).abs()
    plain = our_probabilities(theirs, prompts, SamplingParams())
    print(
        f"without samplers: log probabilities {apart.mean():.2e} apart on average, "
        f"{apart.max():.2e} at most; probabilities {(ours.exp() - theirs.exp()).abs().max():.2e}"
    )
    worst, least = 0.0, 1.0
    for place, params in enumerate(SETTINGS):
        used = msgspec.structs.replace(params, dry_breakers=list(breakers))
        found = our_probabilities(theirs, prompts, used)
        apart_by = max(difference(row, shown[n][place]) for n, row in enumerate(found))
        change = float((plain - found).abs().max())
        worst, least = max(worst, apart_by), min(least, change)
        print(f"{apart_by:.1e} of {change:.1e}  {described(params)}", flush=True)
    print(f"{len(SETTINGS)} settings, {len(prompts)} prompts: {worst:.1e}")
    return int(worst > MAX_DIFFERENCE or least < MAX_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
