"""A GPU that is pretended: it computes on the CPU, and obeys the rules of CUDA.

    with PretendedDevice() as device:
        tensor = torch.zeros(3, device=DEVICE)
        ...
    assert not device.faults

Code that runs inside `with` creates tensors on DEVICE as it would on "cuda". The device counts
launches, and records as a fault what would be an error on a GPU or would make it wait:

- an operation on tensors of the device and of the host;
- a synchronisation: the host reads a value, or an operation's output size depends on values;
- a copy from or to host memory that is not pinned, which CUDA stages and may wait for;
- a copy from or to the host while a graph is captured.

Copies to the host arrive only when an event after them has been waited for. Until then their memory
holds garbage, so results that are read too early are wrong.

PyTorch names no such device, so DEVICE is "meta", whose real tensors have no values.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
GARBAGE = 0xA5
VIEWS = frozenset(
    [
        *["alias", "as_strided", "detach", "diagonal", "expand", "lift_fresh", "narrow", "permute"],
        *["_reshape_alias", "select", "slice", "split", "split_with_sizes", "squeeze", "t"],
        *["transpose", "unbind", "unfold", "_unsafe_view", "unsqueeze", "view", "view_as_real"],
    ]
)
"""Operations that launch nothing, because their results share their input's memory."""
ALLOCATIONS = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])
FACTORIES = frozenset(
    [torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor]
)
SYNCHRONISING = frozenset(
    [
        *["equal", "is_nonzero", "_local_scalar_dense", "masked_select", "nonzero", "_unique2"],
        *["unique_consecutive", "unique_dim"],
    ]
)
"""Operations whose result is read by the host, or whose output size depends on values."""


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """A violated rule: its kind, the operation, and the line of the worker that calls it."""

    kind: str
    operation: str
    line: str


class DeviceTensor(torch.Tensor):
    """A tensor of the pretended device. Its values are in `content`, on the CPU."""

    content: Tensor

    @staticmethod
    def __new__(cls, content: Tensor) -> DeviceTensor:
        tensor: DeviceTensor = cls._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            content.shape,
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=DEVICE,
        )
        tensor.content = content
        return tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor of a device cannot be converted to numpy")

    def data_ptr(self) -> int:
        return self.content.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.content.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _active().dispatch(func, args, dict(kwargs or {}))


class PretendedEvent:
    """An event in the device's queue. Waiting for it completes the copies to the host before it."""

    def __init__(self, blocking: bool = False) -> None:
        self._copies: list[QueuedCopy] = []

    def record(self) -> None:
        self._copies = list(_active().queued_copies)

    def query(self) -> bool:
        return not any(copy in _active().queued_copies for copy in self._copies)

    def synchronize(self) -> None:
        queue = _active().queued_copies
        for copy in self._copies:
            if copy in queue:
                queue.remove(copy)
                copy.complete()


class PretendedStream:
    """A stream. All streams of the device share one queue, which runs in order."""

    def __init__(self, device: torch.device | None = None) -> None:
        assert device is None or device == DEVICE

    def record_event(self, event: PretendedEvent | None = None) -> PretendedEvent:
        event = event or PretendedEvent()
        event.record()
        return event

    def wait_event(self, event: PretendedEvent) -> None:
        pass

    def synchronize(self) -> None:
        self.record_event().synchronize()


@dataclass(eq=False, slots=True)
class QueuedCopy:
    """A copy to the host that is not complete."""

    target: Tensor
    source: Tensor

    def complete(self) -> None:
        self.target.copy_(self.source)


