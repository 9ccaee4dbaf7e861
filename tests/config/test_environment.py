"""The environment fills in what a config leaves open, is told with what it did, and never breaks a line."""

import json
from pathlib import Path

import pytest

from turnwise.config.compose import Composed
from turnwise.config.environment import uses
from turnwise.data.task import prepare_files
from turnwise.data.task_config import compose
from turnwise.errors import ConfigError
from turnwise.ext.judge.environment import judge_addresses
from turnwise.reports.preflight import Outcome, preflight

TINY = str(Path(__file__).parents[2] / "turnwise" / "engines" / "bundled" / "tiny")
ROW = {"data_source": "x", "prompt": [{"role": "user", "content": "6*7?"}], "reward_model": {"ground_truth": "42"}}
FILES = ("task=null", "data.eval_files=[sums/rows.jsonl]", "scoring.scorers={default: exact_match}")


def told(composed: Composed) -> dict[str, tuple[str, bool]]:
    return {use.name: (use.effect, use.used) for use in uses(composed.config)}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data beside the one that commands are given in."""
    folder, here = tmp_path / "repository", tmp_path / "here"
    (folder / "sums").mkdir(parents=True)
    (folder / "sums" / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    here.mkdir()
    monkeypatch.chdir(here)
    return folder


def test_a_model_is_filled_in_only_where_nobody_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_MODEL_PATH", TINY)
    found = compose()
    assert found.config.model.path == TINY and found.origins["model.path"] == "environment BASE_MODEL_PATH"
    assert told(found)["BASE_MODEL_PATH"] == ("model.path", True)
    given = compose(["model.path=tiny"])
    assert given.config.model.path == "tiny" and told(given)["BASE_MODEL_PATH"][0].startswith(
        "not used, model.path=tiny"
    )
    monkeypatch.setenv("VLLM_MODEL_PATH", "/elsewhere")
    with pytest.raises(ConfigError, match=r"BASE_MODEL_PATH=.* and VLLM_MODEL_PATH=/elsewhere differ"):
        compose()
    monkeypatch.delenv("BASE_MODEL_PATH")
    assert compose().config.model.path == "/elsewhere"
    assert compose(["engine=openai", "engine.base_url=http://a:1"]).config.model.path == "tiny"


def test_data_files_that_are_not_here_are_looked_for(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [str(repository / "sums" / "rows.jsonl")]
    assert compose(FILES).config.data.eval_files == ["sums/rows.jsonl"]
    for name in ("DATA_CACHE", "DATA_REPO"):
        monkeypatch.setenv(name, str(repository))
        found = compose(FILES)
        assert found.config.data.eval_files == there and found.origins["data.eval_files"] == f"environment {name}"
        assert told(found)[name][0].startswith("data.eval_files read there")
    monkeypatch.setenv("DATA_REPO", "/no/such/folder")
    with pytest.raises(
        ConfigError, match=r"DATA_REPO=/no/such/folder is not a folder.*data.eval_files=sums/rows.jsonl"
    ):
        compose(FILES)
    monkeypatch.setenv("DATA_REPO", str(repository))
    assert compose(["task=null", f"data.eval_files=[{'x' * 5000}]"]).config.data.eval_files == ["x" * 5000]
    monkeypatch.setenv("DATA_REPO", "/no/such/folder")
    assert told(compose())["DATA_REPO"] == ("no data file read there", False)  # nobody needs it: told, not refused
    Path("sums").mkdir()
    Path("sums/rows.jsonl").write_text(json.dumps(ROW) + "\n")
    assert compose(FILES).config.data.eval_files == ["sums/rows.jsonl"]


def test_prepared_files_go_to_the_cache(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_CACHE", str(repository))
    source = repository / "source"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text(json.dumps({"question": "6*7?", "answer": "It is #### 42"}) + "\n")
    written = prepare_files("gsm8k", ["--source", str(source)])
    assert repository / "data" / "gsm8k" / "test.parquet" in written
    assert compose(["task=gsm8k"]).config.data.eval_files == [str(repository / "data/gsm8k/test.parquet")]


def test_wandbs_variables_are_read_where_it_is_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROJECT": "sums", "ENTITY": "team", "API_KEY": "s3cret", "DIR": "/x", "NOTES": "a\nb"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    found = compose(["tracking.to=[wandb]"])
    assert found.config.trackers.project == "sums" and found.origins["trackers.project"] == "environment WANDB_PROJECT"
    said = told(found)
    assert said["WANDB_ENTITY"] == ("read by wandb", True) and said["WANDB_DIR"][0].startswith("not used: its files")
    assert "s3cret" not in "".join(map(str, uses(found.config)))
    assert compose(["tracking.to=[wandb]", "trackers.project=mine"]).config.trackers.project == "mine"
    assert told(compose())["WANDB_PROJECT"] == ("not used, tracking.to has no wandb", False)
    assert compose().config.trackers.project == "turnwise"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("WANDB_PROJECT", "a/b", "WANDB_PROJECT=a/b: a name of at most 128 characters"),
        ("WANDB_MODE", "ofline", "WANDB_MODE: unknown mode 'ofline': did you mean 'offline'"),
        ("WANDB_BASE_URL", "http://[", "WANDB_BASE_URL=http://[: an address is like"),
        ("WANDB_API_KEY", "two words", "WANDB_API_KEY has characters that no key has"),
        ("WANDB_ENTITY", "a\nb", "WANDB_ENTITY has characters that cannot be used"),
        ("BASE_MODEL_PATH", "a\x1bb", "BASE_MODEL_PATH has characters that cannot be used"),
    ],
)
def test_what_cannot_be_used_is_one_line(name: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        compose(["tracking.to=[wandb]"])
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_the_judges_addresses_and_the_hubs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for hostile in ("a:1", "http://", "http://[", "http://x:99999/v1", "ftp://x/v1"):
        monkeypatch.setenv("LLM_AS_A_JUDGE_BASE", hostile)
        with pytest.raises(ConfigError, match=r"LLM_AS_A_JUDGE_BASE: the address .* must be like"):
            judge_addresses()
    assert told(compose())["LLM_AS_A_JUDGE_BASE"] == ("no scorer asks a judge", False)
    assert told(compose(["scoring.scorers={default: judge}"]))["LLM_AS_A_JUDGE_BASE"][1]
    monkeypatch.setenv("LLM_AS_A_JUDGE_BASE", "http://me:s3cret@judge:1/v1")
    with pytest.raises(ConfigError, match="LLM_AS_A_JUDGE_BASE: no name or password") as refused:
        judge_addresses()
    assert "s3cret" not in f"{refused.value} {uses(compose().config)}"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="HF_HOME=.*file is not a folder, and model.path=somebody/model"):
        compose(["model.path=somebody/model"])
    assert told(compose())["HF_HOME"][0].endswith("model.path=tiny is not one")


def test_check_and_the_plan_show_them(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_REPO", str(repository))
    monkeypatch.setenv("BASE_MODEL_PATH", "/elsewhere")
    report = preflight(compose([*FILES, "model.path=tiny"]))
    assert report.passed, report.errors
    said = {finding.text: finding.outcome for finding in report.findings if finding.check == "environment"}
    assert said[f"DATA_REPO={repository}: data.eval_files read there"] is Outcome.OK
    assert said["BASE_MODEL_PATH=/elsewhere: not used, model.path=tiny was given"] is Outcome.WARNING
    assert f"DATA_REPO={repository}: data.eval_files read there" in report.plan
