"""The filter language chooses the right rows, says what is wrong, and cannot be made to do anything else."""

import math

import pytest

from turnwise.ext.board.filters import FIELDS, FUNCTIONS, BadFilter, compile
from turnwise.ext.board.presets import PRESETS, fields
from turnwise.ext.board.table import Table, listing
from turnwise.storage.index import record
from turnwise.storage.run_dir import RunDir
from turnwise.types import CallStatus, StopReason


@pytest.fixture(scope="module")
def table(tmp_path_factory, make, call):
    """Rows 0 to 5 of one file."""
    run = RunDir(tmp_path_factory.mktemp("run"))
    record(
        run,
        "trajectories/step_000004.parquet",
        [
            make("a", sibling=0, reward=1.5, parts={"acc": 1.0, "format": 0.5}, answer="It is 42."),
            make("a", sibling=1, reward=0.5, parts={"acc": 0.0, "format": 0.5}, answer="Perhaps 41?", calls=[]),
            make("b", sibling=2, source="gsm8k", reward=None, failure="the sandbox failed", stop=StopReason.FAILED),
            make("c", sibling=3, reward=-1.0, parts={"acc": 0.0}, calls=[call(0, "1/0", CallStatus.ERROR)]),
            make("c", sibling=4, reward=-1.0, parts={"acc": 0.0}, stop=StopReason.TOKEN_BUDGET),
            make(
                "d",
                sibling=5,
                reward=0.0,
                parts={"acc": 1.0},
                question="What is 6 times 7?",
                answer="What is 6 times 7?",
            ),
        ],
    )
    table = Table(run)
    table.refresh(None)
    return table


def rows(table, expression):
    return compile(expression).mask(table).nonzero()[0].tolist()


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("reward > 0", [0, 1]),
        ("0 <= reward < 1.5", [1, 5]),
        ("reward == -1", [3, 4]),
        ("right == true", [0, 5]),
        ("right", [0, 5]),
        ("not right", [1, 2, 3, 4]),
        ("right == False or right == TRUE", [0, 1, 3, 4, 5]),
        ("reward > 0 and right == false", [1]),
        ("truncated or failure != null", [2, 4]),
        ("not (truncated or failure)", [0, 1, 3, 5]),
        ("sibling in (2, 5)", [2, 5]),
        ("sibling not in [2, 5]", [0, 1, 3, 4]),
        ('data_source == "gsm8k"', [2]),
        ("data_source in ('gsm8k', 'math')", [2]),
        ("data_source < 'b'", [0, 1, 3, 4, 5]),
        ('"42" in answer', [0, 2, 3, 4]),
        ('"it is" in answer', []),
        ('"it is" in lower(answer)', [0, 2, 3, 4]),
        ('contains(answer, "IT IS")', [0, 2, 3, 4]),
        ("answer == question", [5]),
        ("question in answer", [5]),
        ('"python" in tools', [0, 2, 3, 4, 5]),
        ('not tool("python")', [1]),
        ('contains(tools, "pyth")', []),
        ("len(tools) == 0", [1]),
        ("len(answer) > 11", [5]),
        ("part['format'] == 0.5", [0, 1]),
        ("parts.format > parts.acc", [1]),
        ('reward - part["acc"] == 0.5 ', [0, 1]),
        ("abs(reward) >= 1", [0, 3, 4]),
        ("-reward * 2 + 1 == 3", [3, 4]),
        ("reward / 0 > 0", []),
        ("1 / reward > 1", [1]),
        ("group_size == 2 and group_std == 0", [3, 4]),
        ("group_mean == 1", [0, 1]),
        ("split == 'train'", [0, 1, 2, 3, 4, 5]),
        ("split in ('eval', 'greedy')", []),
        ("failed_calls", [3]),
        ("null", []),
        ("true", [0, 1, 2, 3, 4, 5]),
        ("  reward\n > 0", [0, 1]),
        ("(right == true) == (reward > 0)", [0, 2, 3, 4]),
    ],
)
def test_rows(table, expression, chosen):
    assert rows(table, expression) == chosen


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("reward == null", [2]),
        ("null != reward", [0, 1, 3, 4, 5]),
        ("failure is null", [0, 1, 3, 4, 5]),
        ("failure is not None", [2]),
        ("reward != 1.5", [1, 3, 4, 5]),
        ("reward < 100 or reward >= 100", [0, 1, 3, 4, 5]),
        ("reward > null", []),
        ("failure != 'x'", [2]),
        ("failure not in ('x', 'y')", [2]),
        ("reward in (null, 0)", [2, 5]),
        ("reward + 1 > null - 1", []),
        ("len(failure) < 1000", [2]),
        ("first_right == false", []),
    ],
)
def test_null_compares_false(table, expression, chosen):
    assert rows(table, expression) == chosen


