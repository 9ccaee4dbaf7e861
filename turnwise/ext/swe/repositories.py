"""Generated small repositories with one mistake each: a package, its tests, a history, an issue, and what mends it.

In the texts below <n>, <m>, <k> are numbers, <fn> the function's name and <pkg> the package's.
"""

import hashlib
import random
import re
from dataclasses import dataclass

SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True)
class MistakeKind:
    """A mistake: `wrong` stands once in `code` where `right` should. Tests are lines of (name, body)."""

    name: str
    names: tuple[str, ...]
    """What the function may be called."""
    code: str
    wrong: str
    right: str
    failing: tuple[tuple[str, str], ...]
    """Tests that fail with the mistake and pass without it."""
    passing: tuple[tuple[str, str], ...]
    """Tests that pass with the mistake and without it."""
    issue: str


@dataclass(frozen=True, slots=True)
class RepositoryProblem:
    """One repository with its mistake, and what mends it."""

    kind: MistakeKind
    words: dict[str, str]
    """What the placeholders stand for."""

    @property
    def package(self) -> str:
        return self.words["pkg"]

    @property
    def path(self) -> str:
        """The path of the file that has the mistake."""
        return f"{self.package}/{self.words['fn']}.py"

    @property
    def wrong(self) -> str:
        return self.fill(self.kind.wrong)

    @property
    def right(self) -> str:
        return self.fill(self.kind.right)

    @property
    def issue(self) -> str:
        return self.fill(self.kind.issue)

    def fill(self, text: str) -> str:
        return re.sub(r"<(\w+)>", lambda match: self.words[match[1]], text)

    def files(self) -> dict[str, str]:
        """The repository as the policy finds it, with the tests that pass."""
        fn, pkg = self.words["fn"], self.package
        return {
            "README.md": f"# {pkg}\n\nRun the tests with `python -m unittest`.\n",
            f"{pkg}/__init__.py": f'"""Small functions for a {pkg}."""\n',
            f"{pkg}/names.py": _NAMES,
            self.path: self.fill(self.kind.code.replace("<bug>", self.kind.wrong)).lstrip("\n"),
            "tests/__init__.py": "",
            "tests/test_names.py": _NAMES_TEST.replace("<pkg>", pkg),
            f"tests/test_{fn}.py": self._tests(self.kind.passing),
        }

    def history(self) -> list[tuple[str, list[str]]]:
        """Commits: a message, and the files that come with it; an empty list is all that is left."""
        return [
            ("Start", ["README.md", f"{self.package}/__init__.py"]),
            ("Names", [f"{self.package}/names.py", "tests/__init__.py", "tests/test_names.py"]),
            (f"Add {self.words['fn']}", []),
        ]

    def hidden_files(self) -> dict[str, str]:
        """The tests that decide about a solution, by path; the policy does not see them."""
        path = f"tests/test_{self.words['fn']}.py"
        return {path: self._tests((*self.kind.passing, *self.kind.failing))}

    def fail_to_pass(self) -> list[str]:
        return [self._id(name) for name, _ in self.kind.failing]

    def pass_to_pass(self) -> list[str]:
        return [*(self._id(name) for name, _ in self.kind.passing), "tests.test_names.NamesTest.test_title"]

    def _id(self, name: str) -> str:
        return f"tests.test_{self.words['fn']}.FunctionTest.{name}"

    def _tests(self, tests: tuple[tuple[str, str], ...]) -> str:
        fn = self.words["fn"]
        lines = ["import unittest", "", f"from {self.package}.{fn} import {fn}", "", ""]
        lines.append("class FunctionTest(unittest.TestCase):")
        for name, body in tests:
            lines += [f"    def {name}(self):", *(f"        {line}" for line in self.fill(body).splitlines()), ""]
        return "\n".join(lines)


