"""Turns a chat body into prompt requests: a prompt, sampling parameters, a grammar and a parser.

All APIs with conversations use it. The effective template arguments are computed here, once per
conversation. The parser starts in the state in which the rendered prompt ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gateway.api.openai.naming import rename_error
from gateway.api.openai.requests import BatchBody, ChatBody, empty_prompt
from gateway.api.openai.structured import answer_form
from gateway.api.openai.tool_grammar import calls_instead, tool_grammar
from gateway.api.openai.tools import ToolPlan, tool_plan
from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.model_format import AnswerStart
from gateway.generation.parameters import choices_of, first, read_options
from gateway.generation.reasoning_tokens import ThinkingMeter
from gateway.generation.request import PromptRequest, ToolChoiceCheck
from gateway.prompt import tool_prompt
from gateway.prompt.kwargs import effective_kwargs, thinking_budget
from gateway.prompt.render import PromptConversation
from gateway.prompt.template import ParsedTemplate
from gateway.served_model import ServedModel
from gateway.service import offload
from protocol.errors import InvalidRequest, RequestError
from protocol.grammar import Body, Grammar


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. `kwargs` are the arguments that the template received."""

    text: str
    ids: list[int]
    kwargs: dict[str, Any]

    @property
    def effective(self) -> dict[str, Any]:
        """The `effective` member of the response."""
        return {"chat_template_kwargs": self.kwargs}


def _schema_field(plan: ToolPlan) -> str:
    """Return the field to blame if the engine refuses a tool's schema. The engine does not report
    which schema it was."""
    return "tools[0].function.parameters" if len(plan.declared) == 1 else "tools"


class Preparation:
    """Prepares the conversations of one body. Raises InvalidRequest naming the field.

    trusts_template  accept `chat_template` from the request
    form             the grammar of the answers; None: free text. If the model may call tools, an
                     answer is either calls or matches the form. If a call is required, there is
                     no form
    ignored          paths of the form's members that have no effect
    """

    def __init__(
        self, body: ChatBody | BatchBody, model: ServedModel, *, trusts_template: bool = False
    ) -> None:
        self.body = body
        self.model = model
        self.plan: ToolPlan = tool_plan(body)
        form = answer_form(body)
        self.ignored: list[str] = form.ignored if form else []
        if self.plan.demands_call:
            form = None
        self.form_field: str = form.field if form else _schema_field(self.plan)
        self.form: Body | None = form.body if form else None
        self._template = self._own_template(trusts_template)
        self._check_tools()

    def _own_template(self, trusts: bool) -> ParsedTemplate | None:
        source = self.body.chat_template
        if source is None:
            return None
        if not trusts:
            raise InvalidRequest(
                "chat_template: this server does not accept templates from requests; its operator "
                "can allow them with --trust-request-chat-template",
                param="chat_template",
            )
        return self.model.renderer.compiled(source)

    def _check_tools(self) -> None:
        if self.plan.demands_call and self.model.output_format.tools is None:
            raise InvalidRequest(
                "tool_choice: tool calls cannot be required, because this model's tool format is "
                "unknown; set tool_choice to 'auto', or restart the server with --tool-format",
                param="tool_choice",
            )

    @property
    def is_calls_or_form(self) -> bool:
        """Whether the answer is either calls or text that matches the form."""
        return self.form is not None and self.plan.mode == "auto"

    def rename_field(self, error: RequestError) -> RequestError:
        """Rename the engine's field in an error to the field of the request."""
        if error.param == "max_tokens":  # the message contains the name, too
            return rename_error(error, lambda _: self.body.max_tokens_field)
        fields = {
            "prompt": "messages",
            "grammar": self.form_field,
            "grammar.calls": _schema_field(self.plan),
        }
        error.param = fields.get(error.param or "", error.param)
        return error

    def prompt(self, messages: Sequence[Any], param: str = "messages") -> Prompt:
        """Render and tokenize a conversation. `param` is the path of `messages` in the body."""
        body, renderer = self.body, self.model.renderer
        kwargs = self.kwargs()
        continues = bool(body.continue_final_message)
        text = renderer.text(
            PromptConversation(
                messages=messages,
                param=param,
                template=self._template,
                teaches=self.model.output_format.tools in tool_prompt.FORMATS,
                tools=self.plan.shown or None,
                documents=body.documents,
                kwargs=kwargs,
                add_generation_prompt=first(body.add_generation_prompt, default=not continues),
                continue_final_message=continues,
            )
        )
        ids = renderer.encode(text, offload=offload, param=param)
        if not ids:
            raise empty_prompt(param)
        return Prompt(text, ids, kwargs)

    def kwargs(self) -> dict[str, Any]:
        """Return the effective arguments of the chat template."""
        body = self.body
        template = self._template or self.model.renderer.template_for(self.plan.shown)
        return effective_kwargs(
            body.thinking_fields,
            body.chat_template_kwargs,
            self.model.default_kwargs,
            template.profile,
        )

    def answer_start(self, prompt: Prompt) -> AnswerStart:
        """Return the state in which the answers to `prompt` start. It depends on the end of the
        prompt and on its template arguments."""
        calls = self.plan.mode != "none"
        return self.model.output_format.begin(prompt.text, prompt.kwargs, calls=calls)

    def prompt_request(self, prompt: Prompt) -> PromptRequest:
        """Return the request for one prompt, with its grammar."""
        start = self.answer_start(prompt)
        return replace(self.parse_request(prompt, start), grammar=self._grammar(start))

    def parse_request(self, prompt: Prompt, start: AnswerStart) -> PromptRequest:
        """Return the request for one prompt without a grammar, to parse an existing answer."""
        body, model, plan = self.body, self.model, self.plan
        marks, inside = start.marks, start.inside
        return PromptRequest(
            prompt.ids,
            choices_of(body, model.defaults, model.tokenizer),
            ParserFactory(
                model.tokenizer, read_options(body, continues=False), self._parser_options(start)
            ),
            new_meter=partial(ThinkingMeter, marks, starts_inside=inside) if marks else None,
            demand=ToolChoiceCheck(plan.name) if plan.demands_call else None,
        )

    def _grammar(self, start: AnswerStart) -> Grammar | None:
        field_budget = thinking_budget(self.body.thinking_fields)
        budget = start.budget(*field_budget) if field_budget else None
        if self.form is not None:
            calls_form = None
            if self.is_calls_or_form:
                calls_form = calls_instead(start.bound, self.plan, self.form_field)
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
            include_reasoning=self.body.include_reasoning is not False,
            parallel_tool_calls=self.plan.many,
            calls_or_text=self.is_calls_or_form,
        )
