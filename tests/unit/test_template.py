"""Templates speak Hugging Face's dialect, in a sandbox, within a budget."""

from __future__ import annotations

import itertools
import time
from datetime import datetime
from typing import Any

import pytest

from gateway.chat.sandbox import Budget
from gateway.chat.template import ChatTemplate
from protocol.errors import InvalidRequest

USER = [{"role": "user", "content": "hi"}]


def rendered(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ {'ü': '<b>'} | tojson }}", '{"ü": "<b>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ 1 }}{% set x = 2 %}{% endgeneration %}{{ x }}", "1"),
        ("{% for m in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{% endfor %}", "1/32/33/3"),
        ("{% for m in [1, 2] %}{{ loop.last }}{{ loop.nextitem }}{% endfor %}", "False2True"),
        ("{% for x in nothing %}{% else %}none{% endfor %}", "none"),
        (
            "{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
            "12",
        ),
        ("{{ 'a,b'.split(',') | join('-') }}{{ 'abc' | replace('b', 'x') }}", "a-baxc"),
        ("{{ [{'n': 1}, {'n': 2}] | join('+', attribute='n') }}", "1+2"),
        ("{{ '%s=%d' | format('a', 3) }}{{ '%5s' % 'x' }}{{ '{:>3}'.format(7) }}", "a=3    x  7"),
        ("{{ 'a' ~ 1 ~ none }}{{ [1] + [2] }}{{ 2 ** 5 }}{{ '-' * 3 }}", "a1None[1, 2]32---"),
        ("{{ 'x\ny' | indent(2) }}", "x\n  y"),
        (
            "{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ nothing }}{{ none }}{{ 1.5 | round }}",
            "a1None2.0",
        ),
        ("{{ [1, 2, 3] | batch(2) | list }}", "[[1, 2], [3]]"),
        ("{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m(1) }}", "<1>"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
    ],
)
def test_the_dialect(source: str, text: str) -> None:
    assert rendered(source) == text


def test_the_clock_is_the_one_it_was_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 4))
    assert template.render(USER) == "04 Jul 2024"


def test_what_a_template_raises_is_shown_and_names_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        rendered("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'].nosuch() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ lipsum.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render these messages"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxx{% endfor %}{% endfor %}",
        "{% set n=namespace(s='a') %}{% for i in range(99)%}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n=namespace(s='a') %}{% for i in range(99)%}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n=namespace(s=[1]) %}{% for i in range(99)%}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(25) }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ 'a'.ljust(10 ** 12) }}",
        "{{ 'a' | center(10 ** 12) }}",
        "{{ 'a\nb' | indent(10 ** 12) }}",
        "{{ '%1000000000000d' % 3 }}",
        "{{ '%1000000000000d' | format(3) }}",
        "{{ '{:1000000000000}'.format(3) }}",
        "{% set x = 'a' * 10000000 %}{{ x.replace('a', x) }}",
        "{% set x = 'a' * 10000000 %}{{ x | replace('a', x) }}",
        "{% set x = 'a' * 10000000 %}{{ x.join(range(1000) | map('string') | list) }}",
        "{% set x = 'a' * 10000000 %}{{ range(1000) | join(x) }}",
        "{{ range(10 ** 9) | list }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ [1] | batch(10 ** 12, 0) | list }}",
        "{{ 5 | round(10 ** 9, 'ceil') }}",
        "{% set n=namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set x = 'a' * 9999999 %}{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}"
        "{% endset %}",
        "{% set x = 'a' * 9999999 %}{% macro m() %}{% for i in range(9999) %}{{ x }}{% endfor %}"
        "{% endmacro %}{{ m() | length }}",
    ],
)
def test_a_hostile_template_ends_soon_and_small(source: str) -> None:
    template = ChatTemplate(source, new_budget=lambda: Budget(max_steps=20_000))
    start = time.process_time()
    with pytest.raises(InvalidRequest):
        template.render(USER)
    assert time.process_time() - start < 2.0


def test_time_is_bounded_whatever_the_template_does_with_it() -> None:
    ticks = itertools.count()
    budget = Budget(max_seconds=10, clock=lambda: next(ticks))
    template = ChatTemplate("{% for i in range(1000) %}{% endfor %}")
    with pytest.raises(InvalidRequest, match="takes too long"):
        template.render(USER, budget=budget)


def test_each_rendering_has_its_own_budget() -> None:
    template = ChatTemplate(
        "{% for i in range(600) %}{{ i }}{% endfor %}", new_budget=lambda: Budget(max_steps=700)
    )
    assert template.render(USER) == template.render(USER)


def test_a_template_that_does_not_compile_is_refused_when_it_is_loaded() -> None:
    for source in ("{% if %}", "{{ messages | nosuchfilter }}", "{{ " + "(" * 5000):
        with pytest.raises(ValueError, match="does not compile"):
            ChatTemplate(source)
