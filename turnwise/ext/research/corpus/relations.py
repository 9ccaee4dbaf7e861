"""What the invented world's articles say of each other: one relation is one fact with one answer."""

from dataclasses import dataclass

VALUE = "value"
"""The kind of what has no article of its own: a year, a length."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact about things of one kind: `Relation("inventor", "invention", "person", ...)`; `{}` is the subject."""

    name: str
    subject: str
    object: str
    said: tuple[str, ...]
    """Sentences of an article, `{o}` the object."""
    question: str
    phrase: str = ""
    """The object, named by the subject, as part of a longer question; empty for a value."""
    words: str = ""
    """What to look for besides the subject's name."""


RELATIONS = (
    Relation(
        "flows_into",
        "river",
        "lake",
        ("{s} flows into {o}.", "{s} ends in {o}."),
        "Into which lake does {} flow?",
        "the lake into which {} flows",
        "flows into lake",
    ),
    Relation(
        "length",
        "river",
        VALUE,
        ("It is {o} km long.", "From spring to mouth it measures {o} km."),
        "How many kilometres long is {}?",
        words="km long",
    ),
    Relation(
        "depth",
        "lake",
        VALUE,
        ("{s} is {o} metres deep.", "{s} has a depth of {o} metres."),
        "How many metres deep is {}?",
        words="metres deep",
    ),
    Relation(
        "surveyor",
        "lake",
        "person",
        ("It was surveyed by {o}.", "Its first survey is the work of {o}."),
        "Who surveyed {}?",
        "the surveyor of {}",
        "surveyed by",
    ),
    Relation(
        "river",
        "town",
        "river",
        ("{s} is a town on {o}.", "{s} lies on {o}."),
        "On which river does {} lie?",
        "the river on which {} lies",
        "lies on river",
    ),
    Relation(
        "founded",
        "town",
        VALUE,
        ("It was founded in {o}.", "Its charter dates from {o}."),
        "In which year was {} founded?",
        words="founded year",
    ),
    Relation(
        "mayor",
        "town",
        "person",
        ("Its longest-serving mayor was {o}.", "Nobody was mayor for longer than {o}."),
        "Who was the longest-serving mayor of {}?",
        "the longest-serving mayor of {}",
        "mayor",
    ),
    Relation(
        "birthplace",
        "person",
        "town",
        ("{s} was born in {o}.", "The birthplace of {s} was {o}."),
        "In which town was {} born?",
        "the town in which {} was born",
        "born in",
    ),
    Relation(
        "born",
        "person",
        VALUE,
        ("The year of birth was {o}.", "The parish book gives {o} as the year of birth."),
        "In which year was {} born?",
        words="year of birth",
    ),
    Relation(
        "college",
        "person",
        "college",
        ("After school came years at {o}.", "The studies were done at {o}."),
        "At which college did {} study?",
        "the college at which {} studied",
        "studies college",
    ),
    Relation(
        "founder",
        "company",
        "person",
        ("{s} was founded by {o}.", "{s} goes back to {o}, its founder."),
        "Who founded {}?",
        "the founder of {}",
        "founded by founder",
    ),
    Relation(
        "seat",
        "company",
        "town",
        ("Its seat is in {o}.", "The company is at home in {o}."),
        "In which town does {} have its seat?",
        "the town in which {} has its seat",
        "seat in",
    ),
    Relation(
        "established",
        "company",
        VALUE,
        ("Business began in {o}.", "It opened its doors in {o}."),
        "In which year did {} begin its business?",
        words="business began",
    ),
    Relation(
        "inventor",
        "invention",
        "person",
        ("{S} was invented by {o}.", "{S} is an invention of {o}."),
        "Who invented {}?",
        "the inventor of {}",
        "invented by",
    ),
    Relation(
        "maker",
        "invention",
        "company",
        ("It was first built by {o}.", "The first one was made by {o}."),
        "Which company built {} first?",
        "the company that first built {}",
        "first built by",
    ),
    Relation(
        "shown",
        "invention",
        VALUE,
        ("The public first saw it in {o}.", "It was shown for the first time in {o}."),
        "In which year was {} shown for the first time?",
        words="shown first time",
    ),
    Relation(
        "place",
        "college",
        "town",
        ("{s} stands in {o}.", "{s} is a college in {o}."),
        "In which town does {} stand?",
        "the town in which {} stands",
        "college in town",
    ),
    Relation(
        "head",
        "college",
        "person",
        ("Its first head was {o}.", "The first to lead it was {o}."),
        "Who was the first head of {}?",
        "the first head of {}",
        "first head",
    ),
)
BY_NAME = {relation.name: relation for relation in RELATIONS}
KINDS = tuple(dict.fromkeys(relation.subject for relation in RELATIONS))


def named(title: str, kind: str) -> str:
    """A title as it stands inside a sentence; an invention gets its article."""
    return f"the {title}" if kind == "invention" else title
