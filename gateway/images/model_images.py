"""The images of one served model: whether it reads them, and how its prompts contain them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.images.families import FAMILIES, ImagePrompter
from gateway.images.marks import MarkedImages, PlacedImages, placed_images
from gateway.images.memory import ProcessedImage
from gateway.images.reader import ImageReader, ImageTimes
from gateway.images.settings import CheckpointFiles
from gateway.images.source import ImageSource
from gateway.text.tokenizer import Tokenizer
from protocol.engine.attachments import AttachedTensor, Attachment
from protocol.engine.model_card import ModelCard

TEXT_ONLY = "this model reads text only"


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt."""

    attachments: Sequence[Attachment] = ()
    #: The content of each attachment.
    contents: Sequence[ProcessedImage] = ()
    times: ImageTimes = field(default_factory=ImageTimes)
    #: Paths of images in tool results that the model cannot read, in whose place it reads a note.
    left_out: Sequence[str] = ()

    @property
    def by_digest(self) -> Mapping[str, Sequence[AttachedTensor]]:
        """Digest -> content of each attachment."""
        return {each.digest: each.tensors for each in self.contents}

    @property
    def num_tokens(self) -> int:
        """Number of placeholders in the prompt."""
        return sum(each.num_tokens for each in self.attachments)


NO_IMAGES = PromptImages()


class ModelImages:
    """Puts images into the prompts of one model.

    refusal  why the model reads no images; "": it reads them
    """

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, reader: ImageReader | None) -> None:
        self._reader = reader
        self._tokenizer = tokenizer
        self._prompter: ImagePrompter | None = None
        self.pad_id = -1
        #: Whether the checkpoint has an encoder of images, whether it can be used or not.
        self.has_encoder = card.images is not None
        self.refusal = TEXT_ONLY
        if (support := card.images) is None:
            return
        self.refusal = support.reason
        self.pad_id = support.token_id
        if not self.refusal:
            self.refusal = self._prepare(card, support.model_type, support.files, reader)

    def _prepare(
        self,
        card: ModelCard,
        model_type: str,
        files: dict[str, bytes],
        reader: ImageReader | None,
    ) -> str:
        """Load the image processor. Return why the model's images cannot be used, or ""."""
        if (make := FAMILIES.get(model_type)) is None:
            return f"images of the family {model_type!r} are not supported yet"
        if reader is None:
            return "this process reads no images"
        try:
            found = CheckpointFiles.from_card(files)
        except ValueError as error:
            return f"the image processor of this model cannot be used: {error}"
        pad = self._tokenizer.token_piece(self.pad_id)
        self._prompter = prompter = make(found, card.special_tokens, pad)
        if why := reader.load(prompter.settings(has_company=False)):
            return (
                f"the image processor of this model cannot be loaded: {why}; the "
                "operator can install the extra 'images' in the gateway's environment"
            )
        return ""

    @property
    def prompter(self) -> ImagePrompter:
        """The prompter of a model that reads images."""
        assert self._prompter is not None
        return self._prompter

    def check(self, sources: Sequence[ImageSource]) -> None:
        """Raise InvalidRequest, naming the field, if the model reads no images and one of these
        cannot be replaced by a note."""
        if self.refusal:
            for source in sources:
                if not source.note:
                    raise source.refusal(self.refusal)

    def read(self, sources: Sequence[ImageSource], times: ImageTimes) -> list[ProcessedImage]:
        """Return the images of a conversation, preprocessed. Raises InvalidRequest."""
        assert self._reader is not None
        settings = self.prompter.settings(has_company=len(sources) > 1)
        return self._reader.read(sources, settings, times)

    def placed(
        self, text: str, images: Sequence[ProcessedImage], marks: MarkedImages, shown: str
    ) -> PlacedImages:
        """Return a prompt with the text of its images.

        text   the template's output
        shown  what the template writes for an image; "": it has no markers

        Raises ValueError if the template has not placed each image.
        """
        prompter = self.prompter
        text = text.replace(marks.mark, shown if prompter.marker in shown else prompter.framed)
        has_company = len(images) > 1
        texts = [prompter.text(image.facts, has_company=has_company) for image in images]
        return placed_images(text, texts, marks, marker=prompter.marker, pad=prompter.pad)