@pytest.mark.parametrize(
    ("expression", "column", "said"),
    [
        ("rewrd > 1", 1, "did you mean 'reward'"),
        ("reward > 0 and stp == 3", 16, "did you mean 'step'"),
        ("'äöü' in answr", 10, "did you mean 'answer'"),
        ("   rewrd > 1", 4, "did you mean"),
        ("reward = 1", 8, "use =="),
        ("reward > 1 && right", 13, "in words"),
        ("reward >", 9, "ends too early"),
        ("(reward > 1", 1, "never closed"),
        ("answer == 'x", 11, "never closed"),
        ("reward > 1)", 11, "never opened"),
        ("reward 1", 8, "cannot be read"),
        ("answer > 1", 10, "text cannot be compared with a number"),
        ("1 in answer", 1, "cannot be in a text"),
        ("'a' in reward", 1, "cannot be in a number"),
        ("'a' in 'b' in reward", 8, "cannot be in a number"),
        ("tools > 'a'", 9, "list of names"),
        ("(1, 2)", 1, "not a condition"),
        ("answer + 'x' == 'y'", 1, "a number is needed"),
        ("min(reward) > 1", 1, "unknown function 'min'"),
        ("abs(reward, 1) > 1", 1, "takes 1"),
        ("abs(x=1) > 1", 1, "named arguments"),
        ("abs(answer) > 1", 5, "number is needed"),
        ("lower(reward) == 'a'", 7, "does not take"),
        ("reward is 1", 1, "`is` is for null"),
        ("parts > 1", 1, "parts.acc"),
        ("part[0] > 1", 1, "not part of the filter language"),
    ],
)
def test_mistakes_are_shown_with_their_place_before_any_row_is_read(expression, column, said):
    with pytest.raises(BadFilter, match=said) as caught:
        compile(expression)
    assert caught.value.column == column and str(caught.value).startswith(f"column {column}: ")
    assert caught.value.end > column


def test_the_place_of_a_mistake_is_the_whole_word():
    for expression, wrong in (
        ("'äöü' in answr", "answr"),
        ("  not rewrd > 1", "rewrd"),
        ("1 < min(step)", "min(step)"),
    ):
        with pytest.raises(BadFilter) as caught:
            compile(expression)
        assert expression[caught.value.column - 1 : caught.value.end - 1] == wrong


def test_a_reward_part_nobody_has_is_a_mistake(table):
    with pytest.raises(BadFilter, match=r"column 12: unknown reward part 'acccc'.*did you mean 'acc'"):
        compile("right and (parts.acccc > 0)").mask(table)


HOSTILE = [
    "10**10**10",
    "2**99999999",
    "1 << 99999999",
    "9" * 1900,
    "1e999 * 0",
    "'a' * 10",
    "[0] * 10",
    "(" * 1000,
    "(" * 900 + "1" + ")" * 900,
    "[" * 30 + "]" * 30,
    "-" * 1999 + "1",
    "not " * 490 + "1",
    "~reward",
    "1" + "+1" * 990,
    "1" + "<1" * 990,
    "reward and " * 180 + "reward",
    "__import__('os').system('true')",
    "().__class__.__bases__[0].__subclasses__()",
    "answer.__class__",
    "parts.__class__.__name__",
    "parts.acc.__class__",
    "tools[0]",
    "lambda: 1",
    "[x for x in (1, 2)]",
    "{1: 2}",
    "{reward}",
    "f'{reward}'",
    "b'a' == answer",
    "1j > 0",
    "...",
    "(x := 1)",
    "reward if right else 1",
    "abs(*tools)",
    "abs(**{})",
    "await reward",
    "yield",
    "import os",
    "reward > 1; right",
    "reward\0> 1",
    "reward > 1 # right",
    "\ud800 > 1",
    "\u202ereward > 1",
    "'" + "x" * 1990,
    "",
    "   ",
    "x" * 2001,
    "eval('1')",
    "open('/etc/passwd')",
    "tool(tools)",
    "tool('a', 'b')",
    "part['a']['b']",
    "part[part['acc']]",
    "step in step",
    "1 in 1",
    "null in tools",
    "(1,(2,(3,))) == 1",
    "-answer",
    "-null > 1",
    "re­ward > 1",
]


