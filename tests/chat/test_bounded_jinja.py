"""Chat templates that would go on for ever or fill memory are one line, when they are loaded and afterwards; all others
are rendered as transformers renders them."""

import pytest
from public_templates import save_tokenizer, template_names, template_source
from transformers.utils import chat_template_utils

from turnwise.chat.formats import hermes
from turnwise.chat.renderer import Renderer
from turnwise.chat.template import bounded_jinja, costs
from turnwise.chat.tokenizer import Tokenizer
from turnwise.errors import TemplateError

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TWICE = "{%% set ns = namespace(x='x', l=['a']) %%}{%% for i in range(99) %%}{%% set %s %%}{%% endfor %%}"
BIG = "{% set big = 'x' * 10000000 %}"
PAIRS = (
    "{% set ns = namespace(t=(0, 0), u=(0, 0)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}"
    "{% set ns.u = (ns.u, ns.u) %}{% endfor %}"
)
HOSTILE = {
    "repeated text": "{{ 'x' * 10000000000 }}",
    "repeated list": "{{ ([0] * 10000000000)|length }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that only test": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n > 0 %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursion": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "products": TWICE % "ns.x = (ns.x|length + 9) * 99999999999999 * 99999999999999 * (10 ** 900)",
    "width of a method": "{{ 'x'.ljust(10000000000) }}",
    "width of a filter": "{{ 'x'|center(10000000000) }}",
    "width of a format": "{{ '%10000000000d' % 1 }}",
    "width of a format filter": "{{ '%10000000000d'|format(1) }}",
    "width of a format method": "{{ '{:>10000000000}'.format(1) }}",
    "formatted width": "{{ '{:>{}}'.format(1, 10000000000) }}",
    "indent": "{{ ('x\\n' * 1000000)|indent(90000) }}",
    "join": BIG + "{{ ([big] * 100000)|join }}",
    "join by method": BIG + "{{ ''.join([big] * 100000) }}",
    "join of a generator": BIG + "{{ range(99999)|map('replace', 1, big)|join }}",
    "replace": BIG + "{{ big.replace('x', big) }}",
    "replace by filter": BIG + "{{ big|replace('x', big) }}",
    "doubled by +": TWICE % "ns.x = ns.x + ns.x",
    "doubled by ~": TWICE % "ns.x = ns.x ~ ns.x",
    "kept slices": BIG + "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = ns.l + [big[1:]] %}{% endfor %}",
    "a block": BIG + "{% set y %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endset %}",
    "nested lists": TWICE % "ns.l = [ns.l, ns.l]" + "{{ ns.l }}",
    "nested lists as JSON": TWICE % "ns.l = [ns.l, ns.l]" + "{{ ns.l|tojson }}",
    "nested lists compared": TWICE % "ns.l = [ns.l, ns.l]" + TWICE % "ns.l = [ns.l, ns.l]" + "{{ [ns.l] == [ns.x, ns.l] }}",
    "indented JSON": "{{ [1]|tojson(indent=10000000000) }}",
    "batch": "{{ [1]|batch(10000000000, 'x')|list }}",
    "own text in a loop": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "a constant in a loop": "{% for i in range(99999) %}{{ '" + "x" * 1000 + "' }}{% endfor %}",
    "a filter that is computed when compiled": "{% for i in range(9999) %}{{ 'x'|center(9000) }}{% endfor %}",
    "hash": PAIRS + "{{ dict([[ns.t, 1]]) }}",
    "hash of a generator's": PAIRS + "{{ {}.fromkeys([ns.t]|select) }}",
    "hash of a view's": PAIRS + "{{ dict.fromkeys({'a': ns.t}.values()) }}",
    "hash of a generator in a list": PAIRS + "{{ dict([[ns.t, 1]|select]) }}",
    "unique of a generator": PAIRS + "{{ ([ns.t]|select)|unique|list|length }}",
    "sort of a generator": PAIRS + "{{ ([ns.t, ns.u]|select)|sort|length }}",
    "a test that writes": PAIRS + "{{ ns.t is lower }}",
    "a test that hashes": PAIRS + "{{ ns.t is filter }}",
    "a name of a filter": PAIRS + "{{ [1]|map(ns.t)|list }}",
    "a name of an attribute": PAIRS + "{{ 5|attr(ns.t) }}",
    "items compared": PAIRS + "{{ {'a': ns.t}.items() == {'a': ns.u}.items() }}",
    "a chain of comparisons": PAIRS + "{{ 1 != ns.t == ns.u }}",
    "changed": PAIRS + "{% for i in [ns.t, ns.u] %}{{ loop.changed(i) }}{% endfor %}",
    "items written": PAIRS + "{{ {'a': ns.t}.items() }}",
    "namespace written": PAIRS + "{{ ns }}",
    "namespace in itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns ~ '' }}",
    "format of a list": PAIRS + "{{ ns.t|format(1) }}",
    "a text that a test formats": "{{ '%9999999999d' is odd }}{{ '%9999999999d' is divisibleby(1) }}",
    "width of an escaped text": "{{ ('x'|safe).center(10000000000) }}",
    "join by an escaped text": BIG + "{{ (big|safe).join(range(9999)) }}",
    "replace in an escaped text": BIG + "{{ (big|safe).replace('x', big) }}",
    "replace in bytes": BIG + "{{ big.encode().replace('x'.encode(), big.encode()) }}",
    "replace, named the other way round": BIG + "{{ ('x' * 9999)|replace(new=big, old='x') }}",
    "replace by a list": "{{ ('x' * 99999)|replace('x', [0] * 99999) }}",
    "replace in a list": BIG + "{{ ([1] * 99999)|replace('', big) }}",
    "join by a list": "{{ range(99999)|join([0] * 99999) }}",
    "join of an attribute": BIG + "{{ (['ab'] * 9999)|join(attribute='0', d=big) }}",
    "lines of another width": BIG + "{{ ('x' * 99999)|wordwrap(1, wrapstring=big, break_on_hyphens=99999) }}",
    "separators of JSON": BIG + "{{ (['a'] * 9999)|tojson(separators=(big, ':')) }}",
    "targets of addresses": BIG + "{{ ('x.com ' * 9999)|urlize(target=big) }}",
    "time": "{{ strftime_now('%10000d' * 99999) }}",
    "an attribute of an attribute": "{{ (['x'] * 9999)|map(attribute='0.' * 9999 ~ '0')|list }}",
    "sorted by many": "{{ range(9999)|list|sort(attribute='a,' * 9999) }}",
    "stripped of many": "{{ ('a' * 999999).strip('b' * 999999 ~ 'a') }}",
    "begins with one of many": "{{ ('a' * 999999).startswith(('a' * 999999 ~ 'b', ) * 9999) }}",
    "huge numbers divided": "{% set a = ('f' * 99999)|int(0, 16) %}{{ (a * 1) // 3 }}{{ a // (a // 3) }}",
    "a codec": "{{ ('é' * 999999).encode('punycode') }}",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MOST_STEPS", 100_000)
    monkeypatch.setattr(costs, "MOST_CHARACTERS", 16 << 20)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line_when_it_is_loaded(folder, tmp_path, name):
    path = tmp_path / "hostile.jinja"
    path.write_text(HOSTILE[name] + PLAIN)
    with pytest.raises(TemplateError, match="the chat template cannot render the roles") as raised:
        Renderer(Tokenizer(folder("qwen25"), str(path)), hermes)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


def test_one_that_waits_for_its_moment_is_an_error_then(folder, tmp_path):
    path = tmp_path / "patient.jinja"
    path.write_text("{% if messages|length > 12 %}{{ 'x' * 10000000000 }}{% endif %}" + PLAIN)
    tested = Renderer(Tokenizer(folder("qwen25"), str(path)), hermes)
    conversation = [{"role": "user", "content": "hi"}] * 13
    with pytest.raises(costs.TooCostly):
        tested.tokenizer.apply_template(conversation, [], True, {})
    assert tested.tokenizer.apply_template(conversation[:1], [], True, {}).endswith("assistant"), "the next is well"


def test_one_that_takes_too_long_again_and_again_gets_less_time(folder, tmp_path):
    path = tmp_path / "endless.jinja"
    path.write_text("{# a #}{% if messages|length > 1 %}" + HOSTILE["nested loops"] + "{% endif %}" + PLAIN)
    tokenizer, hello = Tokenizer(folder("qwen25"), str(path)), {"role": "user", "content": "hi"}
    said = []
    for _ in range(bounded_jinja.STRIKES + 1):
        with pytest.raises(costs.TakesTooLong) as raised:
            tokenizer.apply_template([hello, hello], [], True, {})
        said.append(str(raised.value))
    assert said == ["it takes more than 100,000 steps"] * 2 + ["it takes more than 5,000 steps"]
    assert tokenizer.apply_template([hello], [], True, {}).endswith("assistant"), "what a chat needs is left to it"


CALLS = [{"id": "t000c0000", "type": "function", "function": {"name": "probe", "arguments": {"x": "6*7", "n": [1]}}}]
TALKS = [
    [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": CALLS},
        {"role": "tool", "content": "42", "tool_call_id": "t000c0000", "name": "probe"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "so?"},
    ],
]
TOOL = {"type": "function", "function": {"name": "probe", "description": 'Look "it" up.',
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}}}  # fmt: skip


