"""Chooses the files of a repository on the Hugging Face Hub that make up a model.

Only data files are chosen. Pickles (*.bin, *.pt), Python files and everything else in the
repository are never downloaded. This module reads no files and does not use the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from protocol.process.exit_codes import ExitCode
from protocol.shared.gguf_parts import all_parts, is_later_part
from protocol.shared.mmproj import best_mmproj, is_mmproj
from protocol.shared.number_types import NUMBER_TYPE
from tools.failure import Failure
from tools.models.names import HubName

Kind = Literal["safetensors", "GGUF"]

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXT_FILES = frozenset(
    {
        *(CONFIG, "generation_config.json", INDEX),
        *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "tokenizer.model"),
        *("chat_template.jinja", "chat_template.json"),
        *("modules.json", "config_sentence_transformers.json"),
        *("LICENSE", "LICENSE.txt", "LICENSE.md"),
    }
)
"""The files beside the weights that are downloaded with safetensors files."""
TEMPLATES = re.compile(r"additional_chat_templates/[A-Za-z0-9_][A-Za-z0-9_.-]*\.jinja")
MODULES = re.compile(
    r"sentence_[a-z-]+_config\.json|\d+_[A-Za-z0-9_]+/(?:config\.json|model\.safetensors)"
)
"""Files of the modules of sentence-transformers, which say how vectors are made. Older versions put
the family into the name of the first module's file."""
OTHER_WEIGHTS = ("consolidated", "adapter_model")
"""Names that start with one of these belong to other programs: they repeat or change weights."""
PREFERRED = ("Q4_K_M", "Q4_0", "Q4_1", "Q8_0", "BF16", "F16")
"""The quantisations that are tried in this order if the name gives none."""

_WEIGHTS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_GGUF = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.+-]*/){0,2}[A-Za-z0-9_][A-Za-z0-9_.+-]*\.gguf")
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoFile:
    """A file of a repository."""

    #: Path in the repository.
    path: str
    size: int
    #: Digest of the content. None for small files, which the Hub names by `git_sha1` instead.
    sha256: str | None = None
    #: Digest under which git stores the file, in hex.
    git_sha1: str | None = None


def choose_files(name: HubName, files: Sequence[RepoFile]) -> tuple[Kind, list[RepoFile]]:
    """Return the kind of the model `name` and its files, the small ones first.

    files   all files of the repository

    Raises Failure if the repository has no such model.
    """
    ggufs = [each for each in files if _GGUF.fullmatch(each.path)]
    ggufs = [each for each in ggufs if not _NO_MODEL.search(each.path)]
    if name.choice:
        return "GGUF", _choose_gguf(name, ggufs)
    if weights := _choose_weights(files):
        return "safetensors", _with_text_files(name, files, weights)
    if ggufs:
        return "GGUF", _preferred_gguf(name, ggufs)
    raise _bad_model(
        f"{name.repo} has neither {SINGLE}, nor {INDEX}, nor .gguf files; "
        "choose a repository with one of these"
    )


def encoders_of(model: RepoFile, files: Sequence[RepoFile]) -> list[RepoFile]:
    """Return the image encoder (mmproj) of a GGUF model, which is in its folder or in one above;
    several if it is not clear which one it is."""
    paths = {PurePosixPath(each.path): each for each in files if _GGUF.fullmatch(each.path)}
    found = {path: each for path, each in paths.items() if is_mmproj(path.name)}
    for folder in PurePosixPath(model.path).parents:
        if beside := {path.name: each for path, each in found.items() if path.parent == folder}:
            best = best_mmproj(beside)
            return list(beside.values()) if best is None else [beside[best]]
    return []


def _choose_weights(files: Sequence[RepoFile]) -> list[RepoFile]:
    """Return the safetensors files of the model's weights: the single file, or else the parts if
    the repository has an index. Return [] if it has neither."""
    if single := [each for each in files if each.path == SINGLE]:
        return single
    if all(each.path != INDEX for each in files):
        return []
    found = [each for each in files if _WEIGHTS.fullmatch(each.path)]
    return [each for each in found if not each.path.startswith(OTHER_WEIGHTS)]


