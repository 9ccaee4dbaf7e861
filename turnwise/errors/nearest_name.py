"""The suggestion for a name that nobody knows: the nearest valid one, or what there is to choose from."""

import difflib
from collections.abc import Iterable

MOST_MEANT = 3
"""Names that a message offers where several end alike."""


def meant(name: str, valid: Iterable[str]) -> str:
    """A hint such as `did you mean 'gsm8k'?`, empty when no valid name is close."""
    names = sorted(set(valid))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    last = name.rsplit(".", 1)[-1]
    tails: dict[str, list[str]] = {}
    for candidate in names:
        tails.setdefault(candidate.rsplit(".", 1)[-1], []).append(candidate)
    if last == name and last in tails:  # `lr` is learner.lr or sft.lr, and nothing that is spelt like it
        close = tails[last]
    elif not close:  # compare the last dotted part too: `group_sise` should find `rollout.group_size`
        close = [key for hit in difflib.get_close_matches(last, tails, n=1, cutoff=0.6) for key in tails[hit]]
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


def unknown(kind: str, name: str, valid: Iterable[str]) -> str:
    """One sentence for a name nobody knows, with the nearest valid one."""
    return f"unknown {kind} {name!r}: {nearest(name, valid)}"
