"""Compares the distributions after our samplers with those after llama.cpp's.

    python -m tests.benchmarks.llama_cpp_samplers DIRECTORY

DIRECTORY is a checkout of llama.cpp, or `vendor/llama.cpp` of the source package of
llama-cpp-python (tried with 0.3.36). Its samplers are compiled into a library, which takes a minute
with a C++ compiler. Both sides get the same VECTORS vectors of logits and the same earlier tokens.
Prints for each setting the largest difference of a probability, and how much the setting changes a
probability. Exits with 1 if a difference exceeds MAX_DIFFERENCE, or if a setting changes less.

XTC is compared with probability 1 only, since the random numbers differ. With Mirostat, the VECTORS
vectors are the steps of one answer: its tokens are those that llama.cpp draws.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from protocol.engine.sampling import (
    DryBreaker,
    FilterName,
    PenaltyName,
    SamplingParams,
    filter_order,
)
from tests.support.sampled_rows import RowRequest, bind_rows
from worker.sampling.logits import process_logits
from worker.sampling.mirostat import limit_surprise
from worker.sampling.sampler import drawn_from

VECTORS = 20
VOCAB = 32_000
TEXT_TOKENS = 40
MAX_DIFFERENCE = 1e-3
SOURCES = ("llama-sampler", "llama-vocab", "llama-grammar", "unicode", "unicode-data", "llama-impl")
DRY = """
#include "llama-sampler.h"
extern "C" llama_sampler * dry_sampler(float multiplier, float base, int32_t allowed,
        int32_t last_n, const int32_t * tokens, const int32_t * sizes, int32_t count) {
    std::vector<std::vector<llama_token>> breakers;
    for (int32_t i = 0; i < count; tokens += sizes[i++]) {
        breakers.emplace_back(tokens, tokens + sizes[i]);
    }
    return llama_sampler_init_dry_testing(multiplier, base, allowed, last_n, breakers);
}
"""
"""Makes the sampler of DRY without a vocabulary, which llama.cpp's C interface needs."""
LLAMA_CPP_ORDER: list[PenaltyName | FilterName] = [
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
]
BREAKERS = [DryBreaker([3]), DryBreaker([1, 4], [2])]
SETTINGS = [
    SamplingParams(typical_p=0.9),
    SamplingParams(typical_p=0.3),
    SamplingParams(top_n_sigma=1.0),
    SamplingParams(top_n_sigma=3.0, temperature=1.5),
    SamplingParams(dynatemp_range=0.5),
    SamplingParams(temperature=0.8, dynatemp_range=0.7, dynatemp_exponent=0.4),
    SamplingParams(temperature=1.5, dynatemp_range=1.5, dynatemp_exponent=3.0),
    SamplingParams(xtc_probability=1.0, xtc_threshold=0.1),
    SamplingParams(xtc_probability=1.0, xtc_threshold=0.01),
    SamplingParams(dry_multiplier=0.8),
    SamplingParams(dry_multiplier=2.0, dry_base=1.2, dry_allowed_length=1, dry_penalty_last_n=20),
    SamplingParams(dry_multiplier=1.0, dry_breakers=BREAKERS),
    SamplingParams(dry_multiplier=0.5, dry_allowed_length=0, dry_breakers=BREAKERS[:1]),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=-0.3),
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
        repetition_penalty=1.1,
    ),
    SamplingParams(
        samplers=["min_p", "temperature", "xtc", "top_k"],
        temperature=1.4,
        min_p=0.02,
        xtc_probability=1.0,
        xtc_threshold=0.08,
        top_k=12,
    ),
    SamplingParams(samplers=["top_k", "typ_p", "temperature"], top_k=100, typical_p=0.8),
]

MIROSTAT = [
    SamplingParams(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.4),
    SamplingParams(mirostat=2, temperature=0.7),
    SamplingParams(mirostat=1, mirostat_tau=3.0, mirostat_eta=0.4),
    SamplingParams(mirostat=1, temperature=1.3, mirostat_tau=1.5, mirostat_eta=1.0),
]


class Candidate(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float)]


class Candidates(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.POINTER(Candidate)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    ]


