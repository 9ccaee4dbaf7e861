"""Runs that somebody sent: nothing that only their config names is imported, reached, opened or written to."""

import dataclasses
import enum
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from turnwise import configure, extensions
from turnwise.commands.cli import main
from turnwise.config import Config
from turnwise.config.knobs import knobs_of
from turnwise.config.sections import full_config, to_yaml
from turnwise.errors import ConfigError, ScoringFailed
from turnwise.ext.judge.judge import data_url
from turnwise.ext.judge.tool_misuse import _size
from turnwise.rollout.loops.loading import Loops
from turnwise.storage.run_dir import RunDir
from turnwise.storage.trajectories.files import read_trajectories, write_trajectories
from turnwise.training.runs.resume_config import compose_training, resume_command
from turnwise.training.runs.trust import check_sample, needs_trust, reaches
from turnwise.types import (
    FinishReason,
    Image,
    InteractionSpec,
    Ledger,
    Message,
    Role,
    Sample,
    StopReason,
    Trajectory,
    Turn,
)


def configured(overrides: Sequence[str]) -> Config:
    """The config with a task of somebody's that is not asked for its defaults: whoever names one has its file run."""
    config = configure(*(one for one in overrides if not one.startswith("task='")))
    config.task = next((one[6:-1] for one in overrides if one.startswith("task='")), config.task)
    return config


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A maker of runs with one trajectory each, by overrides of the config; the current folder is another."""
    monkeypatch.chdir(tmp_path)
    number = iter(range(100))

    def make(*overrides: str) -> Path:
        folder = tmp_path / "sent" / f"run-{next(number)}"
        turn = Turn(0, Message(Role.ASSISTANT, "#### 18"), FinishReason.STOP, 0, 1, 1)
        sample = Sample("a", (Message(Role.USER, "6*3?"),), "arithmetic", "17")
        one = Trajectory(sample, 0, 0, [*sample.prompt, turn.message], [turn], [], StopReason.ANSWERED, 0.0)
        one.reward = 0.0
        (folder / "eval").mkdir(parents=True)
        write_trajectories(folder / "eval/step_000000.parquet", [one])
        RunDir(folder).write_text("config.yaml", to_yaml(configured(overrides)))
        return folder

    return make


@pytest.fixture
def evil(tmp_path: Path):
    """(a plug-in's file, the mark that it leaves when it is imported)."""
    path, mark = tmp_path / "evil.py", tmp_path / "mark"
    path.write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "async def score(trajectory, **options):\n    return 1.0\n"
        "class Judge:\n    async def verdict(self, question, evidence, rubric):\n        return 1.0\n"
    )
    return path, mark