def test_templates_in_use_are_rendered_as_transformers_renders_them(tmp_path):
    """By the library's own compiler, which is no longer in its place."""
    save_tokenizer("qwen3", tmp_path)
    Tokenizer(tmp_path)
    given = {"documents": None, "bos_token": "<s>", "eos_token": "</s>"}
    sources = [template_source(name) for name in template_names()]
    compared = 0
    for source in sources:
        for talk in TALKS:
            for tools in (None, [TOOL]):
                texts = []
                for compiled in (
                    chat_template_utils._cached_compile_jinja_template(source),
                    chat_template_utils._compile_jinja_template(source),
                ):
                    try:
                        texts.append(compiled.render(messages=talk, tools=tools, add_generation_prompt=True, **given))
                    except Exception as error:
                        texts.append(type(error).__name__)
                assert texts[0] == texts[1]
                compared += len(texts[0]) > 30
    assert compared > 100


@pytest.mark.parametrize(
    "expression",
    [
        "'**%s** since 20240726' % 'x'", "'**%s** since 20240726'|format('x')", "'**{}** since 20240726'.format('x')",
        "'%(a)s (b)' % {'a': 1}", "messages|map(attribute='role')|length", "'user' in messages|map(attribute='role')",
        "messages|map(attribute='role')|default('x')|join", "messages[0].items()", "dict(messages[0].items())",
        "123|replace(2, 9)", "'aaa'|replace(new='b', old='a')", "('a<b'|safe).replace('a', '<')", "'xax'|trim('x')",
        "('<'|safe) ~ '<'", "messages|tojson(true, 4, (', ', ':'))", "'x' is odd", "[1] is lower", "1 < 2 > 1",
    ],
)  # fmt: skip
def test_expressions_mean_what_they_mean_to_transformers(tmp_path, expression):
    save_tokenizer("qwen3", tmp_path)
    Tokenizer(tmp_path)
    said = []
    for compile_template in (
        chat_template_utils._cached_compile_jinja_template,
        chat_template_utils._compile_jinja_template,
    ):
        try:
            source = "{% for i in [1, 2] %}{{ " + expression + " }};{% endfor %}"
            said.append(compile_template(source).render(messages=[{"role": "user", "content": "a<b"}]))
        except Exception as error:
            said.append(repr(error))
    assert said[0] == said[1]


def test_a_long_message_may_be_stripped_of_another():
    """As templates do that take a thought off an answer."""
    bounded_jinja.install()
    assert bounded_jinja.compile_bounded("{{ a.lstrip(b) }}").render(a="yes", b="no " * 5000) == "yes"
