"""Turns a completion body into prompt requests."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.openai import requests
from gateway.api.openai.response_builder import CompletionResponseBuilder
from gateway.api.openai.structured import answer_form
from gateway.formats.choice_parser import ParserFactory
from gateway.generation.parameters import choices_of, read_options
from gateway.generation.request import PromptRequest
from gateway.served_model import ServedModel
from gateway.service import offload
from protocol.errors import RequestError
from protocol.grammar import Grammar
from protocol.sampling import check_token_ids


class Completion:
    """Prepares the prompts of one completion body. Raises InvalidRequest naming the field.

    prompt_requests  one per prompt
    ignored          paths of structured output members that have no effect
    ids              the prompts' token ids, if they are known already
    """

    def __init__(
        self,
        body: requests.CompletionBody,
        model: ServedModel,
        *,
        max_prompts: int,
        ids: Sequence[list[int]] | None = None,
    ) -> None:
        self.body = body
        self._model = model
        self._prompts = requests.prompts_of(body, max_prompts)
        self._options = read_options(body, continues=True)
        form = answer_form(body)
        self.ignored: list[str] = form.ignored if form else []
        self._form_field = form.field if form else ""
        choices = choices_of(body, model.defaults, model.tokenizer)
        parsers = ParserFactory(model.tokenizer, self._options)
        grammar = Grammar(body=form.body) if form is not None else None
        if ids is None:
            is_list = self._prompts is body.prompt  # else it is a single prompt
            ids = [
                _prompt_ids(prompt, model, f"prompt[{place}]" if is_list else "prompt")
                for place, prompt in enumerate(self._prompts)
            ]
        self.prompt_requests = [
            PromptRequest(prompt_ids, choices, parsers, grammar=grammar) for prompt_ids in ids
        ]

    def builder(self) -> CompletionResponseBuilder:
        body = self.body
        texts = None
        if body.echo:
            skips = self._options.skip_special_tokens
            texts = [_prompt_text(prompt, self._model, skips) for prompt in self._prompts]
        return CompletionResponseBuilder(
            self._model.tokenizer,
            body.num_logprobs,
            self._options,
            texts,
            body.logprob_token_ids or (),
        )

    def rename_field(self, error: RequestError) -> RequestError:
        """Rename the engine's "grammar" in an error to the field of the request."""
        error.param = self._form_field if error.param == "grammar" else error.param
        return error


def _prompt_ids(prompt: requests.Prompt, model: ServedModel, param: str) -> list[int]:
    """Return the prompt's token ids, or raise InvalidRequest naming `param`. An empty text becomes
    the BOS token, if the model has one."""
    if isinstance(prompt, str):
        bos = model.card.bos_token_id
        ids = model.tokenizer.encode(prompt, True, offload=offload, param=param)
        ids = ids or ([] if bos is None else [bos])
    else:
        check_token_ids(prompt, model.card.vocab_size, param)
        ids = prompt
    if not ids:
        raise requests.empty_prompt(param)
    return ids


def _prompt_text(prompt: requests.Prompt, model: ServedModel, skip_special_tokens: bool) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
