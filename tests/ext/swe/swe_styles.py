"""A repository and its tests in the many ways that people write them: all of it must pass when code and tests are apart."""

CODE = '''"""A little of everything."""
import asyncio, enum, logging, os, random, sys, time
from collections import namedtuple, defaultdict, OrderedDict, Counter
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal

from . import helpers
from .helpers import double

__version__ = "1.2"
LIMIT = 10
Point = namedtuple("Point", "x y")

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

class Rank(enum.IntEnum):
    LOW = 1
    HIGH = 2

class ShopError(ValueError):
    def __init__(self, code, text="wrong"):
        super().__init__(text)
        self.code = code

class Empty(ShopError, LookupError):
    def __str__(self):
        return "empty: " + str(self.code)

@dataclass
class Item:
    name: str
    price: float = 1.0
    tags: list = field(default_factory=list)

@dataclass(order=True, frozen=True)
class Version:
    major: int
    minor: int = 0
    @classmethod
    def parse(cls, text):
        return cls(*map(int, text.split(".")))
    def __str__(self):
        return f"{self.major}.{self.minor}"

class Money:
    def __init__(self, amount):
        self.amount = amount
    def __eq__(self, other):
        return self.amount == (other.amount if isinstance(other, Money) else other)
    def __hash__(self):
        return hash(self.amount)
    def __add__(self, other):
        return Money(self.amount + getattr(other, "amount", other))
    __radd__ = __add__
    def __lt__(self, other):
        return self.amount < other.amount
    def __repr__(self):
        return f"Money({self.amount})"

class Stack:
    made = 0
    def __init__(self, items=()):
        self.items = list(items)
        type(self).made += 1
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise Empty(7)
        return self.items.pop()
    @property
    def top(self):
        return self.items[-1]
    @top.setter
    def top(self, value):
        self.items[-1] = value
    @staticmethod
    def of(*items):
        return Stack(items)
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
    def __contains__(self, item):
        return item in self.items
    def __getitem__(self, at):
        return self.items[at]
    def __setitem__(self, at, value):
        self.items[at] = value
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.items.clear()
        return False
    def each(self, function):
        return [function(item) for item in self.items]

class Shape:
    def __init__(self, name):
        self.name = name
    def area(self):
        raise NotImplementedError
    def tell(self):
        return f"{self.name}: {self.area()}"

def sort_here(items):
    items.sort()

def count(words):
    found = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return found

def grouped(pairs):
    found = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found

def evens(limit):
    for n in range(0, limit, 2):
        yield n

def say(text):
    print(text)
    print("beware", file=sys.stderr)

def retry(times):
    def wrap(function):
        def inner(*args, **kwargs):
            for left in reversed(range(times)):
                try:
                    return function(*args, **kwargs)
                except KeyError:
                    if not left:
                        raise
        return inner
    return wrap

def wait_and(value):
    time.sleep(1000)
    return value

def home():
    return os.environ["SHOP_HOME"]

def dice():
    return random.randint(1, 10**9)

def save(path, text):
    with open(path, "w") as file:
        file.write(text)

def load(file):
    return file.read().upper()

def tomorrow(day):
    return day.replace(day=day.day + 1)

async def fetch(value):
    await asyncio.sleep(0)
    return value * 2

def quad(x):
    return double(double(x))

def via_module(x):
    return helpers.double(x)

def send(box, text):
    box.send(text, urgent=True)
    box.sent = text
    return box.receive()

def answer():
    return input("? ").strip()

def main(argv=None):
    if not (argv or sys.argv[1:]):
        sys.exit(2)
    return len(argv or sys.argv[1:])

def log(text):
    return logging.getLogger("shop").name + text

def half(x):
    return x / 2

def nothing():
    return None

def price(text):
    return Decimal(text)

def nested():
    return {"a": [1, (2, 3)], "b": {"c": {4}}, 5: b"six", "none": None, "f": 1.5}

def compose(*functions):
    def run(x):
        for function in functions:
            x = function(x)
        return x
    return run
'''
HELPERS = "def double(x):\n    return 2 * x\n"
UNITTEST = """import asyncio, contextlib, copy, io, os, random, sys, tempfile, unittest
from collections import Counter
from datetime import date
from decimal import Decimal
from unittest import mock
import shop
from shop import *
from shop import core as c, helpers
from shop.core import Colour, Empty, Item, Money, Point, Rank, Shape, ShopError, Stack, Version, retry
import tests.data as data

class Square(Shape):
    def __init__(self, side):
        super().__init__("square")
        self.side = side
    def area(self):
        return self.side ** 2

class StyleTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = Stack([1, 2])
    def setUp(self):
        self.stack = Stack([3, 1, 2])
        self.addCleanup(lambda: None)
    def test_values(self):
        self.assertEqual(c.count(["a", "b", "a"]), {"a": 2, "b": 1})
        self.assertEqual(c.nested(), {"a": [1, (2, 3)], "b": {"c": {4}}, 5: b"six", "none": None, "f": 1.5})
        self.assertIsNone(c.nothing())
        self.assertIs(c.nothing(), None)
        self.assertAlmostEqual(c.half(0.3), 0.15)
        self.assertEqual(c.price("1.10"), Decimal("1.1"))
        self.assertEqual(c.LIMIT, 10)
        self.assertEqual(c.__version__, "1.2")
        self.assertEqual(c.tomorrow(date(2024, 1, 1)), date(2024, 1, 2))
        self.assertDictEqual(c.grouped([("a", 1), ("a", 2)]), {"a": [1, 2]})
        self.assertEqual(data.EXPECTED, c.quad(3))
    def test_in_place(self):
        items = [3, 1, 2]
        self.assertIsNone(c.sort_here(items))
        self.assertEqual(items, [1, 2, 3])
        self.stack.items.append(9)
        self.assertEqual(self.stack.pop(), 9)
        self.assertIs(self.stack.items, self.stack.items)
        self.stack.items = [5]
        self.assertEqual(len(self.stack), 1)
    def test_object(self):
        self.assertEqual(list(self.stack), [3, 1, 2])
        self.assertEqual(len(self.stack.push(4)), 4)
        self.assertIn(4, self.stack)
        self.assertNotIn(44, self.stack)
        self.assertEqual(self.stack[1:], [1, 2, 4])
        self.stack[0] = 8
        self.assertEqual(self.stack.items[0], 8)
        self.stack.top = 7
        self.assertEqual(self.stack.top, 7)
        self.assertIsInstance(self.stack, Stack)
        self.assertIs(type(self.stack), Stack)
        self.assertTrue(hasattr(self.stack, "push") and not hasattr(self.stack, "shove"))
        self.assertTrue(self.stack)
        self.assertFalse(Stack())
        self.assertEqual(Stack.of(1, 2).items, [1, 2])
        self.assertGreaterEqual(Stack.made, 1)
        with Stack([1]) as stack:
            self.assertEqual(stack.top, 1)
        self.assertEqual(stack.items, [])
        self.assertEqual(self.shared.items, [1, 2])
    def test_errors(self):
        with self.assertRaises(Empty) as caught:
            Stack().pop()
        self.assertEqual(caught.exception.code, 7)
        self.assertEqual(str(caught.exception), "empty: 7")
        self.assertRaises(ValueError, Stack().pop)
        self.assertRaises(LookupError, Stack().pop)
        self.assertRaises(IndexError, lambda: Stack().top)
        with self.assertRaisesRegex(ShopError, "bad"):
            raise ShopError(3, "bad thing")
        with self.assertRaises(SystemExit) as caught:
            c.main([])
        self.assertEqual(caught.exception.code, 2)
        try:
            Stack().pop()
        except ShopError as error:
            self.assertIsInstance(error, Empty)
        with self.assertRaises(ZeroDivisionError):
            c.Stack([0]).each(lambda x: 1 / x)
        with self.assertRaises(TypeError):
            c.quad()
    def test_classes(self):
        self.assertEqual(Point(1, 2), (1, 2))
        self.assertEqual(Point(1, 2).x, 1)
        self.assertIsInstance(Point(1, 2), tuple)
        x, y = Point(3, 4)
        self.assertEqual((x, y), (3, 4))
        self.assertIs(Colour(1), Colour.RED)
        self.assertEqual(Colour["BLUE"].value, 2)
        self.assertEqual([one.name for one in Colour], ["RED", "BLUE"])
        self.assertEqual(Rank.HIGH, 2)
        self.assertLess(Rank.LOW, Rank.HIGH)
        self.assertEqual(Item("a"), Item("a", 1.0, []))
        self.assertNotEqual(Item("a"), Item("b"))
        self.assertEqual(repr(Item("a")), "Item(name='a', price=1.0, tags=[])")
        self.assertEqual(sorted([Version(2), Version(1, 5)])[0], Version.parse("1.5"))
        self.assertEqual(f"{Version(1, 2)!s}", "1.2")
        self.assertEqual({Version(1): "a"}[Version(1)], "a")
        self.assertEqual(Money(3), 3)
        self.assertEqual(sum([Money(1), Money(2)]), Money(3))
        self.assertNotEqual(Money(3), 4)
        self.assertEqual(max(Money(1), Money(5)).amount, 5)
        one = Item("x", tags=["t"])
        other = copy.deepcopy(one)
        other.tags.append("u")
        self.assertEqual(one.tags, ["t"])
        self.assertTrue(issubclass(Empty, ShopError))
    def test_callbacks(self):
        self.assertEqual(self.stack.each(lambda x: x * 2), [6, 2, 4])
        seen = []
        self.stack.each(seen.append)
        self.assertEqual(seen, [3, 1, 2])
        self.assertEqual(self.stack.each(str), ["3", "1", "2"])
        self.assertEqual(c.compose(len, helpers.double, str)("abc"), "6")
        calls = []
        @retry(3)
        def flaky():
            calls.append(1)
            if len(calls) < 3:
                raise KeyError
            return "done"
        self.assertEqual(flaky(), "done")
        self.assertEqual(list(c.evens(6)), [0, 2, 4])
        steps = c.evens(9)
        self.assertEqual((next(steps), next(steps)), (0, 2))
    def test_subclass(self):
        square = Square(3)
        self.assertEqual(square.area(), 9)
        self.assertEqual(square.tell(), "square: 9")
        self.assertIsInstance(square, Shape)
        with self.assertRaises(NotImplementedError):
            Shape("none").tell()
    def test_mocks(self):
        with mock.patch("shop.core.double", return_value=1) as double:
            self.assertEqual(c.quad(5), 1)
            self.assertEqual(double.call_count, 2)
        self.assertEqual(c.quad(5), 20)
        with mock.patch.object(helpers, "double", side_effect=lambda x: -x):
            self.assertEqual(c.via_module(5), -5)
        with mock.patch.object(Stack, "pop", return_value="p"):
            self.assertEqual(Stack().pop(), "p")
        self.assertRaises(Empty, Stack().pop)
        box = mock.Mock()
        box.receive.return_value = "ok"
        self.assertEqual(c.send(box, "hello"), "ok")
        box.send.assert_called_once_with("hello", urgent=True)
        self.assertEqual(box.sent, "hello")
        with mock.patch("time.sleep") as sleep:
            self.assertEqual(c.wait_and(3), 3)
        sleep.assert_called_once_with(1000)
        with mock.patch("shop.core.time.sleep"):
            self.assertEqual(c.wait_and(4), 4)
        with mock.patch("builtins.input", return_value=" yes "):
            self.assertEqual(c.answer(), "yes")
        with mock.patch.dict(os.environ, SHOP_HOME="/there"):
            self.assertEqual(c.home(), "/there")
        with mock.patch.object(sys, "argv", ["shop", "a", "b"]):
            self.assertEqual(c.main(), 2)
    def test_output(self):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            c.say("hello")
        self.assertEqual(out.getvalue(), "hello\\n")
        self.assertEqual(err.getvalue(), "beware\\n")
    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            c.save(os.path.join(folder, "x"), "text")
            with open(os.path.join(folder, "x")) as file:
                self.assertEqual(file.read(), "text")
        self.assertEqual(c.load(io.StringIO("abc")), "ABC")
        with open(os.path.join(os.path.dirname(__file__), "words.txt")) as file:
            self.assertEqual(c.count(file.read().split()), {"x": 2, "y": 1})
    def test_random(self):
        random.seed(5)
        expected = random.Random(5).randint(1, 10**9)
        self.assertEqual(c.dice(), expected)
    def test_subtests(self):
        for n, wanted in ((1, 4), (2, 8)):
            with self.subTest(n=n):
                self.assertEqual(c.quad(n), wanted)
    def test_coroutine(self):
        self.assertEqual(asyncio.run(c.fetch(4)), 8)

class AsyncTest(unittest.IsolatedAsyncioTestCase):
    async def test_fetch(self):
        self.assertEqual(await c.fetch(2), 4)
"""
PYTEST = """import os
import pytest
from shop import core as c
from shop.core import Empty, Money, Stack, Version

def test_plain():
    assert c.count("aab") == {"a": 2, "b": 1}
    assert c.half(3) == pytest.approx(1.5)

@pytest.mark.parametrize("n, wanted", [(1, 4), (2, 8)])
def test_each(n, wanted):
    assert c.quad(n) == wanted

def test_raises():
    with pytest.raises(Empty, match="empty: 7") as caught:
        Stack().pop()
    assert caught.value.code == 7

def test_fixture(stack, tmp_path, monkeypatch, capsys):
    assert list(stack) == [1, 2]
    c.save(tmp_path / "x", "y")
    assert (tmp_path / "x").read_text() == "y"
    monkeypatch.setenv("SHOP_HOME", "here")
    assert c.home() == "here"
    monkeypatch.setattr(c, "double", lambda x: 0)
    assert c.quad(2) == 0
    monkeypatch.setattr(Stack, "pop", lambda self: "popped")
    assert Stack().pop() == "popped"
    monkeypatch.undo()
    c.say("hi")
    assert capsys.readouterr().out == "hi\\n"

def test_after():
    assert c.quad(2) == 8
    with pytest.raises(Empty):
        Stack().pop()

class TestGroup:
    def test_order(self):
        assert Version(1) < Version(2)
        assert Money(2) == 2
"""
CONFTEST = """import pytest
from shop.core import Stack

@pytest.fixture
def stack():
    return Stack([1, 2])
"""
FILES = {
    "shop/__init__.py": "from .core import quad\n", "shop/core.py": CODE, "shop/helpers.py": HELPERS,
    "tests/__init__.py": "", "tests/data.py": "EXPECTED = 12\n", "tests/words.txt": "x y x",
    "tests/test_styles.py": UNITTEST, "tests/conftest.py": CONFTEST, "tests/test_plain.py": PYTEST,
}  # fmt: skip
_STYLES = [
    "values", "in_place", "object", "errors", "classes", "callbacks", "subclass", "mocks", "output", "files", "random",
    "subtests", "coroutine",
]  # fmt: skip
UNITTESTS = [
    *(f"tests.test_styles.StyleTest.test_{name}" for name in _STYLES),
    "tests.test_styles.AsyncTest.test_fetch",
]
_PLAIN = ["plain", "each[1-4]", "each[2-8]", "raises", "fixture", "after"]
PYTESTS = [*(f"tests/test_plain.py::test_{name}" for name in _PLAIN), "tests/test_plain.py::TestGroup::test_order"]