def test_a_plugin_is_imported_only_when_told(run, evil, capsys):
    path, mark = evil
    sent = run(f"scoring.scorers.default={path}:score")
    assert main(["rescore", str(sent)]) == 2
    said = capsys.readouterr().err
    assert f"scoring.scorers.default={path}:score" in said and "--trust-run" in said and said.count("\n") == 1
    assert not mark.exists() and not (sent / "rescored").exists()
    assert main(["rescore", str(sent), "--trust-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["new_mean_reward"] == 1.0 and mark.exists()


def test_what_is_said_now_needs_no_trust(run, evil):
    path, _ = evil
    sent = run(f"scoring.scorers.default={path}:score")
    assert main(["rescore", str(sent), "--scorer", "gsm8k"]) == 0
    assert main(["rescore", str(sent), "--scorer", f"{path}:score", "--options", "any=1"]) == 0
    assert main(["rescore", str(sent), f"scoring.scorers.default={path}:score"]) == 0


def test_a_file_beside_the_config_is_the_runs_too(run, tmp_path, capsys):
    sent = run("scoring.scorers.default=evil.py:score")
    (sent / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    assert main(["rescore", str(sent)]) == 2
    assert "scoring.scorers.default" in capsys.readouterr().err and not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["scoring.scorers.default=judge"],
        ["scoring.scorers.arithmetic=judge"],
        ["scoring.scorers.default=tapo"],
        ["scoring.scorers.default=judge", "scoring.options.judge.base_urls=[URL]"],
        ["scoring.scorers.default=judge", "scoring.options.judge.base_urls=[URL]", "scoring.options.judge.api_key_env=KEY"],
        ["scoring.scorers.default=judge", "scoring.options.judge.cache=/tmp/x"],
        ["scoring.scorers.default=judge", "scoring.options.judge.rule='PLUGIN:score'"],
        ["scoring.scorers.default=tapo", "scoring.options.tapo.accuracy='PLUGIN:score'"],
        ["scoring.scorers.default=tapo", "scoring.options.tapo.judge='PLUGIN:Judge'"],
        ["scoring.scorers.default=tapo", "scoring.options.tapo.judge_options.base_urls=[URL]"],
        ["scoring.scorers.default=code_tests", "scoring.options.code_tests.level=L0"],
        ["scoring.scorers.default=code_tests", "scoring.options.code_tests.min_level=L0"],
        ["scoring.scorers.default=code_tests", "scoring.options.code_tests.url=URL"],
        ["scoring.scorers.default=code_tests", "scoring.options.code_tests.preload=[evil]"],
        ["scoring.run=http", "scoring.url=URL"],
        ["scoring.run=pool", "scoring.scorers.default='PLUGIN:score'"],
        ["scoring.run=batch", "scoring.scorers.default='PLUGIN:score'"],
    ],
)  # fmt: skip
def test_no_address_key_level_or_plugin_of_a_stranger_is_used(run, evil, overrides, capsys, monkeypatch):
    path, mark = evil
    monkeypatch.setenv("KEY", "a-secret")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        monkeypatch.setenv("LLM_AS_A_JUDGE_BASE", url)
        sent = run(*(text.replace("URL", f"'{url}'").replace("PLUGIN", str(path)) for text in overrides))
        assert main(["rescore", str(sent)]) == 2
        with pytest.raises(BlockingIOError):
            listening.accept()  # nobody has come
    said = capsys.readouterr().err
    assert ".".join(overrides[-1].partition("=")[0].split(".")[:4]) in said and "--trust-run" in said
    assert not mark.exists() and not (sent / "rescored").exists()


def test_options_that_only_count_need_no_trust(run):
    sent = run("scoring.scorers.default=gsm8k", "scoring.options.gsm8k.wrong=-0.5", "scoring.weights.acc=2")
    assert main(["rescore", str(sent)]) == 0


def test_options_of_a_plugin_come_from_whoever_names_it(run, evil, capsys):
    path, _ = evil
    sent = run(f"scoring.scorers.default={path}:score", "scoring.options.score.where=/etc/passwd")
    assert main(["rescore", str(sent), f"scoring.scorers.default={path}:score"]) == 2
    assert "scoring.options.score.where=/etc/passwd" in capsys.readouterr().err


def test_the_environment_is_not_read_for_a_stranger(run, monkeypatch, capsys):
    monkeypatch.setenv("SECRET", "a-secret")
    sent = run()
    text = (sent / "config.yaml").read_text()
    (sent / "config.yaml").write_text(text.replace("run: null", 'run: "${oc.env:SECRET}"'))
    assert main(["rescore", str(sent)]) == 2
    assert "may read the environment" in capsys.readouterr().err
    assert not any("a-secret" in path.read_text(errors="replace") for path in sent.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "task: " + "[" * 50_000,
        "task: !!python/object/apply:os.system ['touch mark']\n",
        "x" * (2 << 20),
    ],
    ids=["aliases", "depth", "python tag", "length"],
)  # fmt: skip
def test_a_config_that_explodes_is_refused(run, text, capsys):
    sent = run()
    (sent / "config.yaml").write_text(text)
    assert main(["rescore", str(sent)]) == 2
    assert len(capsys.readouterr().err.splitlines()) <= 6
    assert not Path("mark").exists()


