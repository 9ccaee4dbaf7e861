"""The files of tests, held in memory: modules of tests are made of it, other code is imported in its own process."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from turnwise.ext.swe.inside.proxies import FarModule
from turnwise.ext.swe.inside.rpc import Link

_PICKLED = {
    "builtins": {"set", "frozenset", "bytearray", "complex", "range", "slice", "object"},
    "copyreg": {"_reconstructor"},
    "collections": {"OrderedDict", "Counter", "deque", "defaultdict"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "uuid": {"UUID"},
}


class _Held(importlib.abc.Loader):
    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._text, self._path, "exec", dont_inherit=True), vars(module))


class _Afar(importlib.abc.Loader):
    def __init__(self, link: Link, places: list[str]) -> None:
        self._link, self._places = link, places

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        places = self._link.request("import", spec.name, self._places)
        spec.submodule_search_locations = [str(folder) for folder in places] if isinstance(places, list) else None
        return self._link.modules.setdefault(spec.name, FarModule(spec.name, self._link))

    def exec_module(self, module: ModuleType) -> None:
        return


class HeldFiles:
    """Imports of a process that runs tests: nothing that lies in the scratch folder is run here but what is held."""

    def __init__(self, link: Link, root: str, scratch: str, held: Mapping[str, str], code: Sequence[str]) -> None:
        self._link, self._scratch = link, scratch
        self._held = {os.path.join(root, name): text for name, text in held.items()}
        self._data = {path: text.encode() for path, text in self._held.items()}
        self._code = {os.path.join(root, name) for name in code}
        self._folders = {os.path.dirname(path)[: at or None] for path in self._code for at in self._ends(path)}
        self._test_folders = {os.path.dirname(path)[: at or None] for path in self._held for at in self._ends(path)}
        self._looking = False
        prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(os.path.isabs, sys.path)} - {root}
        self._installed_in = tuple(
            {f"{folder}/" for prefix in prefixes for folder in (prefix, os.path.realpath(prefix))}
        )

    @staticmethod
    def _ends(path: str) -> list[int]:
        """Where each folder above a file ends in its path; 0 is its own."""
        return [0, *(at for at, letter in enumerate(os.path.dirname(path)) if letter == "/" and at)]

    def install(self) -> None:
        sys.meta_path[:] = [self]
        for path, text in self._held.items():  # where source is looked up: on disk, modules of tests are empty
            linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        sys.addaudithook(self._audit)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        places = [os.path.abspath(folder or os.getcwd()) for folder in (sys.path if path is None else path)]
        for folder in filter(self._inside, places):
            own_spec = self._in_repository(name, os.path.join(folder, name.rpartition(".")[2]), places)
            if own_spec is not None:
                return own_spec
        if path is None:
            for finder in (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter):
                if (spec := finder.find_spec(name)) is not None:
                    return spec
        return importlib.machinery.PathFinder.find_spec(name, list(filter(self._installed, places)))

    def invalidate_caches(self) -> None:
        importlib.machinery.PathFinder.invalidate_caches()

    def _in_repository(self, name: str, base: str, places: list[str]) -> Any:
        is_namespace = base in self._test_folders and base not in self._folders
        for file, is_package in ((base + "/__init__.py", True), (base + ".py", False)):
            if file in self._held:
                loader = _Held(file, self._held[file])
                return importlib.util.spec_from_file_location(
                    name, file, loader=loader, submodule_search_locations=[base] if is_package else None
                )
            if file in self._code and not is_namespace:
                return self._afar(name, file, places)
        if is_namespace:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [base]
            return spec
        return self._afar(name, base, places) if base in self._folders else None

    def _afar(self, name: str, origin: str, places: list[str]) -> Any:
        return importlib.machinery.ModuleSpec(
            name, _Afar(self._link, list(filter(self._inside, places))), origin=origin
        )

    def _inside(self, path: str) -> bool:
        return path == self._scratch or path.startswith(self._scratch + "/")

    def _installed(self, path: str) -> bool:
        """Whether it belongs to Python or its packages; of all else, the code under test may write anywhere."""
        return f"{path}/".startswith(self._installed_in) and not self._inside(path)

    def _is_foreign(self, name: str) -> bool:
        """Whether code comes from a file that is neither installed nor a test's."""
        path = os.path.abspath(name)
        is_file = os.path.isabs(name) or (not name.startswith("<") and os.path.exists(path))
        return is_file and path not in self._held and not self._installed(path)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "exec" and self._is_foreign(name := getattr(args[0], "co_filename", "")):
            raise PermissionError(f"{name}: a file of the code under test is not run by a test itself")
        if event == "pickle.find_class" and args[1] not in _PICKLED.get(args[0], ()):
            raise PermissionError(f"{args[0]}.{args[1]}: not to be unpickled by a test")
        if event == "open" and not self._looking and isinstance(args[0], str | bytes):
            self._check_file(os.path.abspath(os.fsdecode(args[0])), str(args[1] or "r"))
        if event == "os.remove":
            self._data.pop(os.path.abspath(os.fsdecode(args[0])), None)
        if event in ("os.listdir", "os.scandir") and isinstance(args[0], str | bytes):
            self._check_folder(os.path.abspath(os.fsdecode(args[0])))

    def _check_folder(self, path: str) -> None:
        """A test that does something for each file there is would do nothing, so what came with it must be there."""
        gone = [file for file in self._data if os.path.dirname(file) == path and not os.path.lexists(file)]
        if gone:  # no OSError, which `glob` takes for an empty folder
            raise RuntimeError(f"{gone[0]}: removed by the code under test")

    def _check_file(self, path: str, mode: str) -> None:
        """A test reads what came with it; the code under test could have written there."""
        if path not in self._data:
            return
        if set(mode) & set("wax+"):
            del self._data[path]
            return
        self._looking = True
        try:
            with open(path, "rb") as file:
                same = file.read() == self._data[path]
        finally:
            self._looking = False
        if not same:
            raise PermissionError(f"{path}: changed by the code under test")
