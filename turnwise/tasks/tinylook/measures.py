"""What `tinylook` measures of an episode: whether it looked, saw what it answered, and looked where it need not."""

from turnwise.metrics import Reduction
from turnwise.tasks.tinylook.language import Puzzle
from turnwise.types import Trajectory

REDUCTIONS = dict.fromkeys(("looks", "evidence", "faithful", "needless"), Reduction.MEAN)


def measures(trajectory: Trajectory) -> dict[str, float]:
    """`looks`: tool calls. `evidence`: whether some turn before the answer showed a target (a grade of 0.75 at least);
    `faithful`: the same of right answers only, so that its mean is P(evidence | correct). `needless`, where the view is
    enough: whether a tool was called all the same."""
    from turnwise.scoring.turn_scores import EVIDENCE, box_grades  # here, since it imports httpx

    found = {"looks": float(len(trajectory.calls))}
    if trajectory.sample.data_source.rpartition("/")[2] == Puzzle.NONE:
        return found | {"needless": float(bool(trajectory.calls))}
    grades = box_grades(trajectory.sample, trajectory.turns[:-1])
    found["evidence"] = float(any(grade >= EVIDENCE for grade in grades.values()))
    return found | ({"faithful": found["evidence"]} if trajectory.right else {})
