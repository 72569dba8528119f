"""Measures embeddings: tokens per second of Tidegate and of sentence-transformers on the same CPU.

    python -m tests.benchmarks.embeddings [MODEL] [--texts N] [--threads N] [--budget N ...]

MODEL is a directory (default: all-MiniLM-L6-v2, which is downloaded if needed). The texts have
lengths as documents of a search index have: most are short, some are long. Every program encodes
the same texts, in turns, and the best of the rounds counts. Without the package
sentence-transformers, which is no dependency of the tests, transformers computes padded batches
as that package does.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from protocol.engine.encoding import EncodeInputs
from protocol.wire.arrays import Int32
from tests.support.model import minilm
from tests.support.server import Server
from worker.encoders.header import EncoderHeader
from worker.encoders.runner import EncoderModel, EncodeRunner
from worker.loading.encoder import load_encoder
from worker.loading.header import read_any_header

BATCH = 32
"""Texts per batch, the default of sentence-transformers."""
REQUEST_TEXTS, CLIENTS = 64, 4
WORDS = [
    "sea",
    "harbour",
    "bread",
    "storm",
    "window",
    "river",
    "stone",
    "garden",
    "letter",
    "music",
    "winter",
]
Encode = Callable[[list[str]], Tensor]


def texts_of(count: int) -> list[str]:
    chance = random.Random(1)
    sizes = [min(240, int(chance.lognormvariate(3.2, 0.9)) + 3) for _ in range(count)]
    return [" ".join(chance.choices(WORDS, k=size)) for size in sizes]


def peer(path: Path) -> tuple[str, Encode]:
    """Return the name and the function of the program to compare with."""
    if find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(path), device="cpu")
        return "sentence-transformers", lambda texts: torch.from_numpy(
            model.encode(texts, batch_size=BATCH, show_progress_bar=False)
        )
    tokenizer, padded = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    return "transformers, padded", lambda texts: _padded(texts, tokenizer, padded)


@torch.inference_mode()
def _padded(texts: list[str], tokenizer: Any, model: Any) -> Tensor:
    """Encode batches of texts of similar lengths, each padded to its longest one."""
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    rows: dict[int, Tensor] = {}
    for first in range(0, len(order), BATCH):
        places = order[first : first + BATCH]
        ids = tokenizer(
            [texts[place] for place in places],
            padding=True,
            truncation=True,
            max_length=256,
            return_tensors="pt",
        )
        hidden, mask = model(**ids).last_hidden_state, ids["attention_mask"][..., None]
        means = (hidden * mask).sum(1) / mask.sum(1)
        rows |= zip(places, torch.nn.functional.normalize(means, dim=-1), strict=True)
    return torch.stack([rows[place] for place in range(len(texts))])


def worker_of(path: Path, budget: int, tokenizer: Any) -> Encode:
    """Return the function that encodes with the worker alone, in steps of `budget` tokens."""
    header = read_any_header(path)
    assert isinstance(header, EncoderHeader)
    loaded = load_encoder(header, dtype=torch.float32, device=torch.device("cpu"))
    runner = EncodeRunner(EncoderModel(loaded.model, loaded.vectors))

    @torch.inference_mode()
    def encode(texts: list[str]) -> Tensor:
        inputs = [each.ids for each in tokenizer.encode_batch_fast(texts)]
        steps: list[list[list[int]]] = [[]]
        for ids in inputs:
            if steps[-1] and sum(map(len, steps[-1])) + len(ids) > budget:
                steps.append([])
            steps[-1].append(ids)
        return torch.cat([runner.encode(_inputs(step)) for step in steps])

    return encode


def _inputs(step: list[list[int]]) -> EncodeInputs:
    return EncodeInputs(
        tokens=Int32.of([token for ids in step for token in ids]),
        lengths=Int32.of([len(ids) for ids in step]),
    )


def server_of(client: OpenAI) -> Encode:
    """Return the function that encodes over HTTP, with several clients at once."""

    def ask(texts: list[str]) -> list[list[float]]:
        found = client.embeddings.create(model="model", input=texts)
        return [item.embedding for item in found.data]

    def encode(texts: list[str]) -> Tensor:
        parts = [texts[at : at + REQUEST_TEXTS] for at in range(0, len(texts), REQUEST_TEXTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            return torch.tensor([row for rows in pool.map(ask, parts) for row in rows])

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, nargs="*", default=[256, 1024, 4096])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path, texts = options.model or minilm(), texts_of(options.texts)
    tokenizer = AutoTokenizer.from_pretrained(path).backend_tokenizer
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokens = sum(len(each.ids) for each in tokenizer.encode_batch_fast(texts))
    name, encode = peer(path)
    programs: dict[str, Encode] = {name: encode}
    for budget in options.budget:
        programs[f"worker, steps of {budget}"] = worker_of(path, budget, tokenizer)
    arguments = ("--served-name", "model", "--threads", str(options.threads))
    with (
        Server(*arguments, model=str(path)) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600) as client,
    ):
        programs["server, over HTTP"] = server_of(client)
        wanted, best = None, dict.fromkeys(programs, float("inf"))
        for _ in range(options.rounds):
            for program, run in programs.items():
                started = time.perf_counter()
                found = run(texts)
                best[program] = min(best[program], time.perf_counter() - started)
                wanted = found if wanted is None else wanted
                difference = float((found - wanted).abs().max())
                assert difference < 1e-4, f"{program} differs by {difference}"
    print(f"{len(texts)} texts, {tokens:,} tokens, {options.threads} threads, {path.name}")
    for program, seconds in best.items():
        ratio = best[name] / seconds
        print(f"{program:28} {tokens / seconds:9,.0f} tokens/s   {ratio:5.2f} of {name}")


if __name__ == "__main__":
    main()
