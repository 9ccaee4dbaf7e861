"""Stand-ins for what another process holds: what is done to them is done over there."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_UNARY = "iter next len bool hash str repr bytes int float complex index trunc floor ceil abs neg pos invert reversed "
_ASYNC = "aenter aexit aiter anext fspath "
_ITEMS = "call contains getitem setitem delitem enter exit format round length_hint "
_NUMBERS = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
COMPARISONS = frozenset(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "contains"))
SPECIALS = (
    frozenset(
        f"__{name}__"
        for name in (
            *(_UNARY + _ASYNC + _ITEMS).split(),
            *(prefix + name for name in _NUMBERS.split() for prefix in ("", "r", "i") if prefix + name != "idivmod"),
        )
    )
    | COMPARISONS
)
"""What Python looks up in a type, and may be asked of another process's."""
_HIDDEN = frozenset({"__path__", "__spec__", "__loader__", "__file__", "__cached__", "__package__", "__builtins__"})
_ASKED = frozenset({
    "__all__", "__annotations__", "__author__", "__cause__", "__code__", "__context__", "__dataclass_fields__",
    "__defaults__", "__dict__", "__doc__", "__func__", "__members__", "__match_args__", "__name__", "__notes__",
    "__qualname__", "__self__", "__slots__", "__version__", "__wrapped__",
})  # fmt: skip


def may_ask(name: str) -> bool:
    """Whether an attribute is the other process's to say, rather than the machinery's of this one."""
    return not (name.startswith("__") and name.endswith("__")) or name in _ASKED


def is_far(value: object) -> bool:
    """Whether it is a stand-in; what a value says of its own class is not asked."""
    kind = type(value)
    return issubclass(kind, FarObject | FarError | FarModule) or issubclass(kind, FarClass)


def forward(name: str) -> Callable[..., Any]:
    def special(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self)._far_link.special(self, name, args, kwargs)

    special.__name__ = name
    return special


class FarClass(type):
    """The type of stand-ins for classes: calling one makes its instance over there."""

    _far_link: Any
    _far_number: int
    _far_like: type | None

    def __new__(cls, name: str, bases: tuple[Any, ...], space: dict[str, Any], **options: Any) -> Any:
        if "_far_like" in space:
            return super().__new__(cls, name, bases, space)
        return _subclass(cls, name, bases, space)

    def __init__(cls, name: str, bases: tuple[Any, ...], space: dict[str, Any], **options: Any) -> None:
        super().__init__(name, bases, space)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._far_link.request("call", cls, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if cls._far_link is None or not may_ask(name):
            raise AttributeError(name)
        return cls._far_link.request("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if may_ask(name):
            cls._far_link.request("set", cls, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        cls._far_link.request("del", cls, name)

    @property  # type: ignore[misc]
    def __dict__(cls) -> Any:  # type: ignore[override]
        own = dict(type.__dict__["__dict__"].__get__(cls))
        return own if cls._far_link is None else {**own, **cls._far_link.request("vars", cls)}

    def __dir__(cls) -> Any:
        return cls._far_link.request("dir", cls)

    def __iter__(cls) -> Any:
        return cls._far_link.special(cls, "__iter__", (), {})

    def __len__(cls) -> Any:
        return cls._far_link.special(cls, "__len__", (), {})

    def __bool__(cls) -> bool:
        return True

    def __contains__(cls, item: Any) -> Any:
        return cls._far_link.special(cls, "__contains__", (item,), {})

    def __getitem__(cls, item: Any) -> Any:
        return cls._far_link.special(cls, "__getitem__", (item,), {})


def _subclass(meta: type[FarClass], name: str, bases: tuple[Any, ...], space: dict[str, Any]) -> Any:
    """A class made here of one over there: its methods stay here, its instances live there."""
    far = next(base for base in bases if isinstance(base, FarClass))
    link = far._far_link
    own = {key: value for key, value in space.items() if key not in ("__module__", "__qualname__", "__classcell__")}
    remote_class = link.request("subclass", name, far, own)

    def passed_on(key: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: link.request("get", far, key)(self, *args, **kwargs)

    inherited: dict[str, Any] = {key: passed_on(key) for key in link.request("functions", far)}
    reserved = {"_far_number": far._far_number, "_far_link": link, "_far_like": None, "__slots__": ()}
    middle = type.__new__(meta, far.__name__, (far,), {**inherited, **reserved})
    chosen = tuple(middle if base is far else base for base in bases)
    reserved = {"_far_number": remote_class._far_number, "_far_link": link, "_far_like": None}
    local = type.__new__(meta, name, chosen, {**space, **reserved})
    link.classes[remote_class._far_number] = local
    return local


class FarObject(metaclass=FarClass):
    """A stand-in for an object. Each class over there has a class here, with the special methods that it has."""

    __slots__ = ("__weakref__", "_far_at")
    _far_link: Any = None
    _far_at: Any
    _far_like = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self)._far_like or type(self)

    def __getattr__(self, name: str) -> Any:
        if not may_ask(name):
            raise AttributeError(name)
        return type(self)._far_link.request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        type(self)._far_link.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        type(self)._far_link.request("del", self, name)

    def __dir__(self) -> Any:
        return type(self)._far_link.request("dir", self)

    def __copy__(self) -> Any:
        return type(self)._far_link.request("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)._far_link.request("deepcopy", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an object of the code under test cannot be pickled by a test: it lives in another process")


class FarError:
    """What stand-ins for exceptions have beside their real base class."""

    _far_link: Any = None

    def __getattr__(self, name: str) -> Any:
        at = vars(self).get("_far_at")
        if at is None or not may_ask(name):
            raise AttributeError(name)
        return type(self)._far_link.request("get", self, name)


class FarModule(ModuleType):
    """A module that is imported over there."""

    def __init__(self, name: str, link: Any) -> None:
        super().__init__(name)
        _own(self)["_far_link"] = link

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return {**_own(self), **_own(self)["_far_link"].request("vars", self)}

    def __getattr__(self, name: str) -> Any:
        if name in _HIDDEN or not may_ask(name):
            raise AttributeError(name)
        if name == "__all__":
            return _own(self)["_far_link"].request("public", self)
        return _own(self)["_far_link"].request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or type(value) is ModuleType:  # of the machinery of imports, or a test module in it
            _own(self)[name] = value
        elif not isinstance(value, FarModule):
            _own(self)["_far_link"].request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        _own(self)["_far_link"].request("del", self, name)

    def __dir__(self) -> Any:
        return _own(self)["_far_link"].request("dir", self)


def _own(module: ModuleType) -> dict[str, Any]:
    """What a stand-in itself holds."""
    held: dict[str, Any] = vars(ModuleType)["__dict__"].__get__(module)
    return held


def local_class(module: str, name: str) -> type | None:
    """A class that is the same in both processes, by its name."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, type) else None