@pytest.mark.parametrize("name", ["rescored", "log.txt", "eval/step_000001.json", "checkpoints/step_000001/policy"])
def test_links_out_of_a_run_are_not_followed(run, name, tmp_path, capsys):
    sent, outside = run(), tmp_path / "outside"
    outside.mkdir()
    (sent / name).parent.mkdir(parents=True, exist_ok=True)
    (sent / name).symlink_to(outside)
    assert main(["rescore", str(sent)]) == 2
    assert f"{name} -> " in capsys.readouterr().err and not any(outside.iterdir())
    (sent / name).unlink()
    (sent / name).symlink_to(sent / "config.yaml")
    assert main(["show", str(sent)]) == 0


@pytest.mark.parametrize("name", ["eval/step_000001.parquet", "status.json", "metrics.jsonl", "index.jsonl", "log.txt"])
def test_a_pipe_in_a_run_is_not_waited_for(run, name, tmp_path, capsys):
    """Whatever they make of it, the commands end."""
    sent = run()
    os.mkfifo(sent / name)
    asked = ["train", f"runs_dir={sent.parent}", f"run={sent.name}", "resume=auto"]
    assert main(asked) == 2 and f"{name}, which is not a file" in capsys.readouterr().err
    for asked in (["show"], ["rescore"], ["filter", "--out", str(tmp_path / "a.parquet")], ["report", "--out", str(tmp_path / "a.html")]):  # fmt: skip
        assert main([asked[0], str(sent), *asked[1:]]) in (0, 2)


def test_a_pipe_for_an_image_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ScoringFailed, match="not a regular file"):
        data_url(Image(str(tmp_path / "a.png")), 100)
    with pytest.raises(ScoringFailed, match="not a regular file"):
        _size(str(tmp_path / "a.png"))


def test_a_config_that_would_fill_the_memory_is_not_read(run, capsys):
    sent = run()
    os.truncate(sent / "config.yaml", 1 << 40)
    assert main(["rescore", str(sent)]) == 2
    assert "that is not a config" in capsys.readouterr().err


def test_a_resumed_run_imports_its_plugins_only_when_told(run, evil, tmp_path, capsys):
    path, mark = evil
    for overrides in ([f"rollout.tools=['{path}:score']"], [f"task='{path}:score'"], [f"task='{path}'"], [f"rollout.agent='{path}:score'"],
                      [f"algorithm.advantage='{path}:score'"], [f"algorithm.loss='{path}:score'"],
                      [f"rollout.interaction='{path}:Judge'"], ["sandbox.min_level=L0"], ["sandbox.url='http://127.0.0.1:1'"]):  # fmt: skip
        sent = run(*overrides)
        asked = ["train", f"runs_dir={sent.parent}", f"run={sent.name}", "resume=auto"]
        before = sorted(sent.rglob("*"))
        assert main(asked) == 2
        assert "--trust-run" in capsys.readouterr().err and not mark.exists() and sorted(sent.rglob("*")) == before
    with pytest.raises(ConfigError, match="--trust-run"):
        compose_training(asked[1:], None, trusted=False)
    assert compose_training(asked[1:], None, trusted=True).config.sandbox.url == "http://127.0.0.1:1"
    assert (
        compose_training([*asked[1:], "sandbox.url=http://127.0.0.1:1"], None, trusted=False).config.sandbox.url
        is not None
    )


def test_where_a_run_lies_is_not_for_the_run_to_say(run, tmp_path):
    sent = run(f"runs_dir={tmp_path / 'elsewhere'}", "run=another", "resume=never")
    composed = compose_training([f"runs_dir={sent.parent}", f"run={sent.name}", "resume=auto"], None, trusted=False)
    assert (composed.config.runs_dir, composed.config.run) == (str(sent.parent), sent.name)


