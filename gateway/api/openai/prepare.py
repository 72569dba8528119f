"""Checks a body and turns it into prompt requests: prompt, sampling parameters, grammar, parser.

All APIs with conversations use `Preparation`. It computes the effective template arguments, once
per conversation. The answer's parser starts in the state in which the rendered prompt ends, for
example inside a reasoning block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gateway.api.openai.parameters import choices_of, read_options, with_stop_tokens
from gateway.api.openai.requests import (
    BatchBody,
    ChatBody,
    CompletionBody,
    CompletionPrompt,
    empty_prompt,
    prompts_of,
)
from gateway.api.openai.response_builder import CompletionResponseBuilder
from gateway.api.openai.responses import Effective
from gateway.api.openai.structured import FORM_FIELDS, answer_form
from gateway.api.openai.tools import (
    ToolPlan,
    calls_instead_of_form,
    tool_grammar,
    tool_plan,
)
from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.events import OutputWarning
from gateway.formats.model_format import AnswerStart
from gateway.formats.reasoning_tokens import ReasoningCounter
from gateway.generation.request import PromptRequest, ToolChoiceCheck
from gateway.images.source import FileLoader, no_files
from gateway.prompt.infill import InfillFile, InfillFormat
from gateway.prompt.kwargs import thinking_budget
from gateway.prompt.render import PromptConversation, RenderedPrompt, TemplateOptions
from gateway.prompt.template import ParsedTemplate
from gateway.served_model import ServedModel
from gateway.service import offload
from protocol.engine.grammar import Body, Grammar
from protocol.engine.model_card import sets_penalty
from protocol.engine.sampling import check_token_ids
from protocol.wire.errors import InvalidRequest

LEFT_OUT = "content_left_out"
"""Code of the warning about a part of a conversation that the model does not read."""
ANSWER_SHARE = 4
"""If an answer is limited by the context only, one in this many tokens of the context is kept free
of the files that a prompt for filling in the middle contains."""


@dataclass(frozen=True, slots=True)
class Prompt(RenderedPrompt):
    """A rendered conversation: the prompt of a chat request."""

    @property
    def warnings(self) -> list[OutputWarning]:
        """A warning for each image of a tool's result that the model cannot read."""
        why = "left out, because this model reads text only"
        return [OutputWarning(LEFT_OUT, f"{at}: {why}") for at in self.images.left_out]

    @property
    def effective(self) -> Effective:
        """The member `effective` of the response: the arguments that the template received."""
        return Effective(self.kwargs)


