"""The architectures that transformers computes, with our paged attention (hf.py) or with caches of
their own (hf_own_cache.py), and those that cannot be served, each with the reason. Needs no torch.

Each causal decoder of transformers 5.24 is a family of ours (families/), contains one
(wrappers.py), or is in CHECKED, OWN_CACHE or REFUSED; a test compares the lists. An architecture is
in CHECKED only if a differential test covers it, because a class can change the result in ways that
its signature does not show. One with a cache of its own is tried when it is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from protocol.config.worker import WorkerConfig
from protocol.shared import state_memory
from worker.errors import UnusableModel
from worker.spec.facts import KVHeads
from worker.spec.families.registry import FAMILIES
from worker.spec.model_spec import ModelSpec
from worker.spec.step_limits import StepLimits

CHECKED: dict[str, str] = {
    "AfmoeForCausalLM": "afmoe",
    "Apertus1p5TextForCausalLM": "apertus1p5_text",
    "AriaTextForCausalLM": "aria_text",
    "BeamForCausalLM": "beam",
    "BioGptForCausalLM": "biogpt",
    "BitNetForCausalLM": "bitnet",
    "CTRLLMHeadModel": "ctrl",
    "CodeGenForCausalLM": "codegen",
    "Cohere2MoeForCausalLM": "cohere2_moe",
    "CohereForCausalLM": "cohere",
    "CwmForCausalLM": "cwm",
    "DbrxForCausalLM": "dbrx",
    "Dots1ForCausalLM": "dots1",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "FalconForCausalLM": "falcon",
    "FlexOlmoForCausalLM": "flex_olmo",
    "FlintForCausalLM": "flint",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTJForCausalLM": "gptj",
    "GPTNeoForCausalLM": "gpt_neo",
    "GPTNeoXJapaneseForCausalLM": "gpt_neox_japanese",
    "GraniteMoeSWAForCausalLM": "granitemoe_swa",
    "GraniteSWAForCausalLM": "granite_swa",
    "HYV3ForCausalLM": "hy_v3",
    "HeliumForCausalLM": "helium",
    "HyperCLOVAXForCausalLM": "hyperclovax",
    "Jais2ForCausalLM": "jais2",
    "Kolibri1ForCausalLM": "kolibri1",
    "LagunaForCausalLM": "laguna",
    "MellumForCausalLM": "mellum",
    "ModernBertDecoderForCausalLM": "modernbert-decoder",
    "NanoChatForCausalLM": "nanochat",
    "OPTForCausalLM": "opt",
    "OlmoForCausalLM": "olmo",
    "PersimmonForCausalLM": "persimmon",
    "PhiForCausalLM": "phi",
    "SolarOpenForCausalLM": "solar_open",
    "StableLmForCausalLM": "stablelm",
    "VaultGemmaForCausalLM": "vaultgemma",
}
"""Architecture -> its `model_type`, for each architecture that tests/differential checks."""

BORROWED: dict[str, tuple[str, str]] = {
    "exaone": ("LlamaForCausalLM", "ExaoneForCausalLM"),
    "internlm3": ("LlamaForCausalLM", "InternLM3ForCausalLM"),
    "iquestcoder": ("LlamaForCausalLM", "IQuestCoderForCausalLM"),
    "sarvam_mla": ("DeepseekV3ForCausalLM", "SarvamMLAForCausalLM"),
    "sarvam_moe": ("Glm4MoeForCausalLM", "SarvamMoEForCausalLM"),
}
"""`model_type` whose models are computed by the class of another one, with a config class and names
of tensors of their own -> that class, and the architecture that published configs name."""

BORROWED_OWN_CACHE = frozenset({"sarvam_mla"})
"""Those of BORROWED whose class computes with a cache of its own."""

OWN_ATTENTION: dict[str, str] = {
    "CodeGenForCausalLM": "scale_attn",
    "GPTJForCausalLM": "scale_attn",
    "GPTNeoForCausalLM": "",
    "GPTNeoXJapaneseForCausalLM": "norm_factor",
}
"""Architectures whose attention modules call their own method `_attn`, which hf_attention.py
replaces. The value is the module's attribute that divides the scores; empty: they are not
divided."""

INLINE_ATTENTION = {"FalconForCausalLM": "FalconAttention"}
"""Architectures whose attention modules, of the given class, call torch's attention directly.
hf_attention.py intercepts that call."""

BEYOND_FAMILIES: dict[str, tuple[str, Any]] = {"StableLmForCausalLM": ("qk_layernorm", True)}
"""Architecture of a family -> a key of its config, and the value of the key that the family does
not support. Transformers computes the models with this value."""

_OWN_CACHE: dict[str, str] = {
    "its latent attention is sparse, or differs from that of DeepSeek V3": """
        AXK1ForCausalLM AXK2ForCausalLM Dots3NoteForCausalLM
        GlmMoeDsaForCausalLM HYV4ForCausalLM LongcatFlashForCausalLM
    """,
    "it has state-space, recurrent, convolution or linear attention layers": """
        BailingHybridForCausalLM
        Inkling2ForCausalLM Inkling2LoopForCausalLM InklingForCausalLM
        LaraMiniForCausalLM
        Lfm3ForCausalLM
        MiniMaxForCausalLM Qwen4ExpForCausalLM RwkvForCausalLM
        Zamba2ForCausalLM ZambaForCausalLM
        ZayaForCausalLM xLSTMForCausalLM
    """,
    "its layers share keys and values, or have different shapes of them": """
        Gemma4AssistantForCausalLM
        Gemma4UnifiedAssistantForCausalLM Gemma4UnifiedForCausalLM MiMoV2FlashForCausalLM
    """,
    "its attention is sparse or chunked, or has a mask of its own": """
        DeepseekV4ForCausalLM DogeForCausalLM MiniMaxM3VLForCausalLM ReformerModelWithLMHead
    """,
    "it computes a layer's attention more than once, or with experts": """
        DiffLlamaForCausalLM DoryForCausalLM HrmTextForCausalLM JetMoeForCausalLM
    """,
    "its class computes attention itself, without transformers' attention interface": """
        BloomForCausalLM MptForCausalLM OpenAIGPTLMHeadModel XGLMForCausalLM
    """,
}
_REFUSED: dict[str, str] = {
    "it is an encoder-decoder, or the decoder of one": """
        BartForCausalLM BartForConditionalGeneration BigBirdPegasusForCausalLM
        BlenderbotForCausalLM BlenderbotSmallForCausalLM MBartForCausalLM
        MBartForConditionalGeneration MarianForCausalLM MT5ForConditionalGeneration
        MusicgenForCausalLM MusicgenMelodyForCausalLM MvpForCausalLM PLBartForCausalLM
        PegasusForCausalLM ProphetNetForCausalLM T5ForConditionalGeneration TrOCRForCausalLM
        WhisperForCausalLM WhisperForConditionalGeneration
    """,
    "it is an encoder, whose attention sees later tokens": """
        BertGenerationDecoder BertLMHeadModel BigBirdForCausalLM
        CamembertForCausalLM Data2VecTextForCausalLM ElectraForCausalLM ErnieForCausalLM
        MegatronBertForCausalLM RemBertForCausalLM RoCBertForCausalLM
        RoFormerForCausalLM RobertaForCausalLM RobertaPreLayerNormForCausalLM XLMRobertaForCausalLM
        XLMRobertaXLForCausalLM XLMWithLMHeadModel XLNetLMHeadModel XmodForCausalLM
        CpmAntForCausalLM
    """,
    "it is a model of images or audio, or works on bytes": """
        BltForCausalLM CohereCompassForCausalLM Emu3ForCausalLM FuyuForCausalLM
        GitForCausalLM MllamaForCausalLM MoshiForCausalLM Phi4MultimodalForCausalLM
    """,
}
MEDIA, TWO_PARTS = list(_REFUSED)[-1], "it is an encoder-decoder, or the decoder of one"
"""Two of the reasons, which also hold for architectures without an entry."""
MEDIA_KEYS = frozenset(
    f"{medium}{end}"
    for medium in ("vision", "image", "video", "audio", "speech")
    for end in ("_config", "_encoder_config", "_token_id", "_token_index")
)
"""Keys of the configs of models that take images, videos or sound."""
REFUSED: dict[str, str] = {
    name: reason for reason, names in _REFUSED.items() for name in names.split()
}
"""Architecture -> why it cannot be served, as the second half of a sentence."""
OWN_CACHE: dict[str, str] = {
    name: reason for reason, names in _OWN_CACHE.items() for name in names.split()
}
"""Architecture whose class computes with a cache of its own -> why, as the second half of a
sentence."""


BITNET = "BitNetForCausalLM"
BitNetMode = Literal["offline", "online"]
BITNET_MODES: tuple[BitNetMode, ...] = get_args(BitNetMode)
BITNET_KEYS = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "modules_to_not_convert": None,
    "use_rms_norm": False,
}
"""The only supported values of BitNet's `quantization_config`, besides its mode."""


