"""The makers of nonsense: what they make follows from a seed, differs, and is near to sense."""

from __future__ import annotations

import json
from itertools import islice
from random import Random

from protocol import messages, wire
from protocol.messages import Drain
from tests.torture.fuzz.frames import Nonsense
from tests.torture.fuzz.values import changed

VALUE = {"a": [1, 2.5, "x", None, True], "b": {"c": []}}


def test_a_changed_value_leaves_the_old_one_as_it_was_and_follows_from_the_seed() -> None:
    before = json.dumps(VALUE)
    made = [json.dumps(changed(VALUE, Random(seed))) for seed in range(200)]
    assert json.dumps(VALUE) == before
    assert made == [json.dumps(changed(VALUE, Random(seed))) for seed in range(200)]
    assert len(set(made)) > 100


def test_nonsense_is_mostly_refused_and_says_what_is_not() -> None:
    made = list(islice(Nonsense(messages.ToEngine, Random(1), never=(Drain,)), 2000))
    decoder: wire.Decoder[messages.ToEngine] = wire.Decoder(messages.ToEngine)
    understood = [(frames, message) for frames, message in made if message is not None]
    assert 0.05 < len(understood) / len(made) < 0.5
    assert all(decoder.decode(frames) == message for frames, message in understood)
    assert not any(isinstance(message, Drain) for _, message in understood)
