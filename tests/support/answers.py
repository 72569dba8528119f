"""An answer that hears no engine: its choices are told what a test says."""

from __future__ import annotations

from gateway.answering import Answer
from gateway.asking import Ask
from gateway.engine_client import EngineClient
from gateway.output.reader import ReaderFactory
from gateway.text.tokenizer import Tokenizer
from protocol.sampling import SamplingParams
from tests.support.scripted_engine import scripted_card

TOKENIZER = Tokenizer(scripted_card())


def an_answer(n: int = 1, prompts: int = 1, params: SamplingParams | None = None) -> Answer:
    """`n` choices for each of so many prompts of three tokens."""
    readers, each = ReaderFactory(TOKENIZER), params or SamplingParams()
    asks = [Ask([1, 2, 3], [each] * n, readers) for _ in range(prompts)]
    return Answer(EngineClient("ipc:///nowhere"), asks)
