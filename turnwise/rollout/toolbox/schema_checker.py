"""What is wrong with a JSON schema, or with arguments for it; run as a script, answers lines under its CPU clock.

Started by path from `SchemaCheckers` of schema.py, so it imports nothing of this package.
"""

import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

MEMORY = 2 * 1024**3
"""Bytes of address space; more than that raises MemoryError here instead of filling the machine."""
LONGEST = 300
"""Characters of what is said."""
TOO_DEEP = "nested too deeply"
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by any name."""
DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""


def schema_problem(parameters: Any) -> str | None:
    """Why this is no schema of arguments that can be checked; None when it is one."""
    if not isinstance(parameters, dict):
        return f"its parameters are not a JSON schema: {parameters!r:.80} is not a mapping"
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
        resolver = Registry().with_resource("", DRAFT202012.create_resource(parameters)).resolver()
        for reference in _references(parameters):
            if not reference.startswith("#"):  # jsonschema would go and fetch it
                return f"its schema refers to {reference!r:.80}, outside itself"
            resolver.lookup(reference)
    except jsonschema.SchemaError as error:
        return f"its parameters are not a JSON schema: {error.message[:LONGEST]}"
    except Unresolvable:
        return f"its schema refers to {reference!r:.80}, which it lacks"  # the one it was at
    except (RecursionError, OverflowError):
        return f"its schema is {TOO_DEEP}"
    return None


def argument_problem(validator: jsonschema.Draft202012Validator, arguments: Any) -> str | None:
    """The first thing that is wrong with arguments, in words that a model can act on; None when they fit."""
    try:
        errors = sorted(validator.iter_errors(arguments), key=lambda error: [str(step) for step in error.path])
    except RecursionError:
        return TOO_DEEP
    except OverflowError:  # a whole number that no fraction can be compared with
        return "it has a number that is too large"
    except (re.error, Unresolvable) as error:
        return f"its schema cannot be used: {str(error)[:LONGEST]}"
    if not errors:
        return None
    where = ".".join(str(step) for step in errors[0].path)
    return f"{where + ': ' if where else ''}{errors[0].message[:LONGEST]}"


def _references(schema: Any) -> Iterator[str]:
    """Wherever a schema has one: names of properties and data may be any."""
    if isinstance(schema, list):
        for entry in schema:
            yield from _references(entry)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key in BY_NAME and isinstance(value, dict):
                for entry in value.values():
                    yield from _references(entry)
            elif key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            elif key not in DATA:
                yield from _references(value)


def validator_of(parameters: Any) -> jsonschema.Draft202012Validator:
    """A validator that fetches nothing."""
    return jsonschema.Draft202012Validator(parameters, registry=Registry())


@functools.lru_cache(maxsize=64)
def _validator(text: str) -> jsonschema.Draft202012Validator:
    return validator_of(json.loads(text))


def answer_to(request: dict[str, Any]) -> str | None:
    """What is wrong, under the clock."""
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # SIGPROF's default action: the process ends
    try:
        if "arguments" in request:
            return argument_problem(_validator(request["schema"]), request["arguments"])
        return schema_problem(json.loads(request["schema"]))
    except MemoryError:  # what is left of it is garbage
        return "more than there is memory for"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Until standard input ends, which it does when the host does."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the host's to handle
    for line in sys.stdin:
        sys.stdout.write(json.dumps({"problem": answer_to(json.loads(line))}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
