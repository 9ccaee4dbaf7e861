"""The command line as a person uses it: real exit codes, real files, and real processes where that matters."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.commands.cli import VERBS, main

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}


def command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In this process: importing torch and transformers takes longer than most commands."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(args))
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def process(*args: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "turnwise.commands.cli", *args],
        cwd=cwd, env=ENVIRONMENT | more, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_help_lists_the_commands_and_imports_nothing_heavy(tmp_path: Path) -> None:
    done = process("--help", cwd=tmp_path)
    assert done.returncode == 0
    for title, verbs in VERBS.items():
        assert f"\n{title}:\n" in done.stdout
        for verb in verbs:
            assert re.search(rf"^  {verb} ", done.stdout, re.MULTILINE), verb
    code = (
        "import sys; from turnwise.commands.cli import make_parser; make_parser()[0].format_help()\n"
        "heavy = {'torch', 'transformers', 'hydra', 'rich', 'pyarrow', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=False).returncode == 0


def test_eval_show_and_json(tmp_path: Path) -> None:
    done = process("eval", "eval.samples=3", "--json", "run=first", "seed=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["sources"]["arithmetic"]["episodes"] == 3
    assert "accuracy, final answer" in done.stdout and "Are you sure?" in done.stdout
    assert "run directory: " in done.stdout and (tmp_path / "runs" / "first" / "config.yaml").is_file()
    assert "loop         tool_calling (inferred" in done.stderr, "the plan is shown before the run"
    shown = command("show", "runs/first", "--sample", "2", cwd=tmp_path)
    assert shown.returncode == 0 and "arithmetic/test:2" in shown.stdout
    assert command("show", "runs/first", "--sample", "3", cwd=tmp_path).returncode == 2
    missing = command("show", "runs/frist", cwd=tmp_path)
    assert missing.returncode == 2 and "did you mean 'first'?" in missing.stderr
    for name in ("first", "frist"):
        assert "did you mean 'runs/first'?" in command("show", name, cwd=tmp_path).stderr
    worst = command("show", "runs/first", "--worst", "2", "--file", "eval/step_000000", "--raw", cwd=tmp_path)
    titles = re.findall(r"^eval/step_000000, --sample (\d)$", worst.stdout, re.MULTILINE)
    rewards = [float(value) for value in re.findall(r"^reward: (\S+)", worst.stdout, re.MULTILINE)]
    assert len(titles) == 2 and rewards == sorted(rewards)[:2] and "<tool_call>" in worst.stdout
    for wrong, words in (
        (("--step", "1"), "has no episodes of it; it has none of training (--file names an evaluation)"),
        (("--worst", "0"), "--worst 0: a number from 1 on"),
        (("--file", "eval/step_1"), "did you mean 'eval/step_000000'?"),
    ):
        done = command("show", "runs/first", *wrong, cwd=tmp_path)
        assert done.returncode == 2 and words in done.stderr
    again = command("eval", "--config", "runs/first/config.yaml", "run=second", "--json", cwd=tmp_path)
    repeat = json.loads(again.stdout.splitlines()[-1])
    for part in ("accuracy", "policy_tokens", "stop_reasons", "calls_by_status"):
        assert repeat["sources"]["arithmetic"][part] == report["sources"]["arithmetic"][part], "a config is a whole run"


def test_help_and_version_are_also_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words, same in ((["help"], ["--help"]), (["help", "train"], ["train", "--help"]), (["version"], ["--version"])):
        texts = []
        for asked in (words, same):
            with pytest.raises(SystemExit) as done:
                main(asked)
            texts.append((done.value.code, capsys.readouterr().out))
        assert texts[0] == texts[1] and texts[0][0] == 0 and texts[0][1]


def test_mistakes_end_with_code_two_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "support.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    for args, text in (
        (("config", "nosuch"), "unknown key 'nosuch': `turnwise config` lists them all"),
        (("check", "sandbx"), "unknown check 'sandbx': did you mean 'sandbox'?"),
        (("check", "task=notes.txt"), "code is a file that ends in .py"),
        (("eval", "sampling={top_q: 1}"), "set its keys one by one, such as sampling."),
        (("eval", "model.path=nosuch"), "no such folder or bundled model: 'nosuch' (bundled models: tiny"),
        (("prepare",), "required: TASK ("),
        (("eval", "sampling.temprature=0"), "did you mean 'sampling.temperature'?"),
        (("evl",), "unknown command 'evl': did you mean 'eval'?"),
        (("train", "lr=0.1"), "unknown key 'lr'; its equivalent here: learner.lr (in `turnwise sft` sft.lr)"),
        (("train", "learning_rate=1e-5"), "unknown key 'learning_rate'; its equivalent here: learner.lr"),
        (("check", "task=suport.py"), "did you mean 'support.py'?"),
        (("train", "--jsn"), "did you mean '--json'?"),
        (("seed=1",), "config values come after one, as in `turnwise eval seed=1`"),
        (("train", "algorithm.loss=ppoclip"), "did you mean 'ppo_clip'?"),
        (("completion", "bsh"), "did you mean 'bash'?"),
        (("eval", "rollout.tools=[calculat]"), "did you mean 'calculate'?"),
        (("prepare", "gsm8"), "did you mean 'gsm8k'?"),
        (("prepare", "gsm8k", "--flavour", "tools", "--source", "."), "did you mean 'tool'?"),
        (("eval", "task=gsm8k"), "turnwise prepare gsm8k"),
    ):
        done = command(*args, cwd=tmp_path)
        assert done.returncode == 2, (args, done.stderr)
        assert text in done.stderr and "Traceback" not in done.stderr, (args, done.stderr)
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_options_and_overrides_mix_in_any_order(tmp_path: Path) -> None:
    done = command("check", "seed=1", "--json", "eval.samples=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["passed"] is True
    assert found["config"]["seed"] == {"value": 1, "from": "command line"}
    assert found["config"]["training.groups"] == {"value": 24, "from": "task arithmetic"}
    keys = re.findall(r"^ ([a-z_.]+) +│", done.stdout, re.MULTILINE)
    assert keys[:2] == ["seed", "eval.samples"] and "training.groups" in keys, "what a person said comes first"
    assert "runs_dir" not in keys and f"{len(found['config']) - len(keys)} keys have their defaults" in done.stdout


def test_nothing_but_which_runs_are_ones_own_is_written_to_the_home_folder(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    done = command("prepare", "arithmetic", cwd=work)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (work / "data" / "arithmetic").iterdir()) == ["test.parquet", "train.parquet"]
    done = process("eval", "data.eval_files=data/arithmetic/test.parquet", "eval.samples=2", cwd=work, HOME=str(home))
    assert done.returncode == 0, done.stderr
    written = [path for path in home.rglob("*") if path.is_file()]
    assert [path for path in written if ".cache" not in path.parts and path.parent.name != "own_runs"] == []


def test_check_fails_with_code_one_and_names_the_row(tmp_path: Path) -> None:
    row = {"data_source": "arithmetic", "prompt": [{"role": "asistant", "content": "x"}]}
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    done = command("check", "data.eval_files=bad.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"bad\.jsonl row 0: prompt\[0\]\.role.*did you mean\s+'assistant'", done.stdout.replace("\n", " "))


def test_sft_trains_and_the_result_loads_in_transformers(tmp_path: Path) -> None:
    done = command(
        "sft", "sft.traces=6", "sft.steps=2", "sft.batch_tokens=512", "rollout.tools=[calculate]",
        "rollout.interaction=null", "run=first", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    policy = tmp_path / "runs" / "first" / "policy"
    assert AutoModelForCausalLM.from_pretrained(policy).num_parameters() > 400_000
    assert len(AutoTokenizer.from_pretrained(policy)) > 300
    done = command("eval", "model.path=runs/first/policy", "eval.samples=2", "--no-transcript", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_readme_task_in_python_runs(tmp_path: Path) -> None:
    """The README's example is under 30 lines, and the bundled model gets some of it right."""
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "evaluate" in block
    ]
    assert len(code.strip().splitlines()) < 30
    out = io.StringIO()
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert "episodes" in out.getvalue()
    accuracy = re.search(r"accuracy, final answer\W+([\d.]+)%", out.getvalue())
    assert accuracy is not None and float(accuracy[1]) > 0


def test_a_locale_without_our_signs_is_no_error(tmp_path: Path) -> None:
    done = process("check", cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0 and "the model?s own template" in done.stdout, done.stderr
