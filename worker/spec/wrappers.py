"""Models of images or sound whose text part is a decoder of a family of ours.

The config of such a model has the decoder's config under `text_config`. The names of the decoder's
tensors have a prefix, and the files also hold tensors of the other parts. `text_part` returns the
config of the decoder alone, and `text_name` the names that its tensors would have there. So
everything that reads a model's files reads these models, too. Of the other parts, only encoders of
images are used, in some families (worker/vision). A request with sound is refused by the gateway.

In text, all three coordinates of a token in Qwen's M-RoPE are its position, so M-RoPE gives the
same angles as plain rotary embeddings. The coordinates of images differ (RopeConfig.axes).

Sources: the model classes of transformers 5.24 (`_checkpoint_conversion_mapping`, text configs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from worker.errors import UnusableModel

TEXT_TYPES: dict[str, dict[str, Any]] = {
    "kimi_k2": {"model_type": "deepseek_v3"},
    "glm4v_text": {"model_type": "glm4", "attention_bias": True, "mrope_interleaved": False},
    "glm4v_moe_text": {"model_type": "glm4_moe", "use_qk_norm": False, "mrope_interleaved": False},
    "glm_ocr_text": {"model_type": "glm4", "attention_bias": False, "mrope_interleaved": False},
    "qwen2_vl_text": {"model_type": "qwen2", "mrope_interleaved": False},
    "qwen2_5_vl_text": {"model_type": "qwen2", "mrope_interleaved": False},
    "qwen3_vl_text": {"model_type": "qwen3", "mrope_interleaved": True},
    "qwen3_vl_moe_text": {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "mrope_interleaved": True,
    },
    "qwen3_5_text": {"mrope_interleaved": True},
    "qwen3_5_moe_text": {"mrope_interleaved": True},
}
"""`model_type` of a text part -> the keys with which a decoder computes the same. That of a decoder
keeps its `model_type`."""

TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4v_text": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    },
    "glm4v_moe_text": {
        "vocab_size": 151424,
        "max_position_embeddings": 65536,
        "attention_bias": True,
    },
    "glm_ocr_text": {
        "vocab_size": 59392,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    },
}
"""`model_type` of a text part -> defaults that are not those of its decoder."""
WITHOUT_HEAD_DIM = frozenset({"glm4v_text", "glm_ocr_text"})
"""Those whose class divides the hidden size by the heads if a config has no `head_dim`, while that
of the decoder has a default."""

KIMI_TEXTS = frozenset({"kimi_k2", "deepseek_v3"})
WRAPPERS: dict[str, frozenset[str]] = {
    "Exaone4_5_ForConditionalGeneration": frozenset({"exaone4"}),
    "Gemma3ForConditionalGeneration": frozenset({"gemma3_text"}),
    "Gemma3nForConditionalGeneration": frozenset({"gemma3n_text"}),
    "Gemma4ForConditionalGeneration": frozenset({"gemma4_text"}),
    "Glm46VForConditionalGeneration": frozenset({"glm4v_text", "glm4v_moe_text"}),
    "Glm4vForConditionalGeneration": frozenset({"glm4v_text"}),
    "Glm4vMoeForConditionalGeneration": frozenset({"glm4v_moe_text"}),
    "GlmOcrForConditionalGeneration": frozenset({"glm_ocr_text"}),
    "Idefics3ForConditionalGeneration": frozenset({"llama"}),
    "InternVLForConditionalGeneration": frozenset({"qwen2", "qwen3", "qwen3_moe", "gpt_oss"}),
    "KimiK25ForConditionalGeneration": KIMI_TEXTS,
    "Kimi_K25ForConditionalGeneration": KIMI_TEXTS,
    "LightOnOcrForConditionalGeneration": frozenset({"qwen3"}),
    "Llama4ForConditionalGeneration": frozenset({"llama4_text"}),
    "LlavaForConditionalGeneration": frozenset({"llama", "mistral", "qwen2"}),
    "LlavaNextForConditionalGeneration": frozenset({"granite", "llama", "mistral", "qwen2"}),
    "LlavaOnevisionForConditionalGeneration": frozenset({"qwen2"}),
    "Mistral3ForConditionalGeneration": frozenset({"mistral", "ministral3", "mistral4"}),
    "Qwen2AudioForConditionalGeneration": frozenset({"qwen2"}),
    "Qwen2VLForConditionalGeneration": frozenset({"qwen2_vl_text"}),
    "Qwen2_5_VLForConditionalGeneration": frozenset({"qwen2_5_vl_text"}),
    "Qwen3VLForConditionalGeneration": frozenset({"qwen3_vl_text"}),
    "Qwen3VLMoeForConditionalGeneration": frozenset({"qwen3_vl_moe_text"}),
    "Qwen3_5ForConditionalGeneration": frozenset({"qwen3_5_text"}),
    "Qwen3_5MoeForConditionalGeneration": frozenset({"qwen3_5_moe_text"}),
    "SmolVLMForConditionalGeneration": frozenset({"llama"}),
    "VoxtralForConditionalGeneration": frozenset({"llama"}),
}
"""Architecture -> the `model_type`s of text parts that are served. tests/differential checks each
pair. Published configs of Kimi K2.5 have the first of its two names, those of transformers the
second."""

OF_THE_WHOLE = (
    *("quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
    *("pad_token_id", "dtype", "torch_dtype"),
)
"""Keys that hold for the text part also if the config has them only at its top level."""

#: Begins of the names of the text part's tensors.
_TEXT = re.compile(
    r"(?:model\.)?(?:language_model|text_model)\."
    r"(?:(?:model\.)?(?=layers\.|embed_tokens\w*\.|norm\.|(?:per_layer|altup)_\w+\.)|(?=lm_head\.))"
)
#: Begins of the names of other tensors, and of keys about other parts.
_PARTS = re.compile(
    r"(?:model\.)?(?:embed_)?"
    r"(?:visual|vision|image|video|audio|multi_modal_projector|mm_projector|connector)\w*(?:\.|$)"
)


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config of the text part of a wrapper; None if the config is of another model.
    Raises UnusableModel if the text part is not of a kind that is served."""
    match config.get("architectures"):
        case [str(name)] if name in WRAPPERS:
            pass
        case _:
            return None
    text, kind = config.get("text_config"), f"{config.get('model_type')}_text"
    if text is None and kind in TEXT_TYPES:
        # Configs of older releases have no `text_config`. The text part's keys are at the top.
        text = {key: value for key, value in config.items() if not _PARTS.match(key)}
        text["model_type"] = kind
    if not isinstance(text, dict):
        raise UnusableModel(f"config.json of {name} has no text_config")
    kind = str(text.get("model_type", "llama"))
    if kind not in WRAPPERS[name]:
        known = ", ".join(sorted(WRAPPERS[name]))
        raise UnusableModel(
            f"the text part of {name} is a {kind!r:.80}, which is not supported; supported: {known}"
        )
    shared = {key: config[key] for key in OF_THE_WHOLE if config.get(key) is not None}
    read = {**_defaults(kind, text), **text, **shared}
    return {**read, "architectures": None, "model_type": kind, **TEXT_TYPES.get(kind, {})}


def _defaults(kind: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of keys that a text part may lack and whose defaults are not those of its
    decoder."""
    found = dict(TEXT_DEFAULTS.get(kind, {}))
    if kind in WITHOUT_HEAD_DIM:
        sizes = found | dict(text)
        width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if isinstance(width, int) and isinstance(heads, int) and heads > 0:
            found["head_dim"] = width // heads
    return found


def text_name(name: str) -> str | None:
    """Return the name that a tensor of a wrapper's text part has in the files of the decoder alone;
    None if the tensor belongs to another part of the wrapper."""
    if (prefix := _TEXT.match(name)) is not None:
        rest = name[prefix.end() :]
        return rest if rest.startswith("lm_head.") else f"model.{rest}"
    return None if _PARTS.match(name) else name


def documented() -> str:
    """Return the table of docs/models/families.md as Markdown."""
    lines = ["| architecture | `model_type` of its text part |", "|---|---|"]
    for name, kinds in WRAPPERS.items():
        lines.append(f"| `{name}` | {', '.join(f'`{kind}`' for kind in sorted(kinds))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(documented())
