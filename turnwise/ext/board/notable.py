"""Which trajectories a report takes along: those that pass a filter, or the most notable ones."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import ConfigError
from turnwise.ext.board.filters import BadFilter
from turnwise.ext.board.headline import notable_episodes
from turnwise.ext.board.table import Table, listing

Place = tuple[str, int]
"""A trajectory by shard and row."""
WRONG_BUT_REWARDED = "reward > 0 and right == false"
FLIPPED_TO_WRONG = "first_right == true and right == false"
FLIPPED_TO_RIGHT = "first_right == false and right == true"


def passing(table: Table, filter: str, most: int) -> list[Place]:
    """The newest that pass a filter; ConfigError when none does."""
    try:
        page = listing(table, filter=filter, limit=most)
    except BadFilter as error:
        raise ConfigError(f"--filter {filter!r}: {error}") from error
    if not page["matched"]:
        raise ConfigError(f"--filter {filter!r} passes none of {page['total']} trajectories")
    return _places(page["rows"])


@dataclass(frozen=True, slots=True)
class _Query:
    """Trajectories worth a look, the first of them most."""

    split: str = "all"
    filter: str = ""
    sort: str = ""
    order: str = "desc"

    def rows(self, table: Table, limit: int) -> list[dict[str, Any]]:
        page = listing(table, split=self.split, filter=self.filter, sort=self.sort, order=self.order, limit=limit)
        rows: list[dict[str, Any]] = page["rows"]
        return rows


def notable(table: Table, findings: Sequence[dict[str, Any]], most: int) -> list[Place]:
    """First those of the headline, then one after the other of the best, the worst, the surprising, the longest and
    those behind findings.

    Of one group one is enough: its page shows the siblings.
    """
    splits = {info.split for info in table.shards()}
    own = "train" if "train" in splits else "all"
    queries = [
        _Query(own, sort="reward"),
        _Query(own, sort="reward", order="asc"),
        _Query(filter=WRONG_BUT_REWARDED),
        _Query(filter=FLIPPED_TO_WRONG),
        _Query(filter=FLIPPED_TO_RIGHT),
        _Query(own, sort="policy_tokens"),
        *(_Query(split, filter) for filter, split in finding_links(findings, serious=True)),
    ]
    headline = notable_episodes(table.snapshot) or {}
    queues = [iter(query.rows(table, 8 * most)) for query in queries]
    queues.insert(0, iter([row for name in ("best", "worst") if (row := headline.get(name)) is not None]))
    chosen: dict[tuple[str, str], Place] = {}
    while queues and len(chosen) < most:
        for queue in list(queues):
            row = next((row for row in queue if (row["shard"], row["sample_id"]) not in chosen), None)
            if row is None:
                queues.remove(queue)
            elif len(chosen) < most:
                chosen[row["shard"], row["sample_id"]] = (row["shard"], row["row"])
    return list(chosen.values())


def finding_links(findings: Sequence[dict[str, Any]], *, serious: bool = False) -> Iterator[tuple[str, str]]:
    """(filter, split) of the findings' links, as pages/health.js makes them."""
    for finding in findings:
        if finding["filter"] and not (serious and finding["severity"] == "ok"):
            yield finding["filter"], finding["split"]


def _places(rows: Iterable[dict[str, Any]]) -> list[Place]:
    return [(row["shard"], row["row"]) for row in rows]
