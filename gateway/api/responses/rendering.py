"""Renders a Responses request into a prompt, and prepares the prompt request.

It uses the chat's preparation. Errors name the fields of the Responses request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.api.openai.prepare import Preparation, Prompt
from gateway.api.responses.items import PlacedItem
from gateway.api.responses.messages import check_outputs
from gateway.api.responses.requests import ResponsesBody
from gateway.api.responses.translate import ResponsesTranslation, chat_body
from gateway.api.responses.truncation import render_fitting, reserved_tokens
from gateway.generation.request import PromptRequest
from gateway.served_model import ServedModel
from protocol.errors import RequestError


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered request, ready to be sent to the engine."""

    translation: ResponsesTranslation
    preparation: Preparation
    prompt: Prompt

    @property
    def ignored(self) -> list[str]:
        """Paths of members that have no effect."""
        return [self.translation.request_path(path) for path in self.preparation.ignored]

    def prompt_request(self) -> PromptRequest:
        with self.translation.renaming():
            return self.preparation.prompt_request(self.prompt)

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """Rename the fields of the engine's errors raised inside to those of the request."""
        try:
            yield
        except RequestError as error:
            raise self.translation.rename_error(self.preparation.rename_field(error)) from None


def rendered(
    body: ResponsesBody, items: Sequence[PlacedItem], model: ServedModel, *, trusts_template: bool
) -> Rendered:
    """Render a checked body. `items` include those of previous responses. Raise InvalidRequest."""

    def render(items: Sequence[PlacedItem]) -> Rendered:
        translation = chat_body(body, items)
        with translation.renaming():
            preparation = Preparation(translation.chat, model, trusts_template=trusts_template)
            prompt = preparation.prompt(translation.chat.messages)
        return Rendered(translation, preparation, prompt)

    check_outputs(items)
    if body.truncation != "auto":
        return render(items)
    max_prompt_tokens = model.limits.max_len - reserved_tokens(
        body.max_output_tokens, model.limits.max_len
    )
    return render_fitting(
        items, render, lambda rendered: len(rendered.prompt.ids) <= max_prompt_tokens
    )
