"""Random clients of one small, crowded engine, and checks of all their answers.

After each CHECK_EVERY operations the engine's invariants are checked. The echo worker checks that
attention reads exactly each request's own K/V. At the end, `check` compares each answer with its
reference:

- without a grammar: the echo model's tokens;
- with a grammar: its pattern, and the answer to the same request alone in an empty engine.
"""

from __future__ import annotations

import random
import re
from typing import Any

from protocol.engine.attachments import Attachment
from protocol.engine.grammar import Body, ChoiceGrammar, Regex
from protocol.engine.kv_window import KVGroups, max_live_blocks, num_column_blocks
from protocol.engine.messages import Account, Refused
from tests.support.echo_images import PLACEHOLDER, image_of, with_rows
from tests.support.engines import (
    FAILING_SUM,
    MAX_INPUT,
    VOCAB,
    Bench,
    SampleToken,
    echo_vector,
    guess_with_accuracy,
    next_token,
    repetitive_token,
)
from tests.support.examples import examples
from tests.support.grammars import text_of
from tests.support.handover import ClusterMember

SPECULATING, WITH_A_MODEL, WITH_A_HEAD = 100, 200, 300
"""Seeds from SPECULATING on use n-gram drafts, seeds from WITH_A_MODEL on a draft model, and seeds
from WITH_A_HEAD on the model's own head. The main model then repeats itself, so that drafts are
often right."""
CHECK_EVERY = examples(3, 1)
"""The invariants are checked after every n-th operation, and at the end. A check takes as long as
several operations. The operations are random, so a fault that each operation of its kind
shows is found soon, and one that lasts is found by the next check."""
GRAMMARS: list[tuple[Body, str, str]] = [
    (ChoiceGrammar(choices=["abc", "abd", "xy"]), "abc|abd|xy", "(a|ab|x)?"),
    (Regex(pattern="[ab]{2,12}c"), "[ab]{2,12}c", "[ab]{0,12}"),
    (Regex(pattern="(no)+"), "(no)+", "(no)*n?"),
]
"""(grammar, pattern of whole answers, pattern of answers that are cut off)"""
LABELS = [f"label-{i}" for i in range(12)]
BAD = Regex(pattern="(")
FAULTS = ["", "", "", "damaged", "timeout"]
"""Failures of a fetch from a tier; "": none."""
ADAPTERS = ["de", "fr", "it", "nl"]
ACCOUNTS = [None, None, Account(name="alice"), Account(name="bob")]


def speculation_of(seed: int) -> str:
    if seed < SPECULATING:
        return "none"
    if seed >= WITH_A_HEAD:
        return "mtp"
    return "model" if seed >= WITH_A_MODEL else "ngram"


