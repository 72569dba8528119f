"""The worker's config: the model, its device and kernels, and memory for the KV cache."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec

from protocol.config.base import (
    NO_PATH,
    Config,
    DeviceDefault,
    KeyFile,
    LogFormat,
    SharedKey,
    about,
)
from protocol.engine.adapters import split_adapter
from protocol.engine.model_card import SamplingDefaults

Dtype = Literal["auto", "bfloat16", "float32"]
Poisoning = Literal["off", "zeros", "plausible", "wild"]
KernelSet = Literal[
    "auto", "avx512bf16", "avx512", "avxvnni", "avx2", "i8mm", "neon", "generic", "torch"
]
Gpu = Literal["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4", "cuda:5", "cuda:6", "cuda:7"]
Device = Literal["auto", "cpu", "cuda", Gpu]
AttentionBackend = Literal["auto", "flash", "triton", "torch"]
WeightForm = Literal["auto", "packed", "dense", "both"]
Activations = Literal["auto", "int8", "bfloat16"]
KVDtype = Literal["auto", "bfloat16", "int8"]
PoolingOption = Literal["auto", "cls", "mean", "last", "rank"]

MAX_SLOTS = DeviceDefault(cpu=64, gpu=256)
TOKEN_BUDGET = DeviceDefault(cpu=256, gpu=8192)
"""A step reads all weights, which takes a GPU as long as computing several hundred tokens. So only
steps with many tokens use a GPU well. On a CPU a long step would delay all streams."""


DeviceOption = Annotated[
    Device,
    about(
        "device to compute on; auto: the first GPU, or the CPU if torch cannot use a GPU "
        "(tidegate doctor says why)"
    ),
]
Threads = Annotated[
    int,
    about(
        "CPU threads for computation; 0: one per core that this process may use, divided among the "
        "workers of a group on this machine",
        ge=0,
        le=1024,
    ),
]
DraftModel = Annotated[
    str,
    about(
        "smaller model, with the same tokenizer, for --speculation model; named like MODEL",
        metavar="MODEL",
    ),
]


class WorkerConfig(Config, frozen=True, kw_only=True):
    """The process that computes the model: it holds the weights and the KV cache."""

    model: Annotated[str, about("a Hugging Face directory or a .gguf file", wiring=True)]
    address: Annotated[
        str, about("address of the engine's socket for this worker (ZeroMQ)", wiring=True)
    ] = ""
    log_format: LogFormat = "text"
    rank: Annotated[int, about("number of this worker in its group", wiring=True, ge=0, le=63)] = 0
    world_size: Annotated[
        int, about("workers in the group: --tensor-parallel", wiring=True, ge=1, le=64)
    ] = 1
    local_rank: Annotated[
        int,
        about("number among the workers of this machine: its GPU", wiring=True, ge=0, le=63),
    ] = 0
    local_size: Annotated[
        int, about("workers of the group on this machine", wiring=True, ge=0, le=64)
    ] = 1
    rendezvous: Annotated[
        str,
        about(
            "address where the ranks of the group meet: file://PATH, tcp://HOST:PORT of rank 0, or "
            "env:// for torchrun",
            wiring=True,
        ),
    ] = ""
    mmproj: Annotated[
        str,
        about(
            "image encoder of a GGUF model: the mmproj file that llama.cpp's converter makes; "
            f"default: the file beside the model whose name contains mmproj; {NO_PATH}: serve text "
            "only",
            path="file",
        ),
    ] = ""
    draft_model: DraftModel = ""
    draft_head: Annotated[
        bool, about("load the checkpoint's own head: --speculation mtp", wiring=True)
    ] = False
    recommended_sampling: Annotated[
        SamplingDefaults,
        about("the catalogue's sampling parameters, if the model's files give none", wiring=True),
    ] = SamplingDefaults()
    device: DeviceOption = "auto"
    share_device: Annotated[
        bool,
        about(
            "share the GPU with other servers that also set this option; limit the memory of each "
            "with --gpu-memory; default: exclusive use"
        ),
    ] = False
    dtype: Annotated[
        Dtype,
        about(
            "number type of weights and, by default, of the KV cache; auto: the one that --kernels "
            "compute fastest, which is bfloat16 on a GPU and with avx512bf16, else float32"
        ),
    ] = "auto"
    threads: Threads = 0
    kernels: Annotated[
        KernelSet,
        about(
            "CPU kernels, by instruction set, or torch's; auto: the best set that this CPU "
            "supports, or avx512 if a measurement at the first start shows that it is faster than "
            "avx512bf16; on a GPU: Triton's kernels, unless torch's are chosen"
        ),
    ] = "auto"
    attention: Annotated[
        AttentionBackend,
        about(
            "attention on a GPU; flash: a FlashAttention library (tidegate fetch-kernels); triton: "
            "our Triton kernels; torch: torch's operations; auto: the first of these that supports "
            "the GPU and the model; on a CPU, auto is the attention of --kernels"
        ),
    ] = "auto"
    decode_graphs: Annotated[
        Literal["auto", "off"],
        about(
            "on a GPU, capture decode steps as graphs when the worker starts, which saves most of "
            "the time of their launches; off: launch each kernel"
        ),
    ] = "auto"
    libraries: Annotated[
        str,
        about("directory of the libraries of `tidegate fetch-kernels`; empty: none", wiring=True),
    ] = ""
    weights: Annotated[
        WeightForm,
        about(
            "packed: keep the weights as stored in the file; dense: convert them to --dtype, for "
            "torch; auto: packed if the CPU kernels support the model, else dense; both: packed, "
            "plus a dense copy for large steps if it is faster and fits in memory, but then an "
            "answer can depend on how many others are computed with it"
        ),
    ] = "auto"
    activations: Annotated[
        Activations,
        about(
            "int8: round the inputs of quantised weights to eight bits, which is faster and loses "
            "a little quality (docs/operate/performance.md); bfloat16: keep them in --dtype; "
            "auto: int8 if the CPU kernels multiply integers faster, unless --dtype is float32"
        ),
    ] = "auto"
    kv_dtype: Annotated[
        KVDtype,
        about(
            "number type of the KV cache; int8: round keys and values to eight bits, so the cache "
            "holds about twice as many tokens, at a small loss of quality "
            "(docs/operate/performance.md); bfloat16: half of the memory of float32; auto: "
            "--dtype, or bfloat16 if --dtype is auto and the CPU kernels read that faster"
        ),
    ] = "auto"
    pooling: Annotated[
        PoolingOption,
        about(
            "serve /v1/embeddings with the vector of the first token (cls), the mean of all tokens "
            "or the last token; rank: serve /v1/rerank with a Qwen3-Reranker; auto: as the "
            "model's files say, so a chat model has no embeddings"
        ),
    ] = "auto"
    measurements: Annotated[
        str,
        about(
            "directory that stores measured speeds; empty: measure at every start, and do not "
            "choose kernels by their speed",
            wiring=True,
        ),
    ] = ""
    max_slots: Annotated[
        int,
        about(
            f"most requests computed at the same time; 0: {MAX_SLOTS}, or fewer for a model with "
            "recurrent layers, if their states would take more than an eighth of the free memory",
            ge=0,
            le=4096,
        ),
    ] = 0
    token_budget: Annotated[
        int, about("the engine's option of the same name", wiring=True, ge=0, le=1 << 20)
    ] = 0
    max_drafts: Annotated[
        int, about("most tokens that the engine drafts per request", wiring=True, ge=0, le=64)
    ] = 0
    max_len: Annotated[
        int,
        about("most tokens of prompt and answer together; 0: the model's limit", ge=0, le=1 << 24),
    ] = 0
    block_tokens: Annotated[
        int, about("tokens in one KV cache block; must be a power of two", ge=1, le=256)
    ] = 16
    kv_blocks: Annotated[
        int, about("blocks in the KV cache; 0: as many as fit in --kv-memory-gib", ge=0, le=1 << 24)
    ] = 0
    kv_memory_gib: Annotated[
        float,
        about(
            "memory for the KV cache; 0 on a GPU: what --gpu-memory leaves; 0 on a CPU: enough for "
            "--max-slots average requests, but at most a quarter of the free memory",
            ge=0,
            le=1 << 20,
        ),
    ] = 0.0
    gpu_memory: Annotated[
        float,
        about(
            "fraction of the GPU's memory for this worker: weights, largest step and KV cache "
            "together, such as 0.45 for two servers; not used with --kv-blocks or --kv-memory-gib",
            ge=0.01,
            le=1,
            metavar="FRACTION",
        ),
    ] = 0.9
    lora: Annotated[
        list[str],
        about(
            "LoRA adapter to load at the start, where PATH is a directory in PEFT's format; repeat "
            "for further adapters",
            metavar="NAME=PATH",
        ),
    ] = []
    lora_dir: Annotated[
        str,
        about(
            "directory of the LoRA adapters that may be loaded while the server runs; default: "
            "none may be",
            path="directory",
        ),
    ] = ""
    max_loras: Annotated[
        int, about("most LoRA adapters loaded at the same time", ge=1, le=1024)
    ] = 8
    max_lora_rank: Annotated[
        int,
        about(
            "largest rank of a LoRA adapter; with --lora-dir, memory for --max-loras adapters of "
            "this rank is kept free",
            ge=1,
            le=1024,
        ),
    ] = 64
    poison_slots: Annotated[
        Poisoning,
        about(
            "for tests: content of unused slots, so that a stale read gives visibly wrong results; "
            "also checks for per-slot tensors missing from the slot table"
        ),
    ] = "off"

    image_cache_mib: Annotated[
        int,
        about(
            "memory for encoded images, which a later turn of a chat finds again; an image that "
            "does not fit into it is refused",
            ge=1,
            le=1 << 20,
        ),
    ] = 256
    kv_host_gib: Annotated[
        float,
        about(
            "host memory for blocks evicted from the KV cache, to load them back; 0: none",
            ge=0,
            le=1 << 20,
        ),
    ] = 0.0
    kv_disk: Annotated[
        str,
        about(
            "directory that keeps computed blocks across restarts, for its owner only; servers may "
            "share it; default: none",
            path="new directory",
        ),
    ] = ""
    kv_disk_gib: Annotated[
        float,
        about("most disk space used in --kv-disk, by all models together", ge=0.001, le=1 << 24),
    ] = 16.0
    kv_export: Annotated[
        bool, about("allow other workers to fetch K/V from this worker (kv.py)", wiring=True)
    ] = False
    kv_address: Annotated[
        str, about("address where other workers request K/V (ZeroMQ)", wiring=True)
    ] = ""
    kv_mover: Annotated[
        Literal["auto", "shm", "zmq", "nixl"],
        about(
            "how workers move K/V; shm: shared memory on one host; zmq: any ZeroMQ address; nixl: "
            "the NIXL library, if installed; auto: shm if possible, else zmq"
        ),
    ] = "auto"
    cluster_key: SharedKey = ""

    def __post_init__(self) -> None:
        if self.block_tokens & (self.block_tokens - 1):
            raise ValueError(f"block_tokens ({self.block_tokens}) must be a power of two")
        self._make_absolute("kv_disk", "lora_dir", "mmproj")
        msgspec.structs.force_setattr(self, "lora", [_absolute(text) for text in self.lora])
        names = [split_adapter(text)[0] for text in self.lora]
        if len(set(names)) < len(names):
            raise ValueError(f"lora: two adapters have the same name: {', '.join(names)}")
        if len(names) > self.max_loras:
            raise ValueError(f"lora: {len(names)} adapters exceed max_loras ({self.max_loras})")

    @property
    def adapter_rows(self) -> int:
        """Rows of the table of LoRA adapters; 0 if the worker has no adapters."""
        return self.max_loras if self.lora or self.lora_dir else 0


def _absolute(adapter: str) -> str:
    """Return NAME=PATH with an absolute path (`Config._make_absolute`)."""
    name, path = split_adapter(adapter)
    return f"{name}={os.path.abspath(path)}"


class JoinConfig(Config, frozen=True, kw_only=True):
    """A worker on this machine that computes for an engine on another one."""

    model: Annotated[str, about("a Hugging Face directory or a .gguf file", wiring=True)]
    join: Annotated[
        str, about("address of the engine for workers: tcp://HOST:PORT, its --worker-address")
    ] = ""
    cluster_key: KeyFile = ""
    rank: Annotated[
        int,
        about(
            "number of the worker in its group; -1: $RANK of torchrun, or any that is free",
            ge=-1,
            le=63,
        ),
    ] = -1
    local_rank: Annotated[
        int,
        about(
            "number among the workers of the group on this machine, which is the number of its "
            "GPU; -1: $LOCAL_RANK of torchrun, or 0",
            ge=-1,
            le=63,
        ),
    ] = -1
    local_size: Annotated[
        int,
        about(
            "workers of the group on this machine, which share its cores; 0: $LOCAL_WORLD_SIZE of "
            "torchrun, or 1",
            ge=0,
            le=64,
        ),
    ] = 0
    rendezvous: Annotated[
        str,
        about(
            "address where rank 0 meets the others: tcp://HOST:PORT of its machine; default: with "
            "torchrun $MASTER_ADDR and $MASTER_PORT, otherwise the port after --join"
        ),
    ] = ""
    torchrun_size: Annotated[
        int, about("workers that torchrun starts; 0: not started by it", wiring=True, ge=0)
    ] = 0
    device: DeviceOption = "auto"
    threads: Threads = 0
    draft_model: DraftModel = ""
    log_format: LogFormat = "text"
    libraries: Annotated[
        str,
        about("directory of the libraries of `tidegate fetch-kernels`; empty: none", wiring=True),
    ] = ""
    measurements: Annotated[str, about("directory that stores measured speeds", wiring=True)] = ""
