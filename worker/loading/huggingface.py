"""Hugging Face model directories: JSON beside safetensors. Nothing in them is ever executed."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from protocol.model_card import SamplingDefaults
from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields, read_json
from worker.loading.files import ModelFiles, TextFacts
from worker.models.config import llama_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def read_directory(path: Path) -> ModelFiles:
    """Raises UnusableModel, naming what is missing, damaged or not supported."""
    config_json = read_json(path / "config.json")
    config = llama_config(config_json)
    paths = weight_files(path)
    text = _text(path, Fields(config_json, "config.json"), config.vocab_size)
    return ModelFiles(path.resolve().name, config, SafetensorsWeights(paths), text, paths)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of the directory, sorted by name."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if (path / INDEX).is_file():
        return _shards(path)
    if any(file.suffix in PICKLES for file in path.iterdir()):
        raise UnusableModel(
            f"{path} holds weights as pickle files, which can run code when they are read; "
            "convert them to safetensors"
        )
    raise UnusableModel(f"{path} holds neither {SINGLE} nor {INDEX}")


def _shards(path: Path) -> list[Path]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnusableModel(f"{path / INDEX} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnusableModel(f"{path / INDEX} names {name!r}, which is no file of the directory")
        if not (path / name).is_file():
            raise UnusableModel(f"{path / name} is missing")
    return [path / name for name in sorted(names)]


class SafetensorsWeights:
    """A WeightSource over one or more files, mapped; only what is read is touched."""

    def __init__(self, paths: list[Path]) -> None:
        self._file_of: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UnusableModel(f"{path} is damaged or truncated: {error}") from error
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                if name in self._file_of:
                    raise UnusableModel(f"tensor {name!r} is in two files")
                self._file_of[name] = file

    def names(self) -> Set[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read_into(self, name: str, target: Tensor) -> None:
        dtype = self._file_of[name].get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise UnusableModel(f"{name} has dtype {dtype}; supported: {', '.join(DTYPES)}")
        target.copy_(self._file_of[name].get_tensor(name))


def _text(path: Path, config: Fields, vocab_size: int) -> TextFacts:
    if not (path / "tokenizer.json").is_file():
        raise UnusableModel(f"{path} has no tokenizer.json; other tokenizer formats are not read")
    tokenizer = (path / "tokenizer.json").read_bytes()
    ids = _token_ids(read_json(path / "tokenizer.json"))
    settings = _optional_json(path / "special_tokens_map.json")
    settings |= _optional_json(path / "tokenizer_config.json")
    generation = Fields(_optional_json(path / "generation_config.json"), "generation_config.json")
    special = _special_tokens(settings)
    ends = _id_list(generation, "eos_token_id") or _id_list(config, "eos_token_id")
    if special.get("eos_token") in ids:
        ends.append(ids[special["eos_token"]])
    if too_large := [end for end in ends if end >= vocab_size]:
        raise UnusableModel(
            f"eos_token_id {too_large[0]} is outside the vocabulary of {vocab_size:,}"
        )
    return TextFacts(
        tokenizer=tokenizer,
        eos_token_ids=list(dict.fromkeys(ends)),
        bos_token_id=ids.get(special.get("bos_token", "")),
        pad_token_id=ids.get(special.get("pad_token", "")),
        special_tokens=special,
        chat_template=_chat_template(path, settings),
        response_template=_response_template(settings),
        defaults=_defaults(generation),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """token -> id, of the vocabulary and of added tokens."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocab) if isinstance(vocab, dict) else {}
    for token in map(_added_token, tokenizer.get("added_tokens") or []):
        ids[token.text("content")] = token.integer("id")
    return ids


def _added_token(token: Any) -> Fields:
    return Fields(token, "an added token of tokenizer.json")


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Each is written as a string, or as an object with `content`."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _id_list(fields: Fields, name: str) -> list[int]:
    """One id or a list of them; none where absent."""
    value = fields.get(name, [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UnusableModel(f"{name} {value!r:.80} is neither a token id nor a list of them")
    return list(ids)


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """Its own file, or in tokenizer_config.json: a string, or several of which "default" counts."""
    own = path / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):
        named = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def _response_template(settings: dict[str, Any]) -> str | None:
    """As it stands in tokenizer_config.json: whether it can be used is for its reader to say."""
    given = settings.get("response_template")
    return None if given is None else json.dumps(given)


def _defaults(generation: Fields) -> SamplingDefaults:
    def number(name: str) -> float | None:
        return None if generation.get(name) is None else generation.number(name)

    top_k = generation.get("top_k")
    return SamplingDefaults(
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=None if top_k is None else generation.integer("top_k"),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )
