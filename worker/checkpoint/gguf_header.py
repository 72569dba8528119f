"""Reads the model spec, and the names of tensors, from a GGUF file's header. Needs no torch.

The metadata keys are translated to those of config.json (gguf_config.py), and the reader of the
model's family reads the result. So a model's GGUF file and its Hugging Face directory give the same
spec. Tensor names and row order are those of llama.cpp's converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from worker.checkpoint import (
    gguf_config,
    gguf_experts,
    gguf_gemma,
    gguf_latent,
    gguf_mamba,
    gguf_mistral,
)
from worker.checkpoint.gguf_config import (
    LONG_FACTORS,
    ROPE_FREQS,
    SHORT_FACTORS,
    Config,
    Metadata,
)
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_names import (
    CHOICE_ROLES,
    CONV_ROLES,
    EMBEDDING_NORM,
    FUSED_EXPERTS,
    FUSED_QKV,
    GEMMA3N_ROLES,
    GEMMA4_ROLES,
    HYBRID_ROLES,
    LATENT_ROLES,
    LAYER,
    MAMBA1_ROLES,
    MAMBA_ROLES,
    NEMOTRON_ROLES,
    OLD_EXPERTS,
    POST_NORMS,
    ROLES,
    SHARED_ROLES,
    TILED_ROLES,
    WHOLE_UP,
    WITHOUT_ENDING,
)
from worker.errors import UnusableModel
from worker.spec.families.registry import find_family
from worker.spec.model_spec import MAX_LAYERS, LayerSpec, ModelSpec
from worker.spec.recurrent import GatedDeltaSpec
from worker.spec.rope_config import FactorScaling, LinearScaling, RopeConfig
from worker.spec.tensor_names import RowOrder, TensorNames, neighbour_orders

NOT_ROTATED = 9e29
"""Factors of rotary frequencies above this mark pairs that are not rotated."""


MADE_WITH_BIAS = ("attn_q", "attn_qkv", "attn_kv_a_mqa")
"""Names in a layer of tensors that make queries, keys or latents, and may have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How the GGUF files of one `general.architecture` are read."""

    #: Families to which the files may belong, by their name in `architectures` of config.json.
    families: tuple[str, ...]
    #: Returns the keys of config.json besides those of `common`.
    config: Callable[[Metadata], Config]
    common: Callable[[Metadata], Config] = gguf_config.common
    #: Roles whose names differ from ROLES.
    roles: Mapping[str, str] = field(default_factory=dict)
    #: Roles whose names have no ending, besides WITHOUT_ENDING.
    without_ending: tuple[str, ...] = ()
    #: Whether the rows of each query and key head alternate between the head's two halves, because
    #: llama.cpp's rotary embedding rotates neighbouring items.
    is_interleaved: bool = False
    #: Whether the converter added the norms' offset to their weights.
    has_whole_norms: bool = False
    #: Returns the one of `families` to which a file belongs; None: the first one.
    choose: Callable[[Metadata], str] | None = None

    def family(self, metadata: Metadata) -> str:
        return self.choose(metadata) if self.choose else self.families[0]


def _llama_family(metadata: Metadata) -> str:
    if metadata.integer("expert_count", 0):
        return "MixtralForCausalLM"
    return "LlamaForCausalLM" if metadata.window is None else "MistralForCausalLM"


def _olmo_family(metadata: Metadata) -> str:
    return "Olmo2ForCausalLM" if metadata.window is None else "Olmo3ForCausalLM"


def _granite_family(metadata: Metadata) -> str:
    rotated = gguf_config.is_rotated(metadata)
    return "GraniteForCausalLM" if rotated else "GraniteMoeHybridForCausalLM"


def _granite_moe_family(metadata: Metadata) -> str:
    shared = metadata.integer("expert_shared_feed_forward_length", 0)
    return "GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"


FAMILIES = {
    "llama": GGUFFamily(
        families=("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
        choose=_llama_family,
        config=gguf_config.llama,
        is_interleaved=True,
    ),
    "mistral3": GGUFFamily(
        families=("Ministral3ForCausalLM", "MistralForCausalLM"),
        choose=gguf_mistral.mistral3_family,
        config=gguf_mistral.mistral3,
        is_interleaved=True,
    ),
    "qwen2": GGUFFamily(families=("Qwen2ForCausalLM",), config=gguf_config.rms),
    "qwen2moe": GGUFFamily(
        families=("Qwen2MoeForCausalLM",), config=gguf_config.qwen2_moe, roles=SHARED_ROLES
    ),
    "qwen3": GGUFFamily(families=("Qwen3ForCausalLM",), config=gguf_config.rms),
    "qwen3moe": GGUFFamily(families=("Qwen3MoeForCausalLM",), config=gguf_config.qwen3_moe),
    # The text parts of Qwen2-VL and Qwen3-VL. The images' part is another file.
    "qwen2vl": GGUFFamily(families=("Qwen2ForCausalLM",), config=gguf_config.rms),
    "qwen3vl": GGUFFamily(families=("Qwen3ForCausalLM",), config=gguf_config.rms),
    "qwen3vlmoe": GGUFFamily(families=("Qwen3MoeForCausalLM",), config=gguf_config.qwen3_moe),
    "qwen3next": GGUFFamily(
        families=("Qwen3NextForCausalLM",),
        config=gguf_config.qwen_hybrid,
        roles=HYBRID_ROLES | {"delta_ba": LAYER + "ssm_ba"},
        has_whole_norms=True,
    ),
    "qwen35": GGUFFamily(
        families=("Qwen3_5ForCausalLM",),
        config=gguf_config.qwen_hybrid,
        roles=HYBRID_ROLES | TILED_ROLES,
        has_whole_norms=True,
    ),
    "qwen35moe": GGUFFamily(
        families=("Qwen3_5MoeForCausalLM",),
        config=gguf_config.qwen_hybrid,
        roles=HYBRID_ROLES | TILED_ROLES,
        has_whole_norms=True,
    ),
    "arcee": GGUFFamily(
        families=("ArceeForCausalLM",), config=gguf_config.rms, is_interleaved=True
    ),
    "nemotron": GGUFFamily(
        families=("NemotronForCausalLM",),
        config=gguf_config.layer_norm("norm_eps"),
        has_whole_norms=True,
    ),
    "olmoe": GGUFFamily(families=("OlmoeForCausalLM",), config=gguf_experts.olmoe),
    "chatglm": GGUFFamily(
        families=("GlmForCausalLM",),
        config=gguf_experts.glm,
        roles={"gate_up": LAYER + "ffn_up"},
        is_interleaved=True,
    ),
    "glm4": GGUFFamily(
        families=("Glm4ForCausalLM",),
        config=gguf_experts.glm4,
        roles=POST_NORMS | {"gate_up": LAYER + "ffn_up"},
        is_interleaved=True,
    ),
    "glm4moe": GGUFFamily(
        families=("Glm4MoeForCausalLM",),
        config=gguf_experts.glm4_moe,
        roles=SHARED_ROLES | CHOICE_ROLES | {"mlp_norm": LAYER + "post_attention_norm"},
    ),
    "ernie4_5": GGUFFamily(
        families=("Ernie4_5ForCausalLM",), config=gguf_config.rms, is_interleaved=True
    ),
    "ernie4_5-moe": GGUFFamily(
        families=("Ernie4_5_MoeForCausalLM",),
        config=gguf_experts.ernie4_5_moe,
        roles=SHARED_ROLES | CHOICE_ROLES,
        is_interleaved=True,
    ),
    "minimax-m2": GGUFFamily(
        families=("MiniMaxM2ForCausalLM",), config=gguf_experts.minimax_m2, roles=CHOICE_ROLES
    ),
    # GLM-4.7 Flash is read as DeepSeek V3, which computes the same.
    "deepseek2": GGUFFamily(
        families=(
            *("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"),
            *("Glm4MoeLiteForCausalLM", "YoutuForCausalLM"),
        ),
        choose=gguf_latent.deepseek2_family,
        config=gguf_latent.deepseek2,
        common=gguf_latent.latent,
        roles=LATENT_ROLES | SHARED_ROLES | CHOICE_ROLES,
    ),
    "mistral4": GGUFFamily(
        families=("Mistral4ForCausalLM",),
        config=gguf_latent.mistral4,
        common=gguf_latent.latent,
        roles=LATENT_ROLES | SHARED_ROLES,
    ),
    "minicpm3": GGUFFamily(
        families=("MiniCPM3ForCausalLM",),
        config=gguf_latent.minicpm3,
        common=gguf_latent.latent,
        roles=LATENT_ROLES | WHOLE_UP,
    ),
    "gemma": GGUFFamily(
        families=("GemmaForCausalLM",), config=gguf_config.rms, has_whole_norms=True
    ),
    "gemma2": GGUFFamily(
        families=("Gemma2ForCausalLM",),
        config=gguf_gemma.gemma2,
        roles=POST_NORMS,
        has_whole_norms=True,
    ),
    "gemma3": GGUFFamily(
        families=("Gemma3ForCausalLM",),
        config=gguf_gemma.gemma3,
        roles=POST_NORMS,
        has_whole_norms=True,
    ),
    "gemma3n": GGUFFamily(
        families=("Gemma3nForCausalLM",),
        config=gguf_gemma.gemma3n,
        common=gguf_config.of_whole_model,
        roles=GEMMA3N_ROLES,
    ),
    "gemma4": GGUFFamily(
        families=("Gemma4ForCausalLM",),
        config=gguf_gemma.gemma4,
        common=gguf_config.of_whole_model,
        roles=GEMMA4_ROLES,
    ),
    "phi3": GGUFFamily(
        families=("Phi3ForCausalLM",),
        config=gguf_config.phi3,
        roles=FUSED_QKV | {"gate_up": LAYER + "ffn_up"},
    ),
    "olmo2": GGUFFamily(
        families=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        choose=_olmo_family,
        config=gguf_config.olmo2,
        roles=POST_NORMS,
    ),
    "exaone4": GGUFFamily(
        families=("Exaone4ForCausalLM",), config=gguf_config.exaone4, roles=POST_NORMS
    ),
    "granite": GGUFFamily(
        families=("GraniteForCausalLM", "GraniteMoeHybridForCausalLM"),
        choose=_granite_family,
        config=gguf_config.granite,
        is_interleaved=True,
    ),
    "granitemoe": GGUFFamily(
        families=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        choose=_granite_moe_family,
        config=gguf_config.granite_moe,
        roles=SHARED_ROLES,
        is_interleaved=True,
    ),
    "granitehybrid": GGUFFamily(
        families=("GraniteMoeHybridForCausalLM",),
        config=gguf_config.granite_hybrid,
        roles=SHARED_ROLES | MAMBA_ROLES,
        is_interleaved=True,
    ),
    "lfm2": GGUFFamily(families=("Lfm2ForCausalLM",), config=gguf_config.lfm2, roles=CONV_ROLES),
    "lfm2moe": GGUFFamily(
        families=("Lfm2MoeForCausalLM",), config=gguf_config.lfm2, roles=CONV_ROLES
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        GGUFFamily(
            families=("NemotronHForCausalLM",),
            config=gguf_mamba.nemotron_h,
            common=gguf_config.of_whole_model,
            roles=NEMOTRON_ROLES,
        ),
    ),
    "falcon-h1": GGUFFamily(
        families=("FalconH1ForCausalLM",),
        config=gguf_mamba.falcon_h1,
        roles=MAMBA_ROLES,
        without_ending=("mlp_norm",),
    ),
    "jamba": GGUFFamily(
        families=("JambaForCausalLM",),
        config=gguf_mamba.jamba,
        common=gguf_config.of_whole_model,
        roles=MAMBA1_ROLES,
    ),
    "mamba": GGUFFamily(
        families=("MambaForCausalLM", "FalconMambaForCausalLM"),
        choose=gguf_mamba.mamba_family,
        config=gguf_mamba.mamba,
        common=gguf_config.of_whole_model,
        roles=MAMBA1_ROLES,
    ),
    "mamba2": GGUFFamily(
        families=("Mamba2ForCausalLM",),
        config=gguf_mamba.mamba2,
        common=gguf_config.of_whole_model,
        roles=MAMBA_ROLES,
    ),
    "smollm3": GGUFFamily(
        families=("SmolLM3ForCausalLM",), config=gguf_config.rms, is_interleaved=True
    ),
    "seed_oss": GGUFFamily(
        families=("SeedOssForCausalLM",),
        config=gguf_config.rms,
        roles={"mlp_norm": LAYER + "post_attention_norm"},
    ),
    "cohere2": GGUFFamily(
        families=("Cohere2ForCausalLM",), config=gguf_config.cohere2, is_interleaved=True
    ),
    "starcoder2": GGUFFamily(families=("Starcoder2ForCausalLM",), config=gguf_config.starcoder2),
    "stablelm": GGUFFamily(families=("StableLmForCausalLM",), config=gguf_config.stablelm),
    "gpt2": GGUFFamily(
        families=("GPT2LMHeadModel",),
        config=gguf_config.gpt2,
        roles=FUSED_QKV | {"positions": "position_embd"},
    ),
    "gpt-oss": GGUFFamily(
        families=("GptOssForCausalLM",),
        config=gguf_config.gpt_oss,
        roles={"mlp_norm": LAYER + "post_attention_norm"},
    ),
    "gptneox": GGUFFamily(
        families=("GPTNeoXForCausalLM",), config=gguf_config.gpt_neox, roles=FUSED_QKV
    ),
}
"""`general.architecture` -> how its files are read."""


def gguf_family(architecture: str) -> GGUFFamily:
    """Return how files with this `general.architecture` are read. Raises UnusableModel if the
    architecture is not supported."""
    if family := FAMILIES.get(architecture):
        return family
    raise UnusableModel(
        f"architecture {architecture!r} is not supported in GGUF files; supported: "
        f"{', '.join(FAMILIES)}"
    )


def gguf_names(file: GGUFFile, spec: ModelSpec) -> TensorNames:
    """Return the names of the model's tensors in this file.

    Files of older llama.cpp versions, which store each expert in its own tensor, are supported.
    """
    names = architecture_names(file.metadata["general.architecture"], spec, file)
    if EMBEDDING_NORM + ".weight" in file.tensors:
        names = replace(names, roles={**names.roles, "norm": EMBEDDING_NORM})
    if "blk.0.attn_kv_b.weight" in file.tensors:
        names = replace(names, roles={**names.roles, **WHOLE_UP})
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in file.tensors):
        names = replace(names, roles={**names.roles, **FUSED_EXPERTS})
    if "blk.0.ffn_gate.0.weight" in file.tensors:
        return replace(names, roles={**names.roles, **OLD_EXPERTS})
    return names


def architecture_names(
    architecture: str, spec: ModelSpec, file: GGUFFile | None = None
) -> TensorNames:
    """Return the names of the model's tensors in files that today's llama.cpp writes, and the order
    of their rows.

    file   the file, which may also have layers for drafts; None: a file that has none
    """
    family = gguf_family(architecture)
    orders: dict[str, RowOrder] = {}
    attention = next(iter(spec.attentions), None)
    if attention is not None and family.is_interleaved:
        orders = neighbour_orders(spec)
    if attention is not None and attention.gated:
        orders = {"q": RowOrder((attention.num_heads, 2, attention.head_dim), (1, 0, 2))}
    return TensorNames(
        {**ROLES, **family.roles},
        orders=orders,
        computed=(ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS),
        endings=dict.fromkeys((*WITHOUT_ENDING, *family.without_ending), ("", "")),
        stores_decay_factors=True,
        unused=(*_drafts(file, spec), *_unread(spec)),
    )


def _drafts(file: GGUFFile | None, spec: ModelSpec) -> list[str]:
    """Return begins of names of tensors of the layers for drafts. They follow those of the model,
    and `block_count` includes them."""
    count = 0 if file is None else Metadata(file).integer("nextn_predict_layers", 0)
    return [f"blk.{spec.num_layers + index}." for index in range(min(count, MAX_LAYERS))]


def _unread(spec: ModelSpec) -> list[str]:
    """Return begins of names of tensors of layers that read the keys and values of others."""
    return [
        f"blk.{index}.attn_{part}"
        for index, layer in enumerate(spec.layers)
        if layer.attention is not None and layer.attention.kv_of is not None
        for part in ("k.", "v.", "k_norm.")
    ]


def tensor_shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor as the model's own files have it: the converter drops or adds
    axes of some."""
    shapes = {name: info.shape for name, info in file.tensors.items()}
    is_mamba1 = file.metadata["general.architecture"] in ("mamba", "jamba")
    of_heads = () if is_mamba1 else (".ssm_a", ".ssm_d", ".ssm_norm.weight")
    for name, shape in shapes.items():
        if name.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight")) and len(shape) == 2:
            shapes[name] = (shape[0], 1, shape[1])
        elif name.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1:
            shapes[name] = (1, *shape)
        elif name.endswith(of_heads) and len(shape) == 2:
            shapes[name] = (shape[0] * shape[1],)
    return shapes


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """Return the spec of the model that the file's metadata describe. Raises UnusableModel, naming
    the key, if a key is missing, or if its value is wrong or not supported."""
    metadata = Metadata(file)
    family = gguf_family(metadata.architecture)
    if "token_embd.weight" not in file.tensors:
        raise UnusableModel(f"{file.path} holds no tensor 'token_embd.weight'")
    config = {"architectures": [family.family(metadata)], **family.common(metadata)}
    config |= family.config(metadata)
    spec = find_family(config).spec(config, source=str(file.path))
    if family.has_whole_norms:
        spec = replace(spec, norm=replace(spec.norm, offset=0.0))
    return _with_layers(spec, metadata)


