"""Finding what users bring: `module:name`, `file.py:name` or `package.module.Class`; errors say what was tried."""

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from turnwise.errors import PluginError, TurnwiseError, nearest, one_line, unknown
from turnwise.verl_imports import advice, instead, needs_verl, stand_ins

LONGEST_NAME = 80
"""Characters that a message shows of a name."""
SLOW_IMPORT = 15.0
"""Seconds after which it is said that something is still importing."""
LONGEST_IMPORT = 300.0


def load(spec: str, kind: str, *, near: Path | None = None) -> Any:
    """The object a spec names.

    `near` is the folder of the file the spec was written in; modules are looked for there and in the current folder
    besides the installed ones.
    """
    if ":" in spec:
        place, _, name = spec.rpartition(":")
    else:
        place, _, name = spec.rpartition(".")
    if not place or not name or (name == "py" and ":" not in spec):
        raise PluginError(f"{kind} {spec!r}: write module:name, file.py:name or package.module.Class")
    module = _module(place, spec, kind, near)
    if not hasattr(module, name):
        public = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        raise PluginError(f"{kind} {spec!r}: {place} has no {name!r}: {nearest(name, public)}")
    return getattr(module, name)


def unnamed(kind: str, name: str, known: Iterable[str], *keys: str) -> str:
    """A row names code that the config does not: data chooses among names, and never imports anything."""
    return (
        f"the row names the {kind} {name[:LONGEST_NAME]!r}, which is neither built in nor named by the config: rows "
        f"choose among {', '.join(sorted(known))}; if you trust that code, name it in {' or '.join(keys)}"
    )


def load_module(place: str, kind: str, *, near: Path | None = None) -> ModuleType:
    """The module of a file, or of a dotted name."""
    return _module(place, place, kind, near)


def _module(place: str, spec: str, kind: str, near: Path | None) -> ModuleType:
    folders = [folder for folder in (near, Path.cwd()) if folder is not None]
    if place.endswith(".py"):
        with stand_ins(), _watched(spec, kind):
            return _from_file(place, spec, kind, folders)
    for folder in folders:  # before the stand-ins look whether there is a verl: it may be the user's own, here
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # last: a user's folder must not shadow installed packages
    importlib.invalidate_caches()
    with stand_ins(), _watched(spec, kind):
        return _from_name(place, spec, kind, folders)


class ImportTookTooLong(BaseException):
    """Raised in the middle of a user's code, which may catch every Exception."""


@contextlib.contextmanager
def _watched(spec: str, kind: str) -> Iterator[None]:
    """Say that an import takes long, and end one that never does; only the main thread can be interrupted."""
    said = f"{kind} {spec[-LONGEST_NAME:]!r}: still importing after {SLOW_IMPORT:g} s"
    word = threading.Timer(SLOW_IMPORT, print, [said], {"file": sys.stderr})
    word.daemon = True
    in_main = threading.current_thread() is threading.main_thread()
    stops = in_main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL  # else it is another's, or an outer import's

    def give_up(*_: object) -> None:
        raise ImportTookTooLong(f"it has not ended after {LONGEST_IMPORT:g} s")

    word.start()
    try:
        if stops:
            signal.signal(signal.SIGALRM, give_up)
            signal.setitimer(signal.ITIMER_REAL, LONGEST_IMPORT)
        yield
    finally:
        word.cancel()
        if stops:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


def call(function: Any, spec: str, kind: str, *args: Any) -> Any:
    """What a function of the user's gives; PluginError when it cannot be called or fails."""
    if not callable(function):
        raise PluginError(f"{kind} {spec!r} must be a function, not {type(function).__name__}")
    try:
        return function(*args)
    except TurnwiseError:
        raise
    except Exception as error:  # a user's code, run before anything else: its author reads the message
        raise PluginError(f"{kind} {spec!r} failed: {one_line(error)}") from error


def load_function(spec: str, kind: str) -> Callable[[Any], Any]:
    """A plain function of one argument."""
    found = load(spec, kind)
    if not callable(found) or isinstance(found, type):
        raise PluginError(f"{kind} {spec!r} must be a function, not {type(found).__name__}")
    if inspect.iscoroutinefunction(found):
        raise PluginError(f"{kind} {spec!r} must be a plain function, not an async one")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise PluginError(f"{kind} {spec!r} must take the batch and nothing else: {error}") from error
    checked: Callable[[Any], Any] = found
    return checked


