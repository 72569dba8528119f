"""Compiles a grammar to a MatcherTemplate with llguidance, within limits on its cost.

A grammar that cannot be enforced exactly is refused, so an answer is never silently left
unconstrained. It is refused if llguidance reports an error or a warning, or if a random walk
(probe.py) reaches a dead end or a limit.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine_core.grammar.markers import added_tokens, with_markers_special
from engine_core.grammar.matcher import MatcherTemplate, explain
from engine_core.grammar.probe import GrammarProbe
from engine_core.grammar.source import invalid, write_grammar
from engine_core.grammar.thinking_budget import spelling
from protocol.engine.grammar import Body, Grammar
from protocol.engine.model_card import ModelCard
from protocol.wire.errors import InvalidRequest
from protocol.worker.steps import TokenizerRead

LIMITS = LLParserLimits(
    max_items_in_row=6_000,  # 1,000 optional properties need 4,000; such a mask takes about 30 ms
    step_max_items=200_000,
    max_lexer_states=30_000,  # 1 to 2 kB each, shared by all answers of a grammar
    max_grammar_size=100_000,
    initial_lexer_fuel=300_000,  # bounds what a failing compilation uses meanwhile: 60 MB
    verbose_errors=False,
)
"""Published schemas of tools need a tenth of each. With these limits and those of
`protocol/engine/grammar.py`, a compiled grammar keeps at most about 36 MB
(`MAX_TEMPLATE_BYTES`)."""


class Compiler:
    """The grammar compiler of one model.

    Creating it holds the GIL for a few tenths of a second, or for 1.7 s with a vocabulary of
    150,000 tokens. So the engine creates it while the weights load.
    """

    def __init__(self, model: ModelCard | TokenizerRead) -> None:
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
        self._probe = GrammarProbe(self._tokenizer, model.vocab_size)
        self._spelling = spelling(self._tokenizer, self._markers)

    def compile(self, grammar: Grammar) -> MatcherTemplate:
        """Compile a grammar. Raises InvalidRequest if it cannot be enforced.

        Compiling takes milliseconds, or seconds for huge schemas, mostly without the GIL.
        llguidance recurses deeply, so the calling thread needs a large stack (`large_stack.py`).
        If the grammar has thinking or calls beside its body, compiling takes about twice as long,
        because the body and the calls are also compiled separately.
        """
        inner = None
        if grammar.body is not None:
            self._check_parts(grammar, grammar.body)
            inner = self._compile(grammar)
        budget = grammar.budget
        return MatcherTemplate(inner, (budget, self._spelling) if budget is not None else None)

    def _check_parts(self, grammar: Grammar, body: Body) -> None:
        """Raise InvalidRequest if the body or the calls, compiled separately, cannot be enforced.

        Compiling only the whole grammar would miss errors: llguidance finds an error after the
        thinking only when an answer gets there, and an error in one of two alternatives not at all.
        """
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
            self._tokenizer, write_grammar(grammar, self._markers), log_level=0, limits=LIMITS
        )
        if inner.is_error():
            raise invalid(explain(inner))
        if warnings := inner.get_grammar_warnings():
            raise invalid(warnings[0])
        if fault := self._probe.find_fault(inner):
            raise invalid(fault)
        return inner
