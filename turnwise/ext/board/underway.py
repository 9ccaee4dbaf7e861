"""The episodes of a run that no file has yet, as its underway.json shows them while the run goes on."""

from typing import Any

from turnwise.errors import StorageError
from turnwise.ext.board.json_values import plain
from turnwise.storage.json_text import parse
from turnwise.storage.run_dir import UNDERWAY, RunDir
from turnwise.system.files import cannot

_LARGEST = 16 << 20
NOTHING: dict[str, Any] = {"playing": 0, "finished": 0, "episodes": []}


def underway(run: RunDir) -> dict[str, Any]:
    """{"playing", "finished", "episodes"}; all empty when the run shows none."""
    path = run.path / UNDERWAY
    try:
        content = path.read_bytes() if path.stat().st_size <= _LARGEST else b""
    except FileNotFoundError:
        return NOTHING
    except OSError as error:
        raise cannot("read", path, error) from error
    try:
        record = plain(parse(content))
        playing, finished = int(record["playing"]), int(record["finished"])
        episodes = [_checked(episode) for episode in record["episodes"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: {error}") from error
    return {"playing": playing, "finished": finished, "episodes": episodes}


def _checked(episode: dict[str, Any]) -> dict[str, Any]:
    """An episode as the page reads it; TypeError or KeyError for any other value."""
    texts = (episode["sample_id"], episode["question"])
    for message in episode["messages"]:
        texts += (message["role"], message["text"], *message["calls"])
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is none")
    return episode
