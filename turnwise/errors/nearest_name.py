"""The suggestion for a name that nobody knows: the nearest valid one, or what there is to choose from."""

import difflib
from collections.abc import Iterable

MOST_MEANT = 3
"""Names that a message offers where several end alike."""


def meant(name: str, valid: Iterable[str]) -> str:
    """A hint such as `did you mean 'gsm8k'?`, empty when no valid name is close."""
    names = sorted(set(valid))
    last = name.rsplit(".", 1)[-1]
    tails: dict[str, list[str]] = {}
    for candidate in names:
        tails.setdefault(candidate.rsplit(".", 1)[-1], []).append(candidate)
    close = (
        tails.get(name)  # `lr` is learner.lr or sft.lr, and nothing that is spelt like it
        or [other for other in names if other == last]  # `training.seed` is `seed`
        or difflib.get_close_matches(name, names, n=1, cutoff=0.85)
        or _begins_alike(name, names)
        or _ends_alike(last, tails, 0.8)  # `rollout.group_sise` is training.group_size or eval.group_size
        or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        or _ends_alike(last, tails, 0.6)
    )
    return f"did you mean {' or '.join(map(repr, close[:MOST_MEANT]))}?" if close else ""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The hint, or the list of valid names when none is close."""
    names = sorted(set(valid))
    if hint := meant(name, names):
        return hint
    if not names:
        return "there is nothing to choose from."
    listing = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    return f"valid: {listing}."


def _begins_alike(name: str, names: list[str]) -> list[str]:
    """`training.keep` for `training.keep_checkpoints`: the longest that is a part of it, up to a whole word."""
    parts = [other for other in names if name.startswith(f"{other}_") or other.startswith(f"{name}_")]
    return sorted(parts, key=len, reverse=True)[:1]


def _ends_alike(last: str, tails: dict[str, list[str]], cutoff: float) -> list[str]:
    return [name for tail in difflib.get_close_matches(last, tails, n=1, cutoff=cutoff) for name in tails[tail]]


def unknown(kind: str, name: str, valid: Iterable[str]) -> str:
    """One sentence for a name nobody knows, with the nearest valid one."""
    return f"unknown {kind} {name!r}: {nearest(name, valid)}"
