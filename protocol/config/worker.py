"""What the worker is told: the model, where and how it computes, and where K/V is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from protocol.config.base import Config, LogFormat, SharedKey, about
from protocol.model_card import SamplingDefaults

Dtype = Literal["auto", "bfloat16", "float32"]
Poisoning = Literal["off", "zeros", "plausible", "wild"]
KernelSet = Literal["auto", "avx512bf16", "avx512", "avx2", "generic", "torch"]
Device = Literal[
    "auto",
    "cpu",
    "cuda",
    "cuda:0",
    "cuda:1",
    "cuda:2",
    "cuda:3",
    "cuda:4",
    "cuda:5",
    "cuda:6",
    "cuda:7",
]
WeightForm = Literal["auto", "packed", "dense"]


class WorkerConfig(Config, frozen=True, kw_only=True):
    """The process that holds the tensors."""

    model: Annotated[
        str,
        about(
            "a Hugging Face directory, a .gguf file, or a name from `tidegate models`",
            wiring=True,
        ),
    ]
    address: Annotated[str, about("where the engine awaits this worker (ZeroMQ)", wiring=True)] = ""
    log_format: LogFormat = "text"
    draft_model: Annotated[
        str,
        about(
            "a smaller model with the same tokenizer, named as MODEL is, which guesses ahead for "
            "--speculation model"
        ),
    ] = ""
    recommended_sampling: Annotated[
        SamplingDefaults,
        about("the catalogue's advice for this model, where its files give none", wiring=True),
    ] = SamplingDefaults()
    device: Annotated[Device, about("where to compute; auto: on the first GPU, if any")] = "auto"
    share_device: Annotated[
        bool,
        about(
            "others may compute on the same GPU, if they say so too: see to it that there is "
            "memory for all; else whoever has a GPU has it alone"
        ),
    ] = False
    dtype: Annotated[
        Dtype,
        about("of weights and KV cache; auto: bfloat16 where the hardware has it, else float32"),
    ] = "auto"
    threads: Annotated[
        int, about("CPU threads for tensor work; 0: one per core allowed to us", ge=0, le=1024)
    ] = 0
    kernels: Annotated[
        KernelSet,
        about(
            "what computes on a CPU: our kernels for an instruction set, or torch's; "
            "auto: the best that is compiled and that the processor has"
        ),
    ] = "auto"
    weights: Annotated[
        WeightForm,
        about(
            "packed: as the file has them, quantised or not, for our kernels; dense: as numbers "
            "of dtype, for torch; auto: packed, and beside them dense for steps of many rows, "
            "where measuring shows that this is faster and there is room"
        ),
    ] = "auto"
    measurements: Annotated[
        str,
        about(
            "folder where it is kept how fast this machine computes; none: measured", wiring=True
        ),
    ] = ""
    max_slots: Annotated[int, about("requests computed at once", ge=1, le=4096)] = 64
    max_len: Annotated[
        int,
        about(
            "most tokens of prompt and answer together; 0: the model's own limit", ge=0, le=1 << 24
        ),
    ] = 0
    block_tokens: Annotated[int, about("tokens in one KV block; a power of two", ge=1, le=256)] = 16
    kv_blocks: Annotated[
        int, about("blocks in the KV cache; 0: as many as kv-memory-gib holds", ge=0, le=1 << 24)
    ] = 0
    kv_memory_gib: Annotated[
        float,
        about(
            "memory for the KV cache; 0: enough for max-slots average requests, "
            "at most a quarter of what is free",
            ge=0,
            le=1 << 20,
        ),
    ] = 0.0
    poison_slots: Annotated[
        Poisoning,
        about(
            "for tests: what a slot holds while nobody owns it, so that whoever reads what is not "
            "its own goes visibly wrong; the worker then also looks for per-slot tensors that its "
            "slot table does not know"
        ),
    ] = "off"

    kv_host_gib: Annotated[
        float,
        about(
            "host memory for blocks that the KV cache has no room for any more, to be loaded again "
            "instead of computed; 0: none",
            ge=0,
            le=1 << 20,
        ),
    ] = 0.0
    kv_disk: Annotated[
        str,
        about(
            "directory where computed blocks are kept over restarts, readable by its owner only; "
            "several servers may share it. Default: nothing is kept"
        ),
    ] = ""
    kv_disk_gib: Annotated[
        float, about("most that kv-disk may hold, of all models together", ge=0.001, le=1 << 24)
    ] = 16.0
    kv_export: Annotated[
        bool, about("other workers may fetch K/V from this one (kv.py)", wiring=True)
    ] = False
    kv_address: Annotated[
        str, about("where other workers ask for K/V of this one (ZeroMQ)", wiring=True)
    ] = ""
    kv_mover: Annotated[
        Literal["auto", "shm", "zmq", "nixl"],
        about(
            "how K/V travels between workers: shm through shared memory of one host, zmq over any "
            "ZeroMQ address, nixl where that library is installed; auto: shm where it can, else zmq"
        ),
    ] = "auto"
    cluster_key: SharedKey = ""

    def __post_init__(self) -> None:
        if self.block_tokens & (self.block_tokens - 1):
            raise ValueError(f"block_tokens ({self.block_tokens}) must be a power of two")
        self._make_absolute("kv_disk")
