"""Measures the perplexity of texts with each form of weights that Tidegate computes with.

    python -m tests.benchmarks.perplexity [--model FILE.gguf] [--text FILE ...] [--only int8]
    python -m tests.benchmarks.perplexity --types Q4_K_M,Q6_K [--model FILE.gguf] [--text FILE ...]

Prints one line per dtype, kernels and form of weights: the perplexity, how much it differs from
that in float32 on dense weights with torch's operations, and the standard error of this difference
if each token is taken as an independent sample. The engine and the worker's runner compute each
piece of PIECE tokens of a text as the prompt of a request with `prompt_logprobs`. `--llama-cpp`
names the Python of an environment that has llama-cpp-python: llama.cpp then computes the same token
ids with the same file (llama_cpp_logprobs.py).

With `--types`, the weights of the model are quantised to each type, and the packed weights of that
file are compared with the same weights dequantised to float32. Types of `tidegate quantize` are
written by its code. Others (THEIR_TYPES) are written by llama.cpp, so they need `--llama-cpp`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

import torch
from gguf import LlamaFileType
from tokenizers import Tokenizer

from protocol.config.worker import Activations, KernelSet, KVDtype, WeightForm
from protocol.engine.sampling import SamplingParams
from protocol.tools.quantize import TYPES
from tests.support.model import smollm2_gguf
from tests.support.replica import Replica, load
from worker.checkpoint.gguf_file import GGUFFile
from worker.device.cpuinfo import cpu_flags
from worker.kernels.select import select_kernels
from worker.loading.decoder import LoadedModel, open_weights
from worker.loading.header import ModelHeader, read_header
from worker.quantize.writing import quantized_weights, write_model

PIECE = 2048
"""Tokens that are predicted together. A text is cut into pieces of this length."""
PROSE = Path(__file__).parents[1] / "data" / "prose.txt"
"""1,300 words that were written for this purpose, so no model has been trained on them."""
THEIRS = Path(__file__).with_name("llama_cpp_logprobs.py")
THEIR_QUANTIZER = Path(__file__).with_name("llama_cpp_quantize.py")
THEIR_TYPES = {
    "Q2_K": LlamaFileType.MOSTLY_Q2_K,
    "Q3_K": LlamaFileType.MOSTLY_Q3_K_M,
    "IQ4_NL": LlamaFileType.MOSTLY_IQ4_NL,
    "IQ4_XS": LlamaFileType.MOSTLY_IQ4_XS,
    "MXFP4": LlamaFileType.MOSTLY_MXFP4_MOE,
}
"""Type -> llama.cpp's file type. All matrices whose rows fit its blocks get it, the head too."""
THEIR_TIMEOUT_S = 600


@dataclass(frozen=True)
class Form:
    """One way to compute a model: a dtype, kernels, a form of weights, and the types to which the
    inputs of matrices and the K/V are rounded."""

    dtype: torch.dtype
    kernels: KernelSet
    weights: WeightForm
    activations: Activations = "bfloat16"
    kv_dtype: KVDtype = "auto"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        rounded = "" if self.activations == "bfloat16" else f", activations {self.activations}"
        rounded += "" if self.kv_dtype == "auto" else f", K/V {self.kv_dtype}"
        return f"{dtype}, kernels {self.kernels}, weights {self.weights}{rounded}"

    def load(self, model: Path) -> LoadedModel:
        kernels = select_kernels(self.kernels, torch.device("cpu"), cpu_flags=cpu_flags())
        return load(
            model,
            self.dtype,
            kernels=kernels,
            weights=self.weights,
            activations=self.activations,
            kv_dtype=self.kv_dtype,
        )


EXACT = Form(torch.float32, "torch", "dense")
PACKED = Form(torch.float32, "auto", "packed")
"""Computes the same as EXACT, except for the order of sums, and is several times as fast."""
PACKED_FORMS = [
    EXACT,
    Form(torch.float32, "auto", "packed"),
    Form(torch.float32, "auto", "packed", kv_dtype="int8"),
    Form(torch.bfloat16, "auto", "packed"),
    Form(torch.bfloat16, "auto", "packed", "int8"),
    Form(torch.bfloat16, "auto", "packed", kv_dtype="int8"),
    Form(torch.bfloat16, "auto", "packed", "int8", "int8"),
]
FORMS = [
    EXACT,
    Form(torch.float32, "auto", "dense"),
    Form(torch.float32, "auto", "packed"),
    Form(torch.float32, "auto", "packed", kv_dtype="int8"),
    Form(torch.bfloat16, "torch", "dense"),
    Form(torch.bfloat16, "auto", "dense"),
    Form(torch.bfloat16, "auto", "packed"),
    Form(torch.bfloat16, "auto", "packed", "int8"),
    Form(torch.bfloat16, "auto", "packed", kv_dtype="int8"),
    Form(torch.bfloat16, "auto", "packed", "int8", "int8"),
]


def perplexity(loaded: LoadedModel, tokens: Sequence[int]) -> float:
    """Return the perplexity of all tokens but the first, each given all tokens before it."""
    return of_logprobs(logprobs_of(loaded, [tokens]))


