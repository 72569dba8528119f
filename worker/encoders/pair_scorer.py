"""Reads how a decoder scores pairs of texts, as Qwen3-Reranker does. Needs no torch.

A prompt asks whether a document answers a query, and the score is the probability of "yes" against
"no" as the next token. This is the sigmoid of the difference of two logits, so one row of weights
suffices: that of "yes" minus that of "no". The model exists in several forms:

    form                            where the rows are
    Qwen3ForCausalLM                in the output head, at the ids of the two tokens
    the same with LogitScore in     as above; 1_LogitScore/config.json has the ids
    modules.json
    Qwen3ForSequenceClassification  "score.weight", already subtracted
    a GGUF file of pooling type 4   "cls.output.weight"

Files of the first form do not say that they are a reranker, so their name or their README.md
decides, as in llama.cpp's converter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from protocol.engine.encoding import EncodingCard, PairPrompt
from worker.checkpoint.gguf_config import Metadata
from worker.checkpoint.text import token_ids
from worker.encoders.families.family import SCORES, check_one_label, has_sigmoid
from worker.encoders.modules import (
    MODULES,
    max_input_tokens,
    module_kinds,
    read_prompts,
    with_activation,
)
from worker.errors import FETCH_AGAIN, UnusableModel
from worker.spec.fields import Fields, parsed_json, read_json
from worker.spec.matrix_tensors import MatrixPart, Shape

ARCHITECTURE, CLASSIFIER = "Qwen3ForCausalLM", f"Qwen3{SCORES}"
SCORE_TENSOR, GGUF_TENSOR = "score.weight", "cls.output.weight"
LOGIT_SCORE = "LogitScore"
RERANK_TEMPLATE = "tokenizer.chat_template.rerank"
"""Key of a GGUF file's prompt, a text with `{query}` and `{document}`."""
NAME = re.compile(r"qwen3[-_ ]reranker", re.IGNORECASE)
TITLE = re.compile(r"^# qwen3-reranker", re.IGNORECASE | re.MULTILINE)
README, README_BYTES = "README.md", 1 << 16
YES, NO = "yes", "no"
PROMPT = PairPrompt(
    prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the "
    'Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
"""The prompt with which Qwen3-Reranker was trained, from its model card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScorer:
    """How a decoder scores pairs of texts."""

    #: Name of the tensor in the files whose rows score, and the number of its rows.
    tensor: str
    num_rows: int
    #: Row whose logit is added.
    plus: int
    #: Row whose logit is subtracted; None: none.
    minus: int | None = None
    has_sigmoid: bool = True
    #: Most tokens of a prompt; None: as many as the model takes.
    max_tokens: int | None = None
    prompt: PairPrompt = PROMPT

    @property
    def rows(self) -> tuple[int, ...]:
        return (self.plus,) if self.minus is None else (self.plus, self.minus)

    def card(self, context_tokens: int) -> EncodingCard:
        """Return the description of the score task for the model card."""
        limit = min(self.max_tokens or context_tokens, context_tokens)
        return EncodingCard(task="score", max_tokens=limit, size=1, pair_prompt=self.prompt)


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether a parsed config.json is that of a decoder with a head that scores."""
    return config.get("architectures") == [CLASSIFIER]


def has_logit_score(folder: Path) -> bool:
    """Return whether the modules of a directory score with the logits of tokens."""
    return (folder / MODULES).is_file() and LOGIT_SCORE in module_kinds(folder)


def classifier_scorer(
    folder: Path, config: Mapping[str, Any], found: Mapping[str, Shape], hidden: int
) -> PairScorer:
    """Return the scorer of a decoder with a head that scores. Raises UnusableModel if the head has
    several labels, or if its tensor is missing or has another shape.

    found   name -> shape of each tensor in the files
    """
    check_one_label(Fields(config, "config.json"))
    _check_head(SCORE_TENSOR, found.get(SCORE_TENSOR), (1, hidden))
    scorer = PairScorer(tensor=SCORE_TENSOR, num_rows=1, plus=0)
    return _with_settings_of(folder, scorer, config)


def module_scorer(folder: Path, tokenizer: bytes, head: MatrixPart) -> PairScorer:
    """Return the scorer that the modules of a directory describe. Raises UnusableModel if they
    score in another way than Qwen3-Reranker."""
    kinds = module_kinds(folder)
    if kinds != ["Transformer", LOGIT_SCORE]:
        raise UnusableModel(f"{MODULES}: the modules {', '.join(kinds)} are not supported")
    scorer = token_scorer(tokenizer, head)
    file = folder / f"1_{LOGIT_SCORE}" / "config.json"
    config = Fields(read_json(file), str(file))
    given = config.integer("true_token_id"), config.get("false_token_id")
    if given != scorer.rows:
        raise UnusableModel(
            f"{file}: the tokens {given} are not {scorer.rows}, the ids of {YES!r} and {NO!r}; "
            "only Qwen3-Reranker and models that were made from it are supported"
        )
    return _with_settings_of(folder, scorer, {})


def _with_settings_of(folder: Path, scorer: PairScorer, config: Mapping[str, Any]) -> PairScorer:
    """Return a scorer with the limit, the function of the score and the instruction that the files
    of sentence-transformers name. Their default prompt is the instruction.

    config   the parsed config.json, if it may name the function
    """
    prompts, default = read_prompts(folder)
    prompt = scorer.prompt
    if default is not None and prompts[default]:
        prompt = msgspec.structs.replace(prompt, instruction=prompts[default])
    return replace(
        scorer,
        has_sigmoid=has_sigmoid(Fields(with_activation(config, folder), "config.json")),
        max_tokens=max_input_tokens(folder),
        prompt=prompt,
    )


def token_scorer(tokenizer: bytes, head: MatrixPart) -> PairScorer:
    """Return the scorer that compares the logits of "yes" and "no". Raises UnusableModel if the
    model lacks one of these tokens.

    head   the output head, which has a row for each token
    """
    ids = token_ids(parsed_json(tokenizer))
    for token in (YES, NO):
        if not 0 <= ids.get(token, -1) < head.rows:
            raise UnusableModel(f"the model has no token {token!r}, which a reranker needs")
    return PairScorer(tensor=head.weight, num_rows=head.rows, plus=ids[YES], minus=ids[NO])


def gguf_scorer(metadata: Metadata, tokenizer: bytes, head: MatrixPart, hidden: int) -> PairScorer:
    """Return the scorer of a GGUF file. Raises UnusableModel, naming the key or the tensor, if it
    is not supported.

    head   the output head, which is used if the file has no other
    """
    prompt = _gguf_prompt(metadata.fields)
    found = metadata.file.tensors.get(GGUF_TENSOR)
    if found is None:
        return replace(token_scorer(tokenizer, head), prompt=prompt)
    labels, key = metadata.get("classifier.output_labels"), "classifier.output_labels"
    if not isinstance(labels, list) or sorted(map(str, labels)) != [NO, YES]:
        raise UnusableModel(
            f"{metadata.key(key)} is {labels!r:.80}; only {YES!r} and {NO!r} are supported"
        )
    _check_head(GGUF_TENSOR, found.shape, (len(labels), hidden))
    return PairScorer(
        tensor=GGUF_TENSOR,
        num_rows=len(labels),
        plus=labels.index(YES),
        minus=labels.index(NO),
        prompt=prompt,
    )


def _check_head(name: str, shape: Shape | None, wanted: Shape) -> None:
    if shape is None:
        raise UnusableModel(f"tensor {name!r} is missing from the files", remedy=FETCH_AGAIN)
    if shape != wanted:
        raise UnusableModel(f"{name} has shape {shape}; the config requires {wanted}")


def _gguf_prompt(fields: Fields) -> PairPrompt:
    """Return the prompt that a GGUF file names, or PROMPT if the file names none. Raises
    UnusableModel if the named prompt has no `{query}` with a `{document}` after it."""
    template = fields.text(RERANK_TEMPLATE, "")
    if not template or template == PROMPT.plain:
        return PROMPT
    before, has_query, rest = template.partition("{query}")
    middle, has_document, suffix = rest.partition("{document}")
    if not (has_query and has_document):
        raise UnusableModel(f"{RERANK_TEMPLATE} has no {{query}} before a {{document}}")
    # Cut after a line, where no token crosses from one part to the other.
    prefix, newline, start = before.rpartition("\n")
    return PairPrompt(
        prefix=prefix + newline, body=f"{start}{{query}}{middle}{{document}}", suffix=suffix
    )


def is_named_reranker(name: str, folder: Path | None) -> bool:
    """Return whether a model is Qwen3-Reranker by its name or by the title of its README.md.

    folder   directory of the model; None for a file
    """
    if NAME.search(name):
        return True
    if folder is None or not (folder / README).is_file():
        return False
    with (folder / README).open("rb") as file:
        return TITLE.search(file.read(README_BYTES).decode(errors="replace")) is not None