class RequestStorm:
    """Random operations of several clients.

    asked         (client, number) -> (prompt, max_tokens, seed) of all accepted requests
    shown         (client, number) -> the images of their prompts
    constrained   (client, number) -> (grammar, patterns), as in GRAMMARS
    dropped       requests whose client was lost
    refused       number of refused requests
    alone         number of answers with a grammar that were compared with an empty engine's
    """

    def __init__(self, seed: int, *, place: ClusterMember | None = None, **config: Any) -> None:
        """Draw the options of the engine. `config` adds to them or replaces them."""
        self.random = random.Random(seed)
        block_tokens = self.random.choice([1, 4, 8])
        self.sample: SampleToken = repetitive_token if seed >= SPECULATING else next_token
        options: dict[str, Any] = {
            "token_budget": self.random.choice([3, 8, 16, 64]),
            "block_tokens": block_tokens,
            "num_blocks": 1 + self.random.choice([64, 96]) // block_tokens,
            "max_slots": self.random.choice([2, 4, 7]),
            "max_len": 60,
            "prefix_cache": bool(seed % 2),
            "max_waiting": 12,
            "steps_in_flight": 1 + seed % 3 % 2,
            "sample": self.sample,
            "speculation": speculation_of(seed),
            "guess": guess_with_accuracy(0.7, self.sample),
            "ngram_min": self.random.choice([1, 2]),
            "max_drafts": self.random.choice([1, 4, 8]),
            "check_every": CHECK_EVERY,
        }
        self.bench = Bench(place=place, **(options | config))
        self.asked: dict[tuple[bytes, int], tuple[list[int], int, int]] = {}
        self.shown: dict[tuple[bytes, int], list[Attachment]] = {}
        self.constrained: dict[tuple[bytes, int], tuple[Body, str, str]] = {}
        self.dropped: set[tuple[bytes, int]] = set()
        self.refused = 0
        self.alone = 0  # constrained answers that came to their end, and were compared

    def operate(self) -> None:
        choice = self.random.random()
        if choice < 0.25:
            self.bench.plan()
        elif choice < 0.5:
            if self.bench.in_flight:
                self.bench.finish()
        elif choice < 0.8:
            self.add()
        elif choice < 0.88:
            self.compile()
        elif choice < 0.97:
            self.abort()
        elif choice < 0.99:
            self.abort_by_label()
        else:
            self.drop()

    def add(self) -> None:
        client = self.random.choice([b"a", b"b", b"c"])
        prompt, seed = self.prompt(), self.random.randrange(3)
        max_tokens = self.random.randrange(20)
        grammar = self.grammar() if self.random.random() < 0.2 else None
        number = self.bench.try_add(
            prompt,
            grammar=None if grammar is None else grammar[0],
            client=client,
            namespace=self.random.choice(["", "", "x"]),
            priority=self.random.choice([0, 0, 0, 1]),
            max_tokens=max_tokens,
            seed=seed,
            ignore_eos=self.random.random() < 0.8,
            labels=self.random.choices(LABELS, k=self.random.randrange(3)),
            account=self.random.choice(ACCOUNTS),
            adapter=self.adapter(),
            attachments=(images := self.images(prompt)),
        )
        self.bench.check()
        if isinstance(number, Refused):
            self.refused += 1
            return
        self.asked[client, number] = (prompt, max_tokens, seed)
        self.shown[client, number] = images
        if grammar is not None:
            self.constrained[client, number] = grammar

    def adapter(self) -> str:
        """Return the name of the LoRA adapter of a new request; "": none."""
        return ""

    def images(self, prompt: list[int]) -> list[Attachment]:
        """Return the images of a new request with this prompt."""
        return []

    def grammar(self) -> tuple[Body, str, str]:
        """Return a grammar with its patterns, as in GRAMMARS: usually a known one, sometimes a new
        one or one that is refused."""
        choice = self.random.random()
        if choice < 0.05:
            return BAD, "", ""
        if choice < 0.2:
            count = self.random.randrange(1, 40)
            return Regex(pattern=f"a{{{count}}}"), f"a{{{count}}}", "a*"
        return self.random.choice(GRAMMARS)

    def compile(self) -> None:
        """Compile one of the waiting grammars. Check that only requests with a bad grammar are
        refused."""
        if not self.bench.jobs:
            return
        replies = self.bench.compile(self.random.randrange(len(self.bench.jobs)))
        for key in [key for key in self.asked if key in self.bench.refusals]:
            assert key[1] not in replies or self.constrained[key][0] is BAD
            self.refused += 1
            del self.asked[key], self.constrained[key], self.bench.refusals[key]

    def prompt(self) -> list[int]:
        """Return a new prompt, or a fork of an earlier conversation."""
        fresh = [self.random.randrange(VOCAB) for _ in range(self.random.randrange(1, 30))]
        if self.asked and self.random.random() < 0.5:
            key = self.random.choice(list(self.asked))
            known = self.asked[key][0] + self.bench.tokens(key[1], key[0])
            return (known[: self.random.randrange(len(known) + 1)] + fresh)[:58]
        return fresh

    def abort(self) -> None:
        if self.asked:
            client, number = self.random.choice(list(self.asked)[-20:])
            self.bench.abort(number, client=client)

    def abort_by_label(self) -> None:
        """Abort by labels that requests of several clients may share, and by a label that no
        request has. Check that no request with these labels stays open."""
        names = [*self.random.sample(LABELS, 2), "nobody"]
        known = {
            name: any(name in r.labels for r in self.bench.engine.open_requests) for name in names
        }
        assert self.bench.abort_by_label(*names) == known
        assert not any(name in r.labels for r in self.bench.engine.open_requests for name in names)

    def drop(self) -> None:
        client = self.random.choice([b"a", b"b", b"c"])
        self.bench.engine.on_client_lost(client)
        self.bench.check()
        self.dropped |= {key for key in self.asked if key[0] == client}

    def finish_all(self) -> None:
        while self.bench.jobs:
            self.compile()
        self.bench.run()

    def check(self) -> None:
        """Check that all blocks are free, and that each request has one end and a right answer."""
        bench, stats = self.bench, self.bench.engine.stats()
        bench.engine.check()
        assert bench.engine.is_idle
        assert not bench.engine.open_requests.labels
        assert stats.free_blocks == stats.total_blocks
        assert not stats.held_checkpoints
        assert stats.num_accepted == len(self.asked) == sum(stats.num_finished.values())
        assert stats.num_refused == self.refused
        for client, number in self.asked:
            self._check_answer(client, number)

    def _check_answer(self, client: bytes, number: int) -> None:
        bench, (prompt, max_tokens, seed) = self.bench, self.asked[client, number]
        news = bench.outputs[client, number]
        if (client, number) in self.dropped and (not news or news[-1].finish is None):
            return  # its client was lost before the end
        assert [output.finish is not None for output in news].count(True) == 1
        tokens, finish = bench.tokens(number, client), news[-1].finish
        assert len(tokens) <= max_tokens
        if (client, number) in self.constrained:
            _check_text(text_of(tokens), finish, *self.constrained[client, number])
            if finish == "stop":
                self.alone += 1
                assert tokens == self._alone(client, number)
        else:
            seen = with_rows(prompt, self.shown[client, number])
            _check_tokens(self.sample, seen, tokens, seed)
        if finish == "length":
            assert len(tokens) == min(max_tokens, bench.limits.max_len - len(prompt))

    def _alone(self, client: bytes, number: int) -> list[int]:
        """Return the answer to a request with a grammar, alone in an empty engine."""
        prompt, max_tokens, seed = self.asked[client, number]
        images, body = self.shown[client, number], self.constrained[client, number][0]
        limits = self.bench.limits
        fresh = Bench(
            max_len=limits.max_len, sample=self.sample, image_rows=limits.image_rows, checks=False
        )
        fresh.attach(*images)
        number = fresh.add(
            prompt, grammar=body, attachments=images, max_tokens=max_tokens, seed=seed
        )
        fresh.compile()
        fresh.run()
        return fresh.tokens(number)


