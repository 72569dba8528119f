"""A conversation and a body -> what the engine is asked, and how the answers are read.

The one road for chat, batch and tokenize. The effective kwargs are computed here, once per
conversation: the template sees them, and the parser starts where the rendered prompt leaves off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gateway.api.openai.naming import renamed
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
    """A rendered conversation.

    kwargs  what the template was told
    """

    text: str
    ids: list[int]
    kwargs: dict[str, Any]

    @property
    def effective(self) -> dict[str, Any]:
        """As the response tells it."""
        return {"chat_template_kwargs": self.kwargs}


def _schema_field(plan: ToolPlan) -> str:
    """Where the schemas stand that the engine may refuse: it does not say which of them it was."""
    return "tools[0].function.parameters" if len(plan.declared) == 1 else "tools"


class Preparation:
    """What holds for all conversations of a body. Raises InvalidRequest naming the field.

    trusts_template  a request may bring its own
    form             what all answers must look like; None: free text. With tools that the model
                     may call, an answer is of this form or it is calls; with a call that is
                     required, it is calls
    ignored          parts of the form's description that have no effect
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
                "chat_template: this server takes no templates from requests "
                "(--trust-request-chat-template)",
                param="chat_template",
            )
        return self.model.renderer.compiled(source)

    def _check_tools(self) -> None:
        if self.plan.demands_call and self.model.reading.tools is None:
            raise InvalidRequest(
                "tool_choice: calls cannot be required, because the server has no tool format for "
                "this model; set tool_choice to 'auto', or restart the server with --tool-format",
                param="tool_choice",
            )

    @property
    def is_calls_or_form(self) -> bool:
        """Whether the answer is either calls or text of the form."""
        return self.form is not None and self.plan.mode == "auto"

    def named(self, error: RequestError) -> RequestError:
        """Replace the engine's names of fields by those of the request."""
        if error.param == "max_tokens":  # the message names it, too
            return renamed(error, lambda _: self.body.max_tokens_field)
        fields = {
            "prompt": "messages",
            "grammar": self.form_field,
            "grammar.calls": _schema_field(self.plan),
        }
        error.param = fields.get(error.param or "", error.param)
        return error

    def prompt(self, messages: Sequence[Any], param: str = "messages") -> Prompt:
        """Render and encode. `param` is where the messages stand in the body."""
        body, renderer = self.body, self.model.renderer
        kwargs = self.kwargs()
        continues = bool(body.continue_final_message)
        text = renderer.text(
            PromptConversation(
                messages=messages,
                param=param,
                template=self._template,
                teaches=self.model.reading.tools in tool_prompt.FORMATS,
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
        """What the template is told."""
        body = self.body
        template = self._template or self.model.renderer.template_for(self.plan.shown)
        return effective_kwargs(
            body.thinking_fields,
            body.chat_template_kwargs,
            self.model.default_kwargs,
            template.profile,
        )

    def begin(self, prompt: Prompt) -> AnswerStart:
        """Where the answers to a prompt start; of it, its end and its kwargs count."""
        calls = self.plan.mode != "none"
        return self.model.reading.begin(prompt.text, prompt.kwargs, calls=calls)

    def ask(self, prompt: Prompt) -> PromptRequest:
        """What the engine is asked for a prompt, and how its answers are read: a start of their
        own for the answers of each conversation."""
        begun = self.begin(prompt)
        return replace(self.told(prompt, begun), grammar=self._grammar(begun))

    def told(self, prompt: Prompt, begun: AnswerStart) -> PromptRequest:
        """The same, to read answers that were made without us: no grammar is written."""
        body, model, plan = self.body, self.model, self.plan
        marks, inside = begun.marks, begun.inside
        return PromptRequest(
            prompt.ids,
            choices_of(body, model.defaults, model.tokenizer),
            ParserFactory(
                model.tokenizer, read_options(body, continues=False), self._answer(begun)
            ),
            new_meter=partial(ThinkingMeter, marks, starts_inside=inside) if marks else None,
            demand=ToolChoiceCheck(plan.name) if plan.demands_call else None,
        )

    def _grammar(self, begun: AnswerStart) -> Grammar | None:
        said = thinking_budget(self.body.thinking_fields)
        budget = begun.budget(*said) if said else None
        if self.form is not None:
            beside = None
            if self.is_calls_or_form:
                beside = calls_instead(begun.bound, self.plan, self.form_field)
            return begun.grammar(self.form, budget, beside)
        calls = tool_grammar(begun.bound, self.plan)
        if calls is not None:
            return begun.call_grammar(calls, budget)
        return Grammar(budget=budget) if budget else None

    def _answer(self, begun: AnswerStart) -> AnswerOptions | None:
        """None: all text is content."""
        if begun.bound is None:
            return None
        plan = self.plan
        has_grammar = plan.is_enforced or self.form is not None
        return AnswerOptions(
            format=begun.bound.with_drafts() if has_grammar else begun.bound,
            tools=plan.declared,
            starts_inside=begun.inside,
            include_reasoning=self.body.include_reasoning is not False,
            parallel_tool_calls=self.plan.many,
            calls_or_text=self.is_calls_or_form,
        )
