"""The functions that programs call: ways to say a config, runs read back, and wrong values refused in one line."""

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import turnwise as tw
from turnwise import Message, Role, Sample, TurnwiseError
from turnwise.data.task_config import Sections
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.types import Image, InteractionSpec, Text

QUIET = Console(quiet=True)
PROMPT = (Message(Role.USER, "6*7?"),)


def sample(**fields: Any) -> Sample:
    return Sample(**{"id": "a", "prompt": PROMPT, "data_source": "x", "ground_truth": "42", **fields})


def said(message: Any) -> Sample:
    return sample(prompt=(message,))


WRONG_SAMPLES = {
    "text for a prompt": (sample(prompt="text"), "samples[0].prompt: expected a tuple of Message"),
    "None among messages": (sample(prompt=(None,)), "prompt[0]: expected a Message"),
    "no prompt": (sample(prompt=None), "prompt: expected a tuple of Message"),
    "an empty prompt": (sample(prompt=()), "prompt: expected a tuple of Message"),
    "a message for a prompt": (sample(prompt=PROMPT[0]), "prompt: expected a tuple of Message"),
    "a dict for a message": (said({"role": "user", "content": "x"}), "prompt[0]: expected a Message"),
    "a role as text": (said(Message("user", "x")), "prompt[0].role: expected one of Role.SYSTEM"),
    "no role": (said(Message(None, "x")), "prompt[0].role"),
    "no content": (said(Message(Role.USER, None)), "prompt[0].content: expected text"),
    "a number for content": (said(Message(Role.USER, 5)), "prompt[0].content: expected text"),
    "a text among parts": (said(Message(Role.USER, ("x",))), "prompt[0].content[0]: expected Text or Image"),
    "a number in a part": (said(Message(Role.USER, (Text(5),))), "prompt[0].content[0]: expected text"),
    "no source of an image": (said(Message(Role.USER, (Image(None),))), "prompt[0].content[0]: expected text"),
    "half a character": (said(Message(Role.USER, "\ud800")), "not valid Unicode"),
    "calls that are none": (said(Message(Role.USER, "x", tool_calls=None)), "tool_calls: expected a tuple of ToolCall"),
    "a number for a name": (said(Message(Role.USER, "x", name=5)), "prompt[0].name: expected text"),
    "a number for a call's id": (said(Message(Role.TOOL, "x", tool_call_id=5)), "prompt[0].tool_call_id"),
    "no data source": (sample(data_source=None), "data_source: missing"),
    "a number for a source": (sample(data_source=5), "data_source: expected text"),
    "an empty source": (sample(data_source=""), "data_source: empty"),
    "a number for an id": (sample(id=5), "id: expected text, got a number"),
    "no id": (sample(id=None), "id: missing"),
    "an empty id": (sample(id=""), "id: empty"),
    "a number for a loop": (sample(agent=5), "agent: expected text"),
    "a text for tools": (sample(tools="calculate"), "tools: expected names of tools"),
    "a number among tools": (sample(tools=(5,)), "tools[0]: expected text"),
    "a list for tools_kwargs": (sample(tools_kwargs=[1]), "tools_kwargs: expected a dict"),
    "a number in tools_kwargs": (sample(tools_kwargs={"calculate": 5}), "tools_kwargs.calculate: expected a dict"),
    "a text for an interaction": (sample(interaction="gsm8k"), "interaction: expected InteractionSpec"),
    "a number for its name": (sample(interaction=InteractionSpec(5)), "interaction.name: expected text"),
    "a number for its kwargs": (sample(interaction=InteractionSpec("gsm8k", 5)), "interaction.kwargs: expected a dict"),
    "a text for images": (sample(images="a.png"), "images: expected a tuple of Image"),
    "a text among images": (sample(images=("a.png",)), "images[0]: expected Image"),
    "no images": (sample(images=None), "images: expected a tuple of Image"),
    "no info": (sample(info=None), "info: expected a dict"),
    "an object in info": (sample(info={"a": object()}), "info.a: values of type object"),
    "a number for extra_info": (sample(info={"extra_info": 5}), "info.extra_info: expected a dict"),
    "an object for a truth": (sample(ground_truth=object()), "ground_truth: values of type object"),
    "no sample": (None, "samples[0] is not a Sample but NoneType"),
}  # type: ignore[arg-type]


@pytest.fixture
def config(tmp_path: Path) -> tw.Config:
    scorers = "scoring.scorers={default: exact_match}"
    script = "engine.script=['#### 42']"
    return tw.configure(
        "task=null", "engine=scripted", script, scorers, "board.live=false", f"runs_dir={tmp_path / 'runs'}"
    )


def refusal(work: Callable[[], Any], runs: str) -> str:
    with pytest.raises(TurnwiseError) as refused:
        work()
    text = str(refused.value)
    assert "\n" not in text and len(text) < 500 and not Path(runs).exists(), text
    return text


