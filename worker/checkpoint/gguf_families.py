"""How the GGUF files of each `general.architecture` are read. Needs no torch.

gguf_header.py reads a file with these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from worker.checkpoint import (
    gguf_config,
    gguf_experts,
    gguf_gemma,
    gguf_latent,
    gguf_llama,
    gguf_mamba,
    gguf_mistral,
)
from worker.checkpoint.gguf_config import Config, Metadata, with_axes
from worker.checkpoint.gguf_names import (
    CHOICE_ROLES,
    CONV_ROLES,
    FUSED_QKV,
    GEMMA3N_ROLES,
    GEMMA4_ROLES,
    HYBRID_ROLES,
    INDEXER_ROLES,
    KIMI_ROLES,
    LATENT_ROLES,
    LAYER,
    MAMBA1_ROLES,
    MAMBA_ROLES,
    NEMOTRON_ROLES,
    POST_NORMS,
    SHARED_ROLES,
    TILED_ROLES,
    WHOLE_UP,
)
from worker.errors import UnusableModel
from worker.spec.model_spec import ModelSpec


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
    #: Roles of the head for drafts whose names differ -> their names after that of its block.
    head_roles: Mapping[str, str] = field(default_factory=dict)
    #: Whether the rows of each query and key head alternate between the head's two halves, because
    #: llama.cpp's rotary embedding rotates neighbouring items.
    is_interleaved: bool = False
    #: Whether the converter added the norms' offset to their weights.
    has_whole_norms: bool = False
    #: Returns the one of `families` to which a file belongs; None: the first one.
    choose: Callable[[Metadata], str] | None = None
    #: Adds to the spec what no key of config.json describes; None: nothing.
    add: Callable[[ModelSpec, Metadata], ModelSpec] | None = None

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
    "llama4": GGUFFamily(
        families=("Llama4ForCausalLM",),
        config=gguf_llama.llama4,
        roles=SHARED_ROLES,
        is_interleaved=True,
    ),
    "apertus": GGUFFamily(
        families=("ApertusForCausalLM",), config=gguf_config.rms, add=gguf_llama.with_xielu
    ),
    "qwen2": GGUFFamily(families=("Qwen2ForCausalLM",), config=gguf_config.rms),
    "qwen2moe": GGUFFamily(
        families=("Qwen2MoeForCausalLM",), config=gguf_config.qwen2_moe, roles=SHARED_ROLES
    ),
    "qwen3": GGUFFamily(families=("Qwen3ForCausalLM",), config=gguf_config.rms),
    "qwen3moe": GGUFFamily(families=("Qwen3MoeForCausalLM",), config=gguf_config.qwen3_moe),
    # The text parts of Qwen2-VL and Qwen3-VL. The images' part is another file.
    "qwen2vl": GGUFFamily(
        families=("Qwen2ForCausalLM",),
        config=partial(with_axes, gguf_config.rms, is_interleaved=False),
    ),
    "qwen3vl": GGUFFamily(
        families=("Qwen3ForCausalLM",), config=partial(with_axes, gguf_config.rms)
    ),
    "qwen3vlmoe": GGUFFamily(
        families=("Qwen3MoeForCausalLM",), config=partial(with_axes, gguf_config.qwen3_moe)
    ),
    "qwen3next": GGUFFamily(
        families=("Qwen3NextForCausalLM",),
        config=gguf_config.qwen_hybrid,
        roles=HYBRID_ROLES | {"delta_ba": LAYER + "ssm_ba"},
        has_whole_norms=True,
    ),
    "qwen35": GGUFFamily(
        families=("Qwen3_5ForCausalLM",),
        config=partial(with_axes, gguf_config.qwen_hybrid),
        roles=HYBRID_ROLES | TILED_ROLES,
        has_whole_norms=True,
    ),
    "qwen35moe": GGUFFamily(
        families=("Qwen3_5MoeForCausalLM",),
        config=partial(with_axes, gguf_config.qwen_hybrid),
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
    "deepseek32": GGUFFamily(
        families=("DeepseekV32ForCausalLM",),
        config=gguf_latent.deepseek32,
        common=gguf_latent.latent,
        roles=LATENT_ROLES | INDEXER_ROLES | SHARED_ROLES | CHOICE_ROLES,
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
    "kimi-linear": GGUFFamily(
        families=("KimiLinearForCausalLM",),
        config=gguf_latent.kimi_linear,
        common=gguf_latent.latent,
        roles=KIMI_ROLES,
    ),
    "hunyuan-dense": GGUFFamily(families=("HunYuanDenseV1ForCausalLM",), config=gguf_config.rms),
    "hunyuan-moe": GGUFFamily(
        families=("HunYuanMoEV1ForCausalLM",), config=gguf_experts.hunyuan_moe, roles=SHARED_ROLES
    ),
    "phimoe": GGUFFamily(families=("PhimoeForCausalLM",), config=gguf_experts.phimoe),
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
            head_roles={"mlp_norm": "post_attention_norm"},
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


ENCODER = "clip"
"""`general.architecture` of all mmproj files (vision/mmproj.py)."""


def gguf_family(architecture: str) -> GGUFFamily:
    """Return how files with this `general.architecture` are read. Raises UnusableModel if the
    architecture is not supported."""
    if family := FAMILIES.get(architecture):
        return family
    if architecture == ENCODER:
        raise UnusableModel(
            "the file is an image encoder (mmproj), not a model",
            remedy="serve the model's file, and give this one with --mmproj",
        )
    raise UnusableModel(
        f"architecture {architecture!r} is not supported in GGUF files; supported: "
        f"{', '.join(FAMILIES)}"
    )
