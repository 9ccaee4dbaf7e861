"""The samples that a program brings: each is what its fields promise, or refused by name before anything runs."""

import dataclasses
from collections.abc import Iterable
from itertools import islice
from typing import Any

from turnwise.data.values import FieldError, as_text, describe, join, plain
from turnwise.errors import DataError
from turnwise.types import Image, InteractionSpec, Message, Role, Sample, Text, ToolCall

_MESSAGES = 'a tuple of Message, such as (Message(Role.USER, "6*7?"),)'


def program_samples(samples: Any, limit: int | None = None, *, name: str = "samples") -> list[Sample]:
    """The first `limit` of them; two of one id would draw the same noise. Lists become tuples."""
    if isinstance(samples, str | bytes | dict) or not isinstance(samples, Iterable):
        raise DataError(f"{name} is a list of Sample, not {type(samples).__name__}")
    chosen: dict[str, Sample] = {}
    for number, sample in enumerate(islice(samples, limit)):
        if not isinstance(sample, Sample):
            raise DataError(f"{name}[{number}] is not a Sample but {type(sample).__name__}")
        try:
            checked = _checked(sample)
        except FieldError as error:
            raise DataError(f"{name}[{number}].{error.field}: {error.problem}") from error
        if checked.id in chosen:
            raise DataError(f"{name}[{number}]: another sample has the id {checked.id!r}")
        chosen[checked.id] = checked
    return list(chosen.values())


def _checked(sample: Sample) -> Sample:
    for field in ("id", "data_source"):
        plain(as_text(getattr(sample, field), field), field)
    if sample.agent is not None:
        as_text(sample.agent, "agent")
    if not isinstance(sample.prompt, tuple | list) or not sample.prompt:
        raise FieldError("prompt", f"expected {_MESSAGES}, not {_shown(sample.prompt)}")
    if not isinstance(sample.images, tuple | list):
        raise FieldError("images", f"expected a tuple of Image, not {describe(sample.images)}")
    for field in ("info", "tools_kwargs"):
        _object(getattr(sample, field), field)
    for key in ("extra_info", "interaction_kwargs", "reward_model"):
        _object(sample.info.get(key, {}), f"info.{key}")
    for tool, kwargs in sample.tools_kwargs.items():
        _object(kwargs, join("tools_kwargs", tool))
    plain(sample.ground_truth, "ground_truth")
    _check_interaction(sample.interaction)
    return dataclasses.replace(
        sample,
        prompt=tuple(_message(message, f"prompt[{number}]") for number, message in enumerate(sample.prompt)),
        images=tuple(_part(image, f"images[{number}]", (Image,)) for number, image in enumerate(sample.images)),
        tools=_names(sample.tools),
    )


def _message(message: Any, field: str) -> Message:
    if not isinstance(message, Message):
        raise FieldError(field, f"expected a Message, such as Message(Role.USER, ...), not {describe(message)}")
    if not isinstance(message.role, Role):
        roles = ", ".join(f"Role.{role.name}" for role in Role)
        raise FieldError(f"{field}.role", f"expected one of {roles}, not {_shown(message.role)}")
    for name in ("tool_call_id", "name", "reasoning", "answer"):
        if getattr(message, name) is not None:
            _text(getattr(message, name), join(field, name))
    calls, content = message.tool_calls, message.content
    if not isinstance(calls, tuple | list) or not all(isinstance(call, ToolCall) for call in calls):
        raise FieldError(f"{field}.tool_calls", f"expected a tuple of ToolCall, not {describe(calls)}")
    if isinstance(content, tuple | list):
        parts = tuple(_part(part, f"{field}.content[{number}]", (Text, Image)) for number, part in enumerate(content))
        return dataclasses.replace(message, content=parts, tool_calls=tuple(calls))
    _text(content, f"{field}.content")
    return message


def _part(part: Any, field: str, kinds: tuple[type[Text | Image], ...]) -> Any:
    if not isinstance(part, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise FieldError(field, f"expected {wanted}, not {describe(part)}")
    _text(part.text if isinstance(part, Text) else part.source, field)
    return part


def _check_interaction(spec: Any) -> None:
    if spec is None:
        return
    if not isinstance(spec, InteractionSpec):
        raise FieldError("interaction", f'expected InteractionSpec("gsm8k", {{...}}), not {describe(spec)}')
    as_text(spec.name, "interaction.name")
    _object(spec.kwargs, "interaction.kwargs")


def _names(tools: Any) -> tuple[str, ...] | None:
    if tools is None:
        return None
    if not isinstance(tools, tuple | list):
        raise FieldError("tools", f'expected names of tools, such as ("calculate",), not {describe(tools)}')
    return tuple(as_text(name, f"tools[{number}]") for number, name in enumerate(tools))


def _object(value: Any, field: str) -> None:
    if not isinstance(value, dict):
        raise FieldError(field, f"expected a dict, not {describe(value)}")
    plain(value, field)


def _text(value: Any, field: str) -> None:
    if not isinstance(value, str):
        raise FieldError(field, f"expected text, not {describe(value)}")
    plain(value, field)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) and len(value) <= 20 else describe(value)
