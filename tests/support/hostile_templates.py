"""Chat templates that use too much time or memory, in every way that Jinja allows."""

from __future__ import annotations

_DOUBLED = (
    "{% set n = namespace(x=['aaaaaaaa']) %}"
    "{% for i in range(30) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
"""Sets `n.x` to 30 nested lists. Each has the next one twice, so their text has 2**30 strings."""
_OTHER = _DOUBLED.replace("n.x", "m.x").replace("set n ", "set m ")
_DEEP = "{% set n = namespace(x=()) %}{% for i in range(99999) %}{% set n.x = (n.x,) %}{% endfor %}"
_LONG = "{% set long = 'a ' * 3000000 %}"
_MANY = "{% set many = (range(100000) | list) * 50 %}"

SLOW = {
    "text of doubled lists": _DOUBLED + "{{ n.x | string | length }}",
    "doubled lists as JSON": _DOUBLED + "{{ n.x | tojson }}",
    "equal doubled lists": _DOUBLED + _OTHER + "{{ n.x == m.x }}",
    "doubled lists within a list": _DOUBLED + _OTHER + "{{ n.x in [m.x] }}",
    "doubled lists by %": _DOUBLED + "{{ '%s' % [n.x] }}",
    "doubled lists by format": _DOUBLED + "{{ '{}'.format(n.x) }}",
    "doubled lists by pprint": _DOUBLED + "{{ n.x | pprint }}",
    "doubled lists by join": _DOUBLED + "{{ n.x | join }}",
    "wrapped after each letter": _LONG + "{{ long | wordwrap(1) }}",
    "sorted": _MANY + "{% for i in range(99) %}{% set x = many | sort %}{% endfor %}",
    "unique": _MANY + "{% for i in range(99) %}{{ many | unique | list | length }}{% endfor %}",
    "sum of lists": "{{ ([[1]] * 9999999) | sum(start=[]) | length }}",
    "a constant power": "{{ 10 ** (10 ** 9) }}",
    "squares": "{% set n = namespace(x=9) %}"
    "{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "loops within loops": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "output without end": "{% for i in range(99999) %}{% for j in range(99999) %}x"
    "{% endfor %}{% endfor %}",
    "a tree of macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a tree of loops": "{% for x in [60] recursive %}{% if x %}{{ loop([x - 1]) }}"
    "{{ loop([x - 1]) }}{% endif %}{% endfor %}",
    "slices": "{{ [1] | slice(10 ** 12, 0) | list }}",
    "deep values as text": _DEEP + "{% for i in range(99999) %}{{ n.x | string }}{% endfor %}",
}
"""Templates whose process is killed for its time, or for its memory on a fast machine."""

LARGE = {
    "a constant text": "{{ 'a' * 10 ** 12 }}",
    "a constant list": "{{ [0] * 10 ** 9 }}",
    "a constant padding": "{{ 'a' | center(10 ** 12) }}",
    "a text doubled": "{% set n = namespace(s='a') %}"
    "{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a list doubled": "{% set n = namespace(s=[1]) %}"
    "{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "each letter replaced": "{% set x = 'a' * 10000000 %}{{ x.replace('a', x) }}",
    "each letter replaced by a filter": "{% set x = 'a' * 10000000 %}{{ x | replace('a', x) }}",
    "joined by a long text": "{% set x = 'a' * 10000000 %}{{ range(1000) | join(x) }}",
    "a wide number": "{{ '%1000000000000d' % 3 }}",
    "a wide format": "{{ '{:1000000000000}'.format(3) }}",
    "a wide indent": "{{ [1] | tojson(indent=10 ** 10) }}",
    "batches": "{{ [1] | batch(10 ** 12, 0) | list }}",
}
"""Templates that are refused at once because of their memory."""

REFUSED = {
    "a macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop of itself": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a range": "{{ range(10 ** 9) | list }}",
    "deep brackets": "{{ " + "(" * 5000,
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep loops": "{% for i in range(9) %}" * 30 + "{% endfor %}" * 30,
    "a number of many digits": "{{ " + "9" * 100_000 + " }}",
    "half of a surrogate pair": "{{ '\\ud800' }}",
    "long last words": "{{ raise_exception('a' * 10000000) }}",
    "attributes": "{{ ''.__class__.__mro__ }}",
    "attributes in a format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
}
"""Templates that Python or Jinja refuses, before they reach a limit."""
