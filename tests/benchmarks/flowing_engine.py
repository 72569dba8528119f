"""A fast scripted engine as a process of its own, to measure the gateway in front of it.

    python -m tests.benchmarks.flowing_engine ADDRESS

It reads orders from stdin, one JSON object a line (`Order`), which set the next answers and their
speed. The line `go`, to be sent when all streams of an order are open, starts the steps. Each step
sends the next tokens of all streams in one frame, as a real engine does. After the last step the
program prints by how many seconds that step was late. If that is more than a few milliseconds, the
engine was the bottleneck.
"""

from __future__ import annotations

import json
import sys
import time

import msgspec

from protocol.engine.messages import Generate, Output, Outputs, Usage
from protocol.engine.model_card import ModelCard
from tests.support.scripted_engine import ScriptedEngine, TokenReply, scripted_logprob
from tests.support.tokenizers import card_of, smollm2_tokenizer_json

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SPEAKS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
READ_EVERY_S = 0.005


def flowing_card() -> ModelCard:
    """Return a card with SmolLM2's tokenizer, and with markers for reasoning and tool calls."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(smollm2_tokenizer_json().decode())
    inner.add_tokens([tokenizers.AddedToken(m, special=False, normalized=False) for m in MARKERS])
    return card_of(
        inner.to_str().encode(),
        name="flowing",
        context_tokens=1 << 20,
        eos_token_ids=[2],
        chat_template=SPEAKS + "<|im_start|>assistant\n",
    )


class Order(msgspec.Struct):
    """The next answers.

    ids       token ids of every answer
    streams   number of answers
    step_s    time between two steps; 0: as fast as possible
    """

    ids: list[int]
    streams: int
    step_s: float


class FlowingEngine(ScriptedEngine):
    """An engine whose steps are due every `order.step_s`. After a late step it catches up."""

    order = Order([], 1, 0.0)
    started_at: float | None = None

    def prepare(self, order: Order) -> None:
        self.order, self.started_at = order, None
        self.script = lambda generate: TokenReply([[token] for token in order.ids], "length", None)

    def go(self) -> None:
        self.started_at = time.monotonic()
        self.num_steps = 0

    def _round(self) -> None:
        while self._socket.poll(0):
            self._receive()
        if self.started_at is None or not self._talks:
            time.sleep(READ_EVERY_S)
            return
        wait_s = self.started_at + self.num_steps * self.order.step_s - time.monotonic()
        if wait_s > 0:
            time.sleep(min(wait_s, READ_EVERY_S))
        else:
            self._step()
            if not self._talks:
                print(f"{-wait_s:.4f}", flush=True)

    def _step(self) -> None:
        news: dict[bytes, list[Output]] = {}
        for key, talk in list(self._talks.items()):
            assert isinstance(talk.message, Generate)
            tokens, top = talk.steps.popleft(), talk.message.params.logprobs
            is_last, is_first = not talk.steps, not talk.num_generated
            talk.num_generated += 1
            output = Output(
                request=key[1],
                tokens=tokens,
                logprobs=[] if top is None else [scripted_logprob(t, top) for t in tokens],
                finish="length" if is_last else None,
                usage=_usage(talk.message, talk.num_generated) if is_first or is_last else None,
            )
            news.setdefault(talk.client, []).append(output)
            if is_last:
                del self._talks[key]
        self.num_steps += 1
        for client, outputs in news.items():
            self._send(client, Outputs(step=self.num_steps, outputs=outputs))


def _usage(message: Generate, generated: int) -> Usage:
    return Usage(prompt_tokens=len(message.prompt), generated_tokens=generated)


def main() -> None:
    with FlowingEngine(sys.argv[1], card=flowing_card(), max_len=1 << 20) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            if line.strip() == "go":
                engine.go()
            else:
                engine.prepare(msgspec.convert(json.loads(line), Order))


if __name__ == "__main__":
    main()
