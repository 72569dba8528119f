"""Chat templates in Hugging Face's dialect of Jinja, in a sandbox."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from gateway.prompt.template import ChatTemplate
from protocol.wire.errors import InvalidRequest

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


def test_an_error_raised_by_a_template_is_shown_and_names_the_messages() -> None:
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


def test_a_template_that_does_not_compile_is_refused_when_it_is_loaded() -> None:
    loops = "{% for i in range(2) %}" * 30 + "{% endfor %}" * 30
    digits = "{{ " + "9" * 5000 + " }}"
    for source in ("{% if %}", "{{ messages | nosuchfilter }}", "{{ " + "(" * 5000, loops, digits):
        with pytest.raises(ValueError, match="does not compile"):
            ChatTemplate(source)