@pytest.mark.parametrize("expression", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_refused_or_harmless(table, expression):
    try:
        mask = compile(expression).mask(table)
    except BadFilter as error:
        assert len(str(error)) < 600
    else:
        assert mask.dtype == bool and mask.shape == (6,)


def test_what_is_hostile_is_refused():
    harmless = {"1e999 * 0", "reward and " * 180 + "reward", "reward > 1 # right", "-null > 1", "reward > 1; right"}
    for expression in HOSTILE:
        if expression not in harmless and not expression.startswith("1<1"):
            with pytest.raises(BadFilter):
                compile(expression)


def test_every_preset_runs_and_finds_what_it_is_named_for(run_dir, make, call):
    double = [call(0, "print(1)"), call(1, "print(1)")]
    found = {
        "wrong but rewarded": make("s0", reward=0.5, parts={"acc": 0.0}),
        "right but unrewarded": make("s1", reward=0.0, parts={"acc": 1.0}),
        "malformed call": make("s2", calls=[call(0, "", CallStatus.MALFORMED)]),
        "failed tool call": make("s3", calls=[call(0, "1/0", CallStatus.TIMEOUT)]),
        "truncated": make("s4", stop=StopReason.TURN_TRUNCATED),
        "duplicate calls": make("s5", calls=double),
        "print-only code": make("s5", calls=double, sibling=1),
        "infrastructure failure": make("s7", failure="lost", reward=None),
        "flipped to wrong": make("s8", reward=0.0, first_right=True),
        "flipped to right": make("s9", first_right=False),
        "never called a tool": make("s10", calls=[]),
        "sampler and learner differ": make("s11", learned=True),
    }
    record(run_dir, "trajectories/step_000001.parquet", list(found.values()))
    table = Table(run_dir)
    table.refresh(None)
    known = {preset["name"]: preset for preset in fields()["presets"]}
    assert len(known) == len(PRESETS) > 20
    for name, preset in known.items():
        page = listing(table, filter=preset["filter"], sort=preset["sort"] or "", order=preset["order"])
        values = [row[preset["sort"]] for row in page["rows"]] if preset["sort"] else []
        assert values == sorted(values, reverse=preset["order"] == "desc"), name
        if name in found:
            places = {row["row"] for row in page["rows"]}
            assert list(found).index(name) in places and page["matched"] < len(found), name
    assert listing(table, filter=known["zero-variance group"]["filter"])["matched"] == 2
    assert listing(table, filter=known["longest"]["filter"])["matched"] == len(found)
    assert (known["worst"]["sort"], known["worst"]["order"]) == ("reward", "asc")
    assert listing(table, filter=known["ledger is not the full render"]["filter"])["matched"] == 0


def test_every_field_is_described_and_can_be_used(table):
    described = {entry["name"]: entry for entry in fields()["fields"]}
    assert set(described) == {*FIELDS, "parts"}
    for name in FIELDS:
        assert described[name]["doc"] and described[name]["type"]
        test = "len(tools) >= 0" if name == "tools" else f"{name} == null or {name} != null"
        assert len(rows(table, test)) == 6
    assert set(FUNCTIONS) == {"abs", "len", "lower", "contains", "tool"}


def test_numbers_are_compared_as_they_are(table):
    assert rows(table, "reward == 1.5000000000000002") == []
    assert rows(table, f"reward < {math.pi}") == [0, 1, 3, 4, 5]
