"""Finding what users bring: `module:name`, `file.py:name` or `package.module.Class`; errors say what was tried."""

import contextlib
import difflib
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

from turnwise.errors import PluginError, TurnwiseError, one_line
from turnwise.errors.nearest_name import nearest, unknown
from turnwise.extensions import adapters, import_hooks

LONGEST_NAME = 80
"""Characters that a message shows of a name."""
SLOW_IMPORT = 15.0
"""Seconds after which it is said that something is still importing."""
LONGEST_IMPORT = 300.0
_OURS = __name__.split(".")[0]
"""The name of this package."""


def load(spec: str, kind: str, *, near: Path | None = None) -> Any:
    """The object a spec names.

    `near` is the folder of the file the spec was written in; modules are looked for there and in the current folder
    besides the installed ones.
    """
    if ":" in spec:
        target, _, name = spec.rpartition(":")
    else:
        target, _, name = spec.rpartition(".")
    if not target or not name or (name == "py" and ":" not in spec):
        raise PluginError(f"{kind} {spec!r}: write module:name, file.py:name or package.module.Class")
    module = _module(target, spec, kind, near)
    if not hasattr(module, name):
        public = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        raise PluginError(f"{kind} {spec!r}: {target} has no {name!r}: {nearest(name, public)}")
    return getattr(module, name)


def adapted(kind: str, value: object, entry: Any) -> Any:
    """Ours, made of a foreign object by the first extension that knows its kind; None when none does."""
    for adapter in adapters(kind):
        ours = load(adapter, "adapter")(value, entry)
        if ours is not None:
            return ours
    return None


def unnamed(kind: str, name: str, valid: Iterable[str], *keys: str) -> str:
    """A row names code that the config does not: data chooses among names, and never imports anything."""
    return (
        f"the row names the {kind} {name[:LONGEST_NAME]!r}, which is neither built in nor named by the config: rows "
        f"choose among {', '.join(sorted(valid))}; if you trust that code, name it in {' or '.join(keys)}"
    )


def load_module(target: str, kind: str, *, near: Path | None = None) -> ModuleType:
    """The module of a file, or of a dotted name."""
    return _module(target, target, kind, near)


def _module(target: str, spec: str, kind: str, near: Path | None) -> ModuleType:
    folders = [folder for folder in (near, Path.cwd()) if folder is not None]
    if target.endswith(".py"):
        with _hooked(), _watched(spec, kind):
            return _from_file(target, spec, kind, folders)
    if target.split(".")[0] == _OURS:
        return _from_name(target, spec, kind, folders)
    if any((folder / target).is_file() for folder in folders):
        raise PluginError(f"{kind} {spec!r}: code is a file that ends in .py, or a module; {target} is neither")
    for folder in folders:  # before the hooks look what is installed: it may be the user's own, here
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # last: a user's folder must not shadow installed packages
    importlib.invalidate_caches()
    with _hooked(), _watched(spec, kind):
        return _from_name(target, spec, kind, folders)


@contextlib.contextmanager
def _hooked() -> Iterator[None]:
    """While a user's file is imported, extensions may serve what it expects of another package."""
    with contextlib.ExitStack() as stack:
        for hook in import_hooks():
            stack.enter_context(importlib.import_module(hook).importing())
        yield


def _advice(error: ImportError, place: str) -> str | None:
    """What an extension says to an import that failed; None when it concerns none of them."""
    texts = (importlib.import_module(hook).advice(error, place) for hook in import_hooks())
    return next((text for text in texts if text is not None), None)


class ImportTookTooLong(BaseException):
    """Raised in the middle of a user's code, which may catch every Exception."""


@contextlib.contextmanager
def _watched(spec: str, kind: str) -> Iterator[None]:
    """Say that an import takes long, and end one that never does; only the main thread can be interrupted."""
    warning = f"{kind} {spec[-LONGEST_NAME:]!r}: still importing after {SLOW_IMPORT:g} s"
    word = threading.Timer(SLOW_IMPORT, print, [warning], {"file": sys.stderr})
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
    except (Exception, SystemExit) as error:  # a user's code, run before anything else: its author reads the message
        raise PluginError(f"{kind} {spec!r} failed: {one_line(error)}") from error


