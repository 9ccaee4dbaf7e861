"""What is said between two processes: plain values are copied, all else is named by a number and stays where it is.

Lists, dicts and the like are in both processes at once; what one of them changes, the other has at the next message.
"""

import builtins
import contextlib
import importlib
import inspect
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

from turnwise.ext.swe.inside import copied_values, proxies
from turnwise.ext.swe.inside.proxies import SPECIALS, FarClass, FarError, FarModule, FarObject, forward

_MUTABLE = {kind.__name__: kind for kind in (list, dict, set, bytearray, deque, OrderedDict, defaultdict, Counter)}


class Lost(BaseException):
    """The other process is gone, or says what makes no sense."""


class FarFailure(Exception):
    """An exception over there whose class may not be raised here."""


class Guard:
    """What the other side may do to our objects; this one lets it do all."""

    def check(self, what: str, thing: Any, args: tuple[Any, ...]) -> None:
        return

    def local_class(self, module: str, name: str) -> type | None:
        importlib.import_module(module)
        return proxies.local_class(module, name)

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(name)


class Packing:
    """What one end knows of the other's objects, and the other of its own.

    `scratch` is where code lies that is not the same in both processes. `first` is 0 where the tests are, 1 where the
    code is: one side numbers with even numbers, the other with odd ones.
    """

    def __init__(self, first: int, scratch: str, guard: Guard) -> None:
        self.scratch, self.guard = scratch, guard
        self.classes: dict[int, Any] = {}
        self.modules: dict[str, FarModule] = {}
        self.is_trusted = first == 0
        self._next = first
        self._ours: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._theirs: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._described: set[int] = set()
        self._shared: dict[int, list[Any]] = {}
        self._keys: dict[int, int] = {}

    def request(self, what: str, *args: Any) -> Any:
        """Have something done over there."""
        raise NotImplementedError

    # ---- what both have

    def _drop(self) -> list[int]:
        """What nobody here holds any more need not be the same in both."""
        gone = [key for key, entry in self._shared.items() if sys.getrefcount(entry[0]) <= 2]
        for key in gone:
            self._forget(key)
        return gone

    def _forget(self, key: int) -> None:
        entry = self._shared.pop(key, None)
        if entry is not None:
            self._keys.pop(id(entry[0]), None)

    def _changed(self) -> list[Any]:
        changes = []
        for key, entry in list(self._shared.items()):
            if entry[1] is None:  # it is being filled, and a key of it asks for its hash
                continue
            now = _snapshot(entry[0])
            if len(now) != len(entry[1]) or not all(map(operator.is_, now, entry[1])):
                entry[1] = now
                changes.append([key, self._contents(entry[0])])
        return changes

    def _contents(self, value: Any) -> Any:
        if isinstance(value, bytearray):
            return value.decode("latin-1")
        if isinstance(value, dict):
            return [[self.pack(key), self.pack(item)] for key, item in dict.items(value)]
        return [self.pack(item) for item in value]

    def _fill(self, key: int, contents: Any) -> None:
        entry = self._shared[key]
        value, entry[1] = entry[0], None
        value.clear()
        if isinstance(value, bytearray):
            value += contents.encode("latin-1")
        elif isinstance(value, dict):
            for name, packed in contents:
                dict.__setitem__(value, self.unpack(name), self.unpack(packed))
        else:
            add = value.add if isinstance(value, set) else value.append
            for packed in contents:
                add(self.unpack(packed))
        entry[1] = _snapshot(value)

    # ---- values

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is tuple:
            return ["tuple", [self.pack(item) for item in value]]
        if kind is frozenset:
            return ["frozenset", [self.pack(item) for item in value]]
        if (parts := copied_values.write(value)) is not None:
            return ["plain", *parts]
        if kind in _MUTABLE.values():
            return self._pack_shared(value)
        if issubclass(kind, FarModule):
            return ["module", value.__name__]
        if issubclass(kind, FarClass):
            return ["yours", value._far_number]
        if issubclass(kind, FarObject):
            return ["yours", object.__getattribute__(value, "_far_at")]
        if isinstance(value, BaseException):
            return self._pack_error(value)
        if isinstance(value, ModuleType) and self._is_code(value):
            return ["module", value.__name__]
        if isinstance(value, type):
            return self._pack_class(value)
        if self.is_trusted and isinstance(value, FunctionType | type(len)) and (parts := self.named(value)):
            return ["named", *parts]
        if inspect.isawaitable(value) and hasattr(type(value), "__await__") and hasattr(value, "send"):
            return ["awaitable", self._number(value)]
        return ["object", self._number(value), self._pack_class(kind, of_objects=True)]

    def _pack_shared(self, value: Any) -> Any:
        key = self._keys.get(id(value))
        if key is not None:
            return ["shared", key]
        key = self._new_number()
        self._keys[id(value)] = key
        self._shared[key] = [value, _snapshot(value)]
        option: Any = value.maxlen if isinstance(value, deque) else None
        option = value.default_factory if isinstance(value, defaultdict) else option
        return ["shared", key, type(value).__name__, self.pack(option), self._contents(value)]

    def _unpack_shared(self, key: int, kind: str, option: Any, contents: Any) -> Any:
        make: Any = _MUTABLE[kind]
        value = make((), option) if kind == "deque" else make(option) if kind == "defaultdict" else make()
        self._shared[key], self._keys[id(value)] = [value, None], key
        self._fill(key, contents)
        return value

    def _pack_error(self, error: BaseException) -> Any:
        at = getattr(error, "__dict__", {}).get("_far_at")
        if at is not None:
            return ["yours", at]
        return [
            "error",
            self._number(error),
            self._pack_class(type(error)),
            [self.pack(argument) for argument in error.args],
        ]

    def _pack_class(self, kind: type, of_objects: bool = False) -> Any:
        if isinstance(kind, FarClass):
            return ["yours", kind._far_number]
        name_parts = self.named(kind)
        if name_parts is not None and not of_objects:
            return ["class", *name_parts]
        number = self._number(kind)
        if number in self._described:
            return ["described", number]
        self._described.add(number)
        bases = (
            [] if name_parts is not None else [self._pack_class(base) for base in kind.__bases__ if base is not object]
        )
        is_error = issubclass(kind, BaseException)
        foreign = [
            base_class
            for base_class in kind.__mro__
            if base_class is not object and not (is_error and self.named(base_class))
        ]
        specials = sorted({name for base_class in foreign for name in vars(base_class) if name in SPECIALS})
        unhashable = getattr(kind, "__hash__", None) is None
        like = name_parts or next(
            (("builtins", base.__name__) for base in kind.__mro__ if base in copied_values.BASES), None
        )
        facts = [str(kind.__module__), kind.__name__, bases, specials, is_error, unhashable, like]
        return ["described", number, facts]

    def unpack(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        match data:
            case ["tuple" | "frozenset" as kind, items]:
                return (tuple if kind == "tuple" else frozenset)(self.unpack(item) for item in items)
            case ["plain", name, text]:
                return copied_values.read(name, text)
            case ["shared", key]:
                return self._shared[key][0]
            case ["shared", key, kind, option, contents]:
                return self._unpack_shared(key, kind, self.unpack(option), contents)
            case ["yours", number]:
                return self._ours[number]
            case ["module", name]:
                return self.guard.module(name)
            case ["error", number, kind, args]:
                return self._unpack_error(number, self.unpack(kind), [self.unpack(item) for item in args])
            case ["class", module, name]:
                return self.guard.local_class(module, name) or FarFailure
            case ["named", module, name] if not self.is_trusted:
                return operator.attrgetter(name)(importlib.import_module(module))
            case ["described", number, *facts]:
                return self._unpack_class(number, *facts)
            case ["awaitable", number]:
                return self._relay(number)
            case ["object", number, kind]:
                return self._stand_in(number, self.unpack(kind))
        raise Lost

    def _stand_in(self, number: int, kind: Any) -> Any:
        if not isinstance(kind, FarClass):  # an empty object of a class of ours is nobody's to make
            raise Lost
        stand_in = self._theirs.get(number)
        if stand_in is None:
            make: Any = object.__new__
            stand_in = make(kind)
            object.__setattr__(stand_in, "_far_at", number)
            self._theirs[number] = stand_in
        return stand_in

    def _unpack_error(self, number: int, kind: Any, args: list[Any]) -> BaseException:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = FarFailure
        error: BaseException = kind.__new__(kind, *args)
        error.args = tuple(args)
        if isinstance(error, OSError | SystemExit | StopIteration | UnicodeError):
            with contextlib.suppress(TypeError):
                kind.__init__(error, *args)
        vars(error)["_far_at"] = number
        return error

    def _unpack_class(self, number: int, facts: list[Any] | None = None) -> Any:
        if number in self.classes:
            return self.classes[number]
        if facts is None:
            raise Lost
        module, name, bases, specials, is_error, unhashable, like = facts
        unpacked = [self.unpack(item) for item in bases]
        space: dict[str, Any] = {item: forward(item) for item in specials if item in SPECIALS}
        if unhashable:
            space["__hash__"] = None
        elif "__eq__" in space:
            space.setdefault("__hash__", forward("__hash__"))
        space |= {"_far_number": number, "_far_link": self, "_far_like": None, "__module__": module}
        if is_error:
            errors = [item for item in unpacked if isinstance(item, type) and issubclass(item, BaseException)]
            chosen = tuple(dict.fromkeys(errors)) or (Exception,)
            new_class: Any = FarClass(
                name, chosen if any(issubclass(item, FarError) for item in chosen) else (FarError, *chosen), space
            )
        else:
            real: list[Any] = [
                item for item in unpacked if isinstance(item, FarClass) and not issubclass(item, BaseException)
            ]
            space["__slots__"] = ()
            space["_far_like"] = like and self.guard.local_class(*like)
            try:
                new_class = FarClass(name, tuple(dict.fromkeys(real)) or (FarObject,), space)
            except TypeError:  # bases in an order that nobody can follow
                new_class = FarClass(name, (FarObject,), space)
        self.classes[number] = new_class
        return new_class

    async def _relay(self, number: int) -> Any:
        return self.request("await", number)

    def _new_number(self) -> int:
        self._next += 2
        return self._next

    def _number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = self._new_number()
            self._ours[number] = value
        return number

    def _is_code(self, module: ModuleType) -> bool:
        spec = getattr(module, "__spec__", None)
        places = [getattr(spec, "origin", None), *(getattr(spec, "submodule_search_locations", None) or ())]
        return any(str(location).startswith(self.scratch + "/") for location in places if location)

    def named(self, thing: Any) -> tuple[str, str] | None:
        """Module and name of what is the same in both processes."""
        name, module = getattr(thing, "__qualname__", None), sys.modules.get(getattr(thing, "__module__", None) or "")
        if not isinstance(name, str) or module is None or self._is_code(module) or not _is_installed(module):
            return None
        value: Any = module
        for part in name.split("."):
            value = getattr(value, part, None)
        return (module.__name__, name) if value is thing else None


def _snapshot(value: Any) -> Any:
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict):
        return [item for pair in dict.items(value) for item in pair]
    return list(value)


def _is_installed(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return module is builtins or (spec is not None and spec.origin is not None)
