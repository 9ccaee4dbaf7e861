"""Compile, run, the last expression, and failures."""

import pytest


def failure(host, code):
    reply = host.run(code)
    assert reply["status"] == "error", reply
    return reply["failure"]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("x = 5", None),
        ("x = 5\nx", "5"),
        ("None", None),
        ("'text'", "'text'"),
        ("", None),
        ("# only a comment", None),
        ("for i in range(3):\n    i", None),
        ("def f():\n    return 1\nf()", "1"),
        ("a = 1; a + 1", "2"),
        ("class A:\n    def __repr__(self): return 'mine'\nA()", "mine"),
        ("(lambda: 3)()", "3"),
        ("from __future__ import annotations\n7", "7"),
    ],
)
def test_the_value_is_that_of_a_last_expression(host, code, value):
    reply = host.run(code)
    assert (reply["status"], reply["value"], reply["failure"]) == ("ok", value, None)


def test_the_namespace_lives_on_and_is_the_main_module(host):
    host.run("import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: int\np = P(3)")
    assert host.run("pickle.loads(pickle.dumps(p)) == p")["value"] == "True"
    assert host.run("import __main__; __main__.p is p and __name__")["value"] == "'__main__'"
    assert host.run("hasattr(__main__, 'prepare'), hasattr(__main__, 'pytest')")["value"] == "(False, False)"


def test_a_long_value_is_cut(host):
    value = host.run("list(range(100000))")["value"]
    assert value.startswith("[0, 1") and value.endswith("99999]") and "characters left out]" in value
    assert len(value) < 1100


def test_a_repr_that_raises_is_an_error_of_the_call(host):
    found = failure(host, "class A:\n    def __repr__(self):\n        raise ValueError('no')\nA()")
    assert (found["kind"], found["message"], found["line"]) == ("ValueError", "no", 3)


def test_an_exception_is_told_with_its_line(host):
    reply = host.run("print('before')\nx = 1\ny = x / 0\nprint('after')")
    assert reply["status"] == "error" and reply["stdout"] == "before\n"
    assert reply["failure"] == {
        "kind": "ZeroDivisionError",
        "message": "division by zero",
        "line": 3,
        "source": "y = x / 0",
        "traceback": 'Traceback (most recent call last):\n  File "<cell 1>", line 3, in <module>\n    y = x / 0\n'
        "ZeroDivisionError: division by zero",
    }


