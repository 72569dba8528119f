"""A choice group without an engine, and a stream without a client. The test itself passes the
engine's reports to the group, and reads what was written to the stream."""

from __future__ import annotations

from gateway.engine.client import ZmqEngineClient
from gateway.formats.choice_parser import ParserFactory
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import PromptRequest
from gateway.text.tokenizer import Tokenizer
from protocol.engine.sampling import SamplingParams
from tests.support.scripted_engine import scripted_card

TOKENIZER = Tokenizer(scripted_card())


class WrittenStream:
    """A destination of frames that keeps them."""

    def __init__(self) -> None:
        self.data = b""
        self.num_writes = 0
        self.num_ends = 0

    def write(self, data: bytes) -> None:
        assert self.num_ends == 0, "nothing follows the end"
        self.data += data
        self.num_writes += 1

    def finish(self) -> None:
        self.num_ends += 1


def new_choice_group(
    n: int = 1, prompts: int = 1, params: SamplingParams | None = None
) -> ChoiceGroup:
    """Return a group with `n` choices for each of `prompts` prompts of three tokens."""
    readers, each = ParserFactory(TOKENIZER), params or SamplingParams()
    asks = [PromptRequest([1, 2, 3], [each] * n, readers) for _ in range(prompts)]
    return ChoiceGroup(ZmqEngineClient("ipc:///nowhere"), asks)