@pytest.mark.parametrize("name", WRONG_SAMPLES)
def test_wrong_samples_are_refused_by_field(name: str, config: tw.Config) -> None:
    wrong, words = WRONG_SAMPLES[name]
    assert words in refusal(lambda: tw.evaluate(config, samples=[wrong], console=QUIET), config.runs_dir)  # type: ignore[list-item]


def test_lists_do_for_tuples(config: tw.Config) -> None:
    given = sample(prompt=[Message(Role.USER, [Text("6*7?")])], tools=[])
    assert tw.evaluate(config, samples=[given], console=QUIET).trajectories[0].sample.prompt[0].text == "6*7?"


@pytest.mark.parametrize("value", [None, 5, "first", {}, [], tw.Config])
def test_no_config(value: Any) -> None:
    for function in (tw.evaluate, tw.train, tw.sft):
        assert "expected a Config" in refusal(lambda function=function: function(value), "runs")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "trajectories is a list of Trajectory, not int"),
        ([5], "trajectories[0] is not a Trajectory but int"),
    ],
)
def test_wrong_trajectories_are_refused(given: Any, words: str, config: tw.Config) -> None:
    config = tw.configure(f"runs_dir={config.runs_dir}")
    assert words in refusal(lambda: tw.sft(config, trajectories=given, console=QUIET), config.runs_dir)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samples": 5}, "samples is a list of Sample, not int"),
        ({"samples": "abc"}, "samples is a list of Sample, not str"),
        ({"samples": {"a": 1}}, "samples is a list of Sample, not dict"),
        ({"samples": sample()}, "samples is a list of Sample, not Sample"),
        ({"tools": 5}, "tools is a list of tools"),
        ({"tools": [5]}, "5 is not a tool"),
        ({"tools": [list(range(200_000))]}, "[0, 1, 2, 3, 4, 5, ...] is not a tool"),
        ({"tools": ["x" * 500_000]}, "is not a tool"),
        ({"scorer": 5}, "cannot be called"),
        ({"scorer": int}, "its signature cannot be read"),
        ({"interaction": 5}, "interaction"),
        ({"console": 5}, "console is a rich.console.Console, not int"),
        ({"console": "x"}, "console is a rich.console.Console, not str"),
    ],
)
def test_wrong_parts_are_refused_by_name(given: dict[str, Any], words: str, config: tw.Config) -> None:
    every = {"samples": [sample()], "console": QUIET} | given
    assert words in refusal(lambda: tw.evaluate(config, **every), config.runs_dir)


def test_wrong_samples_of_a_training(config: tw.Config) -> None:
    config = tw.configure("board.live=false", f"runs_dir={config.runs_dir}")
    for given, words in (({"samples": 5}, "samples is a list"), ({"eval_samples": 5}, "eval_samples is a list"),
                         ({"eval_samples": [sample(id=5)]}, "eval_samples[0].id"), ({"samples": [None]}, "samples[0]")):  # fmt: skip
        every: dict[str, Any] = {"samples": [sample()], "eval_samples": [sample()], "console": QUIET} | given
        assert words in refusal(lambda every=every: tw.train(config, **every), config.runs_dir)  # type: ignore[misc]


async def counts(upto: int) -> Any:
    """Count.

    Args:
        upto: the last number
    """
    yield upto


@pytest.mark.parametrize("value", [5, [], {}, b"x", counts])
def test_no_tool(value: Any) -> None:
    with pytest.raises(TurnwiseError, match="not a tool|is a generator"):
        tw.tool(value)


@pytest.mark.parametrize("value", [None, 5, ["a=b"], b"a=b"])
def test_no_override(value: Any) -> None:
    assert refusal(lambda: tw.configure(value), "runs")


