"""Measures how much of a conversation with tools a server of a hybrid computes again in each turn.

python -m tests.benchmarks.agent_turns --help

Agents talk in turns: each prompt is the one before it, with the answer and a tool's result. All
start with the same system prompt and tools, of about 2,000 tokens. Prompts are token ids, and each
continues with the tokens that the server has generated itself. The model has the architecture of
Qwen3.5, random weights and SmolLM2's tokenizer. The exit code is 1 if Tidegate computes more in a
turn than the new text and one block, except in the second conversation's first turn, which finds
that its beginning is shared.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import requests
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer

from tests.benchmarks.peers.servers import Competitor, cores, running
from tests.support.family_models import random_model
from tests.support.gguf_files import write_gguf
from tests.support.model import smollm2_gguf
from tests.support.processes import ROOT
from tests.support.tokenizers import smollm2_tokenizer_json
from worker.checkpoint.gguf_file import GGUFFile

BLOCK_TOKENS = 16
SHARED_TOKENS, TASK_TOKENS, ANSWER_TOKENS = 2000, 40, 60
RESULT_TOKENS = (200, 600)
MAX_LEN = 16384
MIB = 1 << 20
TOOLS = ("read_file", "write_file", "list_folder", "search", "run", "test", "commit", "fetch_page")
VOCABULARY = 49152
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    * 3,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": True,
}
Complete = Callable[[list[int]], tuple[list[int], int, int]]
"""Returns the answer to a prompt, and how many of its tokens were cached and computed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a server has computed for one prompt.

    new              tokens after the longest beginning that an earlier request has in common
    cached, computed  what the server says about the prompt
    checkpoint_bytes memory of the states that it keeps after the turn; None: it does not say
    """

    conversation: int
    number: int
    prompt: int
    new: int
    cached: int
    computed: int
    checkpoint_bytes: int | None = None

    @property
    def again(self) -> int:
        return self.computed - self.new


# ---- the model and the text


def add_tokenizer(writer: GGUFWriter) -> None:
    """Write SmolLM2's tokenizer and chat template."""
    metadata = GGUFFile(smollm2_gguf()).metadata
    names = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id")
    given = {name: metadata[f"tokenizer.ggml.{name}"] for name in names}
    writer.add_tokenizer_model(given["model"])
    writer.add_tokenizer_pre(given["pre"])
    writer.add_token_list(given["tokens"])
    writer.add_token_types(given["token_type"])
    writer.add_token_merges(given["merges"])
    writer.add_bos_token_id(given["bos_token_id"])
    writer.add_eos_token_id(given["eos_token_id"])
    writer.add_chat_template(metadata["tokenizer.chat_template"])


