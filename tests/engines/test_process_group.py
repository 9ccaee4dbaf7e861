"""Processes that are asked together: each answers for itself, and whoever dies or hangs is named while nobody waits."""

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from turnwise.engines.learners.process_group import AT_ONCE, LearnerLost, ProcessGroup
from turnwise.errors import EngineError

LARGE = np.zeros(16 * AT_ONCE, np.uint8)


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    made = ProcessGroup("learner_process:Echo", ("the first", "the second"))
    made.begin()
    made.open([(1,), (2,)])
    folder = made._folder
    yield made
    made.stop()
    assert all(process.returncode is not None for process in made._processes) and not folder.exists()
    assert not any(sender.is_alive() for sender in made._senders)


def test_each_answers_for_itself_and_a_death_is_named(group: ProcessGroup) -> None:
    assert group.call("say", [("a",), ("b",)]) == [(1, "a"), (2, "b")]
    assert [len(answer[1]) for answer in group.call("say", [(LARGE,), (LARGE,)])] == [len(LARGE)] * 2
    with pytest.raises(EngineError, match="no room"):
        group.call("fail", [(EngineError("no room"),), (ValueError("a bug"),)])
    with pytest.raises(RuntimeError, match="the first: Traceback(?s:.*)ValueError: a bug"):
        group.call("fail", [(ValueError("a bug"),), (EngineError("no room"),)])
    assert group.call("say", [(1,), (2,)]) == [(1, 1), (2, 2)], "an error ends nobody"
    killer = threading.Timer(0.2, os.kill, (group._processes[1].pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(LearnerLost, match=r"the second \(process \d+\) died in `rest`: SIGKILL"):
        group.call("rest", [(), ()])
    killer.join()
    with pytest.raises(LearnerLost, match="processes are gone: the second"):
        group.call("say", [(1,), (2,)])


def test_one_that_is_stopped_before_a_large_call_holds_nobody_up(group: ProcessGroup) -> None:
    group._limit = 0.5
    os.kill(group._processes[0].pid, signal.SIGSTOP)
    with pytest.raises(
        LearnerLost, match=r"hangs in `say` and is ended: the first has given no sign of life for 0.5 s"
    ):
        group.call("say", [(LARGE,), (LARGE,)])
