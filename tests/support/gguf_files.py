"""GGUF files of models of `transformers`, written as llama.cpp's converter writes them.

The names of tensors come from the package `gguf`. Some options of a model have no place in its GGUF
file, such as the window of a Qwen2; see UNSTORED in tests/differential/test_gguf_families.py.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    get_tensor_name_map,
    quants,
)
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.support import gguf_latent
from tests.support.checkpoints import SPECIAL, TEMPLATE, tiny_tokenizer
from tests.support.gguf_experts import add_routed_experts
from worker.checkpoint.gguf_file import GGMLType

Array = NDArray[np.float32]
Kinds = Callable[[str], GGMLQuantizationType]
F32 = GGMLQuantizationType.F32
ARCHITECTURES = {
    **gguf_latent.ARCHITECTURES,
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "qwen2": MODEL_ARCH.QWEN2,
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "nemotron_h": MODEL_ARCH.NEMOTRON_H,
    "falcon_h1": MODEL_ARCH.FALCON_H1,
    "jamba": MODEL_ARCH.JAMBA,
    "mamba": MODEL_ARCH.MAMBA,
    "falcon_mamba": MODEL_ARCH.MAMBA,
    "mamba2": MODEL_ARCH.MAMBA2,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "arcee": MODEL_ARCH.ARCEE,
    "nemotron": MODEL_ARCH.NEMOTRON,
    "olmoe": MODEL_ARCH.OLMOE,
    "glm": MODEL_ARCH.CHATGLM,
    "glm4": MODEL_ARCH.GLM4,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "ernie4_5_moe": MODEL_ARCH.ERNIE4_5_MOE,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE,
    "hunyuan_v1_moe": MODEL_ARCH.HUNYUAN_MOE,
    "phimoe": MODEL_ARCH.PHIMOE,
    "apertus": MODEL_ARCH.APERTUS,
    "llama4_text": MODEL_ARCH.LLAMA4,
    "gemma": MODEL_ARCH.GEMMA,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma3n_text": MODEL_ARCH.GEMMA3N,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "phi3": MODEL_ARCH.PHI3,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "exaone4": MODEL_ARCH.EXAONE4,
    "granite": MODEL_ARCH.GRANITE,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": MODEL_ARCH.GRANITE_MOE,
    "granitemoehybrid": MODEL_ARCH.GRANITE,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "cohere2": MODEL_ARCH.COHERE2,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "stablelm": MODEL_ARCH.STABLELM,
    "gpt2": MODEL_ARCH.GPT2,
    "gpt_neox": MODEL_ARCH.GPTNEOX,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
}
"""model_type -> architecture of the GGUF file."""
GRANITE_HYBRID = "granitehybrid"
"""The architecture of a Granite 4 some of whose layers have Mamba-2."""
NEMOTRON_MOE = "nemotron_h_moe"
"""The architecture of a Nemotron-H with experts."""
GRANITES = frozenset({"granite", "granitemoe", "granitemoeshared", "granitemoehybrid"})
PERMUTED = frozenset({"llama", "arcee", "mistral", "ministral3", "mixtral", "smollm3"}) | GRANITES
"""Model types for which the converter interleaves the rows of the query and key projections."""
WITH_PATTERN = frozenset({"olmo3", "exaone4"})
"""Model types for which the converter writes a list of the layers that have windows."""
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
STREAM = re.compile(r"(model\.altup_\w*projections)\.\d+\.weight")
OF_HEAD = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight")
"""Tensors that only a head for drafts has. The package `gguf` has their names only for some
architectures."""


def write_gguf(
    path: Path,
    model: Any,
    kind: GGMLQuantizationType | Kinds = F32,
    metadata: Mapping[str, float | str | int | Sequence[int] | Sequence[str]] | None = None,
    *,
    stacks_experts: bool = True,
    architecture: str | None = None,
    tokenizer: Callable[[GGUFWriter], None] | None = None,
    skips: str | None = None,
    more: Mapping[str, Array] | None = None,
    head: Mapping[str, Array] | None = None,
    part_tensors: int = 0,
) -> Path:
    """Write a model with the tiny tokenizer, and return `path`.

    kind             type of the matrices, or a function from the tensor's name to its type; vectors
                     are stored in float32
    metadata         keys to add
    stacks_experts   write the experts of a layer as one tensor, as today's converter does; older
                     files have a tensor for each expert
    architecture     another `general.architecture`, of files with the same keys and tensors
    tokenizer        adds another tokenizer
    skips            name of a tensor, or a key, that is left out
    more             tensors to add
    head             tensors of a head for drafts (gguf_heads.py), named like those of one more
                     layer
    part_tensors     most tensors of a file: the model is split into several ones; 0: it is not
    """
    config: Any = model.config
    # Heads of a Gemma 4 with a window are those of the whole config.
    config.allow_global_per_layer_attribute_access = True
    usual = ARCHITECTURES[config.model_type]
    if config.model_type == "granitemoehybrid" and "linear_attention" in config.layer_types:
        usual = MODEL_ARCH.GRANITE_HYBRID
    if config.model_type == "nemotron_h" and "moe" in config.layer_types:
        usual = MODEL_ARCH.NEMOTRON_H_MOE
    named = MODEL_ARCH_NAMES[usual]
    if config.model_type == "deepseek_v32":
        named = gguf_latent.DEEPSEEK32
    writer = GGUFWriter(path, architecture or named, split_max_tensors=part_tensors)
    add_metadata(writer, config, tokenizer)
    kinds = kind if callable(kind) else lambda _: kind
    if config.model_type == "apertus":
        _add_xielu(writer, model)
    names = get_tensor_name_map(usual, config.num_hidden_layers + bool(head))
    for theirs, data in _tensors(model, head or {}):
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if theirs.startswith("blk."):
            name = theirs
        elif found := OF_HEAD.fullmatch(theirs):
            name = f"blk.{found[1]}.nextn.{found[2].replace('.', '_')}.weight"
        assert name is not None, theirs
        if name == skips:
            continue
        own = kinds(name) if data.ndim > 1 and not name.endswith(".bias") else F32
        parts = {name: data}
        if data.ndim == 3 and not stacks_experts:
            part_name = name.replace("_exps.", ".{}.")
            parts = {part_name.format(index): part for index, part in enumerate(data)}
        for part_name, part in parts.items():
            writer.add_tensor(part_name, _quantized(part, own), raw_dtype=own)
    for name, data in (more or {}).items():
        writer.add_tensor(name, data)
    for key, value in (metadata or {}).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add |= {list: writer.add_array}
        add[type(value)](key, value)  # type: ignore[operator]
    writer.kv_data[0].pop(skips or "", None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(
    writer: GGUFWriter, config: Any, tokenizer: Callable[[GGUFWriter], None] | None = None
) -> None:
    """Write the facts of a model with this config of transformers.

    tokenizer   adds the tokenizer; None: the tiny one
    """
    _add_facts(writer, config)
    _add_own_facts(writer, config)
    _add_rope(writer, config)
    (tokenizer or _add_tokenizer)(writer)


def _quantized(values: Array, kind: GGMLQuantizationType) -> NDArray[Any]:
    """Return the bytes of a tensor. They are random if `gguf` cannot quantise to the type."""
    try:
        return quants.quantize(np.ascontiguousarray(values), kind)
    except NotImplementedError:
        own = GGMLType(kind)
        raw = random_blocks(own, values.size // own.block[0])
        return raw.reshape(*values.shape[:-1], -1)


def _add_tokenizer(writer: GGUFWriter) -> None:
    vocab = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([piece for piece, _ in vocab])
    writer.add_token_types([3 if piece in SPECIAL else 1 for piece, _ in vocab])
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _add_mamba(writer: GGUFWriter, config: Any) -> None:
    """Write the facts of a model without attention. Its context is that of the converter."""
    is_mamba2 = config.model_type == "mamba2"
    inner = config.expand * config.hidden_size if is_mamba2 else config.intermediate_size
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(config.state_size)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if is_mamba2:
        writer.add_ssm_time_step_rank(inner // config.head_dim)
        writer.add_ssm_group_count(config.n_groups)
    else:
        writer.add_ssm_time_step_rank(config.time_step_rank)
        writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def _add_facts(writer: GGUFWriter, config: Any) -> None:
    """Write the facts that all architectures have."""
    if config.model_type in ("mamba", "falcon_mamba", "mamba2"):
        _add_mamba(writer, config)
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if config.model_type == "lfm2":
        writer.add_feed_forward_length(lfm2_width(config))
    elif config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
    elif config.model_type != "qwen3_5_moe_text":  # all its layers have experts
        writer.add_feed_forward_length(config.intermediate_size)
    heads = config.num_attention_heads
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(eps)
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if (eps := getattr(config, name, None)) is not None:
            writer.add_layer_norm_eps(eps)


def _add_own_facts(writer: GGUFWriter, config: Any) -> None:
    """Write the facts of the model's own architecture."""
    if config.model_type in gguf_latent.ARCHITECTURES:
        gguf_latent.add_facts(writer, config)
        return
    match config.model_type:
        case "mixtral" | "qwen3_moe" | "gpt_oss" | "olmoe" | "minimax_m2" | "phimoe":
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            if config.model_type == "minimax_m2":
                writer.add_expert_feed_forward_length(config.intermediate_size)
                writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
            if config.model_type == "gpt_oss":
                writer.add_expert_feed_forward_length(config.intermediate_size)
                writer.add_sliding_window(config.sliding_window)
            if config.model_type == "qwen3_moe":
                writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            if config.model_type == "phimoe":
                writer.add_sliding_window(config.sliding_window or 0)
        case "hunyuan_v1_moe":
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.moe_topk)
            writer.add_expert_feed_forward_length(config.intermediate_size)
            writer.add_expert_shared_feed_forward_length(config.intermediate_size)
            writer.add_expert_shared_count(1)
        case "llama4_text":
            writer.add_feed_forward_length(config.intermediate_size_mlp)
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.intermediate_size)
            writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        case "ministral3":
            rope = config.rope_parameters
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        case "nemotron":
            writer.add_layer_norm_eps(config.norm_eps)
        case "glm4_moe":
            add_routed_experts(writer, config)
            writer.add_leading_dense_block_count(config.first_k_dense_replace)
            writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_norm(config.norm_topk_prob)
        case "ernie4_5_moe":
            writer.add_expert_count(config.moe_num_experts)
            writer.add_expert_used_count(config.moe_k)
            writer.add_interleave_moe_layer_step(config.moe_layer_interval)
            writer.add_leading_dense_block_count(config.moe_layer_start_index)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            writer.add_expert_shared_count(config.moe_num_shared_experts)
        case "lfm2" | "lfm2_moe":
            attends = [kind == "full_attention" for kind in config.layer_types]
            writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
            writer.add_layer_norm_rms_eps(config.norm_eps)
            writer.add_shortconv_l_cache(config.conv_L_cache)
            if config.model_type == "lfm2_moe":
                writer.add_expert_count(config.num_experts)
                writer.add_expert_used_count(config.num_experts_per_tok)
                writer.add_expert_feed_forward_length(config.moe_intermediate_size)
                writer.add_leading_dense_block_count(config.num_dense_layers)
        case "qwen2_moe":
            _add_shared_experts(writer, config)
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text":
            if config.model_type != "qwen3_5_text":
                _add_shared_experts(writer, config)
            writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
            writer.add_ssm_state_size(config.linear_key_head_dim)
            writer.add_ssm_group_count(config.linear_num_key_heads)
            writer.add_ssm_time_step_rank(config.linear_num_value_heads)
            writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
            is_linear = [kind == "linear_attention" for kind in config.layer_types]
            name = MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
            writer.add_array(f"{name}.attention.recurrent_layers", is_linear)
        case "gemma2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
            writer.add_sliding_window(config.sliding_window)
        case "gemma3_text":
            writer.add_sliding_window(config.sliding_window)
        case "gemma3n_text":
            _add_gemma3n(writer, config)
        case "gemma4_text":
            _add_gemma4(writer, config)
        case "jamba":
            _add_jamba(writer, config)
        case "phi3":
            writer.add_sliding_window(config.sliding_window or 0)
        case "olmo3" | "exaone4" if config.sliding_window is not None:
            writer.add_sliding_window(config.sliding_window)
            slides = [kind == "sliding_attention" for kind in config.layer_types]
            writer.add_sliding_window_pattern(slides)
        case "granite" | "granitemoe" | "granitemoeshared" | "granitemoehybrid":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
            if config.model_type in ("granitemoe", "granitemoeshared"):
                writer.add_expert_count(config.num_local_experts)
                writer.add_expert_used_count(config.num_experts_per_tok)
                if shared := getattr(config, "shared_intermediate_size", 0):
                    writer.add_expert_shared_feed_forward_length(shared)
            if config.model_type == "granitemoehybrid":
                is_linear = [kind == "linear_attention" for kind in config.layer_types]
                heads = [0 if linear else config.num_key_value_heads for linear in is_linear]
                writer.add_head_count_kv(heads)
                writer.add_rope_scaling_finetuned(not any(is_linear))
                writer.add_expert_count(config.num_local_experts)
                if config.num_local_experts:
                    writer.add_expert_used_count(config.num_experts_per_tok)
                    shared = config.shared_intermediate_size
                    writer.add_expert_shared_feed_forward_length(shared)
                writer.add_ssm_conv_kernel(config.mamba_d_conv)
                writer.add_ssm_state_size(config.mamba_d_state)
                writer.add_ssm_group_count(config.mamba_n_groups)
                writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
                writer.add_ssm_time_step_rank(config.mamba_n_heads)
        case "nemotron_h":
            _add_nemotron(writer, config)
        case "falcon_h1":
            writer.add_ssm_conv_kernel(config.mamba_d_conv)
            writer.add_ssm_state_size(config.mamba_d_state)
            writer.add_ssm_group_count(config.mamba_n_groups)
            writer.add_ssm_inner_size(config.mamba_d_ssm)
            writer.add_ssm_time_step_rank(config.mamba_n_heads)
        case "cohere2":
            writer.add_logit_scale(config.logit_scale)
            writer.add_sliding_window(config.sliding_window)
        case "stablelm" | "gpt_neox":
            writer.add_parallel_residual(config.use_parallel_residual)