def _with_text_files(
    name: HubName, files: Sequence[RepoFile], weights: list[RepoFile]
) -> list[RepoFile]:
    """Return `weights` with the config, the tokenizer and other text files, the small ones first.
    Raises Failure if the config or the tokenizer is missing."""
    text = [
        each
        for each in files
        if each.path in TEXT_FILES or TEMPLATES.fullmatch(each.path) or MODULES.fullmatch(each.path)
    ]
    for needed in (CONFIG, TOKENIZER):
        if all(each.path != needed for each in text):
            raise _bad_model(f"{name.repo} cannot be served: it has no {needed}")
    return sorted(text + weights, key=lambda each: each.size)


def _choose_gguf(name: HubName, ggufs: Sequence[RepoFile]) -> list[RepoFile]:
    """Return the GGUF file, or the parts of one, that `name.choice` selects: a path, or a
    quantisation."""
    choice = name.choice
    exact = [each for each in ggufs if each.path == choice]
    found = exact
    if not exact and NUMBER_TYPE.fullmatch(choice):
        found = [each for each in ggufs if _has_quantisation(each.path, choice)]
    if not found:
        raise _bad_model(f"{name.repo} has no GGUF file {choice!r}; {_offer(name, ggufs)}")
    # If a name repeats another one with a prefix such as "UD-", the plain name is meant.
    best = min(found, key=lambda each: (len(each.path), each.path))
    return _parts(name, best, ggufs)


def _preferred_gguf(name: HubName, ggufs: Sequence[RepoFile]) -> list[RepoFile]:
    """Return the GGUF file, or the parts of one, to use if the name gives no quantisation."""
    models = [each for each in ggufs if not is_later_part(each.path)]
    if len(models) == 1:
        return _parts(name, models[0], ggufs)
    for quantisation in PREFERRED:
        found = [each for each in ggufs if _has_quantisation(each.path, quantisation)]
        if found:
            best = min(found, key=lambda each: (len(each.path), each.path))
            return _parts(name, best, ggufs)
    raise _bad_model(f"{name.repo} has several GGUF files; {_offer(name, ggufs)}")


def _has_quantisation(path: str, quantisation: str) -> bool:
    """Return whether a path contains a quantisation as a whole word. Case is ignored."""
    word = rf"(?<![A-Za-z0-9]){re.escape(quantisation)}(?![A-Za-z0-9_])"
    return re.search(word, path, re.IGNORECASE) is not None


def quantisations(paths: Iterable[str]) -> list[str]:
    """Return the quantisations that the names of GGUF files contain, sorted, in upper case."""
    found = (match[1].upper() for path in paths for match in NUMBER_TYPE.finditer(path))
    return sorted(set(found))


def _offer(name: HubName, ggufs: Iterable[RepoFile]) -> str:
    paths = [each.path for each in ggufs]
    if kinds := quantisations(paths):
        return f"choose one of {name.repo}:{{{','.join(kinds)}}}"
    return f"choose one of {', '.join(paths[:8])}" if paths else "it has no GGUF files at all"


def _parts(name: HubName, file: RepoFile, ggufs: Sequence[RepoFile]) -> list[RepoFile]:
    """Return `file`, or all parts of the model if it is one of them, in their order. Raises Failure
    if the repository lacks a part."""
    known, paths = {each.path: each for each in ggufs}, all_parts(file.path)
    for path in paths:
        if path not in known:
            raise _bad_model(f"{name.repo} lacks {path}, one of {len(paths)} parts of a model")
    return [known[path] for path in paths]


def _bad_model(message: str) -> Failure:
    return Failure(message, exit_code=ExitCode.BAD_MODEL)
