"""What a filter may name, and ready-made filters for the usual suspects."""

from dataclasses import asdict, dataclass
from typing import Any

from turnwise.ext.board.columns import KINDS, NULLABLE, ColumnKind
from turnwise.ext.board.filters import FIELDS

_DOCS = {
    "sample_id": "the dataset row",
    "data_source": "the dataset",
    "step": "training step; of an evaluation the step it was made at",
    "sibling": "number within its group",
    "stop_reason": "why the episode ended: answered, token_budget, failed, ...",
    "failure": "what failed in the machinery; null when nothing did",
    "reward": "the total; null when scoring failed",
    "advantage": "the advantage that training computed; null before it and in evaluations",
    "right": "the final answer is right; null when nothing scored it",
    "first_right": "the answer before the user's first word was right; evaluations only",
    "seconds": "duration of the episode",
    "turns": "assistant turns",
    "user_turns": "messages of the simulated user",
    "policy_tokens": "tokens the policy wrote",
    "tokens": "all tokens of the ledgers; 0 for an endpoint",
    "prompt_tokens": "tokens before the first turn",
    "calls": "tool calls",
    "failed_calls": "calls that did not end well, malformed ones included",
    "malformed": "calls that could not be read",
    "tools": 'names of the tools called: "python" in tools, or tool("python")',
    "call_seconds": "time spent in tools",
    "called": "called a tool",
    "ran": "a call ended well",
    "evidence": "a call that ended well said something",
    "used": "something a tool said turns up in what was written later",
    "duplicate_calls": "calls equal to an earlier one of the episode",
    "print_only": "calls whose code only says what is written in it",
    "truncated": "cut off: a turn, the token budget or the context was full",
    "exact": "the ledger equals one full render of the conversation; null when not checked",
    "policy_version": "the oldest policy that wrote a turn",
    "gap": "mean distance between the learner's and the sampler's log-probs",
    "entropy": "mean entropy of the policy's tokens",
    "question": "the last user message of the prompt, at most 160 characters",
    "answer": "the last visible words, at most 160 characters",
    "split": "train, eval, greedy, reused or probe",
    "group_mean": "mean reward of the rows with the same file and sample",
    "group_std": "standard deviation of those rewards",
    "group_size": "how many rows the group has",
    "parts": 'a part of the reward: parts.acc or part["acc"]',
}
_TYPES = {
    ColumnKind.NUMBER: "number",
    ColumnKind.COUNT: "number",
    ColumnKind.TRUTH: "yes or no",
    ColumnKind.TEXT: "text",
    ColumnKind.NAMES: "names",
}


@dataclass(frozen=True, slots=True)
class Preset:
    """A ready-made filter, with the order it reads best in if that is not the newest first."""

    group: str
    name: str
    filter: str
    doc: str
    sort: str | None = None
    order: str = "desc"


REWARD, CALLS, LENGTH, USER, MACHINERY = "Reward", "Calls", "Length", "User", "Machinery"

PRESETS = (
    Preset(REWARD, "worst", "reward != null", "lowest reward first", "reward", "asc"),
    Preset(REWARD, "best", "reward != null", "highest reward first", "reward"),
    Preset(REWARD, "highest advantage", "advantage != null", "what training pushed towards most", "advantage"),
    Preset(REWARD, "lowest advantage", "advantage != null", "what training pushed away from most", "advantage", "asc"),
    Preset(
        REWARD,
        "wrong but rewarded",
        "reward > 0 and right == false",
        "the reward pays for something else than being right",
        "reward",
    ),
    Preset(
        REWARD, "right but unrewarded", "reward <= 0 and right == true", "right answers that training pushes away from"
    ),
    Preset(
        REWARD,
        "zero-variance group",
        "group_size > 1 and group_std == 0",
        "all siblings got the same: nothing to learn from",
    ),
    Preset(CALLS, "malformed call", "malformed > 0", "a tool call that could not be read"),
    Preset(CALLS, "failed tool call", "failed_calls > malformed", "a call that was read but did not end well"),
    Preset(CALLS, "every call failed", "calls > 0 and failed_calls == calls", "no tool call of the episode ended well"),
    Preset(CALLS, "never called a tool", "not called", "answered from memory"),
    Preset(CALLS, "duplicate calls", "duplicate_calls > 0", "the same call again"),
    Preset(CALLS, "print-only code", "print_only > 0", "code that computes nothing"),
    Preset(CALLS, "most calls", "calls > 0", "most tool calls first", "calls"),
    Preset(LENGTH, "truncated", "truncated", "the answer was cut off"),
    Preset(LENGTH, "longest", "policy_tokens > 0", "most tokens written by the policy first", "policy_tokens"),
    Preset(LENGTH, "slowest", "seconds > 0", "longest duration first", "seconds"),
    Preset(
        USER,
        "flipped to wrong",
        "first_right == true and right == false",
        "the user's words turned a right answer wrong",
    ),
    Preset(USER, "flipped to right", "first_right == false and right == true", "the user's words helped"),
    Preset(MACHINERY, "infrastructure failure", "failure != null", "the machinery failed; left out of baselines"),
    Preset(
        MACHINERY, "sampler and learner differ", "gap > 0.05", "the log-probs of the same tokens are far apart", "gap"
    ),
    Preset(
        MACHINERY,
        "ledger is not the full render",
        "exact == false",
        "the tokens recorded are not those of one full render",
    ),
)
"""In the groups and the order in which the page shows them."""


def fields() -> dict[str, Any]:
    """The fields of a filter with type and meaning, and the presets."""
    described = [{"name": name, "type": _type(name), "doc": _DOCS[name]} for name in (*FIELDS, "parts")]
    return {"fields": described, "presets": [asdict(preset) for preset in PRESETS]}


def _type(name: str) -> str:
    if name == "split":
        return "text"
    if name not in KINDS or KINDS[name] is ColumnKind.PARTS:
        return "number"
    return _TYPES[KINDS[name]] + (" or null" if name in NULLABLE else "")