def _add_xielu(writer: GGUFWriter, model: Any) -> None:
    """Write the numbers of each layer's xIELU, if the model has it."""
    found = [layer.mlp.act_fn for layer in model.model.layers]
    if model.config.hidden_act == "xielu":
        writer.add_xielu_alpha_p([each.alpha_p.item() for each in found])
        writer.add_xielu_alpha_n([each.alpha_n.item() for each in found])
        writer.add_xielu_beta([each.beta.item() for each in found])
        writer.add_xielu_eps([each.eps.item() for each in found])


def _add_nemotron(writer: GGUFWriter, config: Any) -> None:
    has_experts = "moe" in config.layer_types
    width = config.moe_intermediate_size if has_experts else config.intermediate_size
    is_mlp = [kind in ("mlp", "moe") for kind in config.layer_types]
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_feed_forward_length([width * each for each in is_mlp])
    writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    if has_experts:
        add_routed_experts(writer, config)
        shared = config.moe_shared_expert_intermediate_size
        writer.add_expert_shared_feed_forward_length(shared)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)


def _add_jamba(writer: GGUFWriter, config: Any) -> None:
    heads, period = config.num_key_value_heads, config.attn_layer_period
    attends = [
        index % period == config.attn_layer_offset for index in range(config.num_hidden_layers)
    ]
    writer.add_head_count_kv([heads * each for each in attends])
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_time_step_rank(config.mamba_dt_rank)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _add_gemma3n(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_altup_active_idx(config.altup_active_idx)
    shares = torch.tensor(config.activation_sparsity_pattern, dtype=torch.float32)
    writer.add_activation_sparsity_scale(torch.special.ndtri(shares).tolist())
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_gemma4(writer: GGUFWriter, config: Any) -> None:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config["full_attention"]
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    for add, dim in (
        (writer.add_key_length, full.head_dim),
        (writer.add_value_length, full.head_dim),
        (writer.add_key_length_swa, config.head_dim),
        (writer.add_value_length_swa, config.head_dim),
        (writer.add_rope_dimension_count, full.head_dim),
        (writer.add_rope_dimension_count_swa, config.head_dim),
    ):
        add(dim)
    if full.num_key_value_heads != config.num_key_value_heads:
        counts = (full.num_key_value_heads, config.num_key_value_heads)
        writer.add_head_count_kv([counts[each] for each in slides])
    if config.use_double_wide_mlp:
        shared = config.num_kv_shared_layers
        own, width = config.num_hidden_layers - shared, config.intermediate_size
        writer.add_feed_forward_length([width] * own + [2 * width] * shared)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    rotated = int(full.head_dim * share / 2)
    factors = [1.0] * rotated + [1e30] * (full.head_dim // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _add_shared_experts(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_rope(writer: GGUFWriter, config: Any) -> None:
    """Write the rotary embeddings. The scaling of Llama 3 becomes one factor for each pair of
    dimensions."""
    ropes = getattr(config, "rope_parameters", None)
    if ropes is None:
        return
    rope = ropes.get("full_attention", ropes)
    theta = rope["rope_theta"]
    if (alpha := rope.get("alpha")) is not None:
        theta *= alpha ** (config.head_dim / (config.head_dim - 2))
    writer.add_rope_freq_base(theta)
    if sliding := ropes.get("sliding_attention"):
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    width = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    if rope["rope_type"] != "proportional":
        writer.add_rope_dimension_count(width)
    match rope["rope_type"]:
        case "dynamic":
            writer.add_rope_scaling_type(RopeScalingType.NONE)
            writer.add_rope_scaling_factor(1)
            writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
        case "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "longrope":
            original = rope["original_max_position_embeddings"]
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(scale) / np.log(original)))
            for name in ("long", "short"):
                factors = np.array(rope[f"{name}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{name}.weight", factors)
        case "llama3":
            writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, width))


