"""A choice group without an engine: the test itself passes the engine's reports to it."""

from __future__ import annotations

from gateway.engine.client import ZmqEngineClient
from gateway.formats.choice_parser import ParserFactory
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import PromptRequest
from gateway.text.tokenizer import Tokenizer
from protocol.engine.sampling import SamplingParams
from tests.support.scripted_engine import scripted_card

TOKENIZER = Tokenizer(scripted_card())


def new_choice_group(
    n: int = 1, prompts: int = 1, params: SamplingParams | None = None
) -> ChoiceGroup:
    """Return a group with `n` choices for each of `prompts` prompts of three tokens."""
    readers, each = ParserFactory(TOKENIZER), params or SamplingParams()
    asks = [PromptRequest([1, 2, 3], [each] * n, readers) for _ in range(prompts)]
    return ChoiceGroup(ZmqEngineClient("ipc:///nowhere"), asks)