def load_function(spec: str, kind: str) -> Callable[[Any], Any]:
    """A plain function of one argument."""
    function = load(spec, kind)
    if not callable(function) or isinstance(function, type):
        raise PluginError(f"{kind} {spec!r} must be a function, not {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise PluginError(f"{kind} {spec!r} must be a plain function, not an async one")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise PluginError(f"{kind} {spec!r} must take the batch and nothing else: {error}") from error
    checked: Callable[[Any], Any] = function
    return checked


def call_with(function: Callable[[Any], Any], batch: object, where: str) -> Any:
    """What such a function makes of a batch in the middle of a run."""
    try:
        return function(batch)
    except TurnwiseError:
        raise
    except (Exception, SystemExit) as error:  # a user's code: its author reads the message
        raise PluginError(f"{where} raised {one_line(error)}") from error


def names_in(package: str) -> list[str]:
    """The public modules of a package: the folder is the registry."""
    module = importlib.import_module(package)
    return sorted(entry.name for entry in pkgutil.iter_modules(module.__path__) if not entry.name.startswith("_"))


def plain_options(package: str, name: str) -> frozenset[str]:
    """Options of a built-in plug-in that lead nowhere, as its own file declares them; none where it declares none."""
    if name not in names_in(package):
        return frozenset()
    return frozenset(getattr(importlib.import_module(f"{package}.{name}"), "PLAIN_OPTIONS", ()))


def builtin(
    package: str,
    name: str,
    kind: str,
    *,
    leave_out: tuple[str, ...] = (),
    further: Iterable[str] = (),
    takes_own: bool = True,
) -> ModuleType:
    """The module of a bare name in a folder of ours.

    `further` names come from elsewhere and are only told; `takes_own` where a user may name one of theirs instead.
    """
    valid = [entry for entry in names_in(package) if entry not in leave_out]
    if name not in valid:
        raise PluginError(
            unknown(kind, name, sorted({*valid, *further}))
            + (" Your own is written as file.py:name." if takes_own else "")
        )
    return importlib.import_module(f"{package}.{name}")


def _from_file(target: str, spec: str, kind: str, folders: list[Path]) -> ModuleType:
    tried = [folder / target for folder in folders]
    try:
        path = next((candidate for candidate in tried if candidate.is_file()), None)
    except OSError as error:  # a name that is too long
        raise PluginError(f"{kind} {spec[:80]!r}: {error.strerror}") from error
    if path is None:
        names = [file.name for place in dict.fromkeys(path.parent for path in tried) for file in place.glob("*.py")]
        meant = difflib.get_close_matches(Path(target).name, names, n=1)
        hint = f": did you mean {meant[0]!r}?" if meant else ""
        raise PluginError(f"{kind} {spec!r}: no such file; tried {', '.join(map(str, dict.fromkeys(tried)))}{hint}")
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
        if isinstance(error, ImportError) and (advice := _advice(error, target)) is not None:
            raise PluginError(f"{kind} {spec!r}: {advice}") from error
        raise PluginError(f"{kind} {spec!r}: running {path} failed: {one_line(error)}") from error
    return module


def _from_name(target: str, spec: str, kind: str, folders: list[Path]) -> ModuleType:
    try:
        module = importlib.import_module(target)
    except ImportError as error:
        if (advice := _advice(error, target)) is not None:
            raise PluginError(f"{kind} {spec!r}: {advice}") from error
        if not isinstance(error, ModuleNotFoundError):
            raise PluginError(f"{kind} {spec!r}: importing {target} failed: {one_line(error)}") from error
        if error.name is not None and (target == error.name or target.startswith(error.name + ".")):
            searched = ", ".join(str(folder) for folder in dict.fromkeys(folders))
            raise PluginError(
                f"{kind} {spec!r}: no module {error.name!r} among installed ones or in {searched}"
            ) from error
        raise PluginError(
            f"{kind} {spec!r}: importing {target} needs {error.name!r}, which is not installed"
        ) from error
    except (KeyboardInterrupt, TurnwiseError):
        raise
    except BaseException as error:  # it may call sys.exit
        raise PluginError(f"{kind} {spec!r}: importing {target} failed: {one_line(error)}") from error
    _check_shadowed(module, target, spec, kind, folders[0])
    return module


def _check_shadowed(module: ModuleType, target: str, spec: str, kind: str, folder: Path) -> None:
    """Refuse a namesake: one installed, or one of another folder that was imported before."""
    meant = folder.joinpath(*target.split("."))
    files = [file for file in (meant.with_suffix(".py"), meant / "__init__.py") if file.is_file()]
    file_name = getattr(module, "__file__", None)
    if files and (file_name is None or Path(file_name).resolve() != files[0].resolve()):
        if target.split(".")[0] == _OURS:
            return  # a checkout of this package lies in the folder; the running one is meant
        name = spec[len(target) + 1 :]
        problem = f"{target} is {file_name or 'built in'}, not {files[0]}"
        raise PluginError(f"{kind} {spec!r}: {problem}; if that is meant, write {files[0]}:{name}")
