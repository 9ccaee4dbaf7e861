"""Writes the articles of the `search` tool: `python examples/research_articles/world.py`.

An invented world, the same for the same seed, whose facts fit each other: nobody founds a company before being grown
up, no invention comes before its maker.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.ext.research.corpus.articles import SHIPPED
from turnwise.ext.research.corpus.relations import BY_NAME, RELATIONS, VALUE, named

SEED = 2026
COUNTS = {"lake": 14, "river": 28, "town": 64, "college": 22, "person": 170, "company": 60, "invention": 82}
PREFIX = {"lake": "L", "river": "R", "town": "T", "college": "S", "person": "P", "company": "C", "invention": "V"}

_ONSETS = (*"bdfghklmnprstvz", "br", "dr", "gr", "kl", "pr", "sk", "st", "tr")
_VOWELS = ["a", "e", "i", "o", "u", "ae", "ei", "ou"]
_ENDS = ["l", "m", "n", "r", "s", "sk", "st", "th", "nd", "rn", "lk", "x"]
_GOODS = ["pump", "loom", "lamp", "clock", "plough", "valve", "compass", "kiln", "press", "gauge", "winch", "lens"]
_FIRMS = ["Works", "Mills", "Foundry", "Trading", "Brothers", "Yards", "Glassworks", "Instruments"]
_CRAFTS = ["engineer", "glass maker", "clockmaker", "shipwright", "chemist", "weaver", "printer", "surveyor"]
_REMARKS = {
    "lake": ("Its water is {a} and {b}.", "cold/green/still/brackish/dark", "clear/rich in fish/rarely frozen"),
    "river": (
        "Boatmen know it as {a} and {b}.",
        "slow/quick/shallow/winding",
        "muddy in spring/calm in summer/rich in eels",
    ),
    "town": (
        "Visitors praise its {a} and its {b}.",
        "old bridge/glass hall/harbour/clock tower/salt market",
        "plum cakes/brass bands/lantern feast/smoked trout",
    ),
    "college": (
        "Students wear {a} and row {b}.",
        "grey gowns/blue caps/red scarves",
        "in summer/against their rivals/before breakfast",
    ),
    "person": (
        "Friends recalled a love of {a} and {b}.",
        "chess/beekeeping/old maps/mountain walks/the violin",
        "strong tea/long letters/cold baths/bad puns",
    ),
    "company": (
        "It is known for {a} and {b}.",
        "fair wages/plain design/late deliveries/fine brass",
        "loyal staff/a famous canteen/long strikes",
    ),
    "invention": ("Users found it {a} but {b}.", "quick/light/sturdy/precise", "noisy/costly/hard to mend"),
}
"""A sentence of no consequence by kind, and what may stand in its two places."""


@dataclass(slots=True)
class Thing:
    """Something with an article of its own."""

    id: str
    kind: str
    title: str
    facts: dict[str, str] = field(default_factory=dict)
    """By relation: the id of another thing, or the text of a value."""

    def year(self, name: str) -> int:
        """The fact of this name as a year."""
        return int(self.facts[name])


def make_world(seed: int = SEED) -> list[dict[str, Any]]:
    """The articles as they stand in the file."""
    rng = random.Random(seed)
    titles = _titles(rng)
    things = {
        kind: [Thing(f"{PREFIX[kind]}{n:03d}", kind, next(titles[kind])) for n in range(1, count + 1)]
        for kind, count in COUNTS.items()
    }
    _settle(things, rng)
    everything = {thing.id: thing for group in things.values() for thing in group}
    return [
        {"id": t.id, "title": t.title, "kind": t.kind, "text": _text(t, everything, rng), "facts": t.facts}
        for t in everything.values()
    ]


def _titles(rng: random.Random) -> dict[str, Iterator[str]]:
    words = _words(rng)
    first_names = [next(words) for _ in range(40)]
    return {
        "lake": (f"Lake {word}" for word in words),
        "river": (f"River {word}" for word in words),
        "town": (word for word in words),
        "college": (f"{word} College" for word in words),
        "person": (f"{rng.choice(first_names)} {word}" for word in words),
        "company": (f"{word} {rng.choice(_FIRMS)}" for word in words),
        "invention": (f"{word} {rng.choice(_GOODS)}" for word in words),
    }


def _words(rng: random.Random) -> Iterator[str]:
    """Names that occur once: a name leads to one thing."""
    used: set[str] = set()
    while True:
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(2)) + rng.choice(_ENDS)
        if word not in used:
            used.add(word)
            yield word.capitalize()


def _settle(things: dict[str, list[Thing]], rng: random.Random) -> None:
    """Give everything its facts, in an order in which the years of one bound those of the next."""
    for person in things["person"]:
        person.facts = {"birthplace": rng.choice(things["town"]).id, "born": str(rng.randint(1800, 1900))}
    for lake in things["lake"]:
        lake.facts = {"depth": str(rng.randint(9, 240)), "surveyor": rng.choice(things["person"]).id}
    for river in things["river"]:
        river.facts = {"flows_into": rng.choice(things["lake"]).id, "length": str(rng.randint(31, 690))}
    for town in things["town"]:
        facts = {"river": rng.choice(things["river"]).id, "founded": str(rng.randint(1090, 1640))}
        town.facts = {**facts, "mayor": rng.choice(things["person"]).id}
    for college in things["college"]:
        elders = [person for person in things["person"] if person.year("born") < 1825]
        college.facts = {"place": rng.choice(things["town"]).id, "head": rng.choice(elders).id}
    for person in things["person"]:
        if person.year("born") > 1850:  # the colleges were led by people born before 1825
            person.facts["college"] = rng.choice(things["college"]).id
    for company in things["company"]:
        founder = rng.choice(things["person"])
        year = founder.year("born") + rng.randint(23, 48)
        company.facts = {"founder": founder.id, "seat": rng.choice(things["town"]).id, "established": str(year)}
    for invention in things["invention"]:
        maker = rng.choice(things["company"])
        able = [p for p in things["person"] if 20 <= maker.year("established") + 5 - p.year("born") <= 60]
        inventor = rng.choice(able)
        year = maker.year("established") + rng.randint(1, 9)
        invention.facts = {"inventor": inventor.id, "maker": maker.id, "shown": str(year)}


def _text(thing: Thing, everything: dict[str, Thing], rng: random.Random) -> str:
    """The article: each fact in one sentence, and a sentence of no consequence."""
    subject = named(thing.title, thing.kind)
    sentences = []
    for relation in RELATIONS:
        if relation.subject != thing.kind or relation.name not in thing.facts:
            continue
        value = thing.facts[relation.name]
        if relation.object != VALUE:
            value = named(everything[value].title, relation.object)
        sentence = rng.choice(BY_NAME[relation.name].said)
        sentences.append(sentence.format(s=subject, S=subject[0].upper() + subject[1:], o=value))
    if thing.kind == "person":
        sentences.insert(1, f"By trade: {rng.choice(_CRAFTS)}.")
    remark, first, second = _REMARKS[thing.kind]
    sentences.append(remark.format(a=rng.choice(first.split("/")), b=rng.choice(second.split("/"))))
    return " ".join(sentences)


def write(path: Path = SHIPPED) -> int:
    """Write the file, one article a line; how many there are."""
    articles = make_world()
    lines = ",\n".join(json.dumps(article, ensure_ascii=False) for article in articles)
    path.write_text(f"[\n{lines}\n]\n", "utf-8")
    return len(articles)


if __name__ == "__main__":
    write()
