"""What a person says of a run: a note and tags, in one small file of the run's folder."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from turnwise.errors import ConfigError, StorageError
from turnwise.ext.board.json_values import clean_text
from turnwise.storage.json_values import clean
from turnwise.storage.run_dir import RunDir
from turnwise.system.files import cannot

NOTES = "notes.json"
_MOST_TAGS, _LONGEST_TAG, _LONGEST_NOTE = 16, 40, 4000
_LARGEST = 100_000


class Notes(BaseModel):
    """`Notes(note="the reward of June", tags=["baseline"])`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    note: str = Field(default="", max_length=_LONGEST_NOTE)
    tags: list[str] = Field(default=[], max_length=_MOST_TAGS)

    @field_validator("tags")
    @classmethod
    def _each_is_a_word_or_two(cls, tags: list[str]) -> list[str]:
        for tag in tags:
            if not tag.strip() or tag != tag.strip() or len(tag) > _LONGEST_TAG or "," in tag or not tag.isprintable():
                raise ValueError(f"{tag[:80]!r} is no tag: 1 to {_LONGEST_TAG} letters that can be shown, no comma")
        return list(dict.fromkeys(tags))


def read_notes(run: RunDir) -> Notes:
    """A run's note and tags, empty where nobody wrote any; StorageError when the file is not one of ours."""
    path = run.path / NOTES
    if not path.is_file():
        return Notes()
    try:
        if path.stat().st_size > _LARGEST:
            raise StorageError(f"{path} is larger than any note")
        record = json.loads(path.read_bytes().decode("utf-8", "replace"))
        return _checked(clean(record))
    except OSError as error:
        raise cannot("read", path, error) from error
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: {error}") from error


def write_notes(run: RunDir, notes: Notes) -> None:
    """Replace the run's note and tags, whole or not at all."""
    run.write_json(NOTES, notes.model_dump())


def changed(before: Notes, note: str | None, add: list[str], remove: list[str]) -> Notes:
    """The notes with another text (None: the same one) and other tags; ConfigError for what is no note or tag."""
    unknown = [tag for tag in remove if tag not in before.tags]
    if unknown:
        raise ConfigError(f"the run has no tag {unknown[0]!r}; it has: {', '.join(before.tags) or 'none'}")
    tags = [tag for tag in before.tags if tag not in remove] + add
    try:
        return _checked({"note": before.note if note is None else clean_text(note).strip(), "tags": tags})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _checked(record: Any) -> Notes:
    """ValueError on one line for what is no note."""
    try:
        return Notes.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error
