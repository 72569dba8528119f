"""Facts that are known before a server starts, about the machine and about a model.

`worker.startup.machine_facts` and `worker.startup.preflight` write the facts as JSON for `tidegate
doctor`, `tidegate serve` and `tidegate engine`.
"""

from __future__ import annotations

import msgspec

from protocol.config.worker import MAX_SLOTS
from protocol.engine.model_card import ModelCard

GIB = 1 << 30


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that the driver shows to a worker."""

    #: Name of the model.
    name: str
    #: Compute capability, major and minor.
    capability: tuple[int, int]
    total_bytes: int
    #: Free memory; the total memory if it is unknown.
    free_bytes: int


class CudaDriver(msgspec.Struct, frozen=True, kw_only=True):
    """NVIDIA's driver, as a worker would find it."""

    #: Version of the driver, such as "580.95.05"; "" if it is unknown.
    version: str = ""
    #: Newest version of CUDA that the driver supports; (0, 0) without a driver.
    cuda: tuple[int, int] = (0, 0)
    #: The visible GPUs: cuda:0, cuda:1 and so on.
    gpus: list[GpuFacts] = []
    #: Why no GPU is visible; "" if one is.
    problem: str = ""
    #: What to do about it.
    remedy: str = ""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the machine, and the defaults that the worker would choose on it."""

    #: Version of torch.
    torch: str
    #: "cpu" or "cuda:0".
    device: str
    #: The dtype that `auto` would choose.
    dtype: str
    #: Name of the processor.
    cpu: str
    #: The processor features that our kernels use.
    cpu_flags: list[str]
    #: Number of cores that this process may use.
    cores: int
    #: The value that `--threads 0` would choose.
    threads: int
    #: Free memory of the GPU, or of this container if the device is the CPU.
    free_bytes: int
    #: CPU quota of the container, in cores; None if there is none.
    quota: float | None = None
    #: Name of the GPU; "" for the CPU.
    device_name: str = ""
    #: Name of the device's directory in devices.py; "" for the CPU.
    device_id: str = ""
    #: What torch is built for: "CPUs", "CUDA 13.0" or "HIP 6.4".
    torch_build: str = "CPUs"
    driver: CudaDriver = CudaDriver()
    #: Why torch cannot use the first of the driver's GPUs; "" if it can, or if there is none.
    gpu_problem: str = ""
    #: What to do about it.
    gpu_remedy: str = ""
    #: Version of triton; "" if it is not installed.
    triton: str = ""
    #: Path of the C compiler that Triton would use; "" if there is none.
    c_compiler: str = ""
    #: Installed libraries of attention on GPUs.
    attention: list[str] = []


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the device that a worker would choose."""

    #: "cpu" or "cuda:0".
    device: str
    #: Free memory of the GPU, or of this container if the device is the CPU.
    free_bytes: int
    #: How fast all cores together read it; 0: not measured, because the device is a GPU.
    read_bytes_per_s: float


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a model needs on one worker, estimated from the headers of its files."""

    name: str
    architecture: str
    device: str
    dtype: str
    #: Context length that the model was made for.
    context_tokens: int
    #: Most tokens of one request, prompt and answer together.
    max_len: int
    #: Size of the weights after loading, including the draft model's.
    weights_bytes: int
    #: Size of the KV cache. Without attention, it is the little that its empty blocks take.
    kv_bytes: int
    #: Size of a KV cache that can serve requests of `context_tokens`.
    longest_kv_bytes: int
    #: Memory for the processes, for the temporary tensors of a step, and for `state_bytes`.
    work_bytes: int
    #: Free memory of the GPU, or of this container if the device is the CPU.
    free_bytes: int
    #: Number of requests that are computed at the same time; 0: the model only encodes.
    max_slots: int = 0
    #: Recurrent states: those of all requests that run at a time, and their checkpoints.
    state_bytes: int = 0
    #: The state of one request, or a checkpoint of it; 0: the model has no recurrent layers.
    request_state_bytes: int = 0
    #: None: the model has no prefix cache, or no state.
    num_checkpoints: int | None = None
    #: Host memory for blocks that the cache has dropped.
    tier_bytes: int = 0
    #: The encoder of images, and the encoded images that are kept; 0: the model reads none.
    image_bytes: int = 0
    #: Why a model that reads images has no usable encoder; "": it has one, or reads text only.
    image_refusal: str = ""
    #: Whether a layer has attention, and so keys and values.
    has_kv: bool = True
    #: Quantised types in the files whose weights are expanded to `dtype`.
    expanded: list[str] = []

    @property
    def device_bytes(self) -> int:
        """All memory that the model needs on its device."""
        return self.weights_bytes + self.kv_bytes + self.work_bytes + self.image_bytes

    @property
    def has_fewer_slots(self) -> bool:
        """Whether `max_slots` is below the device's default. If the user has not set it, recurrent
        states are the reason."""
        usual = MAX_SLOTS.choose(0, is_gpu=self.device != "cpu")
        return self.request_state_bytes > 0 and self.max_slots < usual


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking the models before the start: a plan for each worker, or an error.

    error       why a server could not start; "" if it could
    remedy      what the user can do about the error
    is_memory   whether the error is a lack of memory; otherwise the model or an option is at fault
    card        the part of the first model's card that concerns text; None if there is an `error`
    memory      the memory of this machine's device; None if there is an `error`, or if the speed of
                the memory was not measured yet
    """

    plans: list[ModelPlan] = []
    error: str = ""
    remedy: str = ""
    is_memory: bool = False
    card: ModelCard | None = None
    memory: MemoryFacts | None = None
