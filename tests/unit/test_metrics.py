"""What Prometheus is told: all that an engine counts, and of each request how well was guessed."""

from __future__ import annotations

import msgspec

from gateway.exchange import Exchange
from gateway.metrics import _COUNTERS, _GAUGES, Metrics
from protocol.messages import Output, Usage
from protocol.stats import EngineStats
from tests.unit.test_chunks import an_answer


def test_every_number_that_an_engine_tells_has_its_series() -> None:
    stats = msgspec.structs.asdict(EngineStats())
    fields = {name for name, value in stats.items() if not isinstance(value, dict)}
    assert fields == _GAUGES.keys() | _COUNTERS.keys()
    assert _COUNTERS.keys() >= {"num_draft_tokens", "num_accepted_tokens"}


def test_each_request_for_which_something_was_guessed_is_told_with_its_share() -> None:
    metrics = Metrics(list)
    for drafts, accepted in ((8, 6), (4, 0), (0, 0)):
        answer = an_answer()
        usage = Usage(
            prompt_tokens=3, generated_tokens=9, draft_tokens=drafts, accepted_tokens=accepted
        )
        answer.take(answer.choices[0], Output(request=0, tokens=[72], usage=usage))
        exchange = Exchange(
            metrics, method="POST", path="/v1/x", route="/v1/x", request_id="1", logs=False
        )
        exchange.begin(answer)
        exchange.close(200)
    text = metrics.text().decode()
    assert "tidegate_draft_acceptance_count 2.0" in text
    assert "tidegate_draft_acceptance_sum 0.75" in text
    assert 'tidegate_draft_acceptance_bucket{le="0.0"} 1.0' in text
    assert 'tidegate_draft_acceptance_bucket{le="0.7"} 1.0' in text
