"""Loads files of `tidegate quantize` with llama.cpp, and compares its logits with ours.

    python -m tests.benchmarks.quantized_in_llama_cpp PYTHON [--default-model]

PYTHON belongs to an environment with llama-cpp-python. Prints a line for each type of a tiny Llama,
and for a tiny model of each family that GGUF files can store. The error of a token is
|theirs - ours| / |ours|, where the mean of each row is subtracted from its logits. llama.cpp rounds
activations to 8 bits, which random weights amplify; rows in a wrong order give errors of about 1.
The exit code is 1 if llama.cpp refuses a file, or if the median error of the tokens exceeds
MAX_ERROR.

With `--default-model` the default model is written in each type too, and both programs also
continue a text by greedy decoding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protocol.tools.quantize import TYPES
from tests.benchmarks.perplexity import PROSE, quantised, tokens_of
from tests.support.checkpoints import LLAMA3_ROPE, random_llama, write_directory
from tests.support.eager import EagerStepper, load, some_tokens
from tests.support.family_models import LINEAR, WINDOW, YARN, random_model
from tests.support.model import smollm2_gguf
from worker.quantize.writing import quantize_model

THEIRS = Path(__file__).with_name("llama_cpp_logits.py")
MAX_ERROR = 0.1
NUM_TOKENS = 24
GENERATED = 32
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
TINY = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "intermediate_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5000.0}},
    "mistral": {"rope_parameters": YARN},
    "mixtral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True, "moe_intermediate_size": 64},
    "gemma3_text": {"query_pre_attn_scalar": 32, "num_hidden_layers": 6},
    "phi3": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "exaone4": {},
    "granite": {"rope_parameters": LINEAR},
    "smollm3": {},
    "seed_oss": {},
    "cohere2": WINDOW,
    "starcoder2": {},
    "stablelm": {},
    "gpt2": {"n_inner": 256},
    "gpt_neox": {},
}
"""model_type -> options that its GGUF files store."""


@dataclass(frozen=True)
class WrittenFile:
    """A quantised file, tokens to compute with it, and the number of tokens to generate after
    them."""

    name: str
    path: Path
    tokens: list[int]
    generate: int = 0


def tiny_files(folder: Path) -> Iterator[WrittenFile]:
    models = [(f"llama {kind}", kind, random_llama(**WIDE)) for kind in TYPES]
    models += [
        (f"{name} Q8_0", "Q8_0", random_model(name, **TINY | changes))
        for name, changes in FAMILIES.items()
    ]
    for index, (name, kind, model) in enumerate(models):
        source = write_directory(folder / str(index), model)
        path = folder / f"{index}.gguf"
        quantize_model(source, path, kind, lambda *_: None)
        yield WrittenFile(name, path, some_tokens(NUM_TOKENS))


def default_model_files(folder: Path) -> Iterator[WrittenFile]:
    model = smollm2_gguf()
    tokens = tokens_of(load(model), PROSE.read_text(encoding="utf-8"))[:NUM_TOKENS]
    for kind in TYPES:
        path = quantised(model, kind, folder)
        yield WrittenFile(f"default model {kind}", path, tokens, GENERATED)


def computed_here(file: WrittenFile) -> tuple[Tensor, list[int]]:
    """Return our logits [tokens, V] of the file's tokens, and the `file.generate` tokens that
    greedy decoding generates after those tokens."""
    tokens = list(file.tokens)
    stepper = EagerStepper(load(file.path), [tokens + [0] * file.generate])
    logits = stepper.step(len(tokens))[0]
    generated, last = [], logits[-1]
    for index in range(file.generate):
        generated.append(int(last.argmax()))
        stepper.tokens[0][len(tokens) + index] = generated[-1]
        last = stepper.step(1)[0][-1]
    return logits, generated


def computed_there(python: str, files: list[WrittenFile]) -> list[dict[str, Any]]:
    asked = [
        {"model": str(file.path), "tokens": file.tokens, "generate": file.generate}
        for file in files
    ]
    command = [python, str(THEIRS)]
    done = subprocess.run(command, input=json.dumps(asked), text=True, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit("llama.cpp ended with an error")
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(file: WrittenFile, theirs: dict[str, Any]) -> bool:
    """Print the line of a file. Return whether both programs agree: the median error of the tokens
    is at most MAX_ERROR."""
    if "error" in theirs:
        print(f"{file.name:24} REFUSED: {theirs['error']}", flush=True)
        return False
    logits, generated = computed_here(file)
    found = torch.tensor(theirs["logits"], dtype=torch.float32)
    ours, other = (each - each.mean(dim=1, keepdim=True) for each in (logits, found))
    errors = (ours - other).norm(dim=1) / ours.norm(dim=1)
    same = int((ours.argmax(dim=1) == other.argmax(dim=1)).sum())
    text = f"{file.name:24} error {errors.median():.4f}, at most {errors.max():.4f}; "
    text += f"likeliest token equal {same}/{len(ours)}"
    if file.generate:
        pairs = zip(generated, theirs["generated"], strict=True)
        equal = next((i for i, (one, two) in enumerate(pairs) if one != two), file.generate)
        text += f"; first {equal} of {file.generate} generated tokens equal"
    print(text, flush=True)
    return bool(errors.median() <= MAX_ERROR)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.quantized_in_llama_cpp",
        description="Compare files of `tidegate quantize` in llama.cpp and here.",
    )
    parser.add_argument("python", help="a Python that has llama-cpp-python")
    parser.add_argument("--default-model", action="store_true", help="also the default model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = list(tiny_files(Path(folder)))
        if options.default_model:
            files += default_model_files(Path(folder))
        there = computed_there(options.python, files)
        agree = [compare(*pair) for pair in zip(files, there, strict=True)]
    print(f"{sum(agree)} of {len(agree)} files agree")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
