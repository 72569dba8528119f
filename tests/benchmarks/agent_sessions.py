"""Measures what ten turns of real coding agents cost a server.

    python -m tests.benchmarks.agent_sessions [--agent codex --agent claude] [--gguf FILE]

Each agent is run once against a scripted engine (tests/torture/agents): nine calls of its shell,
then an answer. The ten prompts that it sent are then sent to a server, whose model has the shape of
the default model, random weights, SmolLM2's tokenizer and a longer context: the prompts of agents
are longer than that of the default model. For each turn, the command prints how many tokens of the
prompt were cached and how many were computed, and the time to the first token. It exits with 1 if
more was computed than the text that is new and one block.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import requests
from gguf import GGMLQuantizationType

from tests.benchmarks.agent_turns import add_tokenizer, encode
from tests.benchmarks.peers.servers import Competitor, running
from tests.support.checkpoints import random_llama
from tests.support.gguf_files import write_gguf
from tests.torture.agents.running import FOLDER, agent_runner
from tests.torture.agents.scenarios import BLOCK_TOKENS, common
from tests.torture.agents.variants import VARIANTS, install
from tests.torture.table import print_table

CONTEXT = 1 << 16
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
COLUMNS = {"agent": 10, "turn": 6, "prompt": 8, "new": 8, "cached": 8, "computed": 10, "first": 0}


@dataclass(frozen=True)
class AgentTurn:
    """A row of the table.

    new      tokens of the prompt after the beginning that it shares with the prompt before it
    seconds  time to the first token
    """

    agent: str
    number: int
    prompt: int
    new: int
    cached: int
    seconds: float

    @property
    def computed(self) -> int:
        return self.prompt - self.cached

    def cells(self) -> tuple[str, ...]:
        numbers = (self.number, self.prompt, self.new, self.cached, self.computed)
        return self.agent, *map(str, numbers), f"{self.seconds:.2f} s"

    def complaints(self, slack: float) -> list[str]:
        if self.computed <= self.new + BLOCK_TOKENS:
            return []
        return [f"{self.agent}, turn {self.number}: {self.computed} tokens were computed"]


def write_model(path: Path) -> Path:
    kind = GGMLQuantizationType.Q8_0
    return write_gguf(path, random_llama(**SHAPE), kind, tokenizer=add_tokenizer)


def first_token(url: str, prompt: str) -> tuple[int, int, float]:
    """Return (length of a prompt, cached tokens, seconds to the first token)."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "add_special_tokens": False}
    start = perf_counter()
    response = requests.post(f"{url}/v1/completions", json=body, timeout=1800)
    seconds = perf_counter() - start
    response.raise_for_status()
    usage = response.json()["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return usage["prompt_tokens"], details.get("cached_tokens") or 0, seconds


def turns(options: argparse.Namespace) -> Iterator[AgentTurn]:
    folder = Path(options.folder)
    sessions: dict[str, list[str]] = {}
    with agent_runner(folder) as runner:
        for agent in options.agent:
            if install(folder, VARIANTS[agent].agent, newest=False):
                run = runner.run(agent, "turns")
                if run.fault:
                    raise SystemExit(f"{agent}: {run.fault}\n{run.output}")
                sessions[agent] = list(run.prompts)
            else:
                print(f"{agent} cannot be installed")
    with tempfile.TemporaryDirectory() as place:
        gguf = options.gguf or Path(place, "model.gguf")
        if not gguf.exists():
            write_model(gguf)
        command = [sys.executable, "-P", "-m", "tools", "serve", str(gguf), "--port", "{port}"]
        server = Competitor("Tidegate", [*command, "--max-len", str(CONTEXT)], "/readyz", 1.0)
        with running(server) as (url, _):
            for agent, prompts in sessions.items():
                before = ""
                for number, prompt in enumerate(prompts, 1):
                    shared = len(encode(prompt[: common(before, prompt)]))
                    length, cached, seconds = first_token(url, prompt)
                    yield AgentTurn(agent, number, length, length - shared, cached, seconds)
                    before = prompt


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agent", action="append", choices=["codex", "claude", "opencode", "qwen"])
    parser.add_argument("--folder", default=str(FOLDER), help=f"the agents; default: {FOLDER}")
    parser.add_argument("--gguf", type=Path, help="the model; written if it does not exist")
    options = parser.parse_args()
    options.agent = options.agent or ["codex", "claude"]
    return print_table(COLUMNS, turns(options), 1.0)


if __name__ == "__main__":
    sys.exit(main())
