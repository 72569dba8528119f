"""Tiny random models of the types that transformers computes with our attention."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.support.checkpoints import VOCAB
from worker.spec.architectures import BORROWED, BORROWED_OWN_CACHE, CHECKED

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
"""Sizes of every model. No two dimensions are equal, so a misplaced tensor has the wrong shape."""
OPTIONAL: dict[str, Any] = {
    "intermediate_size": 160,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 24,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_num_experts": 5,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "attention_bias": True,
    "use_qk_norm": True,
}
"""Values for keys that only some configs have."""
OWN: dict[str, dict[str, Any]] = {
    "biogpt": {"intermediate_size": 160},
    "codegen": {"num_attention_heads": 8, "rotary_dim": 8, "n_inner": 160},
    "ctrl": {"dff": 160},
    "dbrx": {
        "d_model": 96,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            "hidden_size": 96,
            "ffn_hidden_size": 160,
            "moe_num_experts": 5,
            "moe_top_k": 2,
        },
    },
    "dots1": {"max_window_layers": 2},
    "falcon": {"ffn_hidden_size": 160},
    "flint": {"mlp_only_layers": [0]},
    "gpt_neo": {"window_size": 24, "attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8, "n_inner": 160},
    "granitemoe": {"attention_multiplier": 0.2, "residual_multiplier": 0.4},
    "granitemoeshared": {"attention_multiplier": 0.2, "residual_multiplier": 0.4},
    "granitemoe_swa": {"attention_multiplier": 0.2, "layer_rope_theta": [1e4, 0, 500.0, 0]},
    "granite_swa": {"attention_multiplier": 0.2, "layer_rope_theta": [1e4, 0, 500.0, 0]},
    "helium": {"head_dim": 16},
    "internlm3": {"mlp_bias": True},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 96},
    "stablelm": {"qk_layernorm": True},
}
"""Model type -> values that it needs, or that switch on more of its features."""


COMPUTED = {kind: name for name, kind in CHECKED.items()} | {
    kind: name for kind, (name, _) in BORROWED.items() if kind not in BORROWED_OWN_CACHE
}
"""Model type -> the class of transformers that computes its models."""


def random_model(model_type: str, **changes: Any) -> Any:
    """Return transformers' model with random weights, biases and norms."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = {*config_class().to_dict(), *config_class.attribute_map}
    optional = {key: value for key, value in OPTIONAL.items() if key in known}
    settings = SIZES | optional | OWN.get(model_type, {}) | changes
    config = config_class(**settings)
    architecture = COMPUTED[model_type]
    torch.manual_seed(5)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model
