"""One line for a module whose packages an extra of the installation brings."""

from turnwise.errors import ConfigError


def without_extra(what: str, extra: str, error: ModuleNotFoundError, module: str) -> BaseException:
    """What a module raises that was imported, or was started with `python -m`, without its packages."""
    text = f"{what} needs {error.name}: pip install 'turnwise[{extra}]'"
    return SystemExit(text) if module == "__main__" else ConfigError(text)