def _check_text(text: str, finish: str | None, body: Body, whole: str, cut: str) -> None:
    assert finish in ("stop", "length", "abort")
    pattern = whole if finish == "stop" else f"{whole}|{cut}"
    assert re.fullmatch(pattern, text), (body, finish, text)


def _check_tokens(sample: SampleToken, prompt: list[int], tokens: list[int], seed: int) -> None:
    known = list(prompt)
    for token in tokens:
        assert token == sample(known, seed, None)
        known.append(token)


class WindowStorm(RequestStorm):
    """A storm of a model with a window, and a cache that holds a few windows.

    Most texts are several windows long, and many do not fit into the cache as a whole. With
    `window_blocks`, only some layers have the window, and their K/V takes this many blocks of each
    column. The cache then has room for the K/V of at least one whole text in the other layers.
    """

    def __init__(self, seed: int, window_blocks: int = 0, **config: Any) -> None:
        draw = random.Random(seed)
        size, window = draw.choice([1, 4, 8]), draw.choice([3, 6, 13])
        live = max_live_blocks(1, size, window)
        assert live is not None
        least, groups = live, None
        if window_blocks:
            least = -(-60 // size) + window_blocks * live
            groups = KVGroups(window=window, window_blocks=window_blocks)
        super().__init__(
            seed,
            kv_window=None if window_blocks else window,
            kv_groups=groups,
            block_tokens=size,
            num_blocks=1 + max(least, draw.choice([0, 40, 56]) // size * max(window_blocks, 1)),
            token_budget=draw.choice([3, 8]),
            max_len=60,
            **config,
        )
        self.openings = [[self.random.randrange(VOCAB) for _ in range(44)] for _ in range(3)]

    def operate(self) -> None:
        if self.random.random() < 0.5:
            self.bench.step()
        else:
            super().operate()

    def prompt(self) -> list[int]:
        """Return a prompt that starts with part of one of a few openings."""
        opening = self.random.choice(self.openings)
        return opening[: self.random.randrange(20, len(opening))] + super().prompt()[:14]

    def check(self) -> None:
        super().check()
        limits = self.bench.limits
        num_tokens = (limits.num_blocks - 1) * limits.block_tokens
        assert limits.max_len == 60 > num_tokens // num_column_blocks(limits.kv_groups)


class StateStorm(RequestStorm):
    """A storm of a model with a recurrent state. There are few checkpoints, and most prompts share
    a beginning with others. The echo worker checks that each slot has the state of the positions
    before its next row.

    num_saves      states that plans saved
    num_restored   requests that were bound with a checkpoint
    """

    def __init__(self, seed: int, **config: Any) -> None:
        draw = random.Random(seed)
        size = draw.choice([1, 4, 8])
        options = {
            "block_tokens": size,
            "num_blocks": 1 + draw.choice([64, 160]) // size,
            "num_checkpoints": draw.choice([3, 8, 24]),
            "state_interval": 16,
        } | config
        super().__init__(seed, state_bytes=8, **options)
        self.openings = [[self.random.randrange(VOCAB) for _ in range(44)] for _ in range(4)]

    def operate(self) -> None:
        if self.random.random() < 0.4:
            self.bench.step()
        else:
            super().operate()

    def prompt(self) -> list[int]:
        """Return a prompt that starts with part of one of a few openings, or a fork of an earlier
        conversation."""
        fresh = super().prompt()
        if self.random.random() < 0.5:
            return fresh
        opening = self.random.choice(self.openings)
        return opening[: self.random.randrange(len(opening))] + fresh[:14]

    @property
    def num_saves(self) -> int:
        return sum(len(plan.save_slots or ()) for plan in self.bench.plans)

    @property
    def num_restored(self) -> int:
        return sum(init.checkpoint > 0 for plan in self.bench.plans for init in plan.bind)


class SmallCacheStorm(RequestStorm):
    """A storm with a cache that is far too small, so that many blocks come from the tiers.

    The tiers lose blocks at random, report that late, and fail at random.
    """

    def __init__(self, seed: int, tiers: list[str], **config: Any) -> None:
        options = {"block_tokens": 4, "num_blocks": 25, "kv_load_tokens": 5, "max_slots": 4}
        super().__init__(seed, tiers=tiers, **(options | config))
        self.openings = [[self.random.randrange(VOCAB) for _ in range(44)] for _ in range(12)]

    def operate(self) -> None:
        choice = self.random.random()
        if choice < 0.15:
            self.run_tiers()
        elif choice < 0.4:
            self.bench.step()
        else:
            super().operate()

    def prompt(self) -> list[int]:
        """Return a prompt with one of a few openings, which do not all fit into the cache."""
        opening = self.random.choice(self.openings)
        fresh = super().prompt()[:8]
        return opening[: self.random.randrange(len(opening))] + fresh

    def run_tiers(self) -> None:
        """Let the tiers report their blocks, lose some of them, or end a fetch."""
        tiers, choice = self.bench.tiers, self.random.random()
        if choice < 0.3:
            self.bench.on_kv_report(tiers.report())
        elif choice < 0.4:
            kept = [(tier, content) for tier in tiers.kept for content in tiers.kept[tier]]
            for tier, content in self.random.sample(kept, len(kept) // 20):
                tiers.lose(tier, content)
        elif tiers.jobs:
            job = self.random.choice(list(tiers.jobs))
            self.bench.on_kv_report(tiers.carry_out(job, self.random.choice(FAULTS)))

    def finish_all(self) -> None:
        super().finish_all()
        while self.bench.tiers.jobs:
            self.bench.on_kv_report(self.bench.tiers.carry_out(next(iter(self.bench.tiers.jobs))))
            self.bench.run()


class ImageStorm(RequestStorm):
    """A storm of requests with images. Every run of placeholders in a prompt belongs to one of a
    few images, so many prompts have equal tokens and different images. The engine has room for the
    content and the rows of a few images only, and some images cannot be encoded.

    num_failed    images that could not be encoded
    """

    def __init__(self, seed: int, **config: Any) -> None:
        super().__init__(seed, image_rows=48, image_data_mib=1, **config)
        self.chance = random.Random(seed)
        self.num_failed = 0
        opening = [PLACEHOLDER if 3 <= at % 12 < 9 else at for at in range(44)]
        self.openings = [opening, [*opening[:20], *opening[21:]], [7, *opening]]

    def operate(self) -> None:
        choice = self.chance.random()
        if choice < 0.25:
            fails = self.chance.random() < 0.15
            self.num_failed += self.bench.encode_image("broken" if fails else "") and fails
        elif choice < 0.5:
            self.bench.step()
        else:
            super().operate()

    def prompt(self) -> list[int]:
        fresh = super().prompt()
        if self.chance.random() < 0.3:
            return fresh
        opening = self.chance.choice(self.openings)
        return opening[: self.chance.randrange(len(opening))] + fresh[:14]

    def images(self, prompt: list[int]) -> list[Attachment]:
        """Return an image for each run of placeholders; sometimes two runs belong to one."""
        runs: list[tuple[int, int]] = []
        for at, token in enumerate(prompt):
            if token != PLACEHOLDER:
                continue
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((at, 1))
        images = []
        while runs:
            count = 1 + (self.chance.random() < 0.3)
            images.append(image_of(self.chance.choice("abcdef"), *runs[:count]))
            del runs[:count]
        if self.chance.random() < 0.95:
            self.bench.attach(*images)
        return images

    def _check_answer(self, client: bytes, number: int) -> None:
        last = self.bench.outputs[client, number][-1:]
        if last and last[0].finish == "error":
            assert self.shown[client, number]
            assert last[0].error is not None
            assert last[0].error.message == "attachments: broken"
        else:
            super()._check_answer(client, number)


class AdapterStorm(RequestStorm):
    """A storm in which LoRA adapters are loaded and unloaded, while requests use them. Some
    requests name adapters that are not there, and some loads fail."""

    def __init__(self, seed: int, **config: Any) -> None:
        super().__init__(seed, adapters=["de", "fr"], max_adapters=3, **config)
        self.chance = random.Random(seed)
        self.num_commands = 0
        #: Requests that were accepted with an adapter.
        self.num_adapted = 0

    def operate(self) -> None:
        choice = self.chance.random()
        if choice < 0.03:
            reply = self.bench.load_adapter(self.chance.choice(ADAPTERS))
            self.num_commands += reply is None
        elif choice < 0.06:
            self.num_commands += self.bench.unload_adapter(self.chance.choice(ADAPTERS)) is None
        elif choice < 0.15 and self.bench.adapters.commands:
            self.bench.run_adapter(fails=self.chance.random() < 0.2)
        else:
            super().operate()

    def adapter(self) -> str:
        return self.chance.choice(["", *ADAPTERS])

    def add(self) -> None:
        before = len(self.asked)
        super().add()
        if len(self.asked) > before:
            request = [*self.bench.engine.open_requests][-1]
            self.num_adapted += request.adapter is not None

    def finish_all(self) -> None:
        """Finish all requests, then unload all adapters."""
        super().finish_all()
        while self.bench.adapters.commands or self.bench.engine.adapters.is_leaving:
            self.bench.run_adapter()
        for info in self.bench.engine.adapters.infos:
            self.num_commands += self.bench.unload_adapter(info.name) is None
            self.bench.run_adapter()

    def check(self) -> None:
        super().check()
        adapters = self.bench.adapters
        assert self.bench.engine.adapters.is_empty
        assert not adapters.rows, "the worker still holds an adapter"
        assert len(adapters.replies) == self.num_commands


class EncodeStorm(RequestStorm):
    """A storm in which many requests encode, and clients do not always read. The results of each
    request are compared with those of the echo model.

    encoded   (client, number) -> (inputs, splits) of all accepted requests that encode
    """

    def __init__(self, seed: int, **config: Any) -> None:
        super().__init__(seed, **config)
        self.encoded: dict[tuple[bytes, int], tuple[list[list[int]], list[int] | None]] = {}

    def operate(self) -> None:
        choice = self.random.random()
        if choice < 0.2:
            self.encode()
        elif choice < 0.24 and self.encoded:
            client, number = self.random.choice(list(self.encoded)[-10:])
            self.bench.abort(number, client=client)
        elif choice < 0.29:
            self.read()
        elif choice < 0.4:
            self.bench.step()
        else:
            super().operate()

    def read(self) -> None:
        """Let a client stop to read, or read some of the results that wait for it, or all."""
        client = self.random.choice([b"a", b"b", b"c"])
        if client not in self.bench.not_reading:
            self.bench.not_reading.add(client)
        elif self.random.random() < 0.5:
            self.bench.read(client, self.random.randrange(100))
        else:
            self.bench.not_reading.remove(client)
            self.bench.read(client)

    def finish_all(self) -> None:
        self.bench.not_reading.clear()
        for client in (b"a", b"b", b"c"):
            self.bench.read(client)
        super().finish_all()

    def encode(self) -> None:
        client = self.random.choice([b"a", b"b", b"c"])
        inputs = [
            [self.random.randrange(VOCAB) for _ in range(self.random.randrange(1, MAX_INPUT + 1))]
            for _ in range(self.random.choice([1, 1, 2, 9, 30]))
        ]
        splits = None
        if self.random.random() < 0.3:
            splits = [self.random.randrange(len(each) + 1) for each in inputs]
        number = self.bench.try_encode(
            *inputs,
            client=client,
            splits=splits,
            priority=self.random.choice([0, 0, 1]),
            labels=self.random.choices(LABELS, k=self.random.randrange(3)),
            account=self.random.choice(ACCOUNTS),
        )
        if isinstance(number, Refused):
            self.refused += 1
        else:
            self.encoded[client, number] = (inputs, splits)

    def drop(self) -> None:
        client = self.random.choice([b"a", b"b", b"c"])
        self.bench.engine.on_client_lost(client)
        self.bench.check()
        self.dropped |= {key for key in [*self.asked, *self.encoded] if key[0] == client}

    def check(self) -> None:
        self.bench.engine.check()
        stats = self.bench.engine.stats()
        assert self.bench.engine.is_idle
        assert stats.num_accepted == len(self.asked) + len(self.encoded)
        assert stats.num_accepted == sum(stats.num_finished.values())
        for client, number in self.asked:
            self._check_answer(client, number)
        for (client, number), (inputs, splits) in self.encoded.items():
            news = self.bench.outputs[client, number]
            if (client, number) in self.dropped and not news:
                continue  # its client was lost before the end
            (end,) = news
            wanted = [
                echo_vector(each, len(each) if splits is None else splits[place])
                for place, each in enumerate(inputs)
            ]
            has_failed = any(row[1] == FAILING_SUM for row in wanted)
            assert end.finish in ("abort", "error" if has_failed else "stop")
            if end.finish == "stop":
                assert self.bench.vectors(number, client) == wanted
