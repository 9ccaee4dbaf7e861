"""How far a run had come, as its checkpoints say it beside the learner's own state; read strictly, to resume from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnwise.data.loader import LoaderState
from turnwise.errors import StorageError
from turnwise.system.files import cannot, replacing
from turnwise.training.replay_buffer import ReplayEntry

STATE = "state.json"
FORMAT: Literal[4] = 4
"""Of state.json: raised whenever its meaning changes, so that an older or newer one is refused by name."""

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
M = TypeVar("M", bound=BaseModel)


@dataclass(slots=True)
class Progress:
    """How far a run has come; all of it is in every checkpoint.

    Groups are consumed in the loader's order, so the samples used are exactly its first
    `prompt_batches` batches, none skipped and none twice.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    step: Count = 0
    prompt_batches: Count = 0
    tokens: Count = 0
    seconds: Number = 0.0
    best: Number | None = None
    best_step: Count | None = None
    best_of: str = "accuracy"
    """The number of evaluations that `best` is the highest of."""
    evaluated: Count | None = None
    """The step of the last evaluation."""
    before: dict[str, Number] | None = None
    """What the first evaluation found."""
    after: dict[str, Number] | None = None
    """What the last one found, when the run had come to its end."""
    replay: list[ReplayEntry] = field(default_factory=list)
    """The replay buffer: which recorded groups later steps may train on again."""


class KLState(BaseModel):
    """Of the KL coefficient's controller."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: str
    value: Number


class RunState(BaseModel):
    """The whole content of state.json in a checkpoint of training."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[4]
    kl: KLState
    progress: Progress
    loader: LoaderState


def write_json(folder: Path, state: BaseModel) -> None:
    """Writes a state as state.json into a checkpoint's folder."""
    with replacing(folder / STATE) as file:
        file.write(state.model_dump_json(indent=2).encode())


def read_state(folder: Path) -> RunState:
    """Of the folder of a training's checkpoint."""
    return read_json(folder, RunState)


def read_json(folder: Path, kind: type[M]) -> M:
    """Of a checkpoint's folder; StorageError names the first thing that is wrong with it."""
    try:
        content = (folder / STATE).read_bytes()
    except OSError as error:
        raise cannot("read", folder / STATE, error) from error
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise StorageError(f"{STATE} cannot be used: {where}: {first['msg']}") from error
