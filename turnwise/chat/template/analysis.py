"""What a chat template's program tells: the words it may look for in messages, and how it asks for the time."""

import ast
import re
from collections.abc import Iterator

import jinja2
from jinja2 import meta, nodes

_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""A tag of training libraries around what an assistant says; it shows nothing."""


_CLOCK = re.compile(r"""strftime_now\s*\((?:\s*(?:'([^'\\]*)'|"([^"\\]*)")\s*\))?""")


def clock_formats(source: str) -> list[str] | None:
    """The formats in which a template asks for the time; None when its program does not say them outright."""
    formats = [match.group(1) or match.group(2) for match in _CLOCK.finditer(source)]
    return None if None in formats else formats


def read_variables(source: str) -> set[str]:
    """The names that a template wants to be given; none of a program that cannot be read."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        program = environment.parse(_GENERATION.sub("", source))
    except jinja2.TemplateSyntaxError:
        return set()
    return meta.find_undeclared_variables(program)


def compared_words(source: str) -> tuple[str, ...]:
    """Every text constant of a template that is more than written out: compared, searched for, split at, set aside.

    Those that a message's role is compared with are left out. A program that cannot be read gives all its constants.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        words = _compared(environment.parse(_GENERATION.sub("", source)), written=False)
        return tuple(sorted({word for word in words if word}))
    except jinja2.TemplateSyntaxError:
        strings = (value for _, kind, value in environment.lex(source) if kind == "string")
        return tuple(sorted({word for text in strings if (word := str(ast.literal_eval(text)))}))


def _compared(node: nodes.Node, *, written: bool) -> Iterator[str]:
    """`written`: the node's value is written out as it is."""
    match node:
        case nodes.Const(value=str() as value) if not written:
            yield value
        case nodes.Output() | nodes.Add() | nodes.Concat():
            for child in node.iter_child_nodes():
                yield from _compared(child, written=written or isinstance(node, nodes.Output))
        case nodes.CondExpr():
            yield from _compared(node.test, written=False)
            for branch in (node.expr1, node.expr2):
                if branch is not None:
                    yield from _compared(branch, written=written)
        case nodes.Getitem(arg=nodes.Const(value=str())):  # the name of a field
            yield from _compared(node.node, written=False)
        case nodes.Compare() if any(_is_role(part) for part in (node.expr, *(operand.expr for operand in node.ops))):
            return
        case _:
            for child in node.iter_child_nodes():
                yield from _compared(child, written=False)


def _is_role(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="role") | nodes.Getitem(arg=nodes.Const(value="role")):
            return True
    return False
