"""Grammar -> Template: llguidance, with limits on what one grammar may cost.

What it cannot enforce exactly it refuses: an error, a warning, a grammar in which a short walk
(`trial.py`) comes to a dead end or to the limits. Nothing is ever silently left unconstrained.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine_core.grammar.markers import added_tokens, with_markers_special
from engine_core.grammar.matcher import MatcherTemplate, explain
from engine_core.grammar.probe import GrammarProbe
from engine_core.grammar.source import invalid, write
from engine_core.grammar.thinking_budget import spelling
from protocol.errors import InvalidRequest
from protocol.grammar import Body, Grammar
from protocol.model_card import ModelCard

LIMITS = LLParserLimits(
    max_items_in_row=6_000,  # 1,000 optional properties take 4,000; a mask of so many, about 30 ms
    step_max_items=200_000,
    max_lexer_states=100_000,  # 1 to 2 kB each, shared by all answers of a grammar
    verbose_errors=False,
)


class Compiler:
    """Of one model. Construction takes a few tenths of a second and holds the GIL."""

    def __init__(self, model: ModelCard) -> None:
        self.vocab_size = model.vocab_size
        tokenizer = with_markers_special(model.tokenizer)
        self._tokenizer = LLTokenizer(
            tokenizer.decode(), n_vocab=model.vocab_size, eos_token=model.eos_token_ids
        )
        self._markers = {
            token.content: token.id
            for token in added_tokens(tokenizer)
            if self._tokenizer.is_special_token(token.id)
        }
        self._trial = GrammarProbe(self._tokenizer, model.vocab_size)
        self._spelling = spelling(self._tokenizer, self._markers)

    def compile(self, grammar: Grammar) -> MatcherTemplate:
        """Raises InvalidRequest. Takes milliseconds, for huge schemas seconds, mostly without the
        GIL; needs a deep stack. Thinking before it doubles the time, and so do calls beside it."""
        inner = None
        if grammar.body is not None:
            self._check_parts(grammar, grammar.body)
            inner = self._compile(grammar)
        budget = grammar.budget
        return MatcherTemplate(inner, (budget, self._spelling) if budget is not None else None)

    def _check_parts(self, grammar: Grammar, body: Body) -> None:
        """Refuse a body or calls that are wrong by themselves. After the thinking the error would
        be found too late, and beside the other part not at all."""
        if grammar.thinking is not None or grammar.calls is not None:
            self._compile(Grammar(body=body))
        if grammar.calls is not None:
            try:
                self._compile(Grammar(body=grammar.calls))
            except InvalidRequest as error:
                error.param = f"{error.param}.calls"
                raise

    def _compile(self, grammar: Grammar) -> LLMatcher:
        inner = LLMatcher(
            self._tokenizer, write(grammar, self._markers), log_level=0, limits=LIMITS
        )
        if inner.is_error():
            raise invalid(explain(inner))
        if warnings := inner.get_grammar_warnings():
            raise invalid(warnings[0])
        if fault := self._trial.find_fault(inner):
            raise invalid(fault)
        return inner
