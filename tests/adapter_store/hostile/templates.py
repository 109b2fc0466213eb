"""Chat templates that were made to hurt whoever renders them, and templates put together by chance.

Not here: who renders them (oracle), what is beside (beside).
"""

from tests.adapter_store.hostile.draft import Random

_HOSTILE = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(10**9) %}{% endfor %}", "{{ 7 ** (9 ** 9) }}", "{{ 'a' * 10**9 }}",
    "{% set n = namespace(x=9**9) %}{{ n.x ** n.x }}", "{{ messages[0].content * 10**9 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% include '/etc/passwd' %}",
    "{% for i in range(2000) %}{{ 'x' * 1000 }}{% endfor %}", "{% extends messages[0].content %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ ''|attr('__class__')|attr('mro') }}",
    "{{ messages.append(1) }}", "{{ messages.__init__.__globals__ }}", "{{ lipsum.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}", "{{ self.__dict__ }}", "{{ self }}",
    "{{ raise_exception('x' * 10**7) }}", "{{ raise_exception('\\x1b[31m\\r\\n') }}",
    "{{ raise_exception('\\ud800') }}", "{{ '\\ud800' }}", "\\ud800{{ '\\udfff\\ud800' }}",
    "{{ strftime_now('%' * 10**6) }}", "{{ strftime_now('%9999999Y' * 999) }}",
    "{{ strftime_now('\\ud800\\0') }}", "{{ strftime_now(messages) }}", "{{ '%999999999d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}", "{{ '{0.__class__}'.format(1) }}", "{{ '%s' * 9 }}",
    "{{ ('%' ~ 'x') % 1 }}", "{{ messages | tojson(indent=10**9) }}",
    "{{ [1] | tojson(indent=-1) }}",
    "{% set x = [] %}{% set _ = x.append(x) %}{{ x | tojson }}", "{{ range(10**30) | list }}",
    "{{ 'x' | center(10**9) }}", "{{ 'a b' | wordwrap(1, wrapstring='x' * 10**8) }}",
    "{{ 'x' | indent(10**9, true) }}", "{{ ('a' * 9999) | replace('a', 'b' * 99999) }}",
    "{{ range(99999) | map('string') | join('x' * 9999) }}", "{{ [[]] * 10**8 }}",
    "{{ 10 ** 5000 }}",
    "{{ (range(99999) | batch(1) | list) | tojson }}", "{{ 1 / 0 }}", "{{ 1e308 * 10 }}",
    "{{ 'x'.encode('utf-16').decode('rot13') }}", "{{ dict(a=1).a.b.c.d }}", "{{ absent.x.y }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "{% generation %}",
    "{% set loop = 1 %}{{ loop.index }}", "{% call absent() %}{% endcall %}", "{{ caller() }}",
    "{% for i in range(99999) %}{% generation %}{% endgeneration %}{% endfor %}", "{{ [].pop() }}",
    "{% break %}", "{% continue %}{% for m in messages %}{% break %}{% endfor %}", "{% raw %}",
    "\0",
    "{% filter upper %}{% for i in range(99999) %}xxxxxxxxxxx{% endfor %}{% endfilter %}", "{{",
    "{% block a %}{{ super() }}{% endblock %}", "{% from 'x' import y %}", "{% import 'a' as b %}",
    "{% autoescape true %}{% endautoescape %}", "{% trans %}{% endtrans %}", "{% debug %}", "{#",
    "{%- set ns = namespace() -%}{%- set ns.__class__ = 1 -%}", "{{ namespace(__class__=1) }}",
    "{{ joiner.__init__ }}", "{{ (0).__class__ }}", "{{ messages[0].get.__self__ }}", "{{ 0x }}",
    "{{ {}.update({'a': 1}) }}", "{{ 'x'.join(messages) }}", "{{ messages[9**9] }}", "{{ -}}",
    "{{ 'x'.format_map({}) }}", "{{ ('{a.__class__.__init__}').format_map({'a': 1}) }}",
    "{{ a is b }}",
    "{{ '(a+)+$' in 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!' }}", "{{ 'a' | urlize(10**9) }}",
    "{{ ('http://' ~ 'a.' * 9999) | urlize }}", "{{ ('<' * 99999) | striptags }}", "", " ",
    "\n", "x",
    "{{ ('&' * 99999) | forceescape | forceescape | forceescape }}", "{{ 9 | filesizeformat }}",
    "{{ [3, 'a', none] | sort }}", "{{ messages | groupby('role') | tojson }}",
    "{{ 'x' | random }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | selectattr('x.y.z') | list }}",
    "{{ [1, 2] | sum(start='x') }}", "{{ 'x' | xmlattr }}", "{{ {'a b': 1} | xmlattr }}",
    "{{ 1 | abs }}",
    "{{ '9' * 5000 | int }}", "{{ ('9' * 5000) | int }}", "{{ ('9' * 4300) | float | int }}",
    "{{ 'x' | pprint }}", "{{ messages | pprint }}", "{{ ([messages] * 9999) | pprint }}",
)  # fmt: skip
"""Loops, sizes, depths, ways out, words that fit nowhere."""

_PIECES = (
    "{{", "}}", "{%", "%}", "{#", "#}", "{%-", "-%}", "{{-", "messages", "m", "loop.index",
    "content",
    "for m in messages", "endfor", "if", "elif", "else", "endif", "not", "in", "is", "defined", "~",
    "set", "endset", "macro f(x)", "endmacro", "f(1)", "[0]", "[-1:]", "[::-1]", ".", ",", "|",
    "(", ")",
    "[", "]", "{", "}", "'", '"', "'a'", "1", "10**4", "none", "namespace(a=1)", "ns.a", "=",
    "==", "+",
    "*", "%", "/", "trim", "tojson", "join", "length", "upper", "raise_exception('x')", "range(9)",
    "\n", " ", "\\", "\\u", "\u202e", "\U0001f600", "generation", "endgeneration", "filter",
    "endfilter",
    "call", "endcall", "raw", "endraw", "recursive", "break", "continue", "_", "__class__", "self",
    "bos_token", "eos_token", "tools", "documents", "add_generation_prompt", "lambda", "yield",
    "async",
)  # fmt: skip


def make_template(rng: Random) -> str:
    """A template: one of those by hand, one with a piece twice or away, or pieces by chance."""
    kind = rng.randrange(4)
    if kind == 0:
        return "".join(rng.choice(_PIECES) for _ in range(rng.randint(1, 40)))
    text = rng.choice(_HOSTILE)
    if kind == 1:
        for _ in range(rng.randint(1, 3)):
            at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            text = text[:at] + rng.choice(["", rng.choice(_PIECES), text[at:end] * 2]) + text[end:]
    return text if kind != 2 else _nested(rng, text)


def _nested(rng: Random, text: str) -> str:
    """Many times within itself, or one after the other."""
    num = rng.choice([2, 20, 100, 1000])
    opening, closing = rng.choice([
        ("{% if 1 %}", "{% endif %}"), ("{% for m in messages %}", "{% endfor %}"), ("", ""),
        ("{% filter upper %}", "{% endfilter %}"), ("{{ (", ") }}"), ("{% set a %}",
    "{% endset %}"),
        ("{% generation %}", "{% endgeneration %}"), ("{{ [", "] }}"), ("{% macro a() %}",
        "{% endmacro %}{{ a() }}"), ("{{ -", "1 }}"), ("{{ not ", "1 }}"),
    ])  # fmt: skip
    whole = opening * num + text * (num if not opening else 1) + closing * num
    return whole[:200_000]