class Preparation:
    """Prepares the conversations of one body. Raises InvalidRequest naming the field.

    trusts_template  whether the server accepts `chat_template` from requests
    shown_tools      the tools that the template receives; None: those of the body. The messages may
                     define others, and withdraw some of these
    files            loads the images that are uploaded files
    """

    def __init__(
        self,
        body: ChatBody | BatchBody,
        model: ServedModel,
        *,
        trusts_template: bool = False,
        shown_tools: Sequence[Mapping[str, Any]] | None = None,
        files: FileLoader = no_files,
    ) -> None:
        self.body = body
        self._files = files
        self.model = model
        # Most requests have neither tools nor a form.
        has_tools = bool(body.tools) or body.tool_choice is not None
        has_form = any(getattr(body, field) is not None for field in FORM_FIELDS)
        self.plan: ToolPlan = tool_plan(body, shown_tools) if has_tools else ToolPlan()
        form = answer_form(body) if has_form else None
        #: Paths of structured output members and of tools that have no effect.
        self.ignored: list[str] = [*(form.ignored if form else ()), *self.plan.ignored]
        if self.plan.demands_call:
            form = None
        #: The field that an error names if the engine refuses the grammar.
        self.form_field: str = form.field if form else self.plan.schema_field
        #: The grammar of the answer's text; None if any text is allowed or a tool call is required.
        #: If the model may call tools, the answer is either tool calls or matches this grammar.
        self.form: Body | None = form.body if form else None
        self._template = self._own_template(trusts_template)
        self._check_tools()

    def _own_template(self, trusts: bool) -> ParsedTemplate | None:
        """Return the compiled template of the request, or None if the request has none."""
        source = self.body.chat_template
        if source is None:
            return None
        if not trusts:
            raise InvalidRequest.at(
                "chat_template",
                "this server does not accept templates from requests; its operator "
                "can allow them with --trust-request-chat-template",
            )
        return self.model.renderer.compiled(source)

    def _check_tools(self) -> None:
        if self.plan.demands_call and self.model.output_format.tools is None:
            raise InvalidRequest.at(
                "tool_choice",
                "tool calls cannot be required, because this model's tool format is "
                "unknown; set tool_choice to 'auto', or restart the server with --tool-format",
            )

    @property
    def is_calls_or_form(self) -> bool:
        """Whether the answer is either tool calls or text that matches `form`."""
        return self.form is not None and self.plan.mode == "auto"

    @property
    def engine_fields(self) -> dict[str, str]:
        """The engine's names of fields -> the paths of the chat fields."""
        return {
            "prompt": "messages",
            "grammar": self.form_field,
            "grammar.calls": self.plan.schema_field,
        }

    def request_path(self, name: str) -> str:
        """Return the path of a chat field as the client spelled it."""
        return self.body.max_tokens_field if name == "max_tokens" else name

    def prompt(self, messages: Sequence[Any], param: str = "messages") -> Prompt:
        """Render and tokenize a conversation. `param` is the path of `messages` in the body."""
        body = self.body
        continues = bool(body.continue_final_message)
        adds_prompt = body.add_generation_prompt
        conversation = PromptConversation(
            messages=messages,
            param=param,
            template=self._template,
            tool_format=self.model.output_format.tools,
            tools=self.plan.shown or None,
            documents=body.documents,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=continues,
            files=self._files,
        )
        rendered = self.model.renderer.prompt(conversation, self._options, offload=offload)
        if not rendered.ids:
            raise empty_prompt(param)
        return Prompt(
            rendered.text, rendered.ids, rendered.kwargs, rendered.template_s, rendered.images
        )

    def kwargs(self) -> dict[str, Any]:
        """Return the effective arguments of the chat template."""
        return self.model.renderer.kwargs(self._options, self._template, self.plan.shown)

    @property
    def _options(self) -> TemplateOptions:
        body = self.body
        return TemplateOptions(
            thinking=body.thinking_fields,
            kwargs=body.chat_template_kwargs,
            defaults=self.model.default_kwargs,
        )

    def answer_start(self, prompt: Prompt) -> AnswerStart:
        """Return where the answers to `prompt` start, such as inside a reasoning block. The end of
        the prompt and its template arguments determine this."""
        calls = self.plan.mode != "none"
        return self.model.output_format.answer_start(prompt.text, prompt.kwargs, calls=calls)

    def prompt_request(self, prompt: Prompt) -> PromptRequest:
        """Return the request for one prompt, with its grammar."""
        start = self.answer_start(prompt)
        return replace(self.request_without_grammar(prompt, start), grammar=self._grammar(start))

    def request_without_grammar(self, prompt: Prompt, start: AnswerStart) -> PromptRequest:
        """Return the request for one prompt, without a grammar. No grammar is needed to parse an
        answer that was generated before."""
        body, model, plan = self.body, self.model, self.plan
        marks, inside = start.marks, start.inside
        new_counter = partial(ReasoningCounter, marks, starts_inside=inside) if marks else None
        is_free = self.form is None and not plan.is_enforced
        defaults = model.defaults.for_request(
            body.temperature, is_free=is_free, sets_penalty=sets_penalty(body)
        )
        choices = choices_of(body, defaults, model.tokenizer)
        return PromptRequest(
            prompt.ids,
            choices,
            ParserFactory(
                model.tokenizer,
                read_options(body, choices[0], continues=False),
                self._parser_options(start),
            ),
            new_reasoning_counter=new_counter,
            tool_choice_check=ToolChoiceCheck(plan.name) if plan.demands_call else None,
            images=prompt.images,
        )

    def _grammar(self, start: AnswerStart) -> Grammar | None:
        field_budget = thinking_budget(self.body.thinking_fields)
        budget = start.budget(*field_budget) if field_budget else None
        if self.form is not None:
            calls_form = None
            if self.is_calls_or_form:
                calls_form = calls_instead_of_form(start.bound, self.plan, self.form_field)
            return start.grammar(self.form, budget, calls_form)
        calls = tool_grammar(start.bound, self.plan)
        if calls is not None:
            return start.call_grammar(calls, budget)
        return Grammar(budget=budget) if budget else None

    def _parser_options(self, start: AnswerStart) -> AnswerOptions | None:
        """Return the parser options, or None if all text is content."""
        if start.bound is None:
            return None
        plan = self.plan
        has_grammar = plan.is_enforced or self.form is not None
        return AnswerOptions(
            format=start.bound.with_drafts() if has_grammar else start.bound,
            tools=plan.declared,
            starts_inside=start.inside,
            continues_reasoning=start.thought,
            include_reasoning=self.body.include_reasoning is not False,
            parallel_tool_calls=self.plan.allows_many,
            calls_or_text=self.is_calls_or_form,
        )


