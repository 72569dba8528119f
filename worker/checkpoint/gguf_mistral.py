"""Translates the metadata of GGUF files of Mistral Small 3 and Ministral 3 to the keys of
config.json. Needs no torch."""

from __future__ import annotations

from worker.checkpoint.gguf_config import Config, Metadata, rms, rope_parameters

GROWTH = "attention.temperature_scale"
"""Key of the factor with which queries grow (`QueryGrowth`)."""


def mistral3_family(metadata: Metadata) -> str:
    """Return the class of a file: only the queries of Ministral 3 grow with their positions."""
    grows = metadata.number(GROWTH, 0.0)
    return "Ministral3ForCausalLM" if grows else "MistralForCausalLM"


def mistral3(metadata: Metadata) -> Config:
    """Return the keys of Mistral Small 3.1 and later, or of Ministral 3, besides those of
    `common`."""
    found = rms(metadata) | {"sliding_window": metadata.window}
    if not (beta := metadata.number(GROWTH, 0.0)):
        return found
    growth = {
        "llama_4_scaling_beta": beta,
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length"
        ),
    }
    if scale := metadata.number("rope.scaling.yarn_log_multiplier", 0.0):
        growth |= {"mscale": 1.0, "mscale_all_dim": scale}
    return found | {"rope_parameters": rope_parameters(metadata) | growth}
