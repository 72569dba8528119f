"""Tiny random models whose classes in transformers compute with caches of their own."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers

from tests.support.checkpoints import VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "sliding_window": 24,
    # experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "ssm_state_size": 8,
    "state_size": 8,
    "num_heads": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "time_step_rank": 4,
    "lru_width": 64,
    # shared keys and values
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "global_head_dim": 16,
}
"""Sizes of the text part. Each config takes the keys that it has and lets be set."""
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
CHANGES: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": LATENT,
    "AXK2ForCausalLM": LATENT,
    "BailingHybridForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "InklingTextForCausalLM": {"unpadded_vocab_size": VOCAB},
    "Inkling2ForCausalLM": {"unpadded_vocab_size": VOCAB},
    "Inkling2LoopForCausalLM": {"unpadded_vocab_size": VOCAB},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "GlmMoeDsaForCausalLM": LATENT,
    "LongcatFlashForCausalLM": LATENT,
    "JetMoeForCausalLM": {"kv_channels": 16},
    "MptForCausalLM": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "XGLMForCausalLM": {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 96},
}
ARCHITECTURES = (
    # latent attention
    *("AXK1ForCausalLM", "AXK2ForCausalLM", "GlmMoeDsaForCausalLM"),
    # recurrent layers
    *("MiniMaxForCausalLM", "RwkvForCausalLM", "Lfm3ForCausalLM"),
    *("InklingForCausalLM", "LaraMiniForCausalLM"),
    # shared keys and values
    "MiMoV2FlashForCausalLM",
    # other kinds of attention
    *("BloomForCausalLM", "DeepseekV4ForCausalLM", "DiffLlamaForCausalLM", "DogeForCausalLM"),
    *("JetMoeForCausalLM", "MptForCausalLM", "XGLMForCausalLM"),
    *("HYV4ForCausalLM", "HrmTextForCausalLM", "Inkling2ForCausalLM", "ZayaForCausalLM"),
)


def random_own_cache(architecture: str, model_type: str = "") -> Any:
    """Return a tiny random model of this architecture.

    model_type   of its config; "": the usual one
    """
    kind = getattr(transformers, architecture)
    usual = kind.config_class
    config_class = transformers.CONFIG_MAPPING[model_type] if model_type else usual
    config = _config(config_class, CHANGES.get(architecture, {}))
    torch.manual_seed(5)
    return kind(config).eval()


def _config(kind: Any, changes: dict[str, Any]) -> Any:
    usual = kind()
    text = usual.get_text_config(decoder=True)
    keys = text.to_dict()
    sizes = {name: size for name, size in (SIZES | changes).items() if name in keys}
    kinds = list(dict.fromkeys(keys.get("layer_types") or ()))
    if kinds:
        sizes["layer_types"] = (kinds * 4)[:4]
    while True:
        try:
            if text is usual:
                return kind(**sizes)
            return kind(text_config={**sizes, "model_type": text.model_type})
        except AttributeError as error:
            computed = re.match(r"property '(\w+)' of .* has no setter", str(error))
            if computed is None or computed[1] not in sizes:
                raise
            del sizes[computed[1]]
