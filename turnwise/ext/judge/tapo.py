"""The `tapo` scorer (Tool-Aware Policy Optimization): accuracy, format, and what each tool turn was worth."""

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

from turnwise.errors import ConfigError
from turnwise.errors.nearest_name import unknown
from turnwise.ext.judge.budget import refuse_budget
from turnwise.ext.judge.rubrics import GENERAL, RubricChoice, rubric_of
from turnwise.ext.judge.tool_misuse import EXECUTED, Penalties, misuse_by_turn
from turnwise.ext.judge.turn_scores import LLM, RULES, View, turn_scorer
from turnwise.scoring.client_options import client_options
from turnwise.scoring.scorer import Score, ScorerSpec, evaluate
from turnwise.scoring.service import ReadTruth, truth_reader
from turnwise.types import CallStatus, Remark, Trajectory, Turn

Choice = TypeVar("Choice", bound=enum.Enum)
TAGS = ("think", "code", "answer", "tool_call")
ACC = "acc"
MISUSE = "misuse"
RUBRIC = "rubric"


class Need(enum.Enum):
    """Whether the answer to a task needs tools."""

    search = "search"
    """The answer has to be looked for: each tool turn is judged by what it found."""
    useful = "useful"
    """It can be had without, and tools may do a part: each tool turn is judged by that part, and none is missed."""
    optional = "optional"
    """It can be had without: a tool turn is worth 0, so that nothing is paid for idle calls."""
    none = "none"
    """Tools only cost: a tool turn is worth `needless`."""


JUDGED = (Need.search, Need.useful)


@client_options(
    "acc_weight", "format_weight", "tool_weight", "need", "view", "needless", "tool_misuse", "max_crop", "show_images",
    contacts=True, one_process=refuse_budget,
)  # fmt: skip
async def tapo(
    trajectory: Trajectory,
    *,
    accuracy: str = "exact_match",
    accuracy_options: Mapping[str, Any] | None = None,
    acc_weight: float = 1.0,
    format_weight: float = 0.3,
    tool_weight: float = 0.5,
    need: str | Mapping[str, str] = "search",
    judge: str = LLM,
    judge_options: Mapping[str, Any] | None = None,
    rubric: RubricChoice | None = None,
    view: str = "evidence_only",
    show_images: bool = True,
    needless: float = -0.25,
    tool_misuse: Mapping[str, float] | None = None,
    max_crop: float = 0.9,
) -> Score:
    """`acc_weight * acc + format_weight * format + tool_weight * tool`; `tool` is the mean over the tool turns.

    `accuracy` names another scorer. `need` is search, useful, optional or none, for all or by data source; turns are
    judged for search and useful, by `rubric`: for all, or by data source (see `rubric_of`). A turn that misused a tool
    is worth its penalty and is not shown to the judge. `show_images`: the judge sees the question's images and those of
    the turn; a model that reads text only needs false.
    """
    check_weights(acc_weight, tool_weight)
    penalties = Penalties.of(tool_misuse or {}, max_crop)
    if not -1 <= needless <= 0:
        raise ConfigError(f"tapo: needless must lie between -1 and 0, not {needless:g}")
    wanted, chosen_view = need_of(trajectory.sample.data_source, need), _choice(View, view, "view")
    base = await evaluate(ScorerSpec(accuracy, dict(accuracy_options or {})).make(), trajectory)
    acc = base.parts.get(ACC, base.reward)
    misused = misuse_by_turn(trajectory, search=wanted in JUDGED, max_crop=max_crop)
    penalized = {index: penalties.total(kinds) for index, kinds in misused.items()}
    remarks = [Remark(MISUSE, ", ".join(sorted(kinds)), penalized[index], index) for index, kinds in misused.items()]
    turns = [turn for turn in trajectory.turns if turn.index not in penalized and _executed(turn)]
    if wanted in JUDGED:
        # A turn whose calls all failed showed nothing; that it was repaired is why it has no penalty.
        worked = [turn for turn in turns if any(record.status is CallStatus.OK for record in turn.calls)]
        chosen_rubric = rubric_of(trajectory.sample, rubric)
        score_turns = turn_scorer(judge, chosen_view, judge_options or {}, chosen_rubric, show_images=show_images)
        judged = await score_turns(trajectory, worked) if worked else {}
        scores = penalized | {turn.index: judged[turn.index].value if turn.index in judged else 0.0 for turn in turns}
        remarks += [
            Remark(judge, verdict.words, verdict.value, index) for index, verdict in judged.items() if verdict.words
        ]
        if judged and judge not in RULES and chosen_rubric.name != GENERAL:
            remarks.insert(0, Remark(RUBRIC, chosen_rubric.name))
    else:
        worth = needless if wanted is Need.none else 0.0
        scores = penalized | {turn.index: worth for turn in turns}
    tool = sum(scores.values()) / len(scores) if scores else 0.0
    parts = {ACC: acc, "format": float(is_well_formed(trajectory)), "tool": tool}
    reward = acc_weight * parts[ACC] + format_weight * parts["format"] + tool_weight * tool
    remarks.sort(key=lambda remark: remark.turn or 0)
    by_turn = {index: {"tool": scores[index]} for index in sorted(scores)}
    return Score(reward, parts, by_turn, (*base.remarks, *remarks))


