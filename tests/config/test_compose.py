"""Configuration: layers, origins, and one clear error with the nearest valid name for every mistake."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.config import Config
from turnwise.config.brought_names import BROUGHT
from turnwise.config.choices import Overlong
from turnwise.config.compose import unread
from turnwise.config.knobs import knobs_of
from turnwise.config.sections import complete, full_config, to_yaml
from turnwise.data.task_config import compose, configure
from turnwise.errors import ConfigError


def test_layers_win_in_order_and_every_key_has_an_origin(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 3\nsampling:\n  max_tokens: 40\n  top_k: 5\n")
    composed = compose(["sampling.top_k=7"], file)
    config = composed.config
    assert (config.seed, config.sampling.max_tokens, config.sampling.top_k) == (3, 40, 7)
    assert config.rollout.tools == ["calculate", "python"]
    assert composed.origins["seed"] == str(file)
    assert composed.origins["sampling.top_k"] == "command line"
    assert composed.origins["rollout.tools"] == "task arithmetic"
    assert composed.origins["model.path"] == "default"
    assert set(composed.origins) == set(composed.values())


def test_without_a_task_nothing_is_brought_along() -> None:
    config = configure("task=null")
    assert config.task is None and config.rollout.tools == [] and config.rollout.interaction is None


def test_the_file_may_choose_the_task_and_the_command_line_overrules_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("task: gsm8k\n")
    assert compose([], file).config.data.eval_files == ["data/gsm8k/test.parquet"]
    assert compose(["task=arithmetic"], file).config.data.eval_files == []


def test_values_have_types_and_conveniences() -> None:
    config = configure(
        "engine=openai",
        "engine.base_url=http://127.0.0.1:1/v1",
        "data.eval_files=a.parquet",
        "data.overlong=error",
        "chat.template_kwargs.enable_thinking=false",
        "scoring.scorers={default: gsm8k}",
        "rollout.max_seconds=null",
    )
    assert config.engine.name == "openai"
    assert config.data.eval_files == ["a.parquet"]
    assert config.data.overlong is Overlong.error
    assert config.chat.template_kwargs == {"enable_thinking": False}
    assert config.scoring.scorers == {"default": "gsm8k"}
    assert config.rollout.max_seconds is None


def test_a_section_with_a_name_takes_it_as_a_word_in_files_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("engine: openai\n")
    assert compose([], file).config.engine.name == "openai"


def test_the_written_yaml_reads_back_as_the_same_config(tmp_path: Path) -> None:
    config = configure("sampling.temperature=0.5", "rollout.interaction_kwargs.max_turns=2", "data.overlong=error")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert compose([], file).config == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sampling.temprature=1", "did you mean 'sampling.temperature'?"),
        ("smapling.temperature=1", "did you mean 'sampling.temperature'?"),
        ("group_sise=4", "did you mean 'eval.group_size' or 'training.group_size'?"),
        ("sampling.temperature=hot", "sampling.temperature"),
        ("eval.samples=many", "eval.samples"),
        ("engine.name=tortch", "torch"),
        ("engine=tortch", "torch"),
        ("task=arithmetik", "did you mean 'arithmetic'?"),
        ("sampling=3", "is a section"),
        ("rollout.tools={a: 1}", "rollout.tools"),
        ("justaword", "write key=value"),
        ("run='unclosed", "cannot read"),
        ("~seed=1", "only key=value"),
        ("seed=1,2", "only key=value"),
        ("sampling.max_tokens=0", "at least 1"),
        ("sampling.temperature=-1", "at least 0"),
        ("sampling.top_p=0", "top_p"),
        ("sampling.top_p=1.5", "top_p"),
        ("eval.sampling.temprature=0", "eval.sampling: unknown key 'temprature': did you mean 'temperature'?"),
        ("eval.sampling={temperature: 1e-9}", "eval.sampling.temperature must be 0 (greedy) or at least"),
        ("eval.sampling={max_tokens: 0}", "eval.sampling.max_tokens must be"),
        ("eval.sampling.stop=x", "eval.sampling.stop must be a list of texts"),
        ("rollout.max_failures=2", "max_failures"),
        ("rollout.max_seconds=0", "more than 0"),
        ("rollout.concurrency=0", "at least 1"),
        (
            "tensor_parallel_size=1",
            "unknown key 'tensor_parallel_size'; its equivalent here: nothing; servers.options has vLLM's and SGLang's own",
        ),
        ("actor_rollout_ref.rollout.n=4", "its equivalent here: training.group_size"),
        ("data.val_files=x.parquet", "its equivalent here: data.eval_files"),
        ("learning_rate=1e-5", "its equivalent here: learner.lr (in `turnwise sft` sft.lr)"),
        ("lr=0.1", "its equivalent here: learner.lr (in `turnwise sft` sft.lr)"),
        ("training.batch_size=8", "its equivalent here: training.groups"),
        ("sampling.max_new_tokens=8", "its equivalent here: sampling.max_tokens, of one turn"),
    ],
)
def test_mistakes_on_the_command_line(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sampling:\n  temprature: 1\n", "did you mean 'sampling.temperature'?"),
        ("sampling: 3\n", "is a section"),
        ("- a\n- b\n", "expected a mapping"),
        ("a: [1\n", "not YAML"),
        ("seed: x\n", "seed"),
        ("engine: {name: nope}\n", "torch"),
    ],
)
def test_mistakes_in_the_file_name_the_file(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose([], file)
    assert expected in str(caught.value)


def test_what_stands_for_names_from_elsewhere_exists() -> None:
    keys = knobs_of(full_config())
    for name, ours in BROUGHT.items():
        assert name not in keys
        named = re.findall(r"\b[a-z]+\.[a-z_]+\b", ours.replace("FILE.py", ""))
        assert all(key in keys for key in named) and (named or "runs_dir" in ours or "nothing" in ours), name


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    assert compose([], tmp_path / "mine.yaml").config == configure()
    assert configure("task=null") == complete(Config(task=None))


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="did you mean 'mine.yaml'"):
        compose([], tmp_path / "mien.yaml")


def test_keys_that_this_run_never_reads_are_found() -> None:
    (problem,) = unread(compose(["engine.base_url=http://127.0.0.1:1"]))
    assert problem.startswith("engine.base_url (command line) is never read: engine.name is auto")
    assert unread(compose(["engine=openai", "engine.base_url=http://127.0.0.1:1"])) == []
    assert "rollout.interaction" in unread(compose(["task=null", "rollout.interaction_kwargs.max_turns=2"]))[0]
    (problem,) = unread(compose(["engine=openai", "engine.base_url=http://127.0.0.1:1", "eval.sampling.top_k=4"]))
    assert problem.startswith("eval.sampling.top_k (command line) is never read: engine.name is openai")
    assert unread(compose(["engine.retries=1", "cluster=ray"])) == [], "a turn whose node went away is asked for again"
    assert unread(compose(["engine.retries=1"]))[0].endswith("module:name, or cluster is ray")
    assert unread(compose(["sandbox.memory_mb=1024", "sandbox.level=L3"])) == [], "the sandbox is here"
    assert "sandbox.url" in unread(compose(["sandbox.memory_mb=1024", "sandbox.url=http://127.0.0.1:1"]))[0]


def test_mistakes_are_found_before_torch_is_imported() -> None:
    code = """
import sys
from turnwise.commands.cli import main
assert main(["eval", "sampling.temprature=1"]) == 2
assert main(["eval", "--config", "no_such.yaml"]) == 2
assert main(["eval", "engine.base_url=http://x"]) == 2
assert not {"torch", "transformers"} & set(sys.modules), "torch was imported"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "did you mean 'sampling.temperature'?" in done.stderr
