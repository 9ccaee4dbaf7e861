"""The host's end of the math checkers: a few processes, and a memory of what they have compared."""

import asyncio
import os
from collections import OrderedDict
from pathlib import Path

from turnwise.errors import ScoringFailed
from turnwise.system.children import ClockedProcesses, NoAnswer

PROCESSES = min(4, os.cpu_count() or 1)
QUESTIONS = 5000
"""Comparisons after which a process is replaced, because sympy's caches only grow."""
KEPT = 16384
"""Comparisons remembered: siblings of a group often say the same."""
_SCRIPT = Path(__file__).with_name("math_checker.py")


class MathCheckers(ClockedProcesses):
    """All processes of this one that compare answers."""

    def __init__(self, script: Path = _SCRIPT, processes: int = PROCESSES) -> None:
        super().__init__(script, processes, QUESTIONS)
        self._verdicts: OrderedDict[tuple[tuple[str, ...], str, float], bool] = OrderedDict()

    async def equal(self, golds: tuple[str, ...], answer: str, seconds: float) -> bool:
        """Whether the answer means one of the golds; from any thread and event loop."""
        key = (golds, answer, seconds)
        with self._lock:
            if key in self._verdicts:
                return self._verdicts[key]
        result = await asyncio.wrap_future(self.submit(self.compare, *key))
        with self._lock:
            self._verdicts[key] = result
            if len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
        return result

    def compare(self, golds: tuple[str, ...], answer: str, seconds: float) -> bool:
        """The same from a thread that may wait, without the memory. What takes more than `seconds` of CPU time is not
        equal; ScoringFailed when the process failed for another reason, twice."""
        try:
            return bool(self.ask({"golds": golds, "answer": answer}, seconds)["equal"])
        except NoAnswer as error:
            if error.too_much:
                return False
            raise ScoringFailed(f"the math checker: {error}") from error


checkers = MathCheckers()
