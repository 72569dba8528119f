"""Models that read images, as far as a prompt depends on them: a tokenizer with the special tokens
of the family, a chat template, settings of an image processor, and the processor of transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from io import BytesIO
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tokenizers
from PIL import Image

from gateway.images.families import FAMILIES
from gateway.images.settings import CheckpointFiles
from protocol.engine.attachments import ImageSupport
from protocol.engine.model_card import ModelCard
from tests.support.tokenizers import card_of, smollm2_tokenizer_json

_PARTS = (
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
)
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}" + _PARTS + "{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_IMAGES_FIRST = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' }}"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + part.text }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CLIP = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


@dataclass(frozen=True)
class ImageModel:
    """A family, and the files of a checkpoint."""

    model_type: str
    #: Module and class of the processor in transformers.
    processor: str
    pad: str
    template: str
    #: preprocessor_config.json and processor_config.json.
    image: Mapping[str, Any]
    joint: Mapping[str, Any] = field(default_factory=dict)
    #: Attributes of the tokenizer -> special tokens.
    named: Mapping[str, str] = field(default_factory=dict)
    #: Further special tokens.
    tokens: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.processor.rpartition(".")[2]

    @cached_property
    def tokenizer_json(self) -> bytes:
        inner = tokenizers.Tokenizer.from_buffer(smollm2_tokenizer_json())
        inner.add_special_tokens(sorted({self.pad, *self.named.values(), *self.tokens}))
        return inner.to_str().encode()

    @property
    def files(self) -> dict[str, bytes]:
        contents = {"preprocessor_config.json": self.image, "processor_config.json": self.joint}
        return {name: json.dumps(content).encode() for name, content in contents.items()}

    def card(self, **changes: Any) -> ModelCard:
        inner = tokenizers.Tokenizer.from_buffer(self.tokenizer_json)
        support = ImageSupport(
            model_type=self.model_type,
            token_id=inner.token_to_id(self.pad) or 0,
            files=self.files,
        )
        known = {"chat_template": self.template, "special_tokens": dict(self.named)}
        return card_of(self.tokenizer_json, images=support, **(known | changes))

    @cached_property
    def reference(self) -> Any:
        """Return the processor of transformers. Those that also read videos need torchvision for
        that, which is not installed, so they get none."""
        from importlib import import_module

        from transformers import PreTrainedTokenizerFast
        from transformers.processing_utils import ProcessorMixin

        files = CheckpointFiles.from_card(self.files)
        module, _, name = FAMILIES[self.model_type].processor.rpartition(".")  # type: ignore[attr-defined]
        pixels = getattr(import_module(f"transformers.models.{module}"), name)
        module, _, name = self.processor.rpartition(".")
        with mock.patch.dict(sys.modules, _pixtral_sizes()):
            found = import_module(f"transformers.models.{module}")
        kind = getattr(found, name)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer.from_buffer(self.tokenizer_json),
            extra_special_tokens={"image_token": self.pad, **self.named},
            pad_token="<|im_end|>",
        )
        arguments = {"image_processor": pixels.from_dict(dict(files.image)), "tokenizer": tokenizer}
        if "feature_extractor" in kind.get_attributes():
            arguments["feature_extractor"] = None  # of sound
        if "video_processor" in kind.get_attributes():
            arguments["video_processor"] = SimpleNamespace(num_frames=1, fps=1)
        checked = mock.patch.object(ProcessorMixin, "check_argument_for_proper_class")
        words = mock.patch.object(found, "num2words", str, create=True)
        backends = mock.patch(
            "transformers.utils.import_utils.is_torchvision_available", return_value=True
        )
        with checked, words, backends:
            return kind(**arguments, **self.joint, chat_template=self.template)


SMOLVLM = ImageModel(
    "smolvlm",
    "smolvlm.processing_smolvlm.SmolVLMProcessor",
    "<image>",
    _CHATML.replace("IMAGE", "<image>"),
    {
        "size": {"longest_edge": 512},
        "max_image_size": {"longest_edge": 128},
        "do_image_splitting": True,
    },
    {"image_seq_len": 16},
    {
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
        "video_token": "<video>",
    },
    tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
IDEFICS3 = ImageModel(
    "idefics3",
    "idefics3.processing_idefics3.Idefics3Processor",
    "<image>",
    SMOLVLM.template,
    SMOLVLM.image,
    SMOLVLM.joint,
    {},
    (*SMOLVLM.tokens, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
)
LLAVA_ONEVISION = ImageModel(
    "llava_onevision",
    "llava_onevision.processing_llava_onevision.LlavaOnevisionProcessor",
    "<image>",
    _IMAGES_FIRST,
    {
        "size": {"height": 56, "width": 56},
        "image_grid_pinpoints": [
            [56 * row, 56 * column] for row in (1, 2, 3) for column in (1, 2, 3)
        ],
        **_CLIP,
    },
    {
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_4",
    },
    {"video_token": "<video>"},
)
MISTRAL3 = ImageModel(
    "mistral3",
    "pixtral.processing_pixtral.PixtralProcessor",
    "[IMG]",
    _CHATML.replace("IMAGE", "[IMG]"),
    {"size": {"longest_edge": 224}, "patch_size": 14, **_CLIP},
    {
        "patch_size": 14,
        "spatial_merge_size": 2,
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    },
    {},
    ("[IMG_BREAK]", "[IMG_END]"),
)
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>")
_QWEN = _CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
QWEN2_5_VL = ImageModel(
    "qwen2_5_vl",
    "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    "<|image_pad|>",
    _QWEN,
    {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 64, "patch_size": 14, "merge_size": 2},
    {},
    {"video_token": "<|video_pad|>"},
    _QWEN_TOKENS,
)
QWEN2_VL = replace(
    QWEN2_5_VL,
    model_type="qwen2_vl",
    processor="qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor",
)
QWEN3_VL = ImageModel(
    "qwen3_vl",
    "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    "<|image_pad|>",
    _QWEN,
    {
        "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 64},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    {},
    {"video_token": "<|video_pad|>"},
    _QWEN_TOKENS,
)
_GLM = (  # the published templates write no end of a turn
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    + _PARTS.replace("IMAGE", "<|begin_of_image|><|image|><|end_of_image|>")
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM4V = ImageModel(
    "glm4v",
    "glm4v.processing_glm4v.Glm4vProcessor",
    "<|image|>",
    _GLM,
    {
        "size": {"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 128},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **_CLIP,
    },
    {},
    {"video_token": "<|video|>"},
    (
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    ),
)
GLM46V = replace(
    GLM4V, model_type="glm4v_moe", processor="glm46v.processing_glm46v.Glm46VProcessor"
)
_GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<start_of_image>"
    "{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA3 = ImageModel(
    "gemma3",
    "gemma3.processing_gemma3.Gemma3Processor",
    "<image_soft_token>",
    _GEMMA,
    {"size": {"height": 56, "width": 56}},
    {"image_seq_length": 16},
    {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
)
GEMMA3_CROPS = ImageModel(
    "gemma3",
    "gemma3.processing_gemma3.Gemma3Processor",
    "<image_soft_token>",
    _GEMMA,
    {
        "size": {"height": 56, "width": 56},
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 16,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
    {"image_seq_length": 16},
    GEMMA3.named,
)
GEMMA4 = ImageModel(
    "gemma4",
    "gemma4.processing_gemma4.Gemma4Processor",
    "<|image|>",
    _CHATML.replace("IMAGE", "<|image|>"),
    {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3},
    {},
    {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    },
)
INTERNVL = ImageModel(
    "internvl",
    "internvl.processing_internvl.InternVLProcessor",
    "<IMG_CONTEXT>",
    _CHATML.replace("IMAGE", "<IMG_CONTEXT>"),
    {"size": {"height": 56, "width": 56}, "crop_to_patches": False, "max_patches": 6, **_CLIP},
    {"image_seq_length": 16},
    {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
LLAVA_NEXT = ImageModel(
    "llava_next",
    "llava_next.processing_llava_next.LlavaNextProcessor",
    "<image>",
    _CHATML.replace("IMAGE", "<image>"),
    {
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
        **_CLIP,
    },
    {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
)
GRANITE_VISION = replace(
    LLAVA_NEXT,
    image={
        **LLAVA_NEXT.image,
        "size": {"height": 60, "width": 60},
        "crop_size": {"height": 60, "width": 60},
        "image_grid_pinpoints": [[60, 180], [120, 60], [240, 120], [180, 120]],
    },
    joint={
        "patch_size": 14,
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
    },
)
MODELS = {
    "smolvlm": SMOLVLM,
    "idefics3": IDEFICS3,
    "llava_onevision": LLAVA_ONEVISION,
    "mistral3": MISTRAL3,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "glm4v": GLM4V,
    "glm46v": GLM46V,
    "gemma3": GEMMA3,
    "gemma3_crops": GEMMA3_CROPS,
    "gemma4": GEMMA4,
    "internvl": INTERNVL,
    "llava_next": LLAVA_NEXT,
    "granite_vision": GRANITE_VISION,
}


def _pixtral_sizes() -> dict[str, Any]:
    """Return a module in place of one that imports torchvision, with the function that Pixtral's
    processor imports from it."""
    from transformers.models.pixtral import image_processing_pil_pixtral as pil

    return {"transformers.models.pixtral.image_processing_pixtral": pil}


@cache
def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return the file of an image with a gradient, so that each part of it is different."""
    image = Image.linear_gradient("L").rotate(37 * seed).resize((width, height))
    bands = image, image.transpose(Image.Transpose.ROTATE_180), image.point(lambda each: 255 - each)
    file = BytesIO()
    Image.merge("RGB", bands).save(file, kind)
    return file.getvalue()
