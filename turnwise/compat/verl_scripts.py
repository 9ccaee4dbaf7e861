"""The key=value words of a shell script that runs verl, with the script's own variables filled in; nothing is run."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from turnwise.errors import ConfigError

COMMAND = re.compile(r"^(?!\s*#).*\b\w+(?:\.\w+)*\.main_ppo\w*", re.MULTILINE)
_ASSIGNED = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)\+?=(\([^()]*\)|[^\n]*)", re.MULTILINE)
_ARRAY = re.compile(r"\$\{(\w+)\[@\]\}")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|\$([A-Za-z_]\w*)")
_HERE = ("$(pwd)", "`pwd`")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def overrides(path: Path) -> Iterator[tuple[str, str]]:
    """Keys and their texts. What is not set by the script keeps its `$`, and its reader says so."""
    text = path.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    for here in _HERE:
        text = text.replace(here, ".")
    commands = list(COMMAND.finditer(text))
    if not commands:
        raise ConfigError(f"{path}: no line runs verl.trainer.main_ppo")
    start = commands[-1].start()
    line = text[start:].partition("\n")[0]
    words = _words(line)
    if words is None:
        raise ConfigError(f"{path}: the line that runs verl cannot be read: a quotation has no end")
    variables = _variables(text[:start])
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--config-name":  # Hydra's, after = or as the next word; UNREAD says what becomes of it
            yield "defaults", value or "".join(words[number + 1 : number + 2])
        if (array := _ARRAY.fullmatch(word)) is not None and array[1] not in variables:
            raise ConfigError(f"{path}: the array {array[1]} cannot be read: write its words into the command itself")
        for one in variables[array[1]] if array is not None else [_filled(word, variables)]:
            if (found := _OVERRIDE.fullmatch(one)) is not None and "." in found[1]:
                yield found[1], found[2]


def _variables(text: str) -> dict[str, list[str]]:
    """What the script sets before the command: a text as a list of one, an array as its words."""
    found = {"HOME": [str(Path.home())], "PWD": ["."]}
    for name, value in _ASSIGNED.findall(text):
        is_array = value.startswith("(") and value.endswith(")")
        words = _words(value[1:-1] if is_array else value)
        if words is None or (not is_array and (len(words) != 1 or value.startswith("("))):
            continue  # a command or its output: the script would have to be run
        found[name] = [_filled(word, found) for word in words]
    return found


def _filled(word: str, variables: Mapping[str, list[str]]) -> str:
    def meant(found: re.Match[str]) -> str:
        known = variables.get(found[1] or found[3], [])
        if len(known) == 1:
            return known[0]
        return found[0] if found[2] is None else _filled(found[2], variables)

    return _VARIABLE.sub(meant, word)


def _words(text: str) -> list[str] | None:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return None