def logprobs_of(loaded: LoadedModel, pieces: Sequence[Sequence[int]]) -> list[float]:
    """Return the logprobs of all tokens but the first of each piece."""
    replica = Replica(loaded, max_slots=1, num_blocks=max(map(len, pieces)) // 16 + 3)
    found: list[float] = []
    for piece in pieces:
        number = replica.add(piece, SamplingParams(max_tokens=1, prompt_logprobs=0))
        replica.run()
        outputs = replica.outputs[number]
        found += [entry.logprob for output in outputs for entry in output.prompt_logprobs]
    assert len(found) == sum(len(piece) - 1 for piece in pieces)
    return found


def of_logprobs(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def standard_error(logprobs: Sequence[float], exact: Sequence[float]) -> float:
    """Return the standard error of the mean difference of logprobs. It is about the standard error
    of the relative change in perplexity."""
    differences = [one - other for one, other in zip(logprobs, exact, strict=True)]
    return stdev(differences) / math.sqrt(len(differences))


def pieces_of(loaded: LoadedModel, texts: Iterable[str]) -> list[list[int]]:
    """Return the tokens of the texts, cut into pieces. A piece of one token is dropped."""
    found = []
    for tokens in (tokens_of(loaded, text) for text in texts):
        found += [tokens[start : start + PIECE] for start in range(0, len(tokens), PIECE)]
    return [piece for piece in found if len(piece) > 1]


def tokens_of(loaded: LoadedModel, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_buffer(loaded.card.tokenizer).encode(text).ids
    return ids


def of_llama_cpp(python: str, model: Path, pieces: Sequence[Sequence[int]]) -> list[float]:
    """Return the logprobs that llama.cpp computes with the Python of another environment."""
    found: list[float] = []
    for piece in pieces:
        asked = {"model": str(model), "tokens": list(piece)}
        found += json.loads(_run([python, str(THEIRS)], asked))
    return found


def _run(command: list[str], asked: dict[str, Any]) -> str:
    """Run a program of llama.cpp's environment with JSON as its input, and return its output."""
    done = subprocess.run(
        command, input=json.dumps(asked), text=True, capture_output=True, timeout=THEIR_TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError(f"llama.cpp: {done.stderr.strip()[-2000:]}")
    return done.stdout


def quantised(model: Path, kind: str, folder: Path, llama_cpp: str = "") -> Path:
    """Quantise the weights of a GGUF file to the type `kind`, and return the new file.

    llama_cpp   the Python of llama.cpp's environment, for THEIR_TYPES
    """
    header = read_header(model)
    assert isinstance(header, ModelHeader)
    path = folder / f"{model.stem}.{kind}.gguf"
    if kind in THEIR_TYPES:
        asked = {"model": str(model), "output": str(path), "file_type": THEIR_TYPES[kind]}
        _run([llama_cpp, str(THEIR_QUANTIZER)], asked)
        return path
    contents = quantized_weights(open_weights(header))
    write_model(header, contents, path, kind, lambda *_: None)
    return path


def kinds_in(path: Path) -> str:
    """Return the types of the tensors in a file, except F32, and the number of tensors of each:
    "Q5_0 180, Q6_K 31"."""
    kinds = Counter(info.kind.name for info in GGUFFile(path).tensors.values())
    return ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()) if kind != "F32")


def measured(
    model: Path, texts: Sequence[str], forms: Sequence[Form], llama_cpp: str = ""
) -> Iterator[tuple[str, list[float]]]:
    """Yield (name, logprobs) for each of `forms`, in their order, and then for llama.cpp if
    `llama_cpp` is set. `print_table` compares all others with the first."""
    pieces: list[list[int]] = []
    for form in forms:
        loaded = form.load(model)
        pieces = pieces or pieces_of(loaded, texts)
        yield str(form), logprobs_of(loaded, pieces)
    if llama_cpp:
        yield "llama.cpp", of_llama_cpp(llama_cpp, model, pieces)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.perplexity")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the default model)")
    parser.add_argument(
        "--text", type=Path, default=[PROSE], nargs="+", metavar="FILE", help="texts to predict"
    )
    parser.add_argument(
        "--fast", action="store_true", help="compare with float32 on packed weights, not with torch"
    )
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="measure only forms whose line contains this"
    )
    parser.add_argument(
        "--llama-cpp",
        default="",
        metavar="PYTHON",
        help="a Python that has llama-cpp-python, to compare with",
    )
    types = f"{', '.join(TYPES)}; with --llama-cpp also {', '.join(THEIR_TYPES)}"
    parser.add_argument("--types", default="", help=f"quantise the model first: some of {types}")
    options = parser.parse_args()
    kinds = options.types.split(",") if options.types else []
    if kinds and (options.fast or options.only):
        parser.error("--types: not with --fast or --only")
    for kind in kinds:
        if kind not in (*TYPES, *(THEIR_TYPES if options.llama_cpp else ())):
            parser.error(f"--types: {kind!r} is not one of {types}")
    model = options.model or smollm2_gguf()
    texts = [file.read_text(encoding="utf-8") for file in options.text]
    exact = PACKED if options.fast else EXACT
    others = (form for form in FORMS if form not in (EXACT, exact) and options.only in str(form))
    forms = [exact, *others]
    if not kinds:
        print_table(model, measured(model, texts, forms, options.llama_cpp))
        return
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = quantised(model, kind, Path(folder), options.llama_cpp)
            print(f"{kind} ({kinds_in(path)})")
            print_table(path, measured(path, texts, PACKED_FORMS, options.llama_cpp))


def print_table(model: Path, rows: Iterable[tuple[str, list[float]]]) -> None:
    exact: list[float] = []
    for name, logprobs in rows:
        if not exact:
            exact = logprobs
            print(f"{model.name}, {len(exact)} tokens")
        value, error = of_logprobs(logprobs), standard_error(logprobs, exact)
        change = value / of_logprobs(exact) - 1
        print(f"{name:64} {value:9.4f}  {change:+8.3%}  (standard error {error:.3%})", flush=True)


if __name__ == "__main__":
    main()
