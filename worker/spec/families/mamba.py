"""Mamba, Falcon Mamba and Mamba-2, all of whose layers are recurrent: there is neither attention
nor an MLP."""

from __future__ import annotations

from math import inf

from worker.errors import UnusableModel
from worker.spec.families.family import UNLIMITED_CONTEXT, ConfigFields, ModelFamily
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.recurrent import Mamba1Spec, Mamba2Spec, RecurrentSpec
from worker.spec.tensor_names import TensorNames, names_of


def read_mamba(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Mamba or Falcon Mamba describes. Raises UnusableModel,
    naming the field, if a value is not supported."""
    hidden, rank = config.integer("hidden_size"), config.get("time_step_rank")
    has_norms = config.get("mixer_rms_eps") is not None
    return _model(
        config,
        Mamba1Spec(
            # `expand` does not count if the config has the width itself, as Falcon Mamba's does.
            channels=config.integer("intermediate_size", config.integer("expand") * hidden),
            state=config.integer("state_size"),
            rank=-(-hidden // 16) if rank == "auto" else config.integer("time_step_rank"),
            kernel=config.integer("conv_kernel"),
            eps=config.number("mixer_rms_eps", 0.0),
            conv_bias=config.flag("use_conv_bias"),
            bias=config.flag("use_bias"),
            norms="without weights" if has_norms else None,
        ),
    )


def read_mamba2(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Mamba-2 describes. Raises UnusableModel, naming the field,
    if a value is not supported.

    dt is limited by `time_step_limit`, as in the class of transformers, which however does not
    limit it while it computes single tokens.
    """
    mamba = Mamba2Spec(
        num_heads=config.integer("num_heads"),
        head_dim=config.integer("head_dim"),
        num_groups=config.integer("n_groups"),
        state=config.integer("state_size"),
        kernel=config.integer("conv_kernel"),
        eps=config.number("layer_norm_epsilon"),
        conv_bias=config.flag("use_conv_bias"),
        bias=config.flag("use_bias"),
        limits=config.limits("time_step_limit"),
    )
    width = config.integer("expand") * config.integer("hidden_size")
    if mamba.output_width != width:
        raise UnusableModel(
            f"{mamba.num_heads} heads of {mamba.head_dim} are not {width}, which is expand times "
            "hidden_size"
        )
    return _model(config, mamba)


def _model(config: ConfigFields, recurrent: RecurrentSpec) -> ModelSpec:
    return config.model(
        [LayerSpec(recurrent=recurrent)] * config.num_layers,
        config.rms_norm("layer_norm_epsilon"),
        context_tokens=config.integer("max_position_embeddings", UNLIMITED_CONTEXT),
        float_residual=config.flag("residual_in_fp32"),
    )


PREFIX = "backbone."
LAYER = PREFIX + "layers.{i}."
MIXER = LAYER + "mixer."
NAMES = {
    "embedding": PREFIX + "embeddings",
    "norm": PREFIX + "norm_f",
    "attention_norm": LAYER + "norm",
    "mamba_inputs": MIXER + "in_proj",
    "mamba_conv": MIXER + "conv1d",
    "mamba_decay": MIXER + "A_log",
    "mamba_skip": MIXER + "D",
    "mamba_output": MIXER + "out_proj",
}
OF_MAMBA = {"mamba_made": MIXER + "x_proj", "mamba_step": MIXER + "dt_proj"}
OF_MAMBA2 = {"mamba_bias": MIXER + "dt_bias", "mamba_norm": MIXER + "norm"}
OLDER = {"embedding": (PREFIX + "embedding",)}
"""The embedding's name in files that were written without transformers."""
WITHOUT_ENDING = ("mamba_decay", "mamba_skip", "mamba_bias")


def mamba_names(spec: ModelSpec) -> TensorNames:
    endings = dict.fromkeys(WITHOUT_ENDING, ("", ""))
    return names_of(NAMES, OF_MAMBA, endings=endings, others=OLDER)


def mamba2_names(spec: ModelSpec) -> TensorNames:
    endings = dict.fromkeys(WITHOUT_ENDING, ("", ""))
    return names_of(NAMES, OF_MAMBA2, endings=endings, others=OLDER)


SHARED = {
    "conv_kernel": 4,
    "expand": 2,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": True,
    "use_bias": False,
    "use_conv_bias": True,
}
"""Defaults that the three config classes share."""
MAMBA_DEFAULTS = SHARED | {
    "vocab_size": 50280,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "state_size": 16,
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
}
ONLY_SILU = {"hidden_act": ("silu", "swish")}

FAMILIES = (
    ModelFamily(
        architecture="MambaForCausalLM",
        model_type="mamba",
        defaults=MAMBA_DEFAULTS,
        only=ONLY_SILU | {"mixer_rms_eps": (None,)},
        read=read_mamba,
        names=mamba_names,
    ),
    ModelFamily(
        architecture="FalconMambaForCausalLM",
        model_type="falcon_mamba",
        defaults=MAMBA_DEFAULTS | {"mixer_rms_eps": 1e-6},
        only=ONLY_SILU,
        read=read_mamba,
        names=mamba_names,
    ),
    ModelFamily(
        architecture="Mamba2ForCausalLM",
        model_type="mamba2",
        defaults=SHARED
        | {
            "vocab_size": 32768,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "state_size": 128,
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "time_step_limit": (0.0, inf),
            "tie_word_embeddings": False,
        },
        only=ONLY_SILU,
        read=read_mamba2,
        names=mamba2_names,
    ),
)
