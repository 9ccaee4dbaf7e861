"""The episodes of a run that no file has yet: those being played and those that wait for their step to be recorded.

underway.json shows them to whoever looks on. Playing costs nothing more for it: an episode only says that it begins and
ends, and a thread of its own reads now and then what was said by then.
"""

import contextlib
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from turnwise.errors import StorageError
from turnwise.storage.run_dir import UNDERWAY, RunDir
from turnwise.system.files import cannot
from turnwise.types import Message, Role, Sample, Trajectory

SECONDS = 5.0
"""Between two looks at least; a step that takes less is recorded before anybody has read of it."""
_REST = 20.0
"""Times what the last look took until the next one."""
MOST, MOST_MESSAGES, LONGEST = 40, 16, 1200
"""Episodes that are written out, of each the newest messages, of each so many characters: a megabyte at most."""

_current: ContextVar["EpisodesUnderWay | None"] = ContextVar("episodes_under_way", default=None)


@dataclass(slots=True, eq=False)
class EpisodeUnderWay:
    """One episode: being played while it has no trajectory. `messages` is the list that the conversation grows."""

    sample: Sample
    sibling: int
    step: int
    """As in its noise: below 0 for an evaluation in the middle of a training."""
    started: float
    messages: Sequence[Message]
    trajectory: weakref.ref[Trajectory] | None = None


class EpisodesUnderWay:
    """Written to by the event loop, read by another thread. What ended is held weakly, until a file has it."""

    def __init__(self) -> None:
        self._episodes: dict[int, EpisodeUnderWay] = {}
        self._numbers = itertools.count()
        self.elsewhere: dict[object, Mapping[str, Any]] = {}
        """What other processes of the run play, as `shown` there."""

    @contextlib.contextmanager
    def playing(
        self, sample: Sample, sibling: int, step: int, messages: Sequence[Message]
    ) -> Iterator[list[Trajectory]]:
        """An episode is played in this block, which puts its trajectory into the list; one broken off leaves none."""
        number, ended = next(self._numbers), list[Trajectory]()
        episode = self._episodes[number] = EpisodeUnderWay(sample, sibling, step, time.time(), messages)
        try:
            yield ended
        finally:
            if ended:
                episode.messages = ()
                episode.trajectory = weakref.ref(ended[0], lambda _: self._episodes.pop(number, None))
            else:
                del self._episodes[number]

    def recorded(self, trajectories: Sequence[Trajectory]) -> None:
        """Forgets episodes that a file has now."""
        ids = {id(trajectory) for trajectory in trajectories}
        for number, episode in list(self._episodes.items()):
            if episode.trajectory is not None and id(episode.trajectory()) in ids:
                self._episodes.pop(number, None)

    def now(self) -> list[EpisodeUnderWay]:
        """The episodes under way, in the order they began."""
        return list(self._episodes.values())


@contextlib.contextmanager
def collecting() -> Iterator[EpisodesUnderWay]:
    """Episodes that are played in this block are those yielded."""
    before, episodes = _current.get(), EpisodesUnderWay()
    _current.set(episodes)
    try:
        yield episodes
    finally:
        _current.set(before)


def looked_on() -> bool:
    """Whether somebody wants to know what the caller's run is playing."""
    return _current.get() is not None


def seen_elsewhere(process: object, episodes: Mapping[str, Any] | None) -> None:
    """What another process of the caller's run is playing; None when it has ended."""
    current = _current.get()
    if current is None:
        return
    if episodes:
        current.elsewhere[process] = episodes
    else:
        current.elsewhere.pop(process, None)


@contextlib.contextmanager
def playing(sample: Sample, sibling: int, step: int, messages: Sequence[Message]) -> Iterator[list[Trajectory]]:
    """`EpisodesUnderWay.playing` of the run that the caller is a part of; nothing outside of a run."""
    episodes = _current.get()
    if episodes is None:
        yield []
        return
    with episodes.playing(sample, sibling, step, messages) as ended:
        yield ended


