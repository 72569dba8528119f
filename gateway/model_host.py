"""One model of this server: its engine client, the served model that is prepared from the engine's
card, and the refusals that still hold.

The service has a `ModelHost` for each model. A request looks its host up once, by name, and keeps
the result as a `ModelUse` until its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gevent.lock import Semaphore

from gateway.context import RequestContext
from gateway.engine.base import EngineClient
from gateway.http.sse import LAST_EVENT_HEADER
from gateway.sandbox.clients import TemplateProcesses, trial_process, try_tokenizer
from gateway.served_model import ModelOptions, ModelText, ServedModel, return_free_memory
from protocol.config.gateway import GatewayConfig
from protocol.errors import EngineNotReady, ServingError
from protocol.messages import Account, Limits
from protocol.model_card import ModelCard, read_card

log = logging.getLogger(__name__)


class ModelHost:
    """One model that this process serves.

    engine            the client for the model's engines; the host starts and closes it
    describe_writing  returns in words how this process writes streams, for the log
    on_unservable     called if the first model that the engine reports cannot be served

    The constructor raises ValueError if an option of `config` is invalid.
    """

    def __init__(
        self,
        config: GatewayConfig,
        engine: EngineClient,
        templates: TemplateProcesses,
        *,
        describe_writing: Callable[[], str],
        on_unservable: Callable[[ValueError], None],
    ) -> None:
        self.config = config
        self.options = ModelOptions.from_config(config, templates)
        self.engine = engine
        self._templates = templates
        self._describe_writing = describe_writing
        self._on_unservable = on_unservable
        self._preparing = Semaphore(1)
        self._trial = trial_process()
        #: The newest text side: that of the served model, or of the model being loaded.
        self._text: ModelText | None = None
        self._served: ServedModel | None = None
        self._served_card: ModelCard | None = None
        self._unservable: tuple[ModelCard, ValueError] | None = None

    def start(self) -> None:
        """Start the trial of the tokenizer, if one is needed, and the engine client. Call this
        after the fork."""
        if not self.config.tried_tokenizer:
            self._trial.start()
        self.engine.start()

    def close(self) -> None:
        self.engine.close()
        self._trial.close()

    # ---- the model

    def model(self) -> ServedModel:
        """Return the served model. Raises EngineNotReady, EngineLost or Draining if it cannot be
        served now."""
        trouble = self.trouble()
        if trouble is not None:
            raise trouble
        return self._current_model()

    def trouble(self) -> ServingError | None:
        """Return the error that every request for this model would get now, or None if requests can
        be served. If the engine has reported a new model, prepare it first."""
        trouble = self.engine.trouble()
        if trouble is not None:
            why = f"the engine is not ready: {trouble.message}"
            return type(trouble)(why, retry_after_s=trouble.retry_after_s or 1)
        try:
            self._current_model()
        except ValueError:
            return EngineNotReady("the engine's model cannot be served by this gateway")
        return None

    @property
    def has_served(self) -> bool:
        """Whether the model has become available since the start."""
        return self._served is not None

    @property
    def name(self) -> str:
        """The main name of the model that was prepared last, or "" if there is none."""
        return self._served.names[0] if self._served is not None else ""

    def prepare_expected(self) -> None:
        """Prepare the text side of the model that the engine is loading, if it is known. If that
        fails, the model is prepared when the engine reports it, and the error is reported then."""
        if not self.config.expected_card:
            return
        with self._preparing, contextlib.suppress(ValueError):
            card = read_card(self.config.expected_card).card
            if self._text is None and self._is_tried(card.tokenizer):
                self._text = ModelText.from_card(card, self.options, self._templates)

    def _current_model(self) -> ServedModel:
        """Return the served model, prepared from the engine's last Welcome message.

        A new Welcome may have another model, because the engine may have restarted with one. Raises
        ValueError if the model cannot be served.
        """
        card, limits = self.engine.model, self.engine.limits
        assert card is not None
        assert limits is not None
        with self._preparing:  # loading a template switches greenlets
            return self._prepare_once(card, limits)

    def _prepare_once(self, card: ModelCard, limits: Limits) -> ServedModel:
        """Prepare the model unless that was done before. Return it, or raise the same error again.
        So a model that cannot be served is prepared and logged only once, not at each request."""
        if self._unservable is not None and self._unservable[0] is card:
            raise self._unservable[1]
        served = self._served
        if served is None or served.limits is not limits or self._served_card is not card:
            served = self._served = self._prepare(card, limits)
            self._served_card = card
        return served

    def _prepare(self, card: ModelCard, limits: Limits) -> ServedModel:
        """Return a new served model, and log its formats. Raises ValueError."""
        started_at = time.monotonic()
        try:
            self._try_tokenizer(card.tokenizer)
            if self._text is None or not self._text.fits(card):
                self._text = ModelText.from_card(card, self.options, self._templates)
            served = ServedModel.from_text(self._text, card, limits, self.options)
        except ValueError as error:
            self._unservable = card, error
            log.error("the engine's model cannot be served: %s", error)
            if self._served is None:
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
        return hashlib.sha256(tokenizer).hexdigest() == self.config.tried_tokenizer

    # ---- refusals that still hold

    def raise_cached_refusal(self, context: RequestContext) -> None:
        """Raise the engine's last refusal of the caller's account, if it is still valid.

        Call this before rendering the prompt, to save that work for a refused request. A client
        that resumes a stream is not refused.
        """
        if context.headers.get(LAST_EVENT_HEADER, ""):
            return
        account = context.caller.account
        if (refusal := self.engine.cached_refusal(account)) is not None:
            raise refusal

    def cache_refusal(self, account: Account | None, refusal: ServingError) -> None:
        """Store a refusal for `raise_cached_refusal`, if the engine client needs that."""
        self.engine.cache_refusal(account, refusal)


@dataclass(frozen=True, slots=True)
class ModelUse:
    """One request's use of a model, from its lookup to its end."""

    host: ModelHost
    #: The model at the time of the lookup. The host may prepare another one later, if its engine
    #: restarts.
    model: ServedModel
