"""A client sends images to an engine and a worker in processes of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.engine.attachments import Attachment
from protocol.sdk.client import Client
from protocol.wire.errors import AttachmentMissing, InvalidRequest
from tests.integration.test_engine_process import start
from tests.support.image_engine import attached, reference
from tests.support.wrapper_models import random_wrapper, write_wrapper


def test_images_travel_once_and_the_next_request_finds_them(tmp_path: Path) -> None:
    model = random_wrapper("SmolVLMForConditionalGeneration", "llama")
    placeholder = model.config.image_token_id
    directory = write_wrapper(tmp_path / "model", model)
    pixels = np.random.default_rng(0).normal(size=(1, 3, 3, 28, 28)).astype(np.float32)
    tensors = attached({"pixel_values": pixels})
    prompt = [5, 6, placeholder, placeholder, 7, placeholder, 8, 9]
    with (
        start(directory, tmp_path),
        Client(f"ipc://{tmp_path}/run/engine.sock", wait_s=60) as client,
    ):
        images = client.model.images
        assert images is not None
        assert (images.model_type, images.token_id, images.reason) == ("smolvlm", placeholder, "")
        assert "config.json" in images.files
        assert images.max_tokens == client.limits.image_rows > 0
        missing = Attachment(digest="0f" * 32, kind="image", runs=[(2, 2), (5, 1)])
        with pytest.raises(AttachmentMissing):
            client.generate(prompt, attachments=[missing], max_tokens=1).tokens()
        image = Attachment(digest=client.attach(tensors), kind="image", runs=missing.runs)
        options = {"attachments": [image], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answers = [client.generate(prompt, **options).tokens() for _ in range(2)]  # type: ignore[arg-type]
        inputs = {"pixel_values": torch.from_numpy(pixels)}
        expected = [token for token, _ in reference(model, prompt, 4, **inputs)]
        assert answers == [expected] * 2
        wrong = Attachment(digest=image.digest, kind="image", runs=[(2, 2)])
        with pytest.raises(InvalidRequest, match=r"attachments\[0\]: must have 3 tokens; got 2"):
            client.generate(prompt, attachments=[wrong], max_tokens=1).tokens()
        elsewhere = Attachment(digest=image.digest, kind="image", runs=[(0, 3)])
        with pytest.raises(InvalidRequest, match="positions 0 to 2 are not all placeholders"):
            client.generate(prompt, attachments=[elsewhere], max_tokens=1).tokens()