def call_with(function: Callable[[Any], Any], batch: object, where: str) -> Any:
    """What such a function makes of a batch in the middle of a run."""
    try:
        return function(batch)
    except TurnwiseError:
        raise
    except Exception as error:  # a user's code: its author reads the message
        raise PluginError(f"{where} raised {one_line(error)}") from error


def names_in(package: str) -> list[str]:
    """The public modules of a package: the folder is the registry."""
    found = importlib.import_module(package)
    return sorted(entry.name for entry in pkgutil.iter_modules(found.__path__) if not entry.name.startswith("_"))


def builtin(
    package: str, name: str, kind: str, *, leave_out: tuple[str, ...] = (), takes_own: bool = True
) -> ModuleType:
    """The module of a bare name in a folder of ours; `takes_own` where a user may name one of theirs instead."""
    valid = [entry for entry in names_in(package) if entry not in leave_out]
    if name not in valid:
        raise PluginError(unknown(kind, name, valid) + (" Your own is written as module:name." if takes_own else ""))
    return importlib.import_module(f"{package}.{name}")


def _from_file(place: str, spec: str, kind: str, folders: list[Path]) -> ModuleType:
    tried = [folder / place for folder in folders]
    try:
        path = next((candidate for candidate in tried if candidate.is_file()), None)
    except OSError as error:  # a name that is too long
        raise PluginError(f"{kind} {spec[:80]!r}: {error.strerror}") from error
    if path is None:
        raise PluginError(f"{kind} {spec!r}: no such file; tried {', '.join(map(str, dict.fromkeys(tried)))}")
    # The whole path names the module, so that two files called reward.py do not overwrite each other.
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
    name = f"turnwise_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    description = importlib.util.spec_from_file_location(name, path)
    if description is None or description.loader is None:
        raise PluginError(f"{kind} {spec!r}: {path} cannot be imported")
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module
    try:
        description.loader.exec_module(module)
    except BaseException as error:  # a script without a main guard may call sys.exit
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, ImportError) and needs_verl(error):
            raise PluginError(f"{kind} {spec!r}: {advice(error)}") from error
        raise PluginError(f"{kind} {spec!r}: running {path} failed: {one_line(error)}") from error
    return module


def _from_name(place: str, spec: str, kind: str, folders: list[Path]) -> ModuleType:
    try:
        module = importlib.import_module(place)
    except ImportError as error:
        if needs_verl(error):
            own = place.split(".")[0] == "verl"
            reason = f"verl is not installed; {instead(place)}" if own else advice(error)
            raise PluginError(f"{kind} {spec!r}: {reason}") from error
        if not isinstance(error, ModuleNotFoundError):
            raise PluginError(f"{kind} {spec!r}: importing {place} failed: {one_line(error)}") from error
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            searched = ", ".join(str(folder) for folder in dict.fromkeys(folders))
            raise PluginError(
                f"{kind} {spec!r}: no module {error.name!r} among installed ones or in {searched}"
            ) from error
        raise PluginError(f"{kind} {spec!r}: importing {place} needs {error.name!r}, which is not installed") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it may call sys.exit
        raise PluginError(f"{kind} {spec!r}: importing {place} failed: {one_line(error)}") from error
    _check_shadowed(module, place, spec, kind, folders[0])
    return module


def _check_shadowed(module: ModuleType, place: str, spec: str, kind: str, folder: Path) -> None:
    """Refuse a namesake: one installed, or one of another folder that was imported before."""
    meant = folder.joinpath(*place.split("."))
    files = [file for file in (meant.with_suffix(".py"), meant / "__init__.py") if file.is_file()]
    found = getattr(module, "__file__", None)
    if files and (found is None or Path(found).resolve() != files[0].resolve()):
        if place.split(".")[0] == __name__.split(".")[0]:
            return  # a checkout of this package lies in the folder; the running one is meant
        name = spec[len(place) + 1 :]
        taken = f"{place} is {found or 'built in'}, not {files[0]}"
        raise PluginError(f"{kind} {spec!r}: {taken}; if that is meant, write {files[0]}:{name}")
