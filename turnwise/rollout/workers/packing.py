"""Messages as bytes: nouns by their fields and arrays as they lie in memory, quick to write and to read."""

import dataclasses
import io
import operator
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise import ledger, types
from turnwise.engines.samplers import request
from turnwise.rollout.workers import messages

Reducer = Callable[[Any], tuple[Any, ...]]


def packed(objects: object) -> bytes:
    """What `pickle.loads` gives back: arrays of one dimension are read-only there."""
    content = io.BytesIO()
    pickler = pickle.Pickler(content, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = REDUCERS
    pickler.dump(objects)
    return content.getvalue()


def _by_fields(cls: type) -> Reducer:
    """Dataclasses with slots are written by Python code otherwise, field after field."""
    fields = [field.name for field in dataclasses.fields(cls)]
    if len(fields) < 2:
        return lambda each: (cls, tuple(getattr(each, name) for name in fields))
    values = operator.attrgetter(*fields)
    return lambda each: (cls, values(each))


def _array(array: NDArray[Any]) -> tuple[Any, ...]:
    if array.ndim == 1 and array.dtype.kind in "biuf":
        return np.frombuffer, (array.tobytes(), array.dtype)
    reduced: tuple[Any, ...] = array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[assignment]
    return reduced


def _nouns(module: ModuleType) -> list[type]:
    """The dataclasses that a module defines, but for those that say themselves how they are written."""
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return [each for each in classes if dataclasses.is_dataclass(each) and "__reduce__" not in vars(each)]


REDUCERS: dict[type, Reducer] = {
    np.ndarray: _array,
    **{cls: _by_fields(cls) for module in (types, ledger, request, messages) for cls in _nouns(module)},
}
