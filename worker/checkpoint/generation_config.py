"""Reads generation_config.json: the sampling parameters that a model's authors recommend. Needs no
torch.

Each key of transformers' GenerationConfig is applied, has no effect here, or is named in one log
line if its value would change answers. `python -m worker.checkpoint.generation_config` prints them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.engine.model_card import SamplingDefaults
from worker.errors import UnusableModel
from worker.spec.fields import Fields

log = logging.getLogger(__name__)

FILE = "generation_config.json"
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
"""Keys whose values are those of the parameters with the same names."""
_APPLIED: dict[str, str] = {
    "temperature top_k top_p min_p repetition_penalty": "the parameter with the same name",
    "do_sample": "if it is false: `temperature` 0, whatever the file's `temperature` is",
    "min_new_tokens": "`min_tokens`",
    "bad_words_ids suppress_tokens": "`bad_words_ids`: sequences of tokens that no answer contains",
    "sequence_bias": "`logit_bias`, for single tokens; `bad_words_ids`, if the bias is -Infinity",
    "eos_token_id": "the tokens that end an answer",
}
"""Keys -> what they set."""
APPLIED = frozenset(" ".join(_APPLIED).split())
_NO_EFFECT: dict[str, str] = {
    "requests and the server limit an answer": "max_length max_new_tokens max_time",
    "only beam search reads them": """
        diversity_penalty early_stopping length_penalty num_beam_groups
    """,
    "requests choose the number of answers": "num_return_sequences",
    "drafts change no answer": """
        assistant_confidence_threshold assistant_early_exit assistant_lookbehind is_assistant
        max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule
        prompt_lookup_num_tokens speculation_type target_lookbehind use_mtp
    """,
    "they change how logits are computed, not which": """
        cache_config cache_implementation compile_config continuous_batching_config disable_compile
        low_memory max_cache_len prefill_chunk_size use_cache
    """,
    "they change no probability": "remove_invalid_values renormalize_logits",
    "they choose what `generate` returns": """
        output_attentions output_hidden_states output_logits output_scores return_dict_in_generate
    """,
    "the tokenizer and the chat template make the prompt": "bos_token_id pad_token_id",
    "only models with an encoder read it": "decoder_start_token_id",
    "they describe the file": "_from_model_config transformers_version",
}
NO_EFFECT: dict[str, str] = {
    name: reason for reason, names in _NO_EFFECT.items() for name in names.split()
}
"""Key -> why it has no effect on an answer here."""
NAMED: dict[str, tuple[Any, ...]] = {
    "assistant_ensemble_weight": (),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "stop_strings": ([],),
    "token_healing": (False,),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
}
"""Key that is not applied -> its values, besides null, that change no answer."""


KNOWN = APPLIED | NO_EFFECT.keys() | NAMED.keys()
KEYS = {"min_tokens": "min_new_tokens", "logit_bias": "sequence_bias"}
"""Sampling parameter -> the key that sets it, if its name differs."""
BANNED = -math.inf
"""The bias of a sequence that no answer contains."""


def generation_defaults(values: Mapping[str, Any], vocab_size: int | None) -> SamplingDefaults:
    """Return the defaults in a parsed generation_config.json, and log in one line what is not
    applied: keys in NAMED, unknown keys, and values out of bounds.

    vocab_size   sequences with other tokens are left out, because they cannot occur; None: unknown

    Raises UnusableModel, naming the key, if a value has the wrong type.
    """
    fields = Fields(values, FILE)
    found: dict[str, Any] = {
        name: fields.number(name) for name in NUMBERS if fields.get(name) is not None
    }
    if fields.get("top_k") is not None:
        found["top_k"] = fields.integer("top_k")
    if not fields.flag("do_sample", True):
        found["temperature"] = 0.0
    if minimum := fields.integer("min_new_tokens", 0):
        found["min_tokens"] = minimum
    biases = _biases(fields, vocab_size)
    if banned := [list(tokens) for tokens, bias in biases.items() if bias == BANNED]:
        found["bad_words_ids"] = banned
    finite = {tokens: bias for tokens, bias in biases.items() if bias != BANNED}
    if single := {tokens[0]: bias for tokens, bias in finite.items() if len(tokens) == 1}:
        found["logit_bias"] = single
    defaults, invalid = SamplingDefaults(**found).checked()
    unapplied = [f"{KEYS.get(name, name)} {out_of_bounds(each)}" for name, each in invalid.items()]
    unapplied += [f"{key} {values[key]!r:.60}" for key in NAMED if _changes(key, values.get(key))]
    unapplied += ["sequence_bias of several tokens"] * (len(finite) > len(single))
    unapplied += [f"{key:.60} (unknown)" for key in values if key not in KNOWN]
    log_unapplied(FILE, unapplied)
    return defaults


def log_unapplied(source: str, unapplied: Sequence[str]) -> None:
    """Log in one line what a file recommends and is not applied, if there is anything."""
    if unapplied:
        log.warning("%s: not applied: %s", source, ", ".join(unapplied))


def out_of_bounds(value: Any) -> str:
    """Return the part of the log line about a value that no request could have."""
    return f"{value!r:.60} (out of bounds)"


def _changes(key: str, value: Any) -> bool:
    """Return whether `value` of a key in NAMED would change answers."""
    return value is not None and value not in NAMED[key]


def _biases(fields: Fields, vocab_size: int | None) -> dict[tuple[int, ...], float]:
    """Return a mapping: token sequence -> bias. The bias is added to the logit of the last token of
    the sequence when the tokens before it have been generated.

    As in transformers, an end token alone is not a bad word.
    """
    found: dict[tuple[int, ...], float] = {}
    for item in _items(fields, "sequence_bias"):
        match item:
            case [tokens, int() | float() as bias]:
                found[_sequence(tokens, "sequence_bias")] = float(bias)
            case _:
                raise _wrong("sequence_bias", item, "a list of token ids and a number")
    eos = fields.get("eos_token_id", [])
    ends = {(end,) for end in (eos if isinstance(eos, list) else [eos])}
    words = [_sequence(item, "bad_words_ids") for item in _items(fields, "bad_words_ids")]
    found |= dict.fromkeys((word for word in words if word not in ends), BANNED)
    suppressed = _items(fields, "suppress_tokens")
    found |= dict.fromkeys((_sequence([token], "suppress_tokens") for token in suppressed), BANNED)
    size = math.inf if vocab_size is None else vocab_size
    return {each: bias for each, bias in found.items() if 0 <= min(each) <= max(each) < size}


def _items(fields: Fields, key: str) -> list[Any]:
    value = fields.get(key, [])
    if not isinstance(value, list):
        raise _wrong(key, value, "a list")
    return value


def _sequence(value: Any, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        raise _wrong(key, value, "a list of token ids")
    return tuple(value)


def _wrong(key: str, value: Any, wanted: str) -> UnusableModel:
    return UnusableModel(f"{FILE}: {key!r} has {value!r:.80}, which is not {wanted}")


def documented() -> str:
    """Return the tables for docs/models/checkpoints.md, as Markdown: the keys of
    generation_config.json that are applied, those without an effect, and those that are only
    named in the log."""
    lines = [
        *("| applied | sets |", "|---|---|"),
        *(f"| {_code(names)} | {meaning} |" for names, meaning in _APPLIED.items()),
        *("", "| no effect on an answer | because |", "|---|---|"),
        *(f"| {_code(names)} | {reason} |" for reason, names in _NO_EFFECT.items()),
        *("", f"Not applied, and named in the log: {_code(' '.join(NAMED))}."),
    ]
    return "\n".join(lines)


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


if __name__ == "__main__":
    print(documented())
