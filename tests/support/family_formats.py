"""Published chat templates of model families, and the formats that their models write.

`python -m tests.support.family_formats` prints the table of chat templates in
docs/models/models.md.

The templates are in tests/data/chat_templates. Qwen's and Mistral's are published under Apache 2.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gateway.formats.model_format import ModelOutputFormat
from gateway.prompt.template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from protocol.engine.model_card import ModelCard
from tests.support.scripted_engine import byte_tokenizer, scripted_card

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
CALL = {"name": "weather", "arguments": {"city": 'Saint "Étienne"', "days": [1, 2.5]}}
THOUGHT = "The user wants the weather."


@dataclass(frozen=True)
class PublishedTemplate:
    """A chat template as it was published with a model."""

    #: Name of the file in tests/data/chat_templates.
    name: str
    #: The model that it was published with.
    model: str
    #: Families whose models use it.
    families: tuple[str, ...]
    #: Tokens of the model's vocabulary that may decide the format.
    tokens: tuple[str, ...]
    #: Whether the template writes the reasoning of earlier answers.
    has_reasoning: bool = False

    @cached_property
    def source(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text()

    @cached_property
    def card(self) -> ModelCard:
        """Return the card of a model with this template. Its vocabulary has the marker tokens and
        one token per byte."""
        return scripted_card(
            vocab_size=259 + len(self.tokens),
            tokenizer=byte_tokenizer(self.tokens).to_str().encode(),
            chat_template=self.source,
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.card)

    @cached_property
    def output_format(self) -> ModelOutputFormat:
        written = ChatTemplate(self.source, self.card.special_tokens).written
        return ModelOutputFormat(self.card, self.tokenizer, written=written)

    def call_answer(self) -> tuple[str, str]:
        """Return (prompt, answer), as the template writes them into the prompt of a later turn. The
        answer has CALL, and THOUGHT if the template writes reasoning."""
        tool = {"name": CALL["name"], "description": "", "parameters": {"type": "object"}}
        answer = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALL}],
        }
        if self.has_reasoning:
            answer["reasoning_content"] = THOUGHT
        template = ChatTemplate(self.source, self.card.special_tokens)
        question = {"role": "user", "content": "How is the weather?"}
        variables = {"tools": [{"type": "function", "function": tool}]}
        prompt = template.render_variables(
            {**variables, "messages": [question], "add_generation_prompt": True}
        )
        whole = template.render_variables(
            {**variables, "messages": [question, answer], "add_generation_prompt": False}
        )
        start = len(prompt.rstrip())
        assert whole[:start] == prompt.rstrip()
        return prompt, whole[start:]


PUBLISHED = (
    PublishedTemplate(
        "qwen2_5",
        "Qwen2.5",
        ("Qwen2ForCausalLM",),
        ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    ),
    PublishedTemplate(
        "qwen3",
        "Qwen3",
        ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
        has_reasoning=True,
    ),
    PublishedTemplate(
        "mistral_nemo",
        "Mistral Nemo",
        ("MistralForCausalLM", "MixtralForCausalLM"),
        ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    ),
)


def table() -> str:
    """Return a Markdown table with the formats that are chosen for each template."""
    lines = ["| chat template | families | tool format | reasoning format |", "|---|---|---|---|"]
    for each in PUBLISHED:
        found = each.output_format
        names = [f"`{name}`" if name else "none" for name in (found.tools, found.reasoning)]
        families = ", ".join(f"`{name}`" for name in each.families)
        lines.append(f"| {each.model} | {families} | {' | '.join(names)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
