"""Whether two runs have the same numbers, bit by bit: `python tests/same_numbers.py OLD_RUN NEW_RUN`.

Compares every number of both metrics.jsonl but those that tell of time and memory, and prints how many differ.
"""

import json
import sys
from pathlib import Path

TIMINGS = ("second", "time", "timing", "lag", "memory", "throughput", "idle", "loop/")
"""What the name of a number has in it that no two runs share."""


def numbers(run: Path) -> dict[tuple[int, str], object]:
    """Every comparable number of a run, by its line and its name."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {
        (place, name): value
        for place, line in enumerate(lines)
        for name, value in json.loads(line).items()
        if not any(word in name for word in TIMINGS)
    }


def main(old: Path, new: Path) -> int:
    """0 when every number is there twice and the same."""
    before, after = numbers(old), numbers(new)
    both = before.keys() & after.keys()
    differing = sorted(key for key in both if before[key] != after[key])
    for place, name in differing:
        print(f"line {place + 1}, {name}: {before[place, name]!r} and {after[place, name]!r}")
    for place, name in sorted(before.keys() ^ after.keys()):
        print(f"line {place + 1}, {name}: only in {old if (place, name) in before else new}")
    print(f"{len(both)} numbers compared, {len(differing)} differ, {len(before.keys() ^ after.keys())} in one run only")
    return int(bool(differing or before.keys() ^ after.keys()))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
