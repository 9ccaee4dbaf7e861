"""Rows for the run's files, made in a worker for many episodes at once: one by one they cost twenty times as much."""

import asyncio

from turnwise.rollout.workers.hosts import RunLink
from turnwise.rollout.workers.messages import MadeRows
from turnwise.types import Trajectory

ROWS = 32
SECONDS = 0.5
"""After which fewer rows are made too: at the end of a step nothing more comes."""


class RowMaker:
    """Sends the rows of groups after the groups. The run makes those itself that it needs before."""

    def __init__(self, link: RunLink) -> None:
        self._link = link
        self._groups: dict[int, list[Trajectory]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, number: int, trajectories: list[Trajectory]) -> None:
        """Have the rows of a finished Play made."""
        self._groups[number] = trajectories
        if sum(map(len, self._groups.values())) >= ROWS:
            self._make()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS, self._make)

    def _make(self) -> None:
        from turnwise.storage.index import lasting_entry
        from turnwise.storage.trajectories.files import words_batch
        from turnwise.storage.trajectories.made_rows import encoded, is_plain

        if self._timer is not None:
            self._timer.cancel()
        groups, self._groups, self._timer = self._groups, {}, None
        plain = [number for number, trajectories in groups.items() if all(map(is_plain, trajectories))]
        trajectories = [trajectory for number in plain for trajectory in groups[number]]
        content = encoded(trajectories, words_batch) if trajectories else None
        entries = [] if content is None else [lasting_entry(trajectory) for trajectory in trajectories]
        self._link.send(MadeRows(tuple(groups), tuple(plain), content, entries))