def test_the_resume_command_says_what_it_takes(tmp_path):
    assert resume_command("first", configure()) == "turnwise train run=first resume=auto"
    assert resume_command("first", configure("rollout.tools=['a:b']")).endswith("resume=auto --trust-run")
    assert resume_command("first", configure(), "sft") == "turnwise sft run=first resume=auto"
    ours = configure("task=tinylook", "sft.script='turnwise.ext.tinylook.traces:script'")
    assert resume_command("first", ours, "sft").endswith("resume=auto")
    assert resume_command("first", configure("sft.script='a:b'"), "sft").endswith("resume=auto --trust-run")


def test_commands_that_only_look_import_nothing(run, evil, tmp_path, capsys):
    path, mark = evil
    plugin = f"{path}:score"
    sent = run(
        f"task='{plugin}'", f"scoring.scorers.default='{plugin}'", f"rollout.tools=['{plugin}']",
        f"rollout.agent='{plugin}'", f"rollout.interaction='{plugin}'", f"sft.script='{plugin}'",
    )  # fmt: skip
    assert main(["show", str(sent)]) == 0
    assert main(["filter", str(sent), "--out", str(tmp_path / "kept.parquet")]) == 0
    assert main(["report", str(sent), "--out", str(tmp_path / "report.html")]) == 0
    assert not mark.exists()


def test_rows_lead_elsewhere_for_a_stranger_from_nowhere(run, tmp_path, capsys):
    """A run may be sent with a project around it, and its data lie anywhere there."""
    row = {"prompt": [{"role": "user", "content": "1+1?"}], "data_source": "arithmetic",
           "reward_model": {"ground_truth": "2"}}  # fmt: skip
    last = row | {"extra_info": {"tool_selection": ["retrieve"]}}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*([row] * 3), last])))
    files = "data.train_files=[rows.jsonl]", "data.eval_files=[rows.jsonl]"
    sent = run("task=null", *files)
    asked = [f"runs_dir={sent.parent}", f"run={sent.name}", "resume=auto"]
    assert main(["train", *asked]) == 2
    said = capsys.readouterr().err
    assert "rows.jsonl, whose row 3 names the tool retrieve" in said and "--trust-run" in said
    assert compose_training(asked, None, trusted=True).config.data.train_files == ["rows.jsonl"]
    assert resume_command("mine", configure("task=null", *files)).endswith("--trust-run")
    assert compose_training([*asked, *files], None, trusted=False).config.data.train_files == ["rows.jsonl"]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert compose_training(asked, None, trusted=False).config.data.train_files == ["rows.jsonl"]


@pytest.mark.parametrize(
    "named",
    [{"agent": "PLUGIN:loop"}, {"interaction": InteractionSpec("PLUGIN:Judge", {})}, {"tools": ("calculate", "PLUGIN:score")}, {"tools": ("retrieve",)}, {"info": {"extra_info": {"verifiers": {"config": "{}", "index": 0}}}}],
    ids=["agent", "interaction", "tool", "retrieve", "environment"],
)  # fmt: skip
def test_a_recorded_sample_leads_a_replay_to_no_code(run, evil, named, capsys):
    path, mark = evil
    sent = run("task=null")
    (one,) = read_trajectories(sent / "eval/step_000000.parquet")
    (key, value), plugin = *named.items(), str(path)
    if isinstance(value, InteractionSpec):
        value = InteractionSpec(value.name.replace("PLUGIN", plugin), {})
    elif not isinstance(value, dict):
        value = (
            value.replace("PLUGIN", plugin)
            if isinstance(value, str)
            else tuple(v.replace("PLUGIN", plugin) for v in value)
        )
    one.sample = dataclasses.replace(one.sample, **{key: value})
    one.segments = [Ledger()]
    write_trajectories(sent / "eval/step_000001.parquet", [one])
    for flags in ([], ["--trust-run"]):
        if flags and plugin not in str(named_values(value)):
            continue
        assert main(["replay", str(sent), *flags]) == 2
        said = capsys.readouterr().err
        assert "sample a" in said and not mark.exists(), said
        assert ("--trust-run" in said) is (plugin not in str(named_values(value)))


