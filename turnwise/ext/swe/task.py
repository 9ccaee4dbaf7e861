"""Mend a repository: an issue, a git repository in the sandbox with bash, edit and finish, and tests that judge."""

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from turnwise.data.task import Task
from turnwise.data.write import write_rows
from turnwise.errors import DataError
from turnwise.errors.nearest_name import unknown
from turnwise.ext.swe.repositories import SPLITS, RepositoryProblem, problem_at
from turnwise.system.metrics import Reduction
from turnwise.types import CallStatus, ToolCall, Trajectory

if TYPE_CHECKING:
    from turnwise.engines.samplers.scripted import Script, ScriptRequest

NAME = "swe"
SYSTEM = "Mend the repository with the tools, then call finish."
TESTS = "python -m unittest -q 2>&1 | tail -n 3"
PREPARED = {"train": 2000, "test": 200}
"""Rows that `turnwise prepare swe` writes."""


def row(problem: RepositoryProblem, split: str, index: int, seed: int) -> dict[str, Any]:
    """A verl-shaped row; the repository and its tests as JSON, because names of files are no columns."""
    name = f"{problem.package}-{problem.kind.name}-{split}-{seed}-{index}"
    history = [{"message": message, "files": files} for message, files in problem.history()]
    tests = {
        "FAIL_TO_PASS": problem.fail_to_pass(),
        "PASS_TO_PASS": problem.pass_to_pass(),
        "files": problem.hidden_files(),
        "runner": "unittest",
    }
    return {
        "data_source": NAME,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"In {problem.path}: {problem.issue}"},
        ],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)},
        "extra_info": {
            "split": split,
            "index": index,
            "seed": seed,
            "kind": problem.kind.name,
            "swe": json.dumps({"instance_id": name, "files": problem.files(), "history": history}),
        },
    }


def rows(split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of a split without end, the same for the same seed."""
    if split not in SPLITS:
        raise DataError(unknown("split of swe", split, SPLITS))
    index = 0
    while True:
        yield row(problem_at(split, seed, index), split, index, seed)
        index += 1


def prepare(out: Path, *, seed: Annotated[int, "of the repositories"] = 0) -> dict[Path, int]:
    """Write train.parquet and test.parquet; returns the rows of each file."""
    return {
        out / f"{split}.parquet": write_rows(list(islice(rows(split, seed), count)), out / f"{split}.parquet")
        for split, count in PREPARED.items()
    }


def metrics(trajectory: Trajectory) -> dict[str, float]:
    """`commands`: bash calls; `edits`: changes that were made; `tested`: whether tests were run after the last."""
    ran = [record.call for record in trajectory.calls if record.status is CallStatus.OK]
    edits = [number for number, call in enumerate(ran) if call.name == "edit" and call.arguments["command"] != "view"]
    commands = [call for call in ran if call.name == "bash"]
    after = ran[edits[-1] + 1 :] if edits else []
    tested = any(call.name == "bash" and "test" in str(call.arguments.get("command")) for call in after)
    return {"commands": float(len(commands)), "edits": float(len(edits)), "tested": float(tested)}


# --- traces to learn from before RL -------------------------------------------------------------------------------

MEND = 0.75
"""How often a trace mends the mistake; the others put in the same text again, and reinforcement has something to do."""


def script(seed: int) -> "Script":
    """A Script for samples of this task: look, change, test, finish."""
    return _script(seed, MEND)


def solve(seed: int) -> "Script":
    """A script that solves every problem."""
    return _script(seed, 1.0)


def _script(seed: int, mend: float) -> "Script":
    def say(request: "ScriptRequest") -> str:
        split, index = request.noise.sample.rsplit("/", 1)[-1].split(":")
        rng = random.Random(f"{request.noise.seed}/{request.noise.sample}/{request.noise.sibling}")
        calls = actions(problem_at(split, seed, int(index)), rng.random() < mend)
        return request.call_format.render_call(calls[min(request.turn, len(calls) - 1)])

    return say


def actions(problem: RepositoryProblem, mends: bool) -> list[ToolCall]:
    """What the assistant does, turn by turn."""
    new = problem.right if mends else problem.wrong
    return [
        ToolCall("", "edit", {"command": "view", "path": problem.path}),
        ToolCall(
            "", "edit", {"command": "str_replace", "path": problem.path, "old_str": problem.wrong, "new_str": new}
        ),
        ToolCall("", "bash", {"command": TESTS}),
        ToolCall("", "finish", {}),
    ]


TASK = Task(
    name=NAME,
    rows=rows,
    endless=True,
    prepare=prepare,
    tools=("bash", "edit", "finish"),
    scorer="swe_tests",
    reductions={"commands": Reduction.MEAN, "edits": Reduction.MEAN, "tested": Reduction.MEAN},
    metrics=metrics,
    script="turnwise.ext.swe.task:script",
    defaults={"rollout.agent": "until_finish", "sampling.max_tokens": 256},
)
