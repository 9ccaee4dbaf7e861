"""What a worker or a reward server answered, checked, as a Score or as the exception that was raised there."""

import builtins
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnwise import errors
from turnwise.errors import ScoringFailed
from turnwise.scoring.scorer import Score
from turnwise.system.retrying import AttemptFailed
from turnwise.types import Remark

Number = Annotated[float, Field(allow_inf_nan=False)]
_MODULES = {"builtins": builtins, "turnwise.errors": errors}


class WireError(BaseModel):
    """An exception that was raised elsewhere."""

    module: str
    name: str
    text: str
    bases: list[tuple[str, str]] = []
    notes: list[str] = []
    traceback: str = ""

    def exception(self) -> Exception:
        """An exception of the same name and text, of the nearest class that is known here."""
        error = self._made()
        for note in self.notes:
            error.add_note(note)
        if self.traceback:
            error.add_note(f"where it was raised, in the process that scored:\n{self.traceback.rstrip()}")
        return error

    def _made(self) -> Exception:
        base = next(filter(None, (_known(module, name) for module, name in self.bases)), Exception)
        if (base.__module__, base.__qualname__) == (self.module, self.name):
            try:
                plain = base(self.text)
            except TypeError:  # one that is made of more than a text, such as UnicodeDecodeError
                plain = None
            if plain is not None and str(plain) == self.text:
                return plain
        text = self.text
        body = {"__module__": self.module, "__qualname__": self.name, "__str__": lambda _: text}
        kind = type(self.name.rpartition(".")[2], (base,), body)
        return base.__new__(kind)  # without __init__, which may want what we do not have


def _known(module: str, name: str) -> type[Exception] | None:
    kind = getattr(_MODULES.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, BaseExceptionGroup):
        return kind
    return None


class WireRemark(BaseModel):
    """The words that came with a score."""

    model_config = ConfigDict(strict=True)

    by: str
    text: str
    value: Number | None = None
    turn: int | None = None


class Answer(BaseModel):
    """A reward with parts, scores of turns and remarks; or tests that passed, `f2p_count` of `f2p_total`; or an error.

    `id` is that of the request.
    """

    model_config = ConfigDict(strict=True)

    id: str = ""
    reward: Number | None = None
    parts: dict[str, Number] = {}
    turns: dict[str, dict[str, Number]] = {}
    remarks: list[WireRemark] = []
    f2p_count: Annotated[int, Field(ge=0)] | None = None
    f2p_total: Annotated[int, Field(ge=0)] | None = None
    error: Annotated[WireError, Field(strict=False)] | None = None

    def score(self) -> Score:
        """The score. Raises the error in it; AttemptFailed when it has neither, as from a server that is not ours."""
        if self.error is not None:
            raise self.error.exception()
        if self.reward is not None:
            turns = {_index(turn): scores for turn, scores in self.turns.items()}
            remarks = tuple(Remark(remark.by, remark.text, remark.value, remark.turn) for remark in self.remarks)
            return Score(self.reward, self.parts, turns, remarks)
        if self.f2p_count is None or self.f2p_total is None:
            raise AttemptFailed("the answer has neither a reward nor an error")
        if self.f2p_total == 0:
            raise ScoringFailed("no test was run (f2p_total is 0), which says nothing about the answer")
        if self.f2p_count > self.f2p_total:
            raise AttemptFailed(f"the answer says that {self.f2p_count} of {self.f2p_total} tests passed")
        share = self.f2p_count / self.f2p_total
        return Score(share, self.parts or {"f2p": share})


def _index(turn: str) -> int:
    if not (turn.isascii() and turn.isdigit() and len(turn) < 10):
        raise AttemptFailed(f"the answer has scores for a turn {turn[:20]!r}")
    return int(turn)


def read_answer(content: bytes, request_id: str = "") -> Answer:
    """The answer to this request; AttemptFailed for anything else."""
    try:
        answer = Answer.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))[:80]
        raise AttemptFailed(f"the answer is not understood: {where} {fault['msg'][:200]}".replace("  ", " ")) from error
    if answer.id != request_id:
        raise AttemptFailed(f"the answer belongs to another request ({answer.id[:40]!r} instead of {request_id!r})")
    return answer