def _llama3_factors(rope: Mapping[str, float], width: int) -> Array:
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for pair in range(width // 2):
        length = 2 * np.pi * rope["rope_theta"] ** (2 * pair / width)
        if length < high or length > low:
            factors.append(1.0 if length < high else rope["factor"])
            continue
        smooth = (low / length - 1) / (low / high - 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _tensors(model: Any, head: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Yield (name, content) of each tensor, those of the head included. The matrices of a layer's
    experts become one tensor for each projection."""
    config = model.config
    # The class of Kimi Linear has a head of its own, whatever its config says.
    is_tied = config.tie_word_embeddings and config.model_type != "kimi_linear"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        weights = load_file(Path(folder) / "model.safetensors") | dict(head)
    experts: dict[str, list[Array]] = {}
    streams: dict[str, list[Array]] = {}
    for name, data in sorted(weights.items(), key=lambda item: _expert_index(item[0])):
        if found := EXPERT.fullmatch(name):
            block, _, projection = found.groups()
            block = re.sub(r".*layers\.(\d+)\.block_sparse_moe", r"layers.\1.feed_forward", block)
            if config.model_type == "nemotron_h":
                block = re.sub(r".*layers\.(\d+)\.mixer", r"model.layers.\1.mlp", block)
            if config.model_type == "lfm2_moe":
                projection = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[projection]
            experts.setdefault(f"{block}.experts.{projection}.weight", []).append(data)
        elif found := STREAM.fullmatch(name):
            streams.setdefault(f"{found[1]}.weight", []).append(data)
        elif not (name == "lm_head.weight" and is_tied):
            yield from _converted(config, name, data)
    for name, parts in (experts | streams).items():
        yield name, np.stack(parts)


def _expert_index(name: str) -> int:
    found = EXPERT.fullmatch(name)
    return int(found[2]) if found else -1


def _converted(config: Any, name: str, data: Array) -> Iterator[tuple[str, Array]]:
    """Yield a tensor as the converter writes it. A tensor with gate and up projections becomes two:
    in gpt-oss the projections alternate in it, in Granite 4 they are its halves."""
    if config.model_type in gguf_latent.ARCHITECTURES:
        yield from gguf_latent.converted(config, name, data)
        return
    if config.model_type.startswith("lfm2"):
        yield from _lfm2(name, data)
        return
    if getattr(config, "linear_num_key_heads", None):
        yield from _hybrid(config, name, data)
        return
    if config.model_type == "llama4_text" and ".experts." in name:
        parts = {"down": data}
        if "gate_up" in name:
            parts = dict(zip(("gate", "up"), np.split(data, 2, axis=2), strict=True))
        block = name.rpartition(".")[0]
        yield from (
            (f"{block}.{key}_proj.weight", each.swapaxes(1, 2)) for key, each in parts.items()
        )
        return
    if ".act_fn." in name:  # metadata
        return
    if config.model_type == "gemma3n_text":
        yield _gemma3n(config, name, data)
        return
    if config.model_type == "gemma4_text":
        yield _gemma4(name), data
        return
    if config.model_type == "granitemoehybrid" and ".mamba." in name:
        yield _mamba(name, data, config.mamba_n_groups)
        return
    if config.model_type == "falcon_h1":
        data = data * _falcon_factor(config, name)
        yield _mamba(name, data, config.mamba_n_groups) if ".mamba." in name else (name, data)
        return
    if config.model_type in ("jamba", "mamba", "falcon_mamba"):
        if name.endswith("A_log"):
            data = -np.exp(data)
        yield name, data.squeeze(1) if name.endswith("conv1d.weight") else data
        return
    if name.endswith("e_score_correction_bias"):
        name, data = name.removesuffix("_bias") + ".bias", data.reshape(-1)
    if config.model_type in ("nemotron_h", "mamba2"):
        yield _mamba(name, data, config.n_groups) if ".mixer." in name else (name, data)
        return
    if "block_sparse_moe.input_linear" in name:
        block = name.partition("block_sparse_moe")[0] + "mlp."
        for part, each in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
            yield f"{block}experts.{part}_proj.weight", each
        return
    if ".shared_mlp." in name and config.model_type in GRANITES:
        block = name.partition("shared_mlp")[0] + "mlp."
        if config.num_local_experts:
            block += "shared_expert."
        parts = {"down_proj": data}
        if "input_linear" in name:
            parts = dict(zip(("gate_proj", "up_proj"), np.split(data, 2), strict=True))
        yield from ((f"{block}{part}.weight", each) for part, each in parts.items())
        return
    if config.model_type != "gpt_oss" or ".experts." not in name:
        end = ".weight" if name.endswith("sinks") else ""
        yield name + end, _ordered(config, name, data)
        return
    name = name + ".weight" if not name.endswith("_bias") else name.removesuffix("_bias") + ".bias"
    data = data.swapaxes(-1, -2) if name.endswith(".weight") else data
    if "gate_up_proj" in name:
        yield name.replace("gate_up_proj", "gate_proj"), data[:, ::2]
        yield name.replace("gate_up_proj", "up_proj"), data[:, 1::2]
    else:
        yield name, data


def _falcon_factor(config: Any, name: str) -> Any:
    """Return what the converter multiplies a tensor of Falcon-H1 by."""
    attention_in = config.attention_in_multiplier
    gate, down = config.mlp_multipliers
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "q_proj": attention_in,
        "k_proj": attention_in * config.key_multiplier,
        "v_proj": attention_in,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    part = name.split(".")[-2]
    if part != "in_proj":
        return np.float32(factors.get(part, 1.0))
    width, groups = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    widths = (width, width, groups, groups, config.mamba_n_heads)
    scales = np.repeat(np.array(config.ssm_multipliers, np.float32), widths)
    return scales[:, None] * np.float32(config.ssm_in_multiplier)


def _gemma3n(config: Any, name: str, data: Array) -> tuple[str, Array]:
    """Return a tensor of Gemma 3n. The table of per-layer inputs gets a row of zeros for each token
    that it lacks. The norms have no offset."""
    if "embed_tokens_per_layer" in name:
        data = np.pad(data, ((0, config.vocab_size - len(data)), (0, 0)))
    return name + ".weight" if name.endswith("_scale") else name, data


def _gemma4(name: str) -> str:
    """Return the name under which the converter looks up a tensor, or `blk.` and its whole name."""
    layer, _, end = name.removeprefix("model.layers.").partition(".")
    match end.rpartition(".")[2]:
        case "scale":
            return f"blk.{layer}.ffn_gate_inp.scale"
        case "per_expert_scale":
            return f"blk.{layer}.ffn_down_exps.scale"
        case "layer_scalar":
            return f"blk.{layer}.layer_output_scale.weight"
        case "gate_up_proj" | "down_proj":  # of the experts
            return name + ".weight"
    return name


def _lfm2(name: str, data: Array) -> Iterator[tuple[str, Array]]:
    """Yield a tensor of LFM2 or LFM2-MoE."""
    if name.endswith("expert_bias"):
        yield f"{name}.bias", data
    elif name.endswith("conv.conv.weight"):
        yield name, data.squeeze(1)
    else:
        yield name, data


def lfm2_width(config: Any) -> int:
    """Return the intermediate size of LFM2's MLPs."""
    size: int = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return size
    multiple = config.block_multiple_of
    scaled = int(config.block_ffn_dim_multiplier * int(2 * size / 3))
    return -(-scaled // multiple) * multiple


def _mamba(name: str, data: Array, groups: int) -> tuple[str, Array]:
    """Return a tensor of a Mamba-2 layer."""
    if name.endswith("A_log"):
        return name, -np.exp(data)[:, None]
    if name.endswith(".D"):
        return name, data[:, None]
    if name.endswith("dt_bias"):
        return name.replace("dt_bias", "dt_proj.bias"), data
    if name.endswith("conv1d.weight"):
        return name, data.squeeze(1)
    if name.endswith("norm.weight"):
        return name, data.reshape(groups, -1)
    return name, data


def _hybrid(config: Any, name: str, data: Array) -> Iterator[tuple[str, Array]]:
    """Yield a tensor of Qwen3-Next or Qwen3.5. In files of Qwen3.5, the value heads are ordered so
    that key head k serves the heads k, k + number of key heads, and so on."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    group, num_keys = value_heads // key_heads, 2 * key_heads * key_dim

    def tiled(rows: Array, width: int) -> Array:
        if config.model_type == "qwen3_next":
            return rows
        split = rows.reshape(key_heads, group, width, *rows.shape[1:])
        return split.swapaxes(0, 1).reshape(rows.shape)

    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(data, 2, axis=1)
        yield from (
            (name.replace("gate_up_proj", each), part)
            for each, part in zip(("gate_proj.weight", "up_proj.weight"), (gate, up), strict=True)
        )
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", data
    elif name.endswith("A_log"):
        yield name, -np.exp(tiled(data, 1))
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tiled(data, 1)
    elif name.endswith("conv1d.weight"):
        flat = data.squeeze(1)
        yield name, np.concatenate([flat[:num_keys], tiled(flat[num_keys:], value_dim)])
    elif "in_proj_qkvz" in name:
        by_head = data.reshape(key_heads, -1, data.shape[1])
        ends = np.cumsum([key_dim, key_dim, group * value_dim])
        parts = [each.reshape(-1, data.shape[1]) for each in np.split(by_head, ends, axis=1)]
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(parts[:3])
        yield name.replace("in_proj_qkvz", "in_proj_z"), parts[3]
    elif "in_proj_qkv" in name:
        yield name, np.concatenate([data[:num_keys], tiled(data[num_keys:], value_dim)])
    elif "in_proj_z" in name:
        yield name, tiled(data, value_dim)
    elif "in_proj_a." in name or "in_proj_b." in name:
        yield name, tiled(data, 1)
    elif "linear_attn.out_proj" in name:
        yield name, tiled(data.T, value_dim).T
    else:
        is_norm = name.endswith("norm.weight") and "linear_attn" not in name
        yield name, data + 1 if is_norm else data


def _ordered(config: Any, name: str, data: Array) -> Array:
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": getattr(config, "num_key_value_heads", None),
    }
    if config.model_type in PERMUTED:
        for projection, count in heads.items():
            if projection in name:
                halves = data.reshape(count, 2, len(data) // count // 2, *data.shape[1:])
                return halves.swapaxes(1, 2).reshape(data.shape)
    if config.model_type.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
        return data + 1
    if config.model_type == "gpt2" and re.search(r"\.c_\w+\.weight$", name):
        return data.T
    if "query_key_value" in name:
        by_head = data.reshape(config.num_attention_heads, 3, -1, *data.shape[1:])
        return by_head.swapaxes(0, 1).reshape(data.shape)
    return data


def random_blocks(kind: GGMLType, count: int) -> NDArray[np.uint8]:
    """Return blocks [count, bytes] of random integers. Their scales make the numbers about as large
    as a model's weights. The package `gguf` cannot quantise to all types, such as K-quants."""
    random = np.random.default_rng([kind, count])
    raw = random.integers(0, 256, (count, kind.block[1]), dtype=np.uint8)
    size = SCALES.get(kind, 0.01)
    scales = random.uniform(size / 2, size, (count, 2)).astype(np.float16).view(np.uint8)
    match kind:
        case GGMLType.MXFP4:
            raw[:, 0] = random.integers(120, 124, count)
        case GGMLType.Q3_K | GGMLType.Q6_K:
            raw[:, -2:] = scales[:, :2]
        case GGMLType.Q2_K:
            raw[:, -4:] = scales
        case GGMLType.Q4_1 | GGMLType.Q4_K | GGMLType.Q5_K | GGMLType.Q5_1:
            raw[:, :4] = scales
        case _:
            raw[:, :2] = scales[:, :2]
    return raw


SCALES = {
    GGMLType.Q2_K: 0.01,
    GGMLType.Q3_K: 0.002,
    GGMLType.Q4_K: 0.0005,
    GGMLType.Q5_K: 0.0002,
    GGMLType.Q6_K: 0.00005,
    GGMLType.IQ4_NL: 0.002,
    GGMLType.IQ4_XS: 0.0001,
}
"""Size of a random block's scale; 0.01 for other types. A K-quant's scale is multiplied by the
integer scales of its sub-blocks, so it is smaller."""
