"""The `format_rules` scorer: patterns, tags, one answer, length; every rule is a part, and nothing is compared."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from turnwise.errors import ConfigError
from turnwise.scoring.client_options import client_options
from turnwise.scoring.rules.boxes_and_tags import tagged
from turnwise.scoring.scorer import Score
from turnwise.types import Trajectory

MAX_READ = 100_000
"""Characters of a message that patterns are tried on; a longer message breaks every rule."""


@client_options(
    "required", "forbidden", "tags", "answer_tag", "answer_last", "min_chars", "max_chars", "messages", "total"
)
async def format_rules(
    trajectory: Trajectory,
    *,
    required: Mapping[str, str] | Sequence[str] = (),
    forbidden: Mapping[str, str] | Sequence[str] = (),
    tags: Sequence[str] = (),
    answer_tag: str | None = None,
    answer_last: bool = False,
    min_chars: int = 0,
    max_chars: int | None = None,
    messages: Literal["last", "every"] = "last",
    total: Literal["share", "all"] = "share",
) -> Score:
    """How well the policy kept to the form; 1 is the best.

    `required` and `forbidden` are regular expressions (by name, or numbered); `tags` must each be there, be closed, not
    overlap, and come in this order; `answer_tag` must hold exactly one answer, which must end the message with
    `answer_last`. The rules hold for what the policy wrote in its last message, or in `every` one: then each turn has
    its own `format` score. A rule is a part: 1 when it was kept (with `every`: the share of messages that kept it). The
    reward is the mean of the parts, or with `all` 1 only if all were kept.
    """
    if messages not in ("last", "every") or total not in ("share", "all"):
        raise _wrong("messages must be 'last' or 'every', total 'share' or 'all'")
    needed, banned = _patterns("required", required), _patterns("forbidden", forbidden)
    turns = trajectory.turns if messages == "every" else trajectory.turns[-1:]
    results = []
    for text in [turn.message.text for turn in turns] or [""]:
        readable = 0 < len(text) <= MAX_READ
        readable_text = text if readable else ""
        rules = {name: pattern.search(readable_text) is not None for name, pattern in needed.items()}
        rules |= {name: readable and pattern.search(readable_text) is None for name, pattern in banned.items()}
        if tags:
            rules["tags"] = in_order(readable_text, tags)
        if answer_tag is not None:
            rules["one_answer"] = one_answer(readable_text, answer_tag)
            if answer_last:
                rules["answer_last"] = readable_text.rstrip().endswith(f"</{answer_tag}>")
        if min_chars or max_chars is not None:
            rules["length"] = min_chars <= len(text) and (max_chars is None or len(text) <= max_chars)
        results.append(rules)
    if not results[0]:
        raise _wrong("there is no rule; set required, forbidden, tags, answer_tag or max_chars")
    parts = {name: sum(rules[name] for rules in results) / len(results) for name in results[0]}
    reward = sum(parts.values()) / len(parts) if total == "share" else float(all(v == 1.0 for v in parts.values()))
    shares = {
        turn.index: {"format": sum(rules.values()) / len(rules)} for turn, rules in zip(turns, results, strict=False)
    }
    return Score(reward, parts, shares if messages == "every" else {})


def in_order(text: str, tags: Sequence[str]) -> bool:
    """Whether each tag is opened and closed, one after the other, in this order; a tag may come again in its place."""
    names = "|".join(re.escape(tag) for tag in tags)
    opened: str | None = None
    reached = -1
    closed: set[str] = set()
    for match in re.finditer(rf"<(/?)({names})>", text):
        closing, name = match.group(1) == "/", match.group(2)
        if closing:
            if opened != name:
                return False
            opened = None
            closed.add(name)
        elif opened is not None or tags.index(name) < reached:
            return False
        else:
            opened, reached = name, tags.index(name)
    return opened is None and len(closed) == len(set(tags))


def one_answer(text: str, tag: str) -> bool:
    """Whether there is exactly one answer, and something in it."""
    answers = tagged(text, tag)
    return len(answers) == 1 and bool(answers[0]) and text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1


def _patterns(kind: str, patterns: Mapping[str, str] | Sequence[str]) -> dict[str, "re.Pattern[str]"]:
    if isinstance(patterns, str):
        raise _wrong(f"{kind} must be patterns by name or a list of patterns, not the text {patterns!r}")
    if isinstance(patterns, Mapping):
        named = dict(patterns)
    else:
        named = {f"{kind}_{number}": pattern for number, pattern in enumerate(patterns)}
    return {name: _compiled(kind, pattern) for name, pattern in named.items()}


@functools.lru_cache(maxsize=256)
def _compiled(kind: str, pattern: str) -> "re.Pattern[str]":
    try:
        return re.compile(pattern, re.DOTALL | re.MULTILINE)
    except re.error as error:
        raise _wrong(f"{kind}: {pattern!r} is not a regular expression: {error}") from error


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"scoring.options, scorer format_rules: {what}")
