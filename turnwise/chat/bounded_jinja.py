"""transformers' own environment for chat templates, in which no template can go on for ever or fill memory.

A chat template is a program that comes with a model. The library's sandbox keeps it from files and objects; here every
round of a loop, every call and every text it makes is counted, and what would cost too much is an error instead.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from turnwise.chat.template_costs import (
    TakesTooLong,
    TooCostly,
    bounded,
    costs,
    counted,
    demand_format,
    demand_small_numbers,
    demand_text,
    operate,
    weigh,
)

LONGEST_SOURCE = 1 << 20
STRIKES = 2
"""Renders that take too long before a template gets less time: trying one out takes a hundred of them."""
PATIENCE = 0.05
"""The share of the time that it gets then; what a chat needs is less."""
_COMPARING = (
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "le",
    "<=",
    "gt",
    "greaterthan",
    ">",
    "ge",
    ">=",
    "in",
)


def install() -> None:
    """Have transformers compile chat templates so; for all of this process, once."""
    from transformers.utils import chat_template_utils

    if chat_template_utils._compile_jinja_template is not compile_bounded:
        _bound(chat_template_utils._compile_jinja_template)
        chat_template_utils._compile_jinja_template = compile_bounded


@functools.lru_cache
def compile_bounded(source: str) -> jinja2.Template:
    """A template that counts what it does; TooCostly for one that is itself too long."""
    if len(source) > LONGEST_SOURCE:
        raise TooCostly(f"its program has {len(source):,} characters, and {LONGEST_SOURCE:,} are most")
    return _environments[0].from_string(source)


_environments: list[jinja2.Environment] = []
"""The one that templates are compiled in, once `install` was called."""


def _bound(plain: Callable[[str], jinja2.Template]) -> None:
    """The library's, with our class over its own."""
    made = plain("").environment.overlay()
    made.__class__ = type("BoundedEnvironment", (_Bounded, type(made)), {})
    filters = cast(dict[str, Callable[..., Any]], made.filters)
    tests = cast(dict[str, Callable[..., Any]], made.tests)
    made.filters = {name: bounded(name, each) for name, each in filters.items()} | _OWN_FILTERS
    made.tests = tests | {name: bounded(name, tests[name]) for name in _COMPARING if name in tests}
    made.globals = {name: each for name, each in made.globals.items() if name != "lipsum"}
    made.finalize = _written
    made.template_class = _Template
    _environments[:] = [made]


def _written(value: Any) -> Any:
    costs().make(len(value) if isinstance(value, str) else weigh(value))
    return value


Placed = TypeVar("Placed", bound=nodes.Node)


class _Template(jinja2.Template):
    strikes = 0

    def render(self, *args: Any, **kwargs: Any) -> str:
        """The text; TooCostly for one that would take too much."""
        with counted(PATIENCE if self.strikes >= STRIKES else 1.0):
            try:
                return super().render(*args, **kwargs)
            except TakesTooLong:
                self.strikes += 1
                raise


class _Bounded(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return operate(operator, left, right, self.binop_table[operator])

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        costs().step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes) and isinstance(__obj, types.BuiltinMethodType):
            name = __obj.__name__
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
                costs().make(weigh(args[0]) + len(args[0]) * len(owner))
            else:
                demand_text(name, owner, args, kwargs)
        elif isinstance(__obj, types.BuiltinMethodType):
            demand_small_numbers([*args, *kwargs.values()])
            weigh(*args, *kwargs.values())
        elif isinstance(__obj, types.FunctionType):  # such as raise_exception, which shows what it is given
            weigh(*args, *kwargs.values())
        if not __self.is_safe_callable(__obj):
            raise jinja2.exceptions.SecurityError(f"{__obj!r} is not safely callable")
        return __context.call(__obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__

        def format_bounded(*args: Any, **kwargs: Any) -> str:
            demand_format(text, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return functools.update_wrapper(format_bounded, wrapped)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple | list | dict):
            weigh(argument)
        return super().getitem(obj, argument)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        found: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return found

    @property
    def counted_step(self) -> None:
        """Read at the beginning of every round of a loop."""
        costs().step()


def _joined(*values: Any) -> str:
    """`a ~ b`."""
    costs().make(weigh(*values))
    return "".join(map(str, values))


_OWN_FILTERS = {"a value": _written, "joined texts": _joined}
"""What the transformed program calls: by names that no template can write."""


class _Counting(NodeTransformer):
    """Has a program tell what it is about to do where the sandbox would not be asked."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("counted_step")))
        if node.test is not None:
            node.test = _filter("a value", cast(nodes.Expr, node.test))
        return _placed(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _placed(_filter("joined texts", *node.nodes), node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _placed(_filter("a value", node), node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Of two lists that hold the same one over and over, comparing takes for ever."""
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const) and not all(isinstance(one.expr, nodes.Const) for one in node.ops):
            node.expr = _filter("a value", node.expr)
            for one in node.ops:
                one.expr = _filter("a value", one.expr)
        return _placed(node)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter("a value", node.key)
        return _placed(node)


def _filter(name: str, value: nodes.Expr, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None)


def _placed(node: Placed, like: nodes.Node | None = None) -> Placed:
    """With line numbers and the environment, which the compiler asks every node for."""
    old = like or node
    node.set_lineno(old.lineno, override=False)
    if old.environment is not None:
        node.set_environment(old.environment)
    return node