def _with_layers(spec: ModelSpec, metadata: Metadata) -> ModelSpec:
    """Return `spec` with the biases and the factors of rotary frequencies for which the file has
    tensors."""
    tensors = metadata.file.tensors
    is_tiled = TILED_ROLES.items() <= gguf_family(metadata.architecture).roles.items()

    layers = range(spec.num_layers)
    attends = next((index for index in layers if spec.layers[index].attention is not None), 0)
    has_mlp = next((index for index in layers if spec.layers[index].mlp is not None), 0)

    def has_bias(*names: str, layer: int) -> bool:
        return any(f"blk.{layer}.{name}.bias" in tensors for name in names)

    def changed(layer: LayerSpec) -> LayerSpec:
        attention, mlp = layer.attention, layer.mlp
        if attention is not None:
            has_factors = metadata.architecture != "gemma4" or attention.window is None
            attention = replace(
                attention,
                rope=attention.rope and _with_rope_factors(attention.rope, metadata, has_factors),
                qkv_bias=attention.qkv_bias or has_bias(*MADE_WITH_BIAS, layer=attends),
                output_bias=attention.output_bias or has_bias("attn_output", layer=attends),
            )
        if mlp is not None:
            mlp = replace(mlp, bias=mlp.bias or has_bias("ffn_up", "ffn_gate", layer=has_mlp))
        recurrent = layer.recurrent
        if isinstance(recurrent, GatedDeltaSpec) and is_tiled:
            recurrent = replace(recurrent, tiled=True)
        return replace(layer, attention=attention, recurrent=recurrent, mlp=mlp)

    new = {layer: changed(layer) for layer in set(spec.layers)}
    return replace(spec, layers=tuple(new[layer] for layer in spec.layers))


def _with_rope_factors(rope: RopeConfig, metadata: Metadata, has_factors: bool) -> RopeConfig:
    """Return `rope` with the factors of ROPE_FREQS, multiplied by the linear factor if the model
    has one. The converter writes 1e30 for pairs that are not rotated.

    has_factors   whether the factors are those of the layer. In a Gemma 4, only layers without a
                  window have some
    """
    if ROPE_FREQS not in metadata.file.tensors or not has_factors:
        return rope
    factor = rope.scaling.factor if isinstance(rope.scaling, LinearScaling) else 1.0
    factors = metadata.factors(ROPE_FREQS, rope.width)
    scaled = (math.inf if each > NOT_ROTATED else factor * each for each in factors)
    return replace(rope, scaling=FactorScaling(tuple(scaled)))
