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

from turnwise.chat.template.costs import (
    TakesTooLong,
    TooCostly,
    bounded,
    costs,
    counted,
    demand_format,
    demand_small_numbers,
    demand_text,
    operate,
    settled,
    weigh,
)

LONGEST_SOURCE = 1 << 20
STRIKES = 2
"""Renders that take too long before a template gets less time: trying one out takes a hundred of them."""
PATIENCE = 0.05
"""The share of the time that it gets then; what a chat needs is less."""
LONGEST_TIME = 200
"""Characters of a format of dates: the C library writes out widths."""


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
    environment = plain("").environment.overlay()
    environment.__class__ = type("BoundedEnvironment", (_Bounded, type(environment)), {})
    filters = cast(dict[str, Callable[..., Any]], environment.filters)
    tests = cast(dict[str, Callable[..., Any]], environment.tests)
    environment.filters = {name: bounded(name, each) for name, each in filters.items()} | _OWN_FILTERS
    environment.tests = {name: bounded(name, each) for name, each in tests.items()}
    environment.globals = {name: each for name, each in environment.globals.items() if name != "lipsum"}
    environment.finalize = _output
    environment.optimized = False  # what is computed while compiling is counted for nobody
    environment.template_class = _Template
    _environments[:] = [environment]


def _written(value: Any) -> Any:
    costs().make(len(value) if isinstance(value, str) else weigh(value))
    return value


@jinja2.pass_context
def _output(_: Any, value: Any) -> Any:
    """With the context, so that constants are written, and counted, each time and not once when it is compiled."""
    return _written(value)


@jinja2.pass_context
def _data(_: Any, characters: int) -> None:
    """The program's own text of this length, about to be written once more."""
    costs().make(characters)


def _tested(value: Any) -> Any:
    """The condition of a loop, after one step is counted and its value is written out."""
    costs().step()
    return _written(value)


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
    intercepted_binops = frozenset(("+", "-", "*", "**", "/", "//", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return operate(operator, left, right, self.binop_table[operator])

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        costs().step()
        if not isinstance(__obj, jinja2.runtime.Macro):
            args = tuple(settled(argument) for argument in args)
            __self._demand(__obj, args, kwargs)
        if not __self.is_safe_callable(__obj):
            raise jinja2.exceptions.SecurityError(f"{__obj!r} is not safely callable")
        return __context.call(__obj, *args, **kwargs)

    def _demand(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        if isinstance(owner, str | bytes):
            if name == "join" and args and hasattr(args[0], "__len__"):
                costs().make((weigh(args[0]) + len(args[0]) * len(owner)) * (6 if hasattr(owner, "__html__") else 1))
            else:
                demand_text(name, owner, args, kwargs)
            return
        if isinstance(called, types.BuiltinMethodType):
            demand_small_numbers([*args, *kwargs.values()])
        weight = weigh(*args, *kwargs.values())
        if name == "strftime_now" and weight > LONGEST_TIME:
            raise TooCostly(f"it writes the time in more than {LONGEST_TIME} characters")

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
        costs().step()  # filters ask here for every attribute of every element
        if isinstance(argument, tuple | list | dict):
            weigh(argument)
        return super().getitem(obj, argument)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    @property
    def counted_step(self) -> None:
        """Read at the beginning of every round of a loop."""
        costs().step()


@jinja2.pass_eval_context
def _joined(evaluated: Any, *values: Any) -> str:
    """The text of the operator `a ~ b`, whose length is counted first."""
    costs().make(weigh(*values))
    return jinja2.runtime.markup_join(values) if evaluated.autoescape else "".join(map(str, values))


_OWN_FILTERS = {"a value": _written, "a condition": _tested, "joined texts": _joined, "own text": _data}
"""What the transformed program calls: by names that no template can write."""


class _Counting(NodeTransformer):
    """Has a program tell what it is about to do where the sandbox would not be asked."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("counted_step")))
        if node.test is not None:
            node.test = _filter("a condition", cast(nodes.Expr, node.test))
        return _placed(node)

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        self.generic_visit(node)
        own = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        if not own:
            return [node]
        counter = nodes.ExprStmt(_filter("own text", nodes.Const(own)))
        return [_placed(counter, node), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _placed(_filter("joined texts", *node.nodes), node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _placed(_filter("a value", node), node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Of two lists that hold the same one over and over, comparing takes for ever."""
        self.generic_visit(node)
        if sum(not isinstance(operand, nodes.Const) for operand in (node.expr, *(op.expr for op in node.ops))) > 1:
            node.expr = _filter("a value", node.expr)
            for operand in node.ops:
                operand.expr = _filter("a value", operand.expr)
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
