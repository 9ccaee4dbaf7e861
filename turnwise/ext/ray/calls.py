"""What goes wrong with a call to an actor: told as the errors of this project, wherever it is called from."""

import contextlib
from collections.abc import Iterator
from typing import Any

from turnwise.errors import EngineError, EngineLost, TurnwiseError


class NeedLost(EngineLost):
    """Not the actor went away, but an object or another actor that it needed."""


@contextlib.contextmanager
def calling(ray: Any, who: str) -> Iterator[None]:
    """Around a call to an actor: what it raised there is raised here, and EngineLost when it went away."""
    errors = ray.exceptions
    try:
        yield
    except errors.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, errors.RayError) or isinstance(error, errors.ObjectLostError):
            raise NeedLost(f"{who} could not read what it needs: {type(cause).__name__}") from error
        is_ours = isinstance(cause, TurnwiseError)
        raise cause if is_ours else RuntimeError(f"{who} failed: {error}") from error
    except errors.RayError as error:
        if getattr(error, "actor_init_failed", False):  # before it could say anything: turnwise itself is not there
            raise EngineError(f"{who} cannot run on its node: {last_line(error)}") from error
        raise EngineLost(f"{who} was lost ({type(error).__name__})") from error


def last_line(error: Exception) -> str:
    """Where a trace in a text says what went wrong."""
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)[:300]