def compared_truths(options: Mapping[str, Any]) -> ReadTruth | None:
    """What reads the ground truth of the scorer that says whether an answer is right."""
    return truth_reader(ScorerSpec(options.get("accuracy", "exact_match"), options.get("accuracy_options") or {}))


def check_weights(acc_weight: float, tool_weight: float) -> None:
    """Tools are a means: a policy must never gain more by using them well than by being right."""
    if not abs(tool_weight) < abs(acc_weight):
        raise ConfigError(
            f"tapo: |tool_weight| must be below |acc_weight|; they are {tool_weight:g} and {acc_weight:g}"
        )


def need_of(data_source: str, need: str | Mapping[str, str]) -> Need:
    """Whether this data source needs tools: its own entry, then `default`."""
    if isinstance(need, str):
        return _choice(Need, need, "need")
    chosen = need.get(data_source, need.get("default"))
    if chosen is None:
        raise ConfigError(f"tapo: need: {unknown('data source', data_source, need)} Add it, or a default.")
    return _choice(Need, chosen, f"need of {data_source}")


def is_well_formed(trajectory: Trajectory) -> bool:
    """Tags opened and closed in turn, every call readable, at most one <answer>, and something to read at the end.

    Only the policy's own messages are read: what tools and users wrote can neither help nor harm.
    """
    texts = [message.text for message in trajectory.answers]
    if not texts or trajectory.answers[-1].tool_calls or not trajectory.answers[-1].visible.strip():
        return False
    if any(record.status is CallStatus.MALFORMED for record in trajectory.calls):
        return False
    if sum(text.count("<answer>") for text in texts) > 1:
        return False
    return all(_is_balanced(text, tag) for text in texts for tag in TAGS)


def _is_balanced(text: str, tag: str) -> bool:
    """Templates may open <think> in the prompt, so that one closing tag without an opening one is in order."""
    opened, closed = text.count(f"<{tag}>"), text.count(f"</{tag}>")
    first_open, first_close = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    if tag == "think" and closed == opened + 1:
        return opened == 0 or first_close < first_open
    return opened == closed and (opened == 0 or first_open < first_close)


def _executed(turn: Turn) -> bool:
    return any(record.status in EXECUTED for record in turn.calls)


def _choice(kind: type[Choice], name: str, what: str) -> Choice:
    valid = [entry.value for entry in kind]
    if name not in valid:
        raise ConfigError(f"tapo: {unknown(what, str(name), valid)}")
    return kind(name)
