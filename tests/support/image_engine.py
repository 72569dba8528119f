"""An engine with the real worker's runner and image encoder, in one process, and tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from engine_core.engine import Engine
from engine_core.startup import build_engine
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.attachments import (
    AttachedTensor,
    Attachment,
    TensorType,
    attached_bytes,
    attachment_digest,
)
from protocol.engine.messages import Accepted, Generate, Output
from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Int32, UInt8
from protocol.worker.steps import DropImages, ImageEncoded, StepPlan, StepResult
from worker.device.timing import StartupTiming
from worker.startup.assembly import assemble

CLIENT = b"client"


def attached(tensors: dict[str, np.ndarray[Any, Any]]) -> list[AttachedTensor]:
    """Return the tensors of an image processor as a client sends them."""
    found = []
    for name, array in tensors.items():
        dtype: TensorType = "float32" if array.dtype.kind == "f" else "int64"
        data = UInt8(np.ascontiguousarray(array, np.dtype(dtype)).tobytes())
        found.append(AttachedTensor(name=name, dtype=dtype, shape=list(array.shape), data=data))
    return found


class ImageEngine:
    """Generates answers to prompts with images.

    options      of the worker
    engine       further options of the engine
    num_encoded  number of images that were encoded
    steps        the plans and results so far
    """

    def __init__(
        self,
        model: Path,
        *,
        token_budget: int = 512,
        engine: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Build the engine and its worker.

        engine    options of the engine
        options   those of the worker
        """
        sizes = {"kv_blocks": 129, "max_len": 256} | options
        worker = WorkerConfig(
            model=str(model),
            dtype="float32",
            block_tokens=8,
            max_slots=4,
            token_budget=token_budget,
            poison_slots="plausible",
            **sizes,
        )
        assembled = assemble(worker, StartupTiming())
        assert assembled.runner is not None
        assert assembled.tower is not None
        self.runner, self.tower = assembled.runner, assembled.tower
        self.card = assembled.ready.model
        config = EngineConfig(worker=worker, steps_in_flight=1, **(engine or {}))
        ready = replace(assembled.ready, draft_cost=0.0)  # that of a tiny model is high
        self.engine: Engine = build_engine(ready, config, epoch="e", key=None, journal=None)
        self.num_encoded = 0
        self.steps: list[tuple[StepPlan, StepResult]] = []
        self.outputs: dict[int, list[Output]] = {}

    def attach(
        self,
        tensors: list[AttachedTensor],
        *runs: tuple[int, int],
        grid: tuple[int, int, int] | None = None,
    ) -> Attachment:
        digest = attachment_digest(tensors)
        self.engine.attach(digest, tensors, attached_bytes(tensors))
        return Attachment(digest=digest, kind="image", runs=list(runs), grid=grid)

    def add(self, prompt: Sequence[int], images: list[Attachment], **params: Any) -> int:
        number = len(self.outputs) + 1
        message = Generate(
            request=number,
            prompt=Int32.of(list(prompt)),
            params=SamplingParams(temperature=0.0, ignore_eos=True, **params),
            attachments=images,
        )
        assert self.engine.add(CLIENT, message) == Accepted(request=number)
        self.outputs[number] = []
        return number

    def step(self) -> bool:
        """Compute one step, or encode the next images. Return False if there is nothing to do."""
        plan = self.engine.plan()
        commands = self.engine.images.drain_commands()
        reports = []
        for command in commands:
            if isinstance(command, DropImages):
                for digest in command.digests:
                    del self.runner.image_rows[digest]
                continue
            rows = self.tower.encode(command.digest, command.tensors, command.num_rows)
            self.runner.image_rows[command.digest] = rows
            self.num_encoded += 1
            reports.append(ImageEncoded(digest=command.digest))
        if plan is not None:
            assert isinstance(plan, StepPlan)
            result = self.runner.step(plan)
            self.steps.append((plan, result))
            outputs = self.engine.commit(result, 0.01)
            for output in outputs[CLIENT].outputs if outputs else ():
                self.outputs[output.request].append(output)
        for report in reports:
            self.engine.on_image_encoded(report)
        self.engine.check()
        return plan is not None or bool(reports)

    def run(self) -> None:
        while self.step():
            pass

    def tokens(self, number: int) -> list[int]:
        return [token for output in self.outputs[number] for token in output.tokens]

    def logprobs(self, number: int) -> list[tuple[int, float]]:
        """Return (id, logprob) of the sampled tokens."""
        found = [each for output in self.outputs[number] for each in output.logprobs]
        return [(each.token_id, each.logprob) for each in found]


def reference(
    model: Any, prompt: Sequence[int], num_tokens: int, types: str = "", /, **tensors: torch.Tensor
) -> list[tuple[int, float]]:
    """Return the likeliest tokens that transformers' model continues the prompt with, and their
    logprobs.

    types   the argument of the model that says which tokens are those of an image; "": none
    """
    placeholder = model.config.image_token_id if types else -1
    ids, found = list(prompt), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            inputs = torch.tensor([ids])
            if types:
                tensors[types] = (inputs == placeholder).long()
            logits = model(input_ids=inputs, **tensors).logits[0, -1]
            logprobs = logits.float().log_softmax(-1)
            found.append((int(logprobs.argmax()), float(logprobs.max())))
            ids.append(found[-1][0])
    return found