class LlamaCppSamplers:
    """The samplers of a llama.cpp checkout, compiled into `folder`. Only what they call is in the
    library; the addresses of other functions are never looked up."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        shim, library = folder / "dry.cpp", folder / "samplers.so"
        shim.write_text(DRY)
        sources = [str(checkout / "src" / f"{name}.cpp") for name in SOURCES]
        includes = [f"-I{checkout / path}" for path in ("include", "src", "ggml/include", "common")]
        options = ["-O1", "-fPIC", "-shared", "-std=c++17", "-z", "lazy"]
        command = ["c++", *options, *includes, *sources, str(shim), "-o", str(library)]
        subprocess.run(command, check=True)
        # Python would look up all addresses at once.
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.restype = ctypes.c_void_p
        handle = dlopen(str(library).encode(), ctypes.c_int(os.RTLD_LAZY))
        self._library = ctypes.CDLL(str(library), handle=handle)

    def probabilities(
        self, logits: Sequence[float], tokens: Sequence[int], params: SamplingParams
    ) -> Tensor:
        """Return the probability of each token [V] after the samplers of `params`."""
        found = _candidates(logits)
        # llama.cpp cannot make a sampler of DRY that is off in this way.
        penalties = ["penalties", "dry"] if params.dry_multiplier else ["penalties"]
        for name in [*penalties, *(filter_order(params) or [])]:
            sampler = ctypes.c_void_p(self._make(name, params))
            for token in tokens:
                self._library.llama_sampler_accept(sampler, ctypes.c_int32(token))
            self._library.llama_sampler_apply(sampler, ctypes.byref(found))
            self._library.llama_sampler_free(sampler)
        return _shares(found, len(logits))

    def mirostat_steps(
        self, vectors: Sequence[Sequence[float]], params: SamplingParams
    ) -> Iterator[tuple[Tensor, int]]:
        """Yield for each step of an answer the probability of each token [V], and the token that
        was drawn."""
        temperature = ctypes.c_void_p(self._make("temperature", params))
        limit = ctypes.c_void_p(self._make(f"mirostat_{params.mirostat}", params))
        for logits in vectors:
            found = _candidates(logits)
            for sampler in (temperature, limit):
                self._library.llama_sampler_apply(sampler, ctypes.byref(found))
            yield _shares(found, len(logits)), found.data[found.selected].id
        for sampler in (temperature, limit):
            self._library.llama_sampler_free(sampler)

    def _make(self, name: str, params: SamplingParams) -> int:
        """Return the address of a new sampler."""
        number, whole = ctypes.c_float, ctypes.c_int32
        least = ctypes.c_size_t(0)
        arguments: dict[str, tuple[str, list[object]]] = {
            "penalties": (
                "llama_sampler_init_penalties",
                [
                    whole(VOCAB),
                    whole(TEXT_TOKENS),
                    number(params.repetition_penalty),
                    number(params.frequency_penalty),
                    number(params.presence_penalty),
                ],
            ),
            "temperature": (
                "llama_sampler_init_temp_ext",
                [
                    number(params.temperature),
                    number(params.dynatemp_range),
                    number(params.dynatemp_exponent),
                ],
            ),
            "mirostat_1": (
                "llama_sampler_init_mirostat",
                [
                    whole(VOCAB),
                    ctypes.c_uint32(1),
                    number(params.mirostat_tau),
                    number(params.mirostat_eta),
                    whole(100),
                ],
            ),
            "mirostat_2": (
                "llama_sampler_init_mirostat_v2",
                [ctypes.c_uint32(1), number(params.mirostat_tau), number(params.mirostat_eta)],
            ),
            "top_n_sigma": ("llama_sampler_init_top_n_sigma", [number(params.top_n_sigma)]),
            "top_k": ("llama_sampler_init_top_k", [whole(params.top_k)]),
            "typ_p": ("llama_sampler_init_typical", [number(params.typical_p), least]),
            "top_p": ("llama_sampler_init_top_p", [number(params.top_p), least]),
            "min_p": ("llama_sampler_init_min_p", [number(params.min_p), least]),
            "xtc": (
                "llama_sampler_init_xtc",
                [
                    number(params.xtc_probability),
                    number(params.xtc_threshold),
                    least,
                    ctypes.c_uint32(1),
                ],
            ),
        }
        function, given = arguments[name] if name != "dry" else ("dry_sampler", _dry(params))
        make: Callable[..., int] = self._library[function]
        make.restype = ctypes.c_void_p  # type: ignore[attr-defined]
        return make(*given)


def _candidates(logits: Sequence[float]) -> Candidates:
    data = (Candidate * len(logits))(*(Candidate(i, x, 0.0) for i, x in enumerate(logits)))
    return Candidates(data, len(logits), -1, False)


def _shares(found: Candidates, vocab: int) -> Tensor:
    """Return the probability of each token [vocab]."""
    kept = torch.full((vocab,), float("-inf"), dtype=torch.float64)
    for place in range(found.size):
        kept[found.data[place].id] = found.data[place].logit
    return kept.softmax(0)


def _dry(params: SamplingParams) -> list[object]:
    """Return the arguments of `dry_sampler`."""
    breakers = [[head, *each.tail] for each in params.dry_breakers for head in each.heads]
    breakers = breakers or [[VOCAB]]  # llama.cpp warns if there is none
    tokens = [token for breaker in breakers for token in breaker]
    last_n = TEXT_TOKENS if params.dry_penalty_last_n == -1 else params.dry_penalty_last_n
    return [
        ctypes.c_float(params.dry_multiplier),
        ctypes.c_float(params.dry_base),
        ctypes.c_int32(params.dry_allowed_length),
        ctypes.c_int32(last_n),
        (ctypes.c_int32 * len(tokens))(*tokens),
        (ctypes.c_int32 * len(breakers))(*map(len, breakers)),
        ctypes.c_int32(len(breakers)),
    ]


def our_probabilities(logits: Tensor, texts: list[list[int]], params: SamplingParams) -> Tensor:
    """Return the probabilities [N, V] with which the worker draws."""
    slots, sampled = bind_rows([RowRequest(params, text, prompt_tokens=0) for text in texts])
    processed = process_logits(logits, slots, sampled)
    drawn = drawn_from(processed, slots, sampled, torch.arange(len(logits)))
    return drawn.double().softmax(-1)


def mirostat_differences(
    theirs: LlamaCppSamplers, logits: Tensor, params: SamplingParams
) -> Iterator[float]:
    """Yield the largest difference of a probability at each step of an answer."""
    slots, sampled = bind_rows([RowRequest(params)])
    for row, (expected, token) in zip(
        logits, theirs.mirostat_steps(logits.tolist(), params), strict=True
    ):
        processed = process_logits(row[None], slots, sampled)
        limits = limit_surprise(processed, slots, sampled)
        assert limits is not None
        drawn = drawn_from(processed, slots, sampled, torch.arange(1))
        yield (drawn.double().softmax(-1)[0] - expected).abs().max().item()
        limits.advance(processed, torch.tensor([token]), slots, sampled)


def examples() -> tuple[Tensor, list[list[int]]]:
    """Return logits [N, V], flat in some rows and steep in others, and earlier tokens. These repeat
    themselves, and are likely again."""
    generator = torch.Generator().manual_seed(7)
    spread = torch.linspace(1.0, 4.0, VECTORS)[:, None]
    logits = torch.randn(VECTORS, VOCAB, generator=generator) * spread
    texts = torch.randint(0, 6, (VECTORS, TEXT_TOKENS), generator=generator)
    logits[:, :8] = logits.amax(1, keepdim=True) + torch.randn(VECTORS, 8, generator=generator)
    return logits, texts.tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a llama.cpp checkout")
    logits, texts = examples()
    plain = our_probabilities(logits, texts, SamplingParams())
    worst, least = 0.0, 1.0
    with tempfile.TemporaryDirectory() as folder:
        theirs = LlamaCppSamplers(parser.parse_args().checkout, Path(folder))
        for params in SETTINGS:
            expected = torch.stack(
                [
                    theirs.probabilities(row, text, params)
                    for row, text in zip(logits.tolist(), texts, strict=True)
                ]
            )
            difference = (our_probabilities(logits, texts, params) - expected).abs().max().item()
            change = (plain - expected).abs().max().item()
            worst, least = max(worst, difference), min(least, change)
            print(f"{difference:.1e} of {change:.1e}  {described(params)}", flush=True)
        for params in MIROSTAT:
            difference = max(mirostat_differences(theirs, logits, params))
            worst = max(worst, difference)
            print(f"{difference:.1e}  {described(params)}", flush=True)
    count = len(SETTINGS) + len(MIROSTAT)
    print(f"{count} settings, {VECTORS} vectors of {VOCAB:,} logits each: {worst:.1e}")
    return int(worst > MAX_DIFFERENCE or least < MAX_DIFFERENCE)


def described(params: SamplingParams) -> str:
    """Return the parameters that differ from the defaults."""
    plain = SamplingParams()
    names = (name for name in params.__struct_fields__ if name != "dry_breakers")
    return " ".join(
        f"{name}={value}"
        for name in names
        if (value := getattr(params, name)) != getattr(plain, name)
    )


if __name__ == "__main__":
    sys.exit(main())
