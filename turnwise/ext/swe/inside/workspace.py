"""What is done to the files of a repository, as a script that is run inside a shell session: place, edit, collect.

It reads one JSON object and prints another. It runs as confined as the commands of the session, with Python's own
modules only, so a path or a link that leads elsewhere leads nowhere.
"""

import hashlib
import json
import os
import stat
import sys
from typing import Any

MOST_VIEWED = 400
"""Lines that one look at a file shows."""
MOST_FILE = 1_000_000
MOST_CHANGED = 262_144
MOST_FILES = 200


class RequestRefused(Exception):
    """What the caller is told in words."""


def place(order: dict[str, Any]) -> dict[str, Any]:
    """Write files, remove those that are null."""
    for name, text in order["files"].items():
        path = os.path.join(order["root"], name)
        if text is None:
            if os.path.lexists(path):
                os.unlink(path)
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    return {}


def edit(order: dict[str, Any]) -> dict[str, Any]:
    """view, create, str_replace or insert, on one file of the repository."""
    root = os.path.realpath(order["root"])
    path = os.path.realpath(os.path.join(root, order["path"]))
    if path != root and not path.startswith(root + "/"):
        raise RequestRefused(f"{order['path']} is not in the repository")
    name = os.path.relpath(path, root)
    command = order["command"]
    if command == "view" and os.path.isdir(path):
        return {"text": listing(path)}
    if command == "create":
        if os.path.lexists(path):
            raise RequestRefused(f"{name} exists already: change it with str_replace or insert")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write(path, order["file_text"])
        return {"text": f"{name} was made."}
    text = read(path, name)
    if command == "view":
        return {"text": numbered(text, order.get("view_range"))}
    if command == "str_replace":
        old, new = order["old_str"], order["new_str"]
        count = text.count(old) if old else 0
        if count != 1:
            problem = "does not occur" if count == 0 else f"occurs {count} times"
            raise RequestRefused(f"old_str {problem} in {name}; it must occur exactly once, with its white space")
        start = text[: text.index(old)].count("\n") + 1
        write(path, text.replace(old, new))
        span = [max(start - 3, 1), start + new.count("\n") + 3]
        return {"text": f"{name} was changed:\n{numbered(read(path, name), span)}"}
    lines = text.splitlines(keepends=True)
    at = order["insert_line"]
    if not 0 <= at <= len(lines):
        raise RequestRefused(f"insert_line must be from 0 to {len(lines)}, the number of lines of {name}")
    new = order["new_str"]
    if at and not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    lines.insert(at, new if new.endswith("\n") else new + "\n")
    write(path, "".join(lines))
    span = [max(at - 2, 1), at + new.count("\n") + 4]
    return {"text": f"{name} was changed:\n{numbered(read(path, name), span)}"}


def read(path: str, name: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not hold us
        with open(descriptor, encoding="utf-8", newline="") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_FILE:
                raise RequestRefused(f"{name} is no text file of at most {MOST_FILE} bytes")
            return file.read()
    except FileNotFoundError:
        raise RequestRefused(f"there is no file {name}") from None
    except UnicodeDecodeError:
        raise RequestRefused(f"{name} is no UTF-8 text") from None
    except OSError as error:
        raise RequestRefused(f"{name}: {error.strerror}") from None


def write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise RequestRefused(f"cannot write: {error.strerror}") from None


def numbered(text: str, span: list[int] | None) -> str:
    """Lines of a text with their numbers, all or those of a span."""
    lines = text.splitlines()
    if span is not None and len(span) != 2:
        raise RequestRefused("view_range is two numbers, the first and the last line")
    first, last = span or [1, len(lines)]
    last = len(lines) if last == -1 else min(last, len(lines))
    if first < 1 or (first > last and lines):
        raise RequestRefused(f"view_range must lie in 1 to {len(lines)}")
    viewed = lines[first - 1 : min(last, first - 1 + MOST_VIEWED)]
    result = [f"{number:6}\t{line}" for number, line in enumerate(viewed, first)]
    if last - first + 1 > MOST_VIEWED:
        result.append(f"[{last - first + 1 - MOST_VIEWED} lines left out: give view_range]")
    return "\n".join(result)


def listing(folder: str) -> str:
    """Files two levels deep, without hidden ones."""
    paths = []
    for parent, folders, files in os.walk(folder):
        depth = os.path.relpath(parent, folder).count("/") + (parent != folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < 2 else []
        paths += [os.path.relpath(os.path.join(parent, name), folder) for name in sorted(files)]
    visible = [name for name in paths if not name.startswith(".")]
    return "\n".join(visible[:MOST_FILES]) or "(no files)"


def collect(order: dict[str, Any]) -> dict[str, Any]:
    """Files that differ from those known ({path: sha256}), with their text, and null for those that are gone."""
    root, digests = order["root"], order["known"]
    changed: dict[str, str | None] = {}
    present, size, skipped = set(), 0, 0
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in (".git", "__pycache__", ".pytest_cache"))
        for name in sorted(files):
            path = os.path.join(folder, name)
            facts = os.lstat(path)
            relative = os.path.relpath(path, root)
            if not stat.S_ISREG(facts.st_mode) or name.endswith(".pyc"):
                skipped += 1
                continue
            if facts.st_size > MOST_FILE:
                return {"too_much": f"{relative} has {facts.st_size} bytes"}
            with open(path, "rb") as file:
                content = file.read()
            present.add(relative)
            if hashlib.sha256(content).hexdigest() == digests.get(relative):
                continue
            try:
                changed[relative] = content.decode()
            except UnicodeDecodeError:
                skipped += 1
                continue
            size += len(content)
            if size > MOST_CHANGED or len(changed) > MOST_FILES:
                return {"too_much": f"the changes are more than {MOST_FILES} files or {MOST_CHANGED} bytes"}
    changed.update(dict.fromkeys(sorted(set(digests) - present)))
    return {"changes": changed, "skipped": skipped}


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    try:
        answer = {"place": place, "edit": edit, "collect": collect}[order["do"]](order)
    except RequestRefused as error:
        answer = {"refused": str(error)}
    except OSError as error:
        answer = {"refused": f"{error.strerror}: {error.filename}"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
