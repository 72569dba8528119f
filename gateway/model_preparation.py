"""Prepares the served model from the card that an engine reports.

Preparing takes seconds for a large vocabulary: the tokenizer is tried in a process of its own, then
the tokenizer and the template are loaded. Each card is prepared once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from gevent.lock import Semaphore

from gateway.images.reader import ImageReader
from gateway.prompt.template import TemplateLoader
from gateway.sandbox.clients import trial_process, try_tokenizer
from gateway.served_model import ModelOptions, ModelText, ServedModel
from protocol.config.gateway import ModelConfig
from protocol.engine.messages import Limits
from protocol.engine.model_card import ModelCard, read_card
from protocol.process.malloc import return_free_memory

log = logging.getLogger(__name__)


class ModelPreparation:
    """Prepares the models of one `ModelHost`.

    images            reads the images of requests; None: they are refused
    describe_writing  returns in words how this process writes streams, for the log
    on_unservable     called if the first model that the engine reports cannot be served

    The constructor raises ValueError if an option of `config` is invalid.
    """

    def __init__(
        self,
        config: ModelConfig,
        templates: TemplateLoader,
        images: ImageReader | None = None,
        *,
        describe_writing: Callable[[], str],
        on_unservable: Callable[[ValueError], None],
    ) -> None:
        self.options = ModelOptions.from_config(config, templates)
        #: The model that was prepared last.
        self.served: ServedModel | None = None
        self._config = config
        self._templates = templates
        self._images = images
        self._describe_writing = describe_writing
        self._on_unservable = on_unservable
        self._preparing = Semaphore(1)
        self._trial = trial_process()
        #: The newest text side: that of the served model, or of the model being loaded.
        self._text: ModelText | None = None
        self._served_card: ModelCard | None = None
        self._unservable: tuple[ModelCard, ValueError] | None = None

    def rename(self, config: ModelConfig) -> None:
        """Use other names for the model. `config` differs from the last one only in them."""
        self._config = config
        self.options = replace(self.options, served_names=config.served_name)
        if self.served is not None:
            self.served = replace(self.served, names=config.served_name)

    def start(self) -> None:
        """Start the trial of the tokenizer, if one is needed. Call this after the fork."""
        if not self._config.tried_tokenizer:
            self._trial.start()

    def close(self) -> None:
        self._trial.close()

    def prepare_expected(self) -> None:
        """Prepare the text side of the model that the engine is loading, if it is known. If that
        fails, the model is prepared when the engine reports it, and the error is reported then."""
        if not self._config.expected_card:
            return
        with self._preparing, contextlib.suppress(ValueError):
            card = read_card(self._config.expected_card).card
            if self._text is None and self._is_tried(card.tokenizer):
                self._text = self._text_of(card)

    def served_model(self, card: ModelCard, limits: Limits) -> ServedModel:
        """Return the model, prepared from the `card` and `limits` of an engine's Welcome message.

        Unless they are the same as before, prepare it now. Raises ValueError if the model cannot be
        served: the same error again for the same card. So a model that cannot be served is prepared
        and logged only once, not at each request.
        """
        with self._preparing:  # loading a template switches greenlets
            if self._unservable is not None and self._unservable[0] is card:
                raise self._unservable[1]
            served = self.served
            if served is None or served.limits is not limits or self._served_card is not card:
                served = self.served = self._prepare(card, limits)
                self._served_card = card
            return served

    def _text_of(self, card: ModelCard) -> ModelText:
        return ModelText.from_card(card, self.options, self._templates, self._images)

    def has_failed(self, card: ModelCard | None) -> bool:
        """Return whether preparing the model card `card` has failed. Only the last failure is
        remembered."""
        return self._unservable is not None and self._unservable[0] is card

    def _prepare(self, card: ModelCard, limits: Limits) -> ServedModel:
        """Return a new served model, and log its formats. Raises ValueError."""
        started_at = time.monotonic()
        try:
            self._try_tokenizer(card.tokenizer)
            if self._text is None or not self._text.fits(card):
                self._text = self._text_of(card)
            served = ServedModel.from_text(self._text, card, limits, self.options)
        except ValueError as error:
            self._unservable = card, error
            log.error("the engine's model cannot be served: %s", error)
            if self.served is None:
                self._on_unservable(error)
            raise
        return_free_memory()
        log.info(
            "serving %s after %.2f s of preparation; formats: %s; %s",
            served.names[0],
            time.monotonic() - started_at,
            served.output_format.why,
            self._describe_writing(),
        )
        if (why := served.renderer.why_unusable) is not None:
            log.warning("chat requests will be refused: %s", why)
        return served

    def _try_tokenizer(self, tokenizer: bytes) -> None:
        """Raise ValueError if the tokenizer cannot be used. A tokenizer that `tidegate serve` tried
        before it started this process is not tried again."""
        trial, self._trial = self._trial, trial_process()
        if self._is_tried(tokenizer):
            trial.close()
        else:
            try_tokenizer(tokenizer, trial)

    def _is_tried(self, tokenizer: bytes) -> bool:
        """Return whether `tidegate serve` has tried this tokenizer."""
        return hashlib.sha256(tokenizer).hexdigest() == self._config.tried_tokenizer