class PretendedDevice:
    """The device. Only one is active at a time.

    launches        number of operations that were launched
    by_operation    the same for each operation
    faults          rules that were violated
    queued_copies   copies to the host that no event has been waited for
    """

    active: PretendedDevice | None = None

    def __init__(self) -> None:
        self.by_operation: dict[str, int] = {}
        self.faults: list[DeviceFault] = []
        self.queued_copies: list[QueuedCopy] = []
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._is_fused = False
        self._tape: list[Callable[[], None]] | None = None
        self._stack = ExitStack()

    @property
    def launches(self) -> int:
        return sum(self.by_operation.values())

    def __enter__(self) -> Self:
        assert PretendedDevice.active is None
        PretendedDevice.active = self
        # Tensors of subclasses cannot be created in inference mode.
        for name in ("__enter__", "__exit__"):
            self._stack.enter_context(
                patch.object(torch.inference_mode, name, getattr(torch.no_grad, name))
            )
        cuda = {
            "Stream": PretendedStream,
            "Event": PretendedEvent,
            "current_stream": PretendedStream,
        }
        for name, replacement in (cuda | {"stream": nullcontext}).items():
            self._stack.enter_context(patch.object(torch.cuda, name, replacement))
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        PretendedDevice.active = None

    def forget(self) -> None:
        """Forget all launches and faults so far."""
        self.by_operation.clear()
        self.faults.clear()

    @contextmanager
    def fused(self, name: str, launches: int = 1) -> Iterator[None]:
        """Count everything inside as these launches of a fused kernel, whose slow twin runs here
        instead. Nothing inside is a synchronisation."""
        was_fused, self._is_fused = self._is_fused, True
        if not was_fused:
            self.by_operation[name] = self.by_operation.get(name, 0) + launches
        try:
            yield
        finally:
            self._is_fused = was_fused

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture a graph (worker/step/decode_graph.py): record the operations of `work` with the
        memory that they read and write. The result repeats them, as one launch. What the host did
        meanwhile is not repeated, and its memory must not be read."""
        assert self._tape is None
        tape = self._tape = []
        try:
            work()
        finally:
            self._tape = None

        def replay() -> None:
            with self.fused("graph"):
                for repeat in tape:
                    repeat()

        return replay

    # ---- operations

    def launch(self, name: str, kernel: Callable[..., object], args: Any, kwargs: Any) -> None:
        """Run a kernel that is not torch's, which changes its arguments in place."""
        self.count(name)
        tensors = (*_tensors(args), *_tensors(kwargs))
        if any(each.dim() for each in tensors if not isinstance(each, DeviceTensor)):
            self.fault("mix of host and device", name)

        def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            kernel(*args, **kwargs)
            return ()

        self.run(run, _contents(args), _contents(kwargs))

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation of which an argument is on the device."""
        name = name_of(func)
        if name == "_to_copy":
            return self._converted(func, args, kwargs)
        if name == "copy":
            return self._copied(func, args, kwargs)
        self._check(name, args, kwargs)
        self.count(name)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        result = self.run(func, _contents(args), _contents(kwargs))
        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            return result
        return _on_device(result, {id(each.content): each for each in _device_tensors(args)})

    def upload(self, source: Tensor, *, waits: bool, dtype: torch.dtype | None) -> DeviceTensor:
        """Return a copy of a host tensor on the device."""
        self.count("upload")
        if self._tape is not None:
            self.fault("copy in a graph", "upload")
        if source.dim() and not self.is_pinned(source):
            self.fault("pageable copy", "upload")
        elif waits and source.dim():
            self.fault("synchronisation", "upload that waits")
        return DeviceTensor(source.to(dtype or source.dtype, copy=True))

    def pin(self, tensor: Tensor) -> Tensor:
        """Return the host tensor, whose memory now counts as pinned."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage  # kept, so that no other gets its address
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _converted(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Run `Tensor.to` of a tensor of the device."""
        self.count("convert")
        target = kwargs.pop("device", None)
        kwargs.pop("non_blocking", None)
        kwargs.pop("pin_memory", None)
        result: Tensor = self.run(func, _contents(args), kwargs)
        if target is None or torch.device(target) == DEVICE:
            return DeviceTensor(result)
        self.fault("synchronisation", "copy to the host")
        return result

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Run `target.copy_(source)`."""
        self.count("copy")
        target, source = args[0], args[1]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        host = next((each for each in (target, source) if not isinstance(each, DeviceTensor)), None)
        if host is not None and (host.dim() or host is target):
            if not self.is_pinned(host):
                self.fault("pageable copy", "copy_")
            elif waits:
                self.fault("synchronisation", "copy_ that waits")
        if host is not None and host is target and not waits:
            self.queued_copies.append(QueuedCopy(target, source.content.clone()))
            target.view(torch.uint8).fill_(GARBAGE)
        else:
            self.run(func, _contents(args), _contents(kwargs))
        if self._tape is not None and host is not None:
            self.fault("copy in a graph", "copy_")
        return target

    def _check(self, name: str, args: Any, kwargs: Any) -> None:
        if name in SYNCHRONISING:
            self.fault("synchronisation", name)
        is_masked = any(each.dtype == torch.bool for each in _tensors(args[1:2]))
        if name in ("index", "index_put") and is_masked:
            self.fault("synchronisation", f"{name} with a mask")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.fault("synchronisation", name)
        tensors = (*_tensors(args), *_tensors(kwargs))
        if any(each.dim() for each in tensors if not isinstance(each, DeviceTensor)):
            self.fault("mix of host and device", name)

    def count(self, name: str) -> None:
        """Count a launch of this operation."""
        if not self._is_fused and name not in VIEWS and name not in ALLOCATIONS:
            self.by_operation[name] = self.by_operation.get(name, 0) + 1

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation on the CPU. While a graph is captured, record it."""
        result = func(*args, **kwargs)
        if self._tape is not None:

            def repeat() -> None:
                for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():  # neither a view nor changed in place
                        old.copy_(new)

            self._tape.append(repeat)
        return result

    def fault(self, kind: str, operation: str) -> None:
        """Record that an operation violates a rule."""
        if not (self._is_fused and kind == "synchronisation"):
            self.faults.append(DeviceFault(kind, operation, _line_of_the_worker()))


class _Functions(TorchFunctionMode):
    """Creates tensors on the pretended device, and pins host memory without a GPU."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FACTORIES:
            return self._made(func, args, kwargs)
        if func is torch.Tensor.to and not isinstance(args[0], DeviceTensor):
            targets = [kwargs.get("device"), *args[1:]]
            if any(_is_ours(target) for target in targets):
                dtypes = [each for each in (*targets, kwargs.get("dtype")) if _is_dtype(each)]
                waits = not kwargs.get("non_blocking", False)
                return self._device.upload(args[0], waits=waits, dtype=(*dtypes, None)[0])
        if func is torch.Tensor.is_pinned:
            return self._device.is_pinned(args[0])
        return func(*args, **kwargs)

    def _made(self, func: Callable[..., Tensor], args: Any, kwargs: dict[str, Any]) -> Tensor:
        is_pinned = kwargs.pop("pin_memory", False)
        if not _is_ours(kwargs.get("device")):
            tensor = func(*args, **kwargs)
            return self._device.pin(tensor) if is_pinned else tensor
        kwargs["device"] = torch.device("cpu")
        if func is torch.tensor:
            return self._device.upload(func(*args, **kwargs), waits=True, dtype=None)
        if func is not torch.empty:
            self._device.count(func.__name__)
        return DeviceTensor(self._device.run(func, args, kwargs))


class _Operations(TorchDispatchMode):
    """Creates the tensors that composite operations make for themselves on the device."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _device_tensors(args) or _device_tensors(kwargs):
            return self._device.dispatch(func, args, kwargs)
        if not _is_ours(kwargs.get("device")):
            return func(*args, **kwargs)
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        name = name_of(func)
        if any(each.dim() for each in _tensors(args)):
            self._device.fault("pageable copy", name)
        self._device.count(name)
        return DeviceTensor(self._device.run(func, args, kwargs))


def _active() -> PretendedDevice:
    assert PretendedDevice.active is not None, "the pretended device is used outside its `with`"
    return PretendedDevice.active


def name_of(func: Any) -> str:
    """Return the name of an operation, without its overload: "add" for "aten::add_.Tensor"."""
    name: str = func.name().partition("::")[2].partition(".")[0]
    return name if name.endswith("__") else name.rstrip("_")


def content(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of the device, on the CPU. Only tests may look at them."""
    assert isinstance(tensor, DeviceTensor)
    return tensor.content


def _contents(tree: Any) -> Any:
    """Return an operation's arguments with the values of the device's tensors."""
    if isinstance(tree, DeviceTensor):
        return tree.content
    if isinstance(tree, tuple | list):
        return type(tree)(_contents(each) for each in tree)
    if isinstance(tree, dict):
        return {key: _contents(each) for key, each in tree.items()}
    return tree


def _on_device(tree: Any, known: Mapping[int, DeviceTensor]) -> Any:
    """Return an operation's result with tensors of the device. `known` are those that exist, by the
    id of their content."""
    if isinstance(tree, Tensor):
        return known[id(tree)] if id(tree) in known else DeviceTensor(tree)
    if isinstance(tree, tuple | list):
        return [_on_device(each, known) for each in tree]
    return tree


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors([*tree.values()])


def _device_tensors(tree: Any) -> list[DeviceTensor]:
    return [each for each in _tensors(tree) if isinstance(each, DeviceTensor)]


def _is_ours(target: Any) -> bool:
    return isinstance(target, str | torch.device) and torch.device(target) == DEVICE


def _is_dtype(target: Any) -> bool:
    return isinstance(target, torch.dtype)


def _line_of_the_worker() -> str:
    """Return the place in worker/ that the current operation was called from."""
    for frame in reversed(traceback.extract_stack()):
        if "/worker/" in frame.filename:
            return f"{frame.filename.rsplit('/worker/', 1)[1]}:{frame.lineno}: {frame.line}"
    return "outside worker/"
