"""Measures the turns of a chat with images, beside those of the same chat without them.

    python -m tests.benchmarks.image_turns [--chats 3] [--turns 10] [--options "--dtype float32"]

The model is a SmolVLM with the sizes of SmolVLM-256M and random weights. Each chat has TURNS turns,
and an image in the first, the fourth and the seventh. A chat with images and one without them take
turns, so that a busy moment slows both. Prints for each turn the median time to the first token of
both, the prompt tokens and how many of them were computed. Exits with 1 if an image was encoded
twice, if a turn computed more than its new text and a block, or if the first token of the second
turn takes more than MAX_RATIO times as long with images.
"""

from __future__ import annotations

import argparse
import base64
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import tokenizers

from tests.benchmarks.peers.servers import Competitor, running
from tests.support.image_checkpoint import write_smolvlm
from tests.support.image_models import SMOLVLM, picture

BLOCK_TOKENS = 16
ANSWER_TOKENS = 24
IMAGE_TURNS = (0, 3, 6)
IMAGE_SIZES = ((1024, 768), (640, 960), (900, 900))
MAX_RATIO = 1.3
WORD = tokenizers.Tokenizer.from_buffer(SMOLVLM.tokenizer_json).token_to_id("\u0120the")
"""The token of each answer: " the". Other answers of a random model are tokenised in another way
than they were generated, so that the next turn would compute them again."""
TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
}
ENCODER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
TILE_ROWS = 64
"""Rows of a tile: (512 / 16 / 4) squared, since the connector joins 4 x 4 patches."""


@dataclass(frozen=True)
class ImageTurn:
    """One turn of a chat.

    first_s    seconds from the request to the first token
    prompt     tokens of the prompt
    computed   how many of them were not found in the prefix cache
    new        tokens that the turn before did not have: neither in its prompt nor in its answer
    """

    first_s: float
    prompt: int
    computed: int
    new: int


def write_model(folder: Path) -> Path:
    return write_smolvlm(
        folder,
        tile_rows=TILE_ROWS,
        tile_size=ENCODER["image_size"],
        longest_edge=1024,
        whole={"scale_factor": 4, "vision_config": ENCODER},
        **TEXT,
    )


def words(number: int, turn: int) -> str:
    """Return the text of a turn, which no other chat has."""
    return f"Chat {number}, question {turn}: what is to be seen, and what has changed since before?"


def parts(number: int, turn: int, has_images: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"type": "text", "text": words(number, turn)}]
    if has_images and turn in IMAGE_TURNS:
        place = IMAGE_TURNS.index(turn)
        data = base64.b64encode(picture(*IMAGE_SIZES[place], seed=number * 10 + place)).decode()
        url = {"url": f"data:image/png;base64,{data}"}
        found.insert(0, {"type": "image_url", "image_url": url})
    return found


def chat(url: str, number: int, has_images: bool, turns: int) -> list[ImageTurn]:
    """Hold a chat of `turns` turns, and return them."""
    messages: list[dict[str, Any]] = []
    found: list[ImageTurn] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": parts(number, turn, has_images)})
        body = {
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": {str(WORD): 100},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, first_s, usage = streamed(f"{url}/v1/chat/completions", body)
        messages.append({"role": "assistant", "content": text})
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        before = found[-1].prompt + ANSWER_TOKENS if found else 0
        found.append(ImageTurn(first_s, prompt, prompt - cached, prompt - before))
    return found


def streamed(url: str, body: dict[str, Any]) -> tuple[str, float, dict[str, Any]]:
    """Return the text of an answer, the seconds to its first token, and its usage."""
    data = json.dumps(body).encode()
    text, first_s = "", 0.0
    usage: dict[str, Any] = {}
    began = time.perf_counter()
    with requests.post(url, data=data, stream=True, timeout=600) as response:
        if response.status_code != requests.codes.ok:
            raise SystemExit(f"{url} answered {response.status_code}: {response.text}")
        for line in response.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            delta = "".join(c["delta"].get("content") or "" for c in event["choices"])
            if delta and not first_s:
                first_s = time.perf_counter() - began
            text += delta
    return text, first_s, usage


def num_encoded(url: str) -> int:
    lines = requests.get(f"{url}/metrics", timeout=60).text.splitlines()
    name = "tidegate_engine_images_encoded"
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))


def print_turns(
    with_images: Sequence[Sequence[ImageTurn]], without: Sequence[Sequence[ImageTurn]]
) -> float:
    """Print a line for each turn, and return the ratio of the second one's first tokens."""
    print("             with images               without                  ratio")
    print("turn            ms  prompt  computed      ms  prompt  computed")
    ratios = []
    for place in range(len(with_images[0])):
        each, other = ([turns[place] for turns in chats] for chats in (with_images, without))
        ms, other_ms = (
            1e3 * statistics.median(t.first_s for t in turns) for turns in (each, other)
        )
        ratios.append(ms / other_ms)
        mark = "image" if place in IMAGE_TURNS else ""
        print(
            f"{place + 1:>4}  {mark:5} {ms:>6.0f}  {each[0].prompt:>6}  {each[0].computed:>8}  "
            f"{other_ms:>6.0f}  {other[0].prompt:>6}  {other[0].computed:>8}  {ratios[-1]:>6.2f}"
        )
    return ratios[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.image_turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--chats", type=int, default=3, metavar="N", help="chats of each kind (3)")
    parser.add_argument("--turns", type=int, default=10, metavar="N", help="turns of a chat (10)")
    parser.add_argument("--options", default="", metavar="WORDS", help="options of the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "smolvlm")
        command = [sys.executable, "-P", "-m", "tools", "serve", str(model), "--port", "{port}"]
        command += shlex.split(options.options)
        with running(Competitor("Tidegate", command, "/readyz", 1.0)) as (url, _):
            for has_images in (True, False):  # to compile what is compiled at the first use
                chat(url, 0, has_images, 2)
            before = num_encoded(url)
            chats: dict[bool, list[list[ImageTurn]]] = {True: [], False: []}
            for number in range(1, options.chats + 1):
                for has_images in (True, False):
                    chats[has_images].append(chat(url, number, has_images, options.turns))
            encoded = num_encoded(url) - before
    ratio = print_turns(chats[True], chats[False])
    images = options.chats * sum(turn < options.turns for turn in IMAGE_TURNS)
    again = max(t.computed - t.new for turns in chats[True] for t in turns[1:])
    print(f"{images} images, {encoded} encoded; at most {again} tokens of a turn computed again")
    print(f"first token of the second turn: {ratio:.2f} times as long with images")
    return int(encoded != images or again > BLOCK_TOKENS or ratio > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main())
