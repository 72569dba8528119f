"""The parts of a runner except its slots and caches. The runs at startup use other slots and caches
than the steps do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.attention.base import Attention
from worker.draft.base import TokenProposer
from worker.draft.head import HeadDrafter
from worker.draft.model import DraftModel
from worker.errors import UnusableModel
from worker.kv.cache import PagedCache
from worker.loading.decoder import LoadedModel
from worker.loading.draft_head import LoadedHead
from worker.lora.table import AdapterTable
from worker.models.base import RowModel
from worker.models.decoder import DecoderModel
from worker.sampling.select import select_sampling
from worker.slots.table import SlotTable
from worker.spec.facts import ModelFacts
from worker.step.decode_fast_path import PlainDecode
from worker.step.decode_graph import Capture, GraphDecode
from worker.step.runner import Runner


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The model, and its draft model or head if there is one, each with its attention. Adapters
    change only the model."""

    models: Sequence[LoadedModel]
    attentions: Sequence[Attention]
    adapters: AdapterTable = field(default_factory=AdapterTable)
    head: LoadedHead | None = None

    @property
    def specs(self) -> list[ModelFacts]:
        """Return the spec of each of them. Each has a cache."""
        specs: list[ModelFacts] = [model.spec for model in self.models]
        return specs if self.head is None else [*specs, self.head.spec]

    @property
    def head_hidden(self) -> int:
        """Return the numbers of a hidden state that the head reads; 0: there is no head."""
        return 0 if self.head is None else self.head.spec.hidden

    @property
    def weights(self) -> list[object]:
        """Return everything that holds weights."""
        return [*(model.model for model in self.models), self.head]

    def runner(
        self,
        slots: SlotTable,
        caches: Sequence[PagedCache],
        kind: type[Runner] = Runner,
        decode: PlainDecode | None = None,
    ) -> Runner:
        """Return a runner with these slots, and with a cache for each of `specs`."""
        model = self.models[0]
        return kind(
            model.model,
            slots,
            caches[0],
            self.attentions[0],
            draft_model=self._draft_model(caches[1:]),
            decode=decode,
            sampling=select_sampling(model.model.kernels),
            adapters=self.adapters,
        )

    def _draft_model(self, caches: Sequence[PagedCache]) -> TokenProposer | None:
        model, vocab = self.models[0].model, self.models[0].card.vocab_size
        if self.head is not None:
            assert isinstance(model, DecoderModel)
            return HeadDrafter(self.head.model, model, caches[0], self.attentions[1], vocab)
        if len(self.models) == 1:
            return None
        draft = self.models[1].model
        assert not isinstance(draft, RowModel), "its cache cannot take drafts back"
        return DraftModel(draft, caches[0], self.attentions[1], vocab)

    def captured_decode(
        self, slots: SlotTable, caches: Sequence[PagedCache], capture: Capture
    ) -> PlainDecode | None:
        """Return captured decode steps, or None if those of the model cannot be captured. No slot
        may be bound. Raises UnusableModel if the capture fails."""
        model, attention = self.models[0].model, self.attentions[0]
        decode = GraphDecode.for_model(model, slots, caches[0], attention, capture)
        if decode is None:
            return None
        try:
            decode.prepare()
        except RuntimeError as error:
            raise UnusableModel(
                f"decode steps cannot be captured: {str(error).partition(chr(10))[0]}",
                remedy="serve with --decode-graphs off",
            ) from error
        return decode