def named_values(value: object) -> object:
    return value.name if isinstance(value, InteractionSpec) else value


def test_options_of_the_checker_need_no_trust_and_those_of_an_environment_do_whatever_loop_is_set(tmp_path):
    """A row may name http_env, and the options would be its."""
    assert reaches(configure("rollout.agent=checker", "rollout.agent_options.rounds=3"), tmp_path) == []
    config = configure("rollout.agent=checker", "rollout.agent_options.url=http://x")
    assert reaches(config, tmp_path) == ["rollout.agent_options.url=http://x"]
    with pytest.raises(ConfigError, match="needs rollout.agent_options"):  # those of another loop are not taken
        Loops(config).get("http_env")


KNOBS = knobs_of(full_config())
NEEDED = {
    "servers.": ["engine=vllm_server"], "engine.base": ["engine=openai"], "sandbox.": ["sandbox.url=http://x"], "scoring.": ["scoring.run=http"],
    "sdk_agents.client_env": ["sdk_agents.client='exec:true'"], "rollout.interaction_kwargs": ["rollout.interaction='a:b'"], "rollout.agent_options": ["rollout.agent='a:b'"],
}  # fmt: skip
VALUES = {
    "profile": "=laptop",  # a run's own is a name that is shown: its values are in the run's config already
    "tracking.to": "=[console,wandb]", "model.path": "=somebody/model", "model.trust_remote_code": "=true", "scoring.weights": ".acc=2", "chat.template_kwargs": ".a=b",
    "scoring.scorers": ".default='a:b'", "scoring.options": ".judge.cache=x", "rollout.interaction_kwargs": ".a=b", "rollout.agent_options": ".a=b",
    "rollout.tool_options": ".calculate.timeout=5",
    "cluster": "=ray", "eval.sampling": ".top_k=3",
    "sandbox.level": "=L0", "sandbox.min_level": "=L0", "data.train_files": "=['PLACE/a.parquet']", "data.eval_files": "=['PLACE/a.parquet']",
    "data.images_from": "='PLACE/images'",
    "engine.base_url": "=http://a:1", "sandbox.url": "=http://a:1", "swe.url": "=http://a:1",
    "scoring.url": "=http://a:1", "learner.device": "=cuda:1",
}  # fmt: skip


def takes_text(hint: object) -> bool:
    return hint not in (int, float, bool) and not (isinstance(hint, type) and issubclass(hint, enum.Enum))


@pytest.mark.parametrize(
    "key",
    [
        "sandbox.level",
        "sandbox.min_level",
        "model.trust_remote_code",
        *(k for k, v in KNOBS.items() if takes_text(v.hint)),
    ],
)
def test_every_knob_is_known_to_be_harmless_or_asks_for_trust(key, tmp_path):
    """A new one that takes text has to be thought about: it is marked `reaches` or `harmless`."""
    hint, reach = KNOBS[key].hint, KNOBS[key].reach
    assert reach is not None
    value = VALUES.get(key, "=['a:b']" if "list" in str(hint) else "='a:b'").replace("PLACE", str(tmp_path))
    needed = [one for start, given in NEEDED.items() if key.startswith(start) for one in given]
    usual = reaches(configure(*needed), tmp_path)
    found = [one for one in reaches(configured([*needed, key + value]), tmp_path) if one not in usual]
    assert bool(found) == (reach.what != "nothing")
    assert all(one.startswith(key) for one in found)


def test_the_defaults_and_every_task_of_ours_ask_for_nothing(tmp_path):
    for task in ("null", "arithmetic", "gsm8k", "deep_research"):
        assert reaches(configure(f"task={task}"), tmp_path / "runs") == []