class Completion:
    """Prepares the prompts of one completion body. Raises InvalidRequest naming the field.

    ids    token ids of the prompts, if they are known; the prompts are then not tokenized
    files  other files, as context: the model fills in the middle even if `suffix` is empty. None:
           it does so only if there is a suffix
    """

    def __init__(
        self,
        body: CompletionBody,
        model: ServedModel,
        *,
        max_prompts: int,
        ids: Sequence[list[int]] | None = None,
        files: Sequence[InfillFile] | None = None,
    ) -> None:
        self.body = body
        self._model = model
        self._prompts = prompts_of(body, max_prompts)
        fills_gap = bool(body.suffix) or files is not None
        ends = model.infill.ends if fills_gap and model.infill is not None else ()
        form = answer_form(body)
        is_free = form is None and not fills_gap
        defaults = model.defaults.for_request(
            body.temperature, is_free=is_free, sets_penalty=sets_penalty(body)
        )
        choices = choices_of(body, defaults, model.tokenizer)
        self._options = read_options(body, choices[0], continues=True, end_token_ids=ends)
        if ends:
            choices = [with_stop_tokens(params, ends) for params in choices]
        #: Paths of structured output members that have no effect.
        self.ignored: list[str] = form.ignored if form else []
        self._form_field = form.field if form else ""
        grammar = Grammar(body=form.body) if form is not None else None
        self._infill = _infill_of(model) if fills_gap else None
        self._files = files or ()
        #: Number of `files` that did not fit into a prompt.
        self.num_left_out = 0
        if ids is None:
            is_list = self._prompts is body.prompt  # else it is a single prompt
            ids = [
                self._prompt_ids(prompt, f"prompt[{place}]" if is_list else "prompt")
                for place, prompt in enumerate(self._prompts)
            ]
        parsers = ParserFactory(model.tokenizer, self._options)
        #: One request per prompt.
        self.prompt_requests = [
            PromptRequest(prompt_ids, choices, parsers, grammar=grammar) for prompt_ids in ids
        ]

    def _prompt_ids(self, prompt: CompletionPrompt, param: str) -> list[int]:
        """Return the prompt's token ids, or raise InvalidRequest naming `param`."""
        if self._infill is None:
            return _prompt_ids(prompt, self._model, param)
        if not isinstance(prompt, str):
            check_token_ids(prompt, self._model.card.vocab_size, param)
        max_len = self._model.limits.max_len
        answer_tokens = self.body.max_tokens
        if answer_tokens is None or answer_tokens >= max_len:
            answer_tokens = max_len // ANSWER_SHARE
        ids, num_left_out = self._infill.prompt(
            prompt,
            self.body.suffix or "",
            files=self._files,
            max_tokens=max_len - answer_tokens,
            offload=offload,
            param=param,
        )
        self.num_left_out = max(self.num_left_out, num_left_out)
        return ids

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

    @property
    def engine_fields(self) -> dict[str, str]:
        """The engine's names of fields -> the paths of the completion's fields."""
        return {"grammar": self._form_field}


def _infill_of(model: ServedModel) -> InfillFormat:
    if model.infill is None:
        raise InvalidRequest.at(
            "suffix",
            "this model cannot fill in the middle: its vocabulary has none of the tokens for that",
        )
    return model.infill


def _prompt_ids(prompt: CompletionPrompt, model: ServedModel, param: str) -> list[int]:
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
        raise empty_prompt(param)
    return ids


def _prompt_text(prompt: CompletionPrompt, model: ServedModel, skip_special_tokens: bool) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
