"""The task `tinylook`: questions about a canvas that the policy sees small, and may look at from near with a tool.

`language` has every word that is said (`VOCABULARY`), `scenes` what is drawn, `rows` the rows. The drawing libraries
are imported when something is drawn.
"""

from turnwise.data.task import Task
from turnwise.ext.tinylook.language import VOCABULARY as VOCABULARY
from turnwise.ext.tinylook.language import Puzzle
from turnwise.ext.tinylook.rows import LOOK, NAME, prepare, rows
from turnwise.system.metrics import Reduction
from turnwise.types import Trajectory

REDUCTIONS = dict.fromkeys(("looks", "evidence", "faithful", "needless"), Reduction.MEAN)


def measures(trajectory: Trajectory) -> dict[str, float]:
    """`looks`: tool calls. `evidence`: whether some turn before the answer showed a target (a grade of 0.75 at least);
    `faithful`: the same of right answers only, so that its mean is P(evidence | correct). `needless`, where the view is
    enough: whether a tool was called all the same."""
    from turnwise.ext.judge.turn_scores import EVIDENCE, box_grades  # here, since it imports httpx

    metrics = {"looks": float(len(trajectory.calls))}
    if trajectory.sample.data_source.rpartition("/")[2] == Puzzle.NONE:
        return metrics | {"needless": float(bool(trajectory.calls))}
    grades = box_grades(trajectory.sample, trajectory.turns[:-1])
    metrics["evidence"] = float(any(grade >= EVIDENCE for grade in grades.values()))
    return metrics | ({"faithful": metrics["evidence"]} if trajectory.right else {})


TASK = Task(
    name=NAME,
    further_sources=tuple(f"{NAME}/{puzzle}" for puzzle in Puzzle),
    rows=rows,
    endless=True,
    prepare=prepare,
    tools=(LOOK,),
    script="turnwise.ext.tinylook.traces:script",
    scorer="turnwise.ext.tinylook.reward:tinylook",
    reductions=REDUCTIONS,
    metrics=measures,
    defaults={"sampling.max_tokens": 16, "chat.tool_format": "hermes"},
)