def test_options_of_our_loops_that_are_numbers_ask_for_nothing(tmp_path):
    assert reaches(configure("rollout.agent=checker", "rollout.agent_options.rounds=2"), tmp_path) == []
    named = "rollout.agent=http_env", "rollout.agent_options.url=http://a:1"
    assert reaches(configure(*named), tmp_path) == ["rollout.agent_options.url=http://a:1"]


def test_a_tool_that_sends_queries_to_an_address_of_the_environment_is_reached_for(tmp_path):
    assert reaches(configure("rollout.tools=[search,retrieve]"), tmp_path) == ["rollout.tools=retrieve"]
    row = {
        "prompt": [{"role": "user", "content": "?"}],
        "data_source": "x",
        "extra_info": {"tool_selection": ["retrieve"]},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert needs_trust(
        configure(f"data.eval_files=[{tmp_path / 'rows.jsonl'}]", "task=null"), RunDir(tmp_path / "runs" / "a")
    )


def test_what_an_extension_says_leads_away_asks_wherever_it_is_named(tmp_path, monkeypatch):
    brought = extensions.Extension(
        reaches=("far",), scorers={"far": "far:score"}, engines={"far": extensions.PLUGIN_ENGINE}
    )
    table = {**extensions.extensions(), "far": brought}
    monkeypatch.setattr(extensions, "extensions", lambda: table)
    config = Config(task="far")
    config.rollout.agent = config.rollout.interaction = config.engine.name = "far"
    config.rollout.tools, config.scoring.scorers = ["far"], {"default": "far"}
    keys = ["task", "engine.name", "rollout.agent", "rollout.tools", "rollout.interaction", "scoring.scorers.default"]
    assert reaches(config, tmp_path) == [f"{key}=far" for key in keys]
    row = {"prompt": [{"role": "user", "content": "?"}], "data_source": "x"}
    for more in ({"agent_name": "far"}, {"extra_info": {"interaction_kwargs": {"name": "far"}}}):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row | more) + "\n")
        config = Config(task=None)
        config.data.eval_files = [str(tmp_path / "rows.jsonl")]
        assert needs_trust(config, RunDir(tmp_path / "runs" / "a"))


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["rollout.interaction=llm_user", "rollout.interaction_kwargs.base_url=http://x/v1"],
         ["rollout.interaction_kwargs.base_url=http://x/v1"]),
        (["rollout.interaction=scripted", "rollout.interaction_kwargs.file=/etc/passwd"],
         ["rollout.interaction_kwargs.file=/etc/passwd"]),
        (["rollout.interaction=scripted", "rollout.interaction_kwargs.turns=[{say: a}]"], []),
        (["rollout.interaction=code_verify", "rollout.interaction_kwargs.max_turns=2"], []),
    ],
)  # fmt: skip
def test_files_and_addresses_of_built_in_users_are_reached_for(overrides, found, tmp_path):
    assert reaches(configure(*overrides), tmp_path) == found


@pytest.mark.parametrize("where", ["images", "prompt", "tool", "tools"])
def test_a_recorded_sample_that_names_image_files_is_played_again_only_when_trusted(run, where: str):
    file, inline = Image("/home/me/.ssh/id_rsa"), Image("data:image/png;base64,iVBORw0KGgo=")
    given = {name: file if name == where else inline for name in ("images", "prompt", "tool", "tools")}
    kwargs = {"look": {"create_kwargs": {"image": {"image": given["tool"].source}}}}
    kwargs["python"] = {"create_kwargs": {"image": [given["tools"].source]}}
    prompt = (Message(Role.USER, (given["prompt"],)),)
    sample = Sample("s", prompt, "seen", images=(given["images"],), tools_kwargs=kwargs)
    directory = RunDir.open(run())
    with pytest.raises(ConfigError, match="names the image file /home/me/.ssh/id_rsa"):
        check_sample(directory, sample, trusted=False)
    check_sample(directory, sample, trusted=True)
    check_sample(directory, dataclasses.replace(sample, images=(), prompt=(), tools_kwargs={}), trusted=False)
