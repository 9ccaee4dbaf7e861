"""Keys that had another name: an error names the new one, and in the config of an earlier run it takes their place."""

import functools
from collections.abc import Mapping
from typing import Any

from turnwise.config.knobs import knobs_of
from turnwise.config.sections import full_config

GONE = {
    "algorithm.kl_control": "algorithm.kl_target (a number steers the coefficient, null keeps it)",
    "algorithm.kl_horizon": "nothing; it is 10000",
    "engine.api_key_env": "nothing; the key is read from the environment as OPENAI_API_KEY",
    "eval.dump_jsonl": "turnwise eval --out FILE",
    "rollout.excess_calls": "nothing; calls beyond rollout.max_parallel_calls are answered with an error",
    "sandbox.token_env": "nothing; the token is read from the environment as TURNWISE_SANDBOX_TOKEN",
    "sandbox.warm": "nothing; eight sessions are made ahead of need",
    "scoring.token_env": "nothing; the token is read from the environment as TURNWISE_REWARD_TOKEN",
    "sft.epochs": "nothing; without sft.steps the trajectories are gone through three times",
    "sft.weight_decay": "nothing; it is 0.01",
    "sft.out": "run; the policy is in its folder",
    "training.max_draws": "nothing; it is 3",
}
"""What is done instead of keys that have no successor."""


@functools.cache
def renamed() -> dict[str, str]:
    """The new key of every old one, from the marks `was` at the knobs: the same values under another name."""
    return {knob.was: key for key, knob in knobs_of(full_config()).items() if knob.was is not None}


def answers_to_old(values: Mapping[str, Any]) -> str:
    """What stands for every key of an earlier version among these, in one line; an empty section is none."""
    keys = [key for key, value in values.items() if value not in (None, {}) or "." in key]
    answers = [f"{key!r} is called {renamed()[key]} now" for key in keys if key in renamed()]
    return "; ".join([*answers, *(f"instead of {key!r}: {GONE[key]}" for key in keys if key in GONE)])


def translated(tree: dict[str, Any]) -> dict[str, Any]:
    """The config of a run of an earlier version, with today's names."""
    script = tree.get("sft", {}).get("script") if isinstance(tree.get("sft"), dict) else None
    if isinstance(script, str) and script.startswith(_OLD_TASKS):
        _pop(tree, ["sft", "script"])  # the task says where its script is now
    for key in GONE:
        _pop(tree, key.split("."))
    values = {new: value for old, new in renamed().items() if (value := _pop(tree, old.split("."))) is not _MISSING}
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return tree


_MISSING = object()
_OLD_TASKS = "turnwise.tasks."


def _pop(tree: dict[str, Any], steps: list[str]) -> Any:
    """Take a value out of a tree, and a section that is empty then."""
    name, *further = steps
    if name not in tree or isinstance(tree[name], dict) is not bool(further):
        return _MISSING
    if not further:
        return tree.pop(name)
    value = _pop(tree[name], further)
    if not tree[name]:
        del tree[name]
    return value
