"""What `check` calls an error, `eval` and `train` refuse before they write anything, in the same words."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from turnwise import Message, Role, Sample, Trajectory, configure, evaluate
from turnwise.commands.cli import main
from turnwise.data.task_config import compose
from turnwise.errors import DataError, PluginError, TemplateError, TurnwiseError
from turnwise.reports.preflight import Outcome, Report, preflight
from turnwise.train import train

QUIET = Console(quiet=True)
TOOLLESS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = ("eval.samples=2", "training.samples=32", "training.steps=1")


def errors(report: Report) -> str:
    return " | ".join(f"{found.check}: {found.text}" for found in report.errors)


def runs(folder: Path) -> list[Path]:
    return list((folder / "runs").glob("*"))


def three_ways(folder: Path, *overrides: str) -> tuple[str, str, str]:
    """(what check says, what eval says, what train says)."""
    chosen = (*SMALL, f"runs_dir={folder}/runs", *overrides)
    checked = errors(preflight(compose(chosen)))
    raised = []
    for command in (evaluate, train):
        with pytest.raises(TurnwiseError) as error:
            command(configure(*chosen), console=QUIET)
        raised.append(str(error.value))
    assert runs(folder) == [], "nothing is written for a run that cannot be"
    return checked, raised[0], raised[1]


def test_tools_that_the_template_hides_are_refused_everywhere(tmp_path: Path) -> None:
    (tmp_path / "toolless.jinja").write_text(TOOLLESS)
    for words in three_ways(tmp_path, f"chat.template={tmp_path}/toolless.jinja"):
        assert "does not show 'calculate' of tool 'calculate'" in words and "chat.template=chatml_hermes" in words


def test_a_template_that_rewrites_history_is_refused_everywhere(tmp_path: Path) -> None:
    (tmp_path / "forgetful.jinja").write_text(
        TOOLLESS.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}")
    )
    template = f"chat.template={tmp_path}/forgetful.jinja"
    for words in three_ways(tmp_path, template, "rollout.tools=[]"):
        assert "chat template" in words


def test_a_template_that_leaves_the_header_to_the_policy_is_refused_everywhere(tmp_path: Path) -> None:
    (tmp_path / "headless.jinja").write_text(TOOLLESS.partition("{% if add")[0])
    alone = ("rollout.tools=[]", "rollout.interaction=null")
    for words in three_ways(tmp_path, f"chat.template={tmp_path}/headless.jinja", *alone):
        assert "ignores add_generation_prompt" in words and "<|im_start|>assistant" in words


@pytest.mark.parametrize("end", ["<|im_start|>assistant\n", ""], ids=["always a header", "none at all"])
def test_templates_whose_prompt_is_whole_without_being_asked_for_are_fine(tmp_path: Path, end: str) -> None:
    inst = "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}<|im_end|>{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    always = TOOLLESS.partition("{% if add")[0] + end
    (tmp_path / "own.jinja").write_text(always if end else inst)
    report = preflight(
        compose([*SMALL, f"chat.template={tmp_path}/own.jinja", "rollout.tools=[]", "rollout.interaction=null"])
    )
    assert report.passed, errors(report)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise ValueError('no such answer')", "raised ValueError: no such answer"),
        ("return None", "returned None (NoneType) as a score"),
        ("return float('nan')", "returned nan (float) as a score"),
        ("return float('inf')", "returned inf (float) as a score"),
        ("return '1'", "returned '1' (str) as a score"),
        ("return [1.0]", "returned [1.0] (list) as a score"),
        ("return {}", "returned an empty dict"),
        ("return {'score': None}", "returned None (NoneType) as part 'score'"),
    ],
)
def test_a_scorer_that_cannot_score_is_refused_everywhere(tmp_path: Path, body: str, problem: str) -> None:
    (tmp_path / "mine.py").write_text(f"async def reward(trajectory):\n    {body}\n")
    for words in three_ways(tmp_path, f"scoring.scorers={{arithmetic: '{tmp_path}/mine.py:reward'}}"):
        assert problem in words and "\n" not in words


def test_the_scorer_is_given_a_finished_trajectory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def reward(trajectory):\n"
        "    assert trajectory.turns and trajectory.answers[-1].visible == '#### 0' and trajectory.segments\n"
        "    return 0.25\n"
    )
    report = preflight(compose([*SMALL, f"scoring.scorers={{arithmetic: '{tmp_path}/mine.py:reward'}}"]))
    assert report.passed, errors(report)
    assert ["gave 0.25" in found.text for found in report.findings if found.check == "scorer of arithmetic"] == [True]


def test_samples_and_scorers_of_python_callers_are_looked_at_too(tmp_path: Path) -> None:
    config = configure("task=null", "engine=scripted", f"runs_dir={tmp_path}/runs")
    config.engine.script = ["42"]

    async def broken(trajectory: Trajectory) -> str:
        return "good"

    sample = Sample("q", (Message(Role.USER, "6*7?"),), "mine", ground_truth="42")
    with pytest.raises(PluginError, match="returned 'good' .str. as a score"):
        evaluate(config, samples=[sample], scorer=broken, console=QUIET)  # type: ignore[arg-type]

    async def fine(trajectory: Trajectory) -> float:
        return 1.0

    blank = Sample("blank", (Message(Role.USER, "  "),), "mine")
    with pytest.raises(DataError, match="sample blank: prompt: no message has text"):
        evaluate(config, samples=[sample, blank], scorer=fine, console=QUIET)
    assert runs(tmp_path) == []
    assert evaluate(config, samples=[sample], scorer=fine, console=QUIET).sources["mine"].accuracy == 1.0


def test_the_command_line_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "toolless.jinja").write_text(TOOLLESS)
    for verb in ("eval", "train"):
        assert main([verb, *SMALL, f"chat.template={tmp_path}/toolless.jinja", f"runs_dir={tmp_path}/runs"]) == 2
        said = capsys.readouterr().err
        assert len(said.strip().splitlines()) == 1 and "chatml_hermes" in said and "Traceback" not in said
    assert runs(tmp_path) == []


def test_a_user_that_fails_at_the_start_is_refused_by_check_and_run_alike(tmp_path: Path) -> None:
    """A run counts failures that come later; one that is there at the start is mended first."""
    (tmp_path / "moody.py").write_text(
        "from turnwise import BaseInteraction\n"
        "class Moody(BaseInteraction):\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n"
        "        raise RuntimeError('asleep')\n"
    )
    chosen = ("eval.samples=2", f"runs_dir={tmp_path}/runs", f"rollout.interaction={tmp_path}/moody.py:Moody")
    assert "asleep" in errors(preflight(compose(chosen)))
    with pytest.raises(TurnwiseError, match="asleep"):
        evaluate(configure(*chosen, "rollout.max_failures=1"), console=QUIET)
    assert not (tmp_path / "runs").exists()


# --- what only training asks for ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("training.group_size=1", "a group of 1 has no others"),
        ("algorithm.overlong_tokens=5", "rollout.max_tokens, which is not set"),
        ("training.minibatches=100000", "a step has 192 episodes"),
        ("training.groups=33", "33 samples cannot be made from 32"),
        ("learner.device=cuda:77", "learner.device=cuda:77"),
        ("data.train_files=nowhere.parquet", "nowhere.parquet"),
    ],
)
def test_check_finds_what_training_would_refuse(tmp_path: Path, override: str, problem: str) -> None:
    chosen = (*SMALL, f"runs_dir={tmp_path}/runs", override)
    assert problem in errors(preflight(compose(chosen)))
    with pytest.raises(TurnwiseError) as error:
        train(configure(*chosen), console=QUIET)
    assert problem in str(error.value) and runs(tmp_path) == []


def test_training_rows_are_rolled_out_too(tmp_path: Path) -> None:
    row = {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
    }
    odd = {**row, "data_source": "odd"}
    for name, rows in (("test", [row]), ("train", [odd, row] * 8)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(
        "async def reward(trajectory):\n    return None if trajectory.sample.data_source == 'odd' else 1.0\n"
    )
    files = [f"data.eval_files={tmp_path}/test.jsonl", f"data.train_files={tmp_path}/train.jsonl", "training.groups=4"]
    report = preflight(compose(["task=null", *files, f"scoring.scorers={{default: '{tmp_path}/mine.py:reward'}}"]))
    assert "scorer of odd" in errors(report) and "scorer of mine" not in errors(report)


def test_who_set_nothing_of_training_is_only_warned(tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text(
        "def rows(split, seed):\n"
        "    for n in range(3):\n"
        "        yield {'data_source': 'arithmetic', 'prompt': [{'role': 'user', 'content': f'{n}+1?'}],\n"
        "               'reward_model': {'ground_truth': str(n + 1)}}\n"
    )
    report = preflight(compose([f"task={tmp_path}/few.py:rows"]))
    assert report.passed, errors(report)
    checked = [found for found in report.findings if found.check == "training"]
    assert [found.outcome for found in checked] == [Outcome.WARNING] and "cannot be made from 3" in checked[0].text
    assert not preflight(compose([f"task={tmp_path}/few.py:rows", "training.steps=3"])).passed


def test_a_template_error_keeps_its_kind(tmp_path: Path) -> None:
    (tmp_path / "toolless.jinja").write_text(TOOLLESS)
    with pytest.raises(TemplateError, match="tool schemas"):
        evaluate(
            configure(*SMALL, f"chat.template={tmp_path}/toolless.jinja", f"runs_dir={tmp_path}/runs"), console=QUIET
        )


def test_what_is_wrong_with_both_splits_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def nothing(trajectory):\n    return None\n")
    checked, evaluated, trained = three_ways(tmp_path, f"scoring.scorers.arithmetic={tmp_path}/mine.py:nothing")
    assert checked == evaluated == trained
    assert checked.count("returned None") == 1


def test_a_scorer_that_changes_the_record_is_refused_everywhere(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def tidy(trajectory):\n    trajectory.messages.clear()\n    return 1.0\n")
    for words in three_ways(tmp_path, f"scoring.scorers.arithmetic={tmp_path}/mine.py:tidy"):
        assert "mine.py:tidy changes the messages, turns or tokens" in words


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return None", "never called chat.generate()"),
        ("raise SystemExit(3)", "mine.py:loop: SystemExit: 3"),
        ("raise ValueError('no')", "mine.py:loop: ValueError: no"),
    ],
)
def test_a_loop_that_cannot_play_is_refused_everywhere(tmp_path: Path, body: str, problem: str) -> None:
    (tmp_path / "mine.py").write_text(f"async def loop(chat):\n    {body}\n")
    for words in three_ways(tmp_path, f"rollout.agent={tmp_path}/mine.py:loop"):
        assert problem in words


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ("words.png", "is not a PNG"),
        ("none.png", "cannot be read"),
        (5, "is a path, a data URL or the bytes of an image"),
        (["cat.png", "http://example.org/a.png"], "nothing is fetched"),
    ],
)
def test_what_a_row_gives_a_tool_to_look_at_is_an_image(tmp_path: Path, image: object, problem: str) -> None:
    (tmp_path / "words.png").write_text("words")
    (tmp_path / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    row = {
        "data_source": "arithmetic", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"},
        "extra_info": {"tools_kwargs": {"image_zoom": {"create_kwargs": {"image": image}}}},
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    chosen = configure(
        f"data.eval_files=[{tmp_path}/rows.jsonl]", "rollout.tools=[image_zoom]", f"runs_dir={tmp_path}/runs"
    )
    with pytest.raises(DataError, match=rf"rows.jsonl:0: tools_kwargs.image_zoom: .*{problem}"):
        evaluate(chosen, console=QUIET)
    assert runs(tmp_path) == []