def write_model(path: Path) -> Path:
    """Write the GGUF file of the model with random weights, and return `path`."""

    def kind(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType.F32 if ".ssm_" in name else GGMLQuantizationType.Q8_0

    sections = {"qwen35.rope.dimension_sections": [4, 2, 2, 0]}  # llama.cpp needs them
    return write_gguf(
        path, random_model("qwen3_5_text", **SIZES), kind, sections, tokenizer=add_tokenizer
    )


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(smollm2_tokenizer_json().decode())


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


class Script:
    """The text of the conversations, made from prose and from descriptions of tools."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        prose = (ROOT / "tests" / "data" / "prose.txt").read_text()
        self._sentences = prose.replace("\n", " ").split(". ")

    def _prose(self, num_tokens: int) -> str:
        """Return sentences of at least this many tokens."""
        text = ""
        while len(encode(text)) < num_tokens:
            text += f"{self._dice.choice(self._sentences)}. "
        return text

    def shared(self) -> list[int]:
        """Return the system prompt with its tools."""
        tools = "\n".join(json.dumps(self._tool(name)) for name in TOOLS)
        text = f"# Tools\n\n<tools>\n{tools}\n</tools>\n\n"
        text += self._prose(SHARED_TOKENS - len(encode(text)))
        return encode(f"<|im_start|>system\n{text}<|im_end|>\n")

    def _tool(self, name: str) -> dict[str, Any]:
        field = {"type": "string", "description": self._prose(15)}
        schema = {"type": "object", "properties": {"path": field, "text": field}}
        function = {"name": name, "description": self._prose(30), "parameters": schema}
        return {"type": "function", "function": function}

    def task(self) -> list[int]:
        return self._message(self._prose(TASK_TOKENS))

    def result(self) -> list[int]:
        """Return the end of an answer, and a tool's result."""
        text = self._prose(self._dice.randrange(*RESULT_TOKENS) - 30)
        return encode("<|im_end|>\n") + self._message(f"<tool_response>\n{text}\n</tool_response>")

    def _message(self, text: str) -> list[int]:
        return encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


# ---- the conversations


def converse(
    complete: Complete,
    memory: Callable[[], int | None],
    *,
    conversations: int,
    turns: int,
    dropped: int,
    seed: int,
) -> list[Turn]:
    """Have conversations, one turn of each after the other, and return what was computed.

    memory    returns `Turn.checkpoint_bytes`
    dropped   number of leading tokens of each answer that later prompts leave out
    """
    script, known, found = Script(seed), list[list[int]](), list[Turn]()
    shared = script.shared()
    histories = [shared + script.task() for _ in range(conversations)]
    for number in range(1, turns + 1):
        for conversation, history in enumerate(histories, start=1):
            answer, cached, computed = complete(history)
            new = len(history) - max((common(history, each) for each in known), default=0)
            found.append(Turn(conversation, number, len(history), new, cached, computed, memory()))
            known.append(history + answer[:-1])  # the last token has not been computed
            histories[conversation - 1] = history + answer[dropped:] + script.result()
    return found


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def missed(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns that computed more than their new text and a block."""
    return [
        turn
        for turn in turns
        if turn.again > BLOCK_TOKENS and (turn.conversation, turn.number) != (2, 1)
    ]


# ---- the servers


class TidegateApi:
    def __init__(self, url: str) -> None:
        self._url = url
        model = requests.get(f"{url}/v1/models", timeout=60).json()["data"][0]
        self._model, self.state_bytes = model["id"], model["states"]["bytes"]

    def complete(self, prompt: list[int]) -> tuple[list[int], int, int]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "timings": True,
        }
        answer = _post(f"{self._url}/v1/completions", body)
        timings = answer["timings"]
        return answer["choices"][0]["token_ids"], timings["cache_n"], timings["prompt_n"]

    def metric(self, name: str) -> int:
        text = requests.get(f"{self._url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith(f"tidegate_engine_{name}")]
        return sum(int(float(line.split()[-1])) for line in lines)

    def checkpoint_bytes(self) -> int:
        return self.metric('state_bytes{place="checkpoints"}')


class LlamaCppApi:
    def __init__(self, url: str) -> None:
        self._url = url

    def complete(self, prompt: list[int]) -> tuple[list[int], int, int]:
        body = {
            "prompt": prompt,
            "n_predict": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        answer = _post(f"{self._url}/completion", body)
        timings = answer["timings"]
        return answer["tokens"], timings["cache_n"], timings["prompt_n"]


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = requests.post(url, json=body, timeout=600)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def tidegate(gguf: Path, interval: int, options: str) -> Competitor:
    command = [sys.executable, "-P", "-m", "tools", "serve", str(gguf), "--port", "{port}"]
    command += ["--max-len", str(MAX_LEN), "--state-interval", str(interval)]
    return Competitor("Tidegate", [*command, *shlex.split(options)], "/readyz", 1.0)


def llama_cpp(binary: Path, gguf: Path, options: str) -> Competitor:
    command = [
        str(binary),
        "--model",
        str(gguf),
        "--port",
        "{port}",
        "--ctx-size",
        str(4 * MAX_LEN),
    ]
    command += ["--threads", str(len(cores()))]
    return Competitor("llama.cpp", [*command, *shlex.split(options)], "/health", 1.0)


# ---- the tables


def print_turns(turns: Sequence[Turn], peer: Sequence[Turn]) -> None:
    """Print a line for each turn, with the same turn in the peer, and the sums."""
    head = "conversation  turn  prompt   new  cached  computed  again       checkpoints"
    print(head + ("  llama.cpp: cached  computed  again" if peer else ""))
    for place, turn in enumerate(turns):
        line = f"{turn.conversation:>12}  {turn.number:>4}  {turn.prompt:>6}  {turn.new:>4}  "
        line += f"{turn.cached:>6}  {turn.computed:>8}  {turn.again:>5}  {_memory(turn):>16}"
        if peer:
            other = peer[place]
            line += f"  {other.cached:>17}  {other.computed:>8}  {other.again:>5}"
        print(line)
    for name, each in (("Tidegate", turns), ("llama.cpp", peer)):
        if each:
            prompts, computed = (sum(getattr(t, f) for t in each) for f in ("prompt", "computed"))
            again = sum(turn.again for turn in each)
            print(f"{name}: {computed:,} of {prompts:,} prompt tokens computed, {again:,} again")


def _memory(turn: Turn) -> str:
    return "" if turn.checkpoint_bytes is None else f"{turn.checkpoint_bytes / MIB:.1f} MiB"


def _again(turns: Sequence[Turn]) -> str:
    """Return the tokens that each conversation computed again."""
    numbers = sorted({turn.conversation for turn in turns})
    sums = (sum(t.again for t in turns if t.conversation == number) for number in numbers)
    return " + ".join(map(str, sums))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.agent_turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--turns", type=int, default=10)
    add("--conversations", type=int, default=3, help="agents that talk in turns (default 3)")
    add(
        "--dropped",
        type=int,
        default=0,
        metavar="N",
        help="tokens at the start of each answer that later prompts leave out, like reasoning",
    )
    add(
        "--state-interval",
        type=int,
        nargs="+",
        default=[2048],
        metavar="N",
        help="values to compare; the table of turns is that of the first",
    )
    add("--tidegate", default="", metavar="OPTIONS", help="more options for `tidegate serve`")
    add("--gguf", type=Path, metavar="FILE", help="the model; written if it does not exist")
    add("--llama-server", type=Path, metavar="BINARY", help="llama.cpp's server, to compare with")
    add("--llama-url", default="", metavar="URL", help="a running one, which has the same model")
    add("--llama-options", default="", metavar="OPTIONS", help="more options for BINARY")
    add("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    given = parse()
    talk = {name: getattr(given, name) for name in ("conversations", "turns", "dropped", "seed")}
    peer: list[Turn] = []
    rows: list[list[Turn]] = []
    with tempfile.TemporaryDirectory() as folder:
        gguf = given.gguf or Path(folder) / "hybrid.gguf"
        if not gguf.exists():
            write_model(gguf)
        if given.llama_url:
            peer = converse(LlamaCppApi(given.llama_url).complete, lambda: None, **talk)
        elif given.llama_server:
            with running(llama_cpp(given.llama_server, gguf, given.llama_options)) as (url, _):
                peer = converse(LlamaCppApi(url).complete, lambda: None, **talk)
        lines = [
            f"{'state interval':>14}  {'checkpoints':>16}  {'evicted':>7}  again, by conversation"
        ]
        for interval in given.state_interval:
            with running(tidegate(gguf, interval, given.tidegate)) as (url, _):
                api = TidegateApi(url)
                turns = converse(api.complete, api.checkpoint_bytes, **talk)
                evicted = api.metric("evicted_checkpoints_total")
                size = api.state_bytes
            rows.append(turns)
            lines.append(f"{interval:>14}  {_memory(turns[-1]):>16}  {evicted:>7}  {_again(turns)}")
    print(
        f"{given.conversations} conversations that start with the same {SHARED_TOKENS:,} tokens; "
        f"answers of {ANSWER_TOKENS}; a state takes {size / MIB:.2f} MiB"
    )
    print_turns(rows[0], peer)
    print("\n".join(["", *lines]))
    return int(bool(missed(rows[0])))


if __name__ == "__main__":
    sys.exit(main())
