"""The chat templates in ../shared/templates, each as the card of a model that has it.

Each template gets a model directory of its own. The vocabulary has one token per byte, or is that
of a published tokenizer; the template's control tokens are added to it. `worker.startup.card` reads
the directory, so the card has everything that it would have for the real model's files.

Tests of these templates must be skipped if the folder is absent; then `NAMES` is empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from tokenizers import AddedToken

from gateway.prompt.template import ParsedTemplate
from gateway.served_model import ModelOptions, ModelText
from gateway.text.tokenizer import Tokenizer
from protocol.config.gateway import ModelConfig
from protocol.engine.model_card import ModelCard
from tests.support.scripted_engine import byte_tokenizer
from tests.support.templates import UnlimitedTemplates
from tests.support.tokenizers import REAL_TOKENIZERS
from worker.startup.card import text_card

FOLDER = Path(__file__).parents[3] / "shared" / "templates"
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.jinja")))
"""Names of the templates: their files' names without the suffix."""
NEEDS_TEMPLATES = pytest.mark.skipif(not NAMES, reason=f"{FOLDER} with templates does not exist")

BYTES = "bytes"
"""Name of the vocabulary with one token per byte. It is fast to load."""
CONTEXT_TOKENS = 1 << 17
CONTROL_TOKEN = re.compile(
    r"<\|[^|<>{}\s]{1,40}\|>"
    r"|<\uff5c[^\uff5c<>{}\s]{1,40}\uff5c>"
    r"|<\|\"\|>|<\|/?[a-z_]{1,30}>|</?[a-z_]{1,30}\|>"
    r"|\[/?[A-Z_]{2,30}\]"
    r"|<(?:start|end)_of_(?:turn|image|utterance)>|<(?:start|end)_function_(?:call|response)>"
    r"|</?s>|<bos>|<eos>|<SPECIAL_\d+>|<seed:[a-z]+>"
)
"""Pattern of tokens without text."""
TAG = re.compile(r"</?[A-Za-z_][\w:.-]{0,40}>")
"""Pattern of tokens that are text."""
BEGINNINGS = (
    "<|begin_of_text|>",
    "<\uff5cbegin▁of▁sentence\uff5c>",
    "<|startoftext|>",
    "<bos>",
    "<seed:bos>",
    "<s>",
)
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<\uff5cend▁of▁sentence\uff5c>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|end|>",
    "<|endoftext|>",
    "<seed:eos>",
    "</s>",
)
"""Usual tokens at the beginning of prompts and at the end of answers. A model has the first one
that its template contains, or else the last one."""


def source(name: str) -> str:
    """Return the text of a template."""
    return (FOLDER / f"{name}.jinja").read_text()


def control_tokens(template: str) -> tuple[str, ...]:
    """Return the tokens without text that a template contains."""
    return tuple(dict.fromkeys(CONTROL_TOKEN.findall(template)))


def tags(template: str) -> tuple[str, ...]:
    """Return the other tags that a template contains."""
    found = dict.fromkeys(TAG.findall(template))
    return tuple(tag for tag in found if not CONTROL_TOKEN.fullmatch(tag))


@cache
def card(name: str, vocabulary: str = BYTES) -> ModelCard:
    """Return the card of a model that has the template `name`.

    vocabulary  BYTES, or the name of a published tokenizer in ../shared/tokenizers
    """
    return card_of_template(source(name), vocabulary)


def card_of_template(template: str, vocabulary: str = BYTES) -> ModelCard:
    """Return the card of a model that has this template."""
    begin, end = (
        next((token for token in usual if token in template), usual[-1])
        for usual in (BEGINNINGS, ENDS)
    )
    inner = byte_tokenizer() if vocabulary == BYTES else _published(vocabulary)
    inner.add_special_tokens([begin, end, *control_tokens(template)])
    inner.add_tokens([AddedToken(tag, normalized=False) for tag in tags(template)])
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        inner.save(str(folder / "tokenizer.json"))
        config = {"max_position_embeddings": CONTEXT_TOKENS, "architectures": ["LlamaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
        settings = {"bos_token": begin, "eos_token": end}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "chat_template.jinja").write_text(template)
        return text_card(folder)


def _published(vocabulary: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(REAL_TOKENIZERS / vocabulary / "tokenizer.json"))


@cache
def tokenizer(name: str, vocabulary: str = BYTES) -> Tokenizer:
    """Return the tokenizer of `card`."""
    return Tokenizer(card(name, vocabulary))


class LoadedTemplates(UnlimitedTemplates):
    """Loads each template once, because compiling and probing it takes longer than most tests."""

    def __init__(self) -> None:
        self._loaded: dict[str, ParsedTemplate] = {}

    def load(self, source: str, special_tokens: Mapping[str, str]) -> ParsedTemplate:
        key = json.dumps([source, dict(special_tokens)])
        if key not in self._loaded:
            self._loaded[key] = super().load(source, special_tokens)
        return self._loaded[key]


TEMPLATES = LoadedTemplates()


@cache
def model_text(name: str, vocabulary: str = BYTES) -> ModelText:
    """Return the text side of the model of `card`, prepared as a server prepares it: tokenizer,
    renderer and output format. Templates are rendered in this process."""
    options = ModelOptions.from_config(ModelConfig(), TEMPLATES)
    return ModelText.from_card(card(name, vocabulary), options, TEMPLATES)
