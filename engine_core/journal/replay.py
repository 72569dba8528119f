"""A journal's engine again, without workers: told the same, does it decide the same?

`replay` is the heart of a test that is made of an incident: it raises Differs at the first record
whose answer is another one now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count

import msgspec

from engine_core.engine import Engine
from engine_core.grammar.cache import CompiledGrammar, digest_of
from engine_core.grammar.compiler import Compiler
from engine_core.grammar.matcher import MatcherTemplate
from engine_core.journal.recorder import planned
from engine_core.journal.records import (
    FORMAT,
    AbortByLabelRecord,
    AbortRecord,
    AddRecord,
    AnyRecord,
    Began,
    ClientLostRecord,
    CommitRecord,
    Drained,
    Full,
    GrammarRecord,
    KnownRecord,
    KVReportRecord,
    MasksRecord,
    PlanRecord,
    Ticked,
    digest,
)
from engine_core.journal.state import FrozenObject, Unknown, freeze, grammar_of, thaw
from protocol.errors import ServingError, error_from
from protocol.grammar import Grammar
from protocol.stats import EngineStats


class ReplayDiffers(Exception):
    """What the engine says now is not what it has said. The message names the record."""


class NoJournal(Exception):
    """These are no records of an engine's life."""


@dataclass
class ReplayReport:
    """began     the first record;  stats: of the engine, at the end
    seconds   of the engine's clock, from the first tick to the last
    is_full   the journal had no room for all of it
    """

    began: Began
    num_records: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    stats: EngineStats = field(default_factory=EngineStats)
    is_full: bool = False


def replay(records: Iterable[AnyRecord], *, checks: bool = False) -> ReplayReport:
    """Raises Differs; NoJournal; and whatever the engine raises, as it may have then.

    checks   look at every law of slots, blocks and the cache after each record: slow
    """
    told = iter(records)
    began = next(told, None)
    if not isinstance(began, Began) or began.format != FORMAT:
        raise NoJournal("this is no journal, or one of another version")
    life = _Life(began)
    done = ReplayReport(began)
    first: float | None = None
    for number, record in zip(count(1), told, strict=False):
        life.live(number, record)
        if checks:
            life.engine.check()
        done.num_records = number
        done.kinds[str(type(record).__struct_config__.tag)] += 1
        done.is_full = isinstance(record, Full)
        if isinstance(record, Ticked):
            first = record.now if first is None else first
            done.seconds = record.now - first
    done.stats = life.engine.stats()
    return done


_STRANGE = "this part of a journal is of another version of the engine, or none"


def _check_shapes(then: FrozenObject, now: FrozenObject) -> None:
    """Of what any engine consists of. Raises Unknown where it has changed."""
    old, new = then.shapes(), now.shapes()
    for name in old.keys() & new.keys():
        if changed := old[name] ^ new[name]:
            raise Unknown(f"{name} differs in {', '.join(sorted(changed))}")


class _Life:
    def __init__(self, began: Began) -> None:
        self._seeds: list[int] = []
        self._jobs: dict[bytes, Grammar] = {}
        self._compiler = cache(partial(Compiler, began.model))  # some models have none
        self._at = 0.0
        draw = self._draw
        self._given: dict[str, object] = {
            "config": began.config,
            "model": began.model,
            "limits": began.limits,
            "draw_seed": draw,
        }
        self.engine = Engine(
            began.config,
            began.model,
            began.limits,
            draft_cost=began.draft_cost,
            step_costs=began.step_costs,
            tiers=began.tiers,
            draw_seed=draw,
        )

    def _draw(self) -> int:
        return self._seeds.pop(0)

    def live(self, number: int, record: AnyRecord) -> None:
        engine = self.engine
        match record:
            case KnownRecord():
                self._know(record)
            case Ticked(now=now):
                self._at = now
                news = engine.tick(now)
                self._compare(number, record, digest(news) if news else b"")
            case AddRecord(client=client, message=message, seeds=seeds):
                self._seeds = list(seeds)
                self._compare(number, record, digest(engine.add(client, message)))
            case GrammarRecord():
                self._compare(number, record, digest(engine.settle(self._compiled(record))))
            case AbortRecord(client=client, numbers=numbers):
                self._compare(number, record, digest(engine.abort(client, numbers)))
            case AbortByLabelRecord(names=names):
                self._compare(number, record, digest(engine.abort_named(names)))
            case ClientLostRecord(client=client):
                engine.drop(client)
            case Drained():
                engine.drain()
            case PlanRecord():
                self._plan(number, record)
            case MasksRecord():
                self._compare(number, record, digest(engine.masks()))
            case CommitRecord(result=result, elapsed_s=elapsed_s):
                self._compare(number, record, digest(engine.commit(result, elapsed_s)))
            case KVReportRecord(report=report):
                self._compare(number, record, digest(engine.hear(report)))
        self._jobs |= {job.digest: job.grammar for job in self.engine.take_jobs()}
        self.engine.drain_kv_commands()
        self.engine.freed.clear()

    def _know(self, record: KnownRecord) -> None:
        """Be the engine that it was when this part of its life began. Raises NoJournal."""
        self._jobs = {digest_of(grammar): grammar for grammar in record.grammars}
        templates = cache(self._template)

        def find(name: str) -> object:
            return self._given[name] if name in self._given else templates(grammar_of(name))

        try:
            state = msgspec.msgpack.decode(record.state, type=FrozenObject)
            _check_shapes(state, freeze(self.engine, {id(v): k for k, v in self._given.items()}))
            known = thaw(state, find, lambda digest: templates(digest).start())
        except (Unknown, msgspec.MsgspecError) as error:
            raise NoJournal(f"{_STRANGE}: {error}") from None
        vars(self.engine).update(known)

    def _template(self, digest: bytes) -> MatcherTemplate:
        return self._compiler().compile(self._jobs[digest])

    def _plan(self, number: int, record: PlanRecord) -> None:
        plan = self.engine.plan()
        now = PlanRecord() if plan is None else planned(plan)
        if now != record:
            raise ReplayDiffers(f"{self._where(number)}: was {_told(record)}, is {_told(now)}")

    def _compare(
        self,
        number: int,
        record: Ticked
        | AddRecord
        | GrammarRecord
        | AbortRecord
        | AbortByLabelRecord
        | MasksRecord
        | CommitRecord
        | KVReportRecord,
        said: bytes,
    ) -> None:
        if said != record.said:
            what = str(type(record).__struct_config__.tag)
            raise ReplayDiffers(f"{self._where(number)}: the answer to {what!r} is another one")

    def _where(self, number: int) -> str:
        return f"record {number}, at {self._at:.3f} s"

    def _compiled(self, record: GrammarRecord) -> CompiledGrammar:
        result: MatcherTemplate | ServingError
        if record.error is not None:
            result = error_from(record.error)
        else:
            result = self._template(record.digest)
        return CompiledGrammar(record.digest, result)


def _told(record: PlanRecord) -> str:
    if record.step is None:
        return "no step"
    return (
        f"step {record.step} of {record.rows} rows and {record.tokens} tokens ({record.said.hex()})"
    )