_NAMES = '''"""Names as people write them."""


def title(name):
    """Each word with a capital letter."""
    return " ".join(word.capitalize() for word in name.split())
'''
_NAMES_TEST = """import unittest

from <pkg>.names import title


class NamesTest(unittest.TestCase):
    def test_title(self):
        self.assertEqual(title("ann lee"), "Ann Lee")
"""
PACKAGES = ("larder", "ferry", "orchard", "kiln", "harbour", "apiary", "loom", "quarry", "bakery", "tannery")
KINDS = (
    MistakeKind(
        "off_by_one", ("pages", "crates", "batches"),
        '''
def <fn>(total, size):
    """How many groups of `size` hold `total` things; the last may be partly filled."""
    return <bug>
''',
        "total // size + 1", "-(-total // size)",
        (("test_full", "self.assertEqual(<fn>(<n> * <k>, <n>), <k>)"),
         ("test_none", "self.assertEqual(<fn>(0, <n>), 0)")),
        (("test_rest", "self.assertEqual(<fn>(<n> * <k> + 1, <n>), <k> + 1)"),),
        "<fn>(<n> * <k>, <n>) gives one too many: all groups are full, so it should be <k>.",
    ),
    MistakeKind(
        "wrong_operator", ("discounted", "reduced", "after_tax_credit"),
        '''
def <fn>(price, percent):
    """The price when `percent` of it is taken off."""
    return <bug> * percent / 100
''',
        "price + price", "price - price",
        (("test_part", "self.assertEqual(<fn>(100, <n>), 100 - <n>)"),
         ("test_all", "self.assertEqual(<fn>(<m>, 100), 0)")),
        (("test_nothing", "self.assertEqual(<fn>(<m>, 0), <m>)"), ("test_free", "self.assertEqual(<fn>(0, <n>), 0)")),
        "<fn>(100, <n>) makes the price higher instead of lower.",
    ),
    MistakeKind(
        "missing_edge", ("mean", "average", "middle_value"),
        '''
def <fn>(values):
    """The mean of the values; <n> when there are none."""
    <bug>(values) / len(values)
''',
        "return sum", "if not values:\n        return <n>\n    return sum",
        (("test_empty", "self.assertEqual(<fn>([]), <n>)"),),
        (("test_one", "self.assertEqual(<fn>([<m>]), <m>)"), ("test_two", "self.assertEqual(<fn>([0, <m> * 2]), <m>)")),
        "<fn>([]) raises ZeroDivisionError; the docstring promises <n>.",
    ),
    MistakeKind(
        "wrong_default", ("repeat", "stretch", "copies"),
        '''
def <fn>(text, <bug>):
    """The text several times; <n> times when nothing is said."""
    return text * times
''',
        "times=<m>", "times=<n>",
        (("test_default", 'self.assertEqual(<fn>("ab"), "ab" * <n>)'),),
        (("test_given", 'self.assertEqual(<fn>("x", <k>), "x" * <k>)'),
         ("test_none", 'self.assertEqual(<fn>("x", 0), "")')),
        "<fn>(\'ab\') should repeat the text <n> times by default, as its docstring says.",
    ),
    MistakeKind(
        "swapped_arguments", ("clamp", "limited", "bounded"),
        '''
def within(value, low, high):
    """The value, not below low and not above high."""
    return max(low, min(value, high))


def <fn>(value):
    """The value within 0 and <n>."""
    return within(<bug>)
''',
        "value, <n>, 0", "value, 0, <n>",
        (("test_inside", "self.assertEqual(<fn>(1), 1)"), ("test_below", "self.assertEqual(<fn>(-<m>), 0)")),
        (("test_above", "self.assertEqual(<fn>(<n> + <m>), <n>)"), ("test_edge", "self.assertEqual(<fn>(<n>), <n>)")),
        "<fn> always gives <n>, even for 1.",
    ),
    MistakeKind(
        "wrong_comparison", ("passes", "qualifies", "is_enough"),
        '''
LIMIT = <n>


def <fn>(score):
    """Whether the score reaches the limit."""
    return <bug>
''',
        "score > LIMIT", "score >= LIMIT",
        (("test_limit", "self.assertTrue(<fn>(<n>))"),),
        (("test_above", "self.assertTrue(<fn>(<n> + <m>))"), ("test_below", "self.assertFalse(<fn>(<n> - 1))")),
        "A score of exactly <n> reaches the limit, but <fn>(<n>) says it does not.",
    ),
    MistakeKind(
        "wrong_end", ("last_items", "newest", "tail_of"),
        '''
def <fn>(items, count):
    """The last `count` items in their order."""
    return list(items)<bug>
''',
        "[:count]", "[max(len(items) - count, 0):]",
        (("test_some", "self.assertEqual(<fn>(list(range(<n> + 2)), 2), [<n>, <n> + 1])"),),
        (("test_all", "self.assertEqual(<fn>([<n>, <m>], 2), [<n>, <m>])"),
         ("test_none", "self.assertEqual(<fn>([<n>], 0), [])")),
        "<fn> gives the first items instead of the last.",
    ),
    MistakeKind(
        "shared_default", ("with_tag", "tagged", "labelled"),
        '''
def <fn>(tag, <bug>
    tags.append(tag)
    return tags
''',
        'tags=[]):\n    """The tags with one more; a new list when none is given."""',
        'tags=None):\n    """The tags with one more; a new list when none is given."""\n'
        "    tags = [] if tags is None else tags",
        (("test_twice", "<fn>(<n>)\nself.assertEqual(<fn>(<m>), [<m>])"),),
        (("test_given", "self.assertEqual(<fn>(<n>, [<m>]), [<m>, <n>])"),),
        "The second call of <fn> without a list still has the tag of the first.",
    ),
    MistakeKind(
        "wrong_order", ("merged", "combined", "overlaid"),
        '''
def <fn>(old, new):
    """Both together; where both have a key, the new value stands."""
    return dict(<bug>)
''',
        "list(new.items()) + list(old.items())", "list(old.items()) + list(new.items())",
        (("test_both", "self.assertEqual(<fn>(dict(a=<n>), dict(a=<m>)), dict(a=<m>))"),),
        (("test_apart", "self.assertEqual(<fn>(dict(a=<n>), dict(b=<m>)), dict(a=<n>, b=<m>))"),),
        "When both have a key, <fn> keeps the old value; the new one should stand.",
    ),
    MistakeKind(
        "half_done", ("same_name", "alike", "equal_names"),
        '''
def <fn>(first, second):
    """Whether two names are the same, whatever their case."""
    return first.lower() <bug>
''',
        "== second", "== second.lower()",
        (("test_case", 'self.assertTrue(<fn>("Ann<n>", "ANN<n>"))'),),
        (("test_same", 'self.assertTrue(<fn>("Bo<n>", "bo<n>"))'),
         ("test_other", 'self.assertFalse(<fn>("a<n>", "b<m>"))')),
        "<fn>(\'Ann<n>\', \'ANN<n>\') says that these are two names.",
    ),
    MistakeKind(
        "early_return", ("total_length", "all_letters", "width_of"),
        '''
def <fn>(words):
    """Letters of all words together, each word counted <n> times."""
    total = 0
    for word in words:
        total += <n> * len(word)
<bug>
''',
        "        return total\n    return 0", "    return total",
        (("test_two", 'self.assertEqual(<fn>(["a" * <m>, "b"]), <n> * (<m> + 1))'),),
        (("test_one", 'self.assertEqual(<fn>(["abc"]), 3 * <n>)'), ("test_none", "self.assertEqual(<fn>([]), 0)")),
        "<fn> only counts the first word.",
    ),
    MistakeKind(
        "wrong_unit", ("in_minutes", "duration", "minutes_of"),
        '''
def <fn>(hours, minutes=0):
    """All of it in minutes."""
    return <bug> + minutes
''',
        "hours * 100", "hours * 60",
        (("test_hours", "self.assertEqual(<fn>(<k>, <n>), <k> * 60 + <n>)"),),
        (("test_minutes", "self.assertEqual(<fn>(0, <m>), <m>)"),),
        "<fn>(<k>) counts more than 60 minutes in an hour.",
    ),
)  # fmt: skip


def problem_at(split: str, seed: int, index: int) -> RepositoryProblem:
    """Repository number `index` of a split. Train and test share none, whatever the seed."""
    rng = random.Random(f"repositories/{seed}/{split}/{index}")
    while True:
        kind = rng.choice(KINDS)
        n, m = rng.sample(range(3, 60), 2)
        words = {"n": str(n), "m": str(m), "k": str(rng.randint(2, 9))}
        words |= {"fn": rng.choice(kind.names), "pkg": rng.choice(PACKAGES)}
        if split_of(kind, words) == split:
            return RepositoryProblem(kind, words)


def split_of(kind: MistakeKind, words: dict[str, str]) -> str:
    """A fifth of all choices is held out, decided by their hash."""
    text = ",".join([kind.name, *(words[key] for key in sorted(words))])
    return "test" if hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % 5 == 0 else "train"