WAYS = {
    "texts": lambda: tw.configure("training.steps=2", "task=null", "data.eval_files=[a.parquet]"),
    "a dict": lambda: tw.configure({"training": {"steps": 2}, "task": None, "data": {"eval_files": ("a.parquet",)}}),
    "dotted keys": lambda: tw.configure({"training.steps": 2, "task": None, "data.eval_files": [Path("a.parquet")]}),
    "sections": lambda: tw.configure(training={"steps": 2}, task=None, data={"eval_files": ["a.parquet"]}),
    "typed sections": lambda: tw.configure(
        tw.Config(task=None), training=tw.TrainingConfig(steps=2), data=tw.DataConfig(eval_files=["a.parquet"])
    ),
    "a whole config": lambda: tw.configure(
        tw.Config(task=None, training=tw.TrainingConfig(steps=2), data=tw.DataConfig(eval_files=["a.parquet"]))
    ),
    "all of them": lambda: tw.configure("task=null", {"training": {"steps": 2}}, data={"eval_files": ["a.parquet"]}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_config_is_said_in_texts_dicts_and_sections(way: str) -> None:
    assert WAYS[way]() == WAYS["texts"]()


def test_typed_values_keep_their_types() -> None:
    options = {"polite": {"bonus": 0.2, "words": ["a b", "c"]}}
    config = tw.configure({"scoring.options": options, "engine": "scripted"}, sandbox={"level": SandboxLevel.L2})
    assert config.scoring.options == options and config.engine.name == "scripted"
    assert tw.configure({"scoring.scorers": {"openai/gsm8k.v2": "gsm8k"}}).scoring.scorers["openai/gsm8k.v2"] == "gsm8k"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"training": {"stepz": 2}}, "configure: unknown key 'training.stepz': did you mean 'training.steps'?"),
        ({"trainin": {"steps": 2}}, "did you mean 'training.steps'?"),
        ({"training": 2}, "configure: 'training' is a section"),
        ({"training": tw.SamplingConfig()}, "configure: training is a TrainingConfig or a dict, not a SamplingConfig"),
        ({"training": tw.TrainingConfig}, "a section such as TrainingConfig(steps=2), not type"),
        (tw.Config(training=tw.TrainingConfig(steps="two")), "training.steps must be a whole number, not 'two'"),  # type: ignore[arg-type]
        ({"training": {"steps": "two"}}, "training.steps must be a whole number, not 'two'"),
        ({"training": {"steps": 0}}, "training.steps must be at least 1"),
        ({"training": {"steps": None}}, "training.steps must be a whole number, not null"),
        ({"engine": {"name": "vlm"}}, "did you mean"),
        ({"scoring.scorers": {"default": len}}, "scoring.scorers.default is text, a number"),
        ({5: 2}, "configure: a key is a name, not 5"),
        ({"training": {5: 2}}, "a key is a name, not 5"),
        ({"run": 0.5}, "configure: run is text"),
    ],
)
def test_wrong_values_of_a_dict_are_refused_by_key(given: dict[Any, Any], words: str) -> None:
    assert words in refusal(lambda: tw.configure(given), "runs")


def test_what_a_section_leaves_at_its_default_stays_as_the_task_says() -> None:
    assert tw.configure(training=tw.TrainingConfig(steps=2)).training.groups == tw.configure().training.groups == 24
    assert tw.configure(training=tw.TrainingConfig()) == tw.configure()


def test_type_checkers_know_every_section_of_the_core() -> None:
    assert set(Sections.__annotations__) == {field.name for field in dataclasses.fields(tw.Config)}


def test_a_key_is_given_once() -> None:
    two = {"training": {"steps": 2}}
    for wrong in (
        lambda: tw.configure("training.steps=3", two),
        lambda: tw.configure(two, training={"steps": 3}),
        lambda: tw.configure({"training.steps": 3, **two}),
    ):
        assert refusal(wrong, "runs") == "configure: training.steps is given twice"


def test_every_public_name_is_listed_loads_and_is_known_to_type_checkers() -> None:
    assert {"train", "sft", "evaluate", "read", "configure", "BaseInteraction"} <= set(dir(tw))
    assert all(getattr(tw, name) is not None for name in dir(tw))
    tree = ast.parse(Path(tw.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {target.id for node in block.body if isinstance(node, ast.Assign) for target in node.targets}  # type: ignore[attr-defined]
    assert names - {None} == set(tw.__all__)


def test_a_run_is_read_back_as_tables(config: tw.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tw.evaluate(config, samples=[sample(ground_truth="#### 42"), sample(id="b")], console=QUIET)
    run = tw.read(report.run)
    assert run.files == ["eval/step_000000"] and run.config["task"] == "null"
    rows = run.arrow().to_pylist()
    assert [(row["sample_id"], row["reward"], row["right"], row["file"]) for row in rows] == [
        ("a", 1.0, True, "eval/step_000000"), ("b", 0.0, False, "eval/step_000000"),
    ]  # fmt: skip
    assert report.arrow().equals(run.arrow())
    (report.run / "index.jsonl").unlink()
    assert tw.read(str(report.run)).arrow().equals(report.arrow())
    assert run.arrow("steps").column("val/accuracy").to_pylist() == [0.5]
    assert [one.sample.id for one in run.trajectories("eval/step_000000.parquet")] == ["a", "b"]
    assert list(report.frame()["reward"]) == list(run.frame()["reward"]) == [1.0, 0.0]
    monkeypatch.setattr("turnwise.storage.recorded_run.find_spec", lambda name: None)
    assert "pip install pandas" in refusal(run.frame, "none")
    assert "not of 'rows'" in refusal(lambda: run.arrow("rows"), "none")
    assert "did you mean 'eval/step_000000'?" in refusal(lambda: run.trajectories("eval/step_000001"), "none")
    assert "not by int" in refusal(lambda: tw.read(5), "none")  # type: ignore[arg-type]