def test_frames_of_earlier_cells_are_told_and_those_of_libraries_are_not(host):
    host.run("import json\ndef parse(text):\n    return json.loads(text)")
    found = failure(host, "value = 1\nparse('{')")
    assert (found["kind"], found["line"], found["source"]) == ("JSONDecodeError", 2, "parse('{')")
    assert '"<cell 1>", line 3, in parse\n    return json.loads(text)' in found["traceback"]
    assert "decoder.py" not in found["traceback"]
    assert found["traceback"].splitlines()[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")


def test_deep_recursion_is_cut(host):
    found = failure(host, "def f(n):\n    return f(n + 1)\nf(0)")
    assert found["kind"] == "RecursionError" and found["line"] == 2
    assert found["traceback"].count("File") == 6 and "frames left out]" in found["traceback"]


def test_a_syntax_error_has_its_line(host):
    found = failure(host, "x = 1\nif x\n    pass")
    assert (found["kind"], found["line"], found["source"]) == ("SyntaxError", 2, "if x")
    assert found["message"] == "expected ':'"
    assert found["traceback"] == "  File \"<cell 1>\", line 2\n    if x\nSyntaxError: expected ':'"
    assert failure(host, "  x = 1")["kind"] == "IndentationError"


def test_a_syntax_error_of_evaluated_text_has_the_line_that_evaluated_it(host):
    found = failure(host, "a = 1\neval('1 +')")
    assert (found["kind"], found["line"], found["source"]) == ("SyntaxError", 2, "eval('1 +')")


def test_form_feeds_and_odd_separators_do_not_shift_the_lines(host):
    found = failure(host, "s = 'a\x0cb\u2028c'\r\n\r\n1 / 0")
    assert (found["line"], found["source"]) == (3, "1 / 0")


@pytest.mark.parametrize(
    "code",
    [
        "(" * 5000 + ")" * 5000,
        "-" * 100_000 + "1",
        "x" + ".a" * 50_000,
        "x" + "+1" * 50_000,
        "\x00",
        "x = '\ud800'",
        "def",
        "return 1",
        "await x",
        "'" * 100_001,
        "\n" * 100_000 + "(",
    ],
    ids=["brackets", "minus", "attributes", "sum", "nul", "surrogate", "def", "return", "await", "quotes", "lines"],
)
def test_code_that_cannot_be_compiled_gives_a_clean_reply(host, code):
    reply = host.run(code)
    assert reply["status"] in ("error", "memory") and reply["failure"]["kind"]
    assert host.run("1")["value"] == "1"


def test_a_chain_of_exceptions_is_told(host):
    found = failure(host, "try:\n    {}['k']\nexcept KeyError as e:\n    raise RuntimeError('outer') from e")
    assert (found["kind"], found["line"]) == ("RuntimeError", 4)
    text = found["traceback"]
    assert text.index("KeyError: 'k'") < text.index("caused the next one") < text.index("RuntimeError: outer")
    assert (
        "KeyError"
        not in failure(host, "try:\n    {}['k']\nexcept KeyError:\n    raise RuntimeError from None")["traceback"]
    )


def test_exceptions_in_a_circle_end(host):
    code = "a, b = ValueError('a'), ValueError('b')\na.__cause__ = b\nb.__cause__ = a\nraise a"
    assert failure(host, code)["message"] == "a"


def test_a_group_tells_its_members(host):
    text = failure(host, "raise ExceptionGroup('many', [ValueError(i) for i in range(9)])")["traceback"]
    assert "ExceptionGroup: many (9 sub-exceptions)" in text and "ValueError: 0" in text and "[5 more]" in text


def test_notes_are_told(host):
    assert "look here" in failure(host, "e = ValueError('x')\ne.add_note('look here')\nraise e")["traceback"]


@pytest.mark.parametrize("raised", ["ValueError('no')", "SystemExit(0)", "KeyboardInterrupt()", "MemoryError()"])
def test_an_exception_whose_text_cannot_be_had(host, raised):
    code = f"class Odd(Exception):\n    def __str__(self):\n        raise {raised}\nraise Odd"
    found = failure(host, code)
    assert found["kind"] == "Odd" and "str() of the exception raised" in found["message"]


def test_a_huge_message_is_cut(host):
    found = failure(host, "raise ValueError('x' * 10_000_000)")
    assert len(found["message"]) < 2100 and len(found["traceback"]) < 4100


def test_odd_classes_of_exceptions_do_not_break_the_reply(host):
    code = "class M(type):\n    @property\n    def __module__(cls): raise ValueError\nclass E(Exception, metaclass=M): pass\nraise E('x')"
    assert host.run(code)["status"] == "error"
    assert (
        host.run("class E(SyntaxError):\n    msg = property(lambda s: 1 / 0)\nraise E('x', ('f', 1, 1, 't'))")["status"]
        == "error"
    )
    assert host.run("1")["value"] == "1"


@pytest.mark.parametrize(
    "code",
    [
        "class E(SystemExit):\n    code = property(lambda self: 1 / 0)\nraise E",
        "class C:\n    __eq__ = lambda self, other: 1 / 0\nraise SystemExit(C())",
        "class E(OSError):\n    errno = property(lambda self: exit(0))\nraise E",
        "class E(Exception):\n    __class__ = property(lambda self: 1 / 0)\nraise E",
        "class E(Exception):\n    __traceback__ = property(lambda self: 1 / 0)\nraise E",
        "class E(MemoryError):\n    def __setattr__(self, name, value): raise SystemExit\nraise E",
    ],
)
def test_exceptions_that_answer_with_exceptions(host, code):
    assert host.run(code)["status"] in ("error", "memory")
    assert host.run("1")["value"] == "1"


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "GeneratorExit", "BaseException", "asyncio.CancelledError"])
def test_exceptions_that_are_no_errors_end_the_call_only(host, raised):
    assert failure(host, f"import asyncio\nraise {raised}")["kind"] == raised.split(".")[-1]
    assert host.run("1")["value"] == "1"


def test_exit_is_told_and_the_session_goes_on(host):
    host.run("x = 1")
    for code in ("import sys; sys.exit()", "raise SystemExit(0)"):
        reply = host.run(f"print('a')\n{code}")
        assert (reply["status"], reply["stdout"], reply["failure"]) == ("ok", "a\n", None)
        assert reply["notices"] == ["the code asked to exit; the session goes on"]
    assert failure(host, "import sys\nsys.exit('bad')")["message"] == "bad"
    assert host.run("x")["value"] == "1"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.mkdir('/sys/x')",
        "raise OSError(1, 'Operation not permitted')",
        "try:\n    raise PermissionError\nexcept OSError as e:\n    raise RuntimeError('wrapped') from e",
        "import urllib.error\ntry:\n    raise PermissionError\nexcept OSError as e:\n    raise urllib.error.URLError(e)",
        "import socket\nraise socket.gaierror(-3, 'Temporary failure in name resolution')",
    ],
)
def test_what_the_sandbox_refused_is_denied(host, code):
    reply = host.run(code)
    assert reply["status"] == "denied" and reply["failure"]["line"]


def test_a_file_that_may_not_be_read_is_denied(session_with):
    reply = session_with(ordinary=True).run("open('/etc/shadow')")
    assert (reply["status"], reply["failure"]["kind"]) == ("denied", "PermissionError")


def test_a_refusal_that_was_handled_is_none(host):
    code = "try:\n    raise PermissionError\nexcept PermissionError:\n    pass\n"
    assert host.run(code + "1")["status"] == "ok"
    assert host.run(code + "open('missing')")["status"] == "error"
    assert host.run("try:\n    raise PermissionError\nexcept PermissionError:\n    1 / 0")["status"] == "error"


def test_sources_of_many_cells_do_not_pile_up(host):
    for _ in range(40):
        host.run("x = 1" + " " * 200_000)
    code = "import linecache\nlen([n for n in linecache.cache if n.startswith('<cell')])"
    assert int(host.run(code)["value"]) <= 16
    assert (
        host.run(
            "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    text = traceback.format_exc()\n'1 / 0' in text"
        )["value"]
        == "True"
    )