class UnderwayWriter:
    """Keeps underway.json while a block runs, and removes it at its end.

    waits for: the clock. unblocked by: the end of the block. Whatever keeps the file from being written ends the
    looking on, never the run; the log says so.
    """

    def __init__(self, run: RunDir, seconds: float = SECONDS) -> None:
        self.episodes = EpisodesUnderWay()
        self._run, self._seconds = run, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="turnwise-underway", daemon=True)
        self._before: EpisodesUnderWay | None = None

    def __enter__(self) -> EpisodesUnderWay:
        self._before = _current.get()
        _current.set(self.episodes)
        self._remove()
        self._thread.start()
        return self.episodes

    def __exit__(self, *_: object) -> None:
        _current.set(self._before)
        self._over.set()
        self._thread.join()
        self._remove()

    def _look_on(self) -> None:
        rest, before = self._seconds, ""
        while not self._over.wait(rest):
            began = time.perf_counter()
            try:
                before = self._write(before)
            except (StorageError, ValueError) as error:
                with contextlib.suppress(StorageError):  # a full disk takes no line either
                    self._run.log(f"the episodes under way are not shown any more: {error}")
                return
            rest = max(self._seconds, _REST * (time.perf_counter() - began))

    def _write(self, before: str) -> str:
        """Replace the file if there is anything new; what it holds. Not flushed to the disk: nobody needs it later."""
        seen = joined([shown(self.episodes.now()), *list(self.episodes.elsewhere.values())])
        # each by itself: one call for all would keep the event loop waiting until it is done
        episodes = ", ".join(json.dumps(episode) for episode in seen.pop("episodes"))
        content = f'{json.dumps(seen)[:-1]}, "episodes": [{episodes}]}}'
        if content == before:
            return before
        path = self._run.path / UNDERWAY
        temporary = path.with_name(f".{UNDERWAY}.tmp")
        try:
            temporary.write_text(content, encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            raise cannot("write", path, error) from error
        return content

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # a reader sees by the run's state that it is over
            (self._run.path / UNDERWAY).unlink(missing_ok=True)


def shown(episodes: Sequence[EpisodeUnderWay]) -> dict[str, Any]:
    """{"playing": count, "finished": count, "episodes": [...]}: those being played first, the oldest of them first."""
    playing = [episode for episode in episodes if episode.trajectory is None]
    ended = [(one, ref()) for one in reversed(episodes) if (ref := one.trajectory) is not None]
    finished = [(one, trajectory) for one, trajectory in ended if trajectory is not None]
    listed = [_episode(one, None) for one in playing[:MOST]]
    listed += [_episode(*pair) for pair in finished[: max(MOST - len(listed), MOST // 2)]]
    return {"playing": len(playing), "finished": len(finished), "episodes": listed}


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several processes show, as if one had played it; those that finished are with us, others show their own."""
    episodes = [episode for part in parts for episode in part["episodes"]]
    playing = [episode for episode in episodes if "stop_reason" not in episode]
    finished = [episode for episode in episodes if "stop_reason" in episode]
    playing.sort(key=lambda episode: float(episode["started"]))
    listed = playing[:MOST]
    listed += finished[: max(MOST - len(listed), MOST // 2)]
    return {
        "playing": sum(part["playing"] for part in parts),
        "finished": sum(part["finished"] for part in parts),
        "episodes": listed,
    }


def _episode(episode: EpisodeUnderWay, trajectory: Trajectory | None) -> dict[str, Any]:
    messages = list(episode.messages if trajectory is None else trajectory.messages)
    outcome: dict[str, Any] = {}
    if trajectory is not None:
        outcome = {
            "stop_reason": trajectory.stop_reason.value,
            "failure": trajectory.failure,
            "reward": trajectory.reward,
            "right": trajectory.right,
            "seconds": trajectory.seconds,
        }
    return outcome | {
        "sample_id": episode.sample.id,
        "data_source": episode.sample.data_source,
        "sibling": episode.sibling,
        "evaluation": episode.step < 0,
        "started": episode.started,
        "question": _cut(next((message.text for message in reversed(episode.sample.prompt)), "")),
        "turns": sum(message.role is Role.ASSISTANT for message in messages),
        "before": max(len(messages) - MOST_MESSAGES, 0),
        "messages": [_message(message) for message in messages[-MOST_MESSAGES:]],
    }


def _message(message: Message) -> dict[str, Any]:
    calls = [call.name for call in message.tool_calls]
    return {
        "role": message.role.value,
        "name": message.name,
        "text": _cut(message.text),
        "calls": calls,
        "images": len(message.images),
    }


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"