def bitnet_mode(config: Mapping[str, Any]) -> BitNetMode | None:
    """Return how the linear layers of a BitNet model are stored: "offline" as packed weights,
    "online" as those of the training; None if they are ordinary ones. Raises UnusableModel if they
    are of another kind than in the published models."""
    values = config.get("quantization_config")
    if values is None:
        return None
    for mode in BITNET_MODES:
        usual = BITNET_KEYS | {"quantization_mode": mode}
        if isinstance(values, dict) and usual | values == usual:
            return mode
    raise UnusableModel(f"quantization_config {values!r:.160} is not supported for {BITNET}")


@dataclass(frozen=True, slots=True)
class OwnCache:
    """The size of the cache that a model's class keeps for one request.

    token_items   items for each token
    state_items   items that do not depend on the number of tokens, such as a recurrent state
    """

    token_items: int
    state_items: int

    @property
    def half_width(self) -> int:
        """Return the head dim of one layer with one head, whose key and value have as many items as
        a token of this cache. The engine counts blocks of this size."""
        return max(1, -(-self.token_items // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec:
    """The facts about a model that transformers computes. It implements ModelFacts.

    If the model has a cache of its own, layers and heads are not those of the model: they say how
    much a token takes (`OwnCache.half_width`).
    """

    architecture: str
    vocab_size: int
    hidden: int
    context_tokens: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    #: Number of elements of the largest tensor.
    largest_tensor: int
    #: How many numbers the widest layer, except the head, computes for one token.
    inner: int
    #: All of config.json as JSON. The model's digest covers it.
    config: str
    #: Size of the cache that the model's class keeps; None: it uses our paged cache.
    own_cache: OwnCache | None = None

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers

    @property
    def layer_heads(self) -> tuple[KVHeads, ...]:
        return (KVHeads(self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def state_items(self) -> int:
        """Return 0: a model with a recurrent state keeps it in `SlotTable.states`."""
        return 0

    @property
    def has_rope_axes(self) -> bool:
        """Return False: images of these models are not computed."""
        return False

    @property
    def window(self) -> int | None:
        """Return None: the model's class decides which keys a layer sees, when it runs."""
        return None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Return None for each layer: the model's class decides which keys a layer sees."""
        return (None,) * self.num_layers


def keeps_own_cache(spec: object) -> bool:
    """Return whether a model's class keeps a cache by itself."""
    return isinstance(spec, TransformersSpec) and spec.own_cache is not None


def request_state_bytes(spec: ModelSpec | TransformersSpec) -> int:
    """Return the bytes of the recurrent state of one request; 0: the model has none. Some classes
    of transformers compute them in float32 whatever the dtype is."""
    own = spec.own_cache if isinstance(spec, TransformersSpec) else None
    return 4 * (spec.state_items if own is None else own.state_items)


def state_bytes(spec: ModelSpec | TransformersSpec, limits: StepLimits) -> int:
    """Return the memory of the recurrent states of all slots, in bytes."""
    return request_state_bytes(spec) * limits.max_slots


def num_checkpoints(spec: ModelSpec | TransformersSpec, limits: StepLimits, free_bytes: int) -> int:
    """Return how many checkpoints of recurrent states a worker keeps. It is 0 if the model has no
    state, or if its class keeps it in a cache of its own.

    free_bytes   memory that the weights, the slots and a step leave
    """
    return state_memory.num_checkpoints(4 * spec.state_items, limits.max_slots, free_bytes)


def fitting_limits(
    spec: ModelSpec | TransformersSpec, limits: StepLimits, config: WorkerConfig, free_bytes: int
) -> StepLimits:
    """Return `limits` with fewer slots if the default number of them would take too much memory for
    recurrent states.

    free_bytes   memory that the weights leave
    """
    if config.max_slots:
        return limits
    size = request_state_bytes(spec)
    slots = state_memory.default_slots(limits.max_slots, size, max(free_bytes, 0))
    return replace(limits, max_slots=slots)


@dataclass(frozen=True, slots=True)
class TransformersArchitecture:
    """An architecture whose models the transformers library computes.

    has_own_cache   whether its class computes attention and keeps a cache by itself; otherwise it
                    is in CHECKED
    """

    name: str
    model_type: str
    has_own_cache: bool = False


def fallback(config: Mapping[str, Any]) -> TransformersArchitecture | None:
    """Return the architecture of a parsed config.json if transformers computes it.

    Return None if a family of ours has the architecture, or if the architecture is missing,
    ambiguous or unknown: the caller asks transformers, or `registry.find_family` reads or refuses
    the config. Raises
    UnusableModel, with the reason, if the architecture cannot be served, or if the config
    contradicts itself or has an unsupported value.
    """
    architectures, model_type = config.get("architectures"), config.get("model_type")
    borrowed = BORROWED.get(str(model_type))
    if borrowed is not None and architectures in (None, *([name] for name in borrowed)):
        return _computed(borrowed[0], str(model_type), config)
    if isinstance(architectures, list) and len(architectures) == 1:
        name = str(architectures[0])
    elif architectures is None:
        name = next((name for name, kind in CHECKED.items() if kind == model_type), "")
    else:
        return None
    if _has_family(name, config):
        return None
    if name in OWN_CACHE or _has_text_part(name, config):
        return with_own_cache(name, config)
    if (reason := _reason(name, config)) is not None:
        raise UnusableModel(f"architecture {architectures!r:.80} is not supported: {reason}")
    if name not in CHECKED:
        return None
    if model_type not in (None, CHECKED[name]):
        raise UnusableModel(
            f"config.json contradicts itself: {name} has the model_type {CHECKED[name]!r}, not "
            f"{model_type!r:.80}",
            remedy="correct 'architectures' or 'model_type'",
        )
    return _computed(name, CHECKED[name], config)


def with_own_cache(name: str, config: Mapping[str, Any]) -> TransformersArchitecture:
    """Return the architecture `name`, whose class computes with a cache of its own. Raises
    UnusableModel if the config does not say of which type it is, or has quantised weights."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnusableModel(f"config.json of {name} has no 'model_type'")
    if config.get("quantization_config") is not None:
        raise UnusableModel(
            f"quantised weights of {name} are not supported", remedy="use a model in bfloat16"
        )
    return TransformersArchitecture(name, model_type, has_own_cache=True)


def _has_text_part(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether an architecture that is in no list contains a decoder for text."""
    return (
        name.endswith("ForConditionalGeneration")
        and name not in REFUSED
        and isinstance(config.get("text_config"), dict)
        and config.get("is_encoder_decoder") is not True
    )


def _computed(name: str, model_type: str, config: Mapping[str, Any]) -> TransformersArchitecture:
    """Return the architecture `name` with the config class of `model_type`. Raises UnusableModel if
    a key in UNSUPPORTED has a value that is not supported."""
    if name in OWN_CACHE or model_type in BORROWED_OWN_CACHE:
        return with_own_cache(name, {**config, "model_type": model_type})
    _check_values(config, name)
    return TransformersArchitecture(name, model_type)


def _reason(name: str, config: Mapping[str, Any]) -> str | None:
    """Return why models of an architecture cannot be served; None if nothing is known against
    it."""
    if name in REFUSED or name in CHECKED:
        return REFUSED.get(name)
    if not MEDIA_KEYS.isdisjoint(config):
        return MEDIA
    if config.get("is_encoder_decoder") is True:
        return TWO_PARTS
    return f"{MEDIA}, or {TWO_PARTS}" if name.endswith("ForConditionalGeneration") else None


def _has_family(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a family of ours has to read the config, or refuse it."""
    key, value = BEYOND_FAMILIES.get(name, ("", True))
    return any(name in family.architectures for family in FAMILIES) and config.get(key) != value


def _check_values(config: Mapping[str, Any], name: str) -> None:
    """Raise UnusableModel if a key in UNSUPPORTED has a value that is not supported."""
    if name == BITNET and bitnet_mode(config) is not None:
        config = {**config, "quantization_config": None}
    for key, supported in UNSUPPORTED.items():
        if (value := config.get(key)) not in supported:
            raise UnusableModel(f"{key} {value!r:.80} is not supported for {name}")


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "alibi": (None, False),
    "per_layer_config": (None,),
}
"""Keys that any class may have, with the values that are supported."""


def documented() -> str:
    """Return the lists of docs/models/transformers.md as Markdown: architectures that transformers
    computes, and a table of the refused ones with their reasons."""
    ours = {family.architecture for family in FAMILIES} - BEYOND_FAMILIES.keys()
    checked = ", ".join(f"`{name}`{_condition(name)}" for name in sorted(CHECKED.keys() - ours))
    borrowed = ", ".join(f"`{kind}` (`{name}`)" for kind, (name, _) in BORROWED.items())
    lines = [
        *(checked, ""),
        *(f"These model types are computed by the class of another one: {borrowed}.", ""),
        *("| with a cache of its own, because | architectures |", "|---|---|"),
        *_rows(_OWN_CACHE, ours),
        *("", "| not supported, because | architectures |", "|---|---|"),
        *_rows(_REFUSED, ours),
    ]
    return "\n".join(lines)


def _rows(reasons: Mapping[str, str], ours: Collection[str]) -> list[str]:
    """Return the rows of a table: each reason with its architectures, except those of `ours`."""
    return [
        f"| {reason} | {', '.join(f'`{name}`' for name in names.split() if name not in ours)} |"
        for reason, names in reasons.items()
    ]


def _condition(name: str) -> str:
    """Return the condition under which transformers computes models of `name`, in parentheses; ""
    if it computes all of them."""
    if name not in BEYOND_FAMILIES:
        return ""
    key, value = BEYOND_FAMILIES[name]
    return f" (if `{key}` is {str(value).lower()})"


if __name__ == "__main__":
    print(documented())
