"""Shell completion: the words offered, and the scripts in the shells themselves where those are installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.commands.cli import VERBS, make_parser
from turnwise.commands.completion import SCRIPTS, candidates
from turnwise.extensions import named

COMMANDS = make_parser()[1]


def offered(*words: str) -> list[str]:
    return candidates(words, COMMANDS)


def test_every_file_of_the_folder_is_a_verb_with_a_place() -> None:
    folder = Path(sys.modules["turnwise.commands"].__file__ or "").parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "cli"}
    assert files == {name for names in VERBS.values() for name in names}
    assert set(COMMANDS) == files | set(named("verbs"))


def test_verbs_of_extensions_stand_beside_ours_in_the_help() -> None:
    text = make_parser()[0].format_help()
    after = text[text.index("after a run:") : text.index("shell:")]
    assert [line.split()[0] for line in after.splitlines()[1:] if line.strip()] == [
        "chat", "show", "replay", "rescore", "filter", "board", "report", "note", "import-jsonl",
        "export-jsonl", "weights",
    ]  # fmt: skip


def test_verbs_options_keys_and_values() -> None:
    assert offered("ev") == ["eval"] and offered("") == sorted([*COMMANDS, "--help", "--version"])
    assert offered("train", "--tr") == ["--trust-run"] and offered("nonsense", "") == []
    assert offered("eval", "sam") == ["sampling."]
    assert offered("eval", "sampling.t") == ["sampling.temperature=", "sampling.top_k=", "sampling.top_p="]
    assert "seed=" in offered("train", "") and "training." in offered("train", "")
    assert offered("train", "--json", "algorithm.loss=c") == ["algorithm.loss=cispo"]
    engines = ("auto", "cuda", "openai", "scripted", "sglang_server", "torch", "vllm", "vllm_server")
    assert offered("eval", "engine=") == [f"engine={name}" for name in engines]
    assert offered("train", "board.live=") == ["board.live=false", "board.live=true"]
    assert offered("eval", "rollout.interaction=c") == ["rollout.interaction=code_verify"]
    assert "task=gsm8k" in offered("eval", "task=") and "task=null" in offered("eval", "task=")
    assert offered("config", "training.max_l") == ["training.max_lag", "training.max_logprob_gap"]
    assert offered("completion", "") == ["bash", "fish", "zsh"] and offered("completion", "bash", "") == []
    assert {"chat_env", "gsm8k", "swe"} <= set(offered("prepare", ""))
    assert offered("check", "san") == ["sandbox", "sandbox."] and "swe" in offered("check", "s")
    assert {"calculate", "bash", "look"} <= {word.partition("=")[2] for word in offered("eval", "rollout.tools=")}
    assert {"tool_calling", "gym_env"} <= {word.partition("=")[2] for word in offered("eval", "rollout.agent=")}
    assert offered("weights", "") == ["from-mcore", "merge", "to-mcore"]
    assert offered("weights", "merge", "a", "b", "--dtype", "") == ["bfloat16", "float16", "float32"]
    assert offered("eval", "--config", "") == [], "the shell's own files"
    assert offered("eval", "model.path=") == []


def test_runs_are_offered_where_a_run_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second", "no_run"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        if name != "no_run":
            (tmp_path / "runs" / name / "config.yaml").touch()
    assert offered("show", "") == []
    monkeypatch.chdir(tmp_path)
    for verb in ("show", "report", "rescore", "replay", "chat", "serve"):
        assert [word for word in offered(verb, "ru") if "/" in word] == ["runs/first", "runs/second"]
    assert offered("show", "runs/first", "") == []
    assert offered("train", "run=f") == ["run=first"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A shell's, in which `turnwise` is this package's."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "turnwise").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m turnwise.commands.cli "$@"\n')
    (tmp_path / "bin" / "turnwise").chmod(0o755)
    root = Path(__file__).parent.parent.parent
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(root), "HOME": str(tmp_path), "TERM": "dumb"}


def shell(name: str, code: str, environment: dict[str, str]) -> list[str]:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([name, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes(environment: dict[str, str]) -> None:
    """As readline calls it: the words are split at `=` too."""
    press = """
eval "$(turnwise completion bash)"
compopt() { echo "compopt:$*"; }
press() { COMP_LINE="$1"; COMP_POINT=${#1}; _turnwise turnwise; echo "${COMPREPLY[@]}" end; }
press 'turnwise tra'
press 'turnwise eval sampling.temp'
press 'turnwise train algorithm.loss=g'
press 'turnwise train algorithm.loss=g --j'
complete -p turnwise
"""
    words = shell("bash", press, environment)
    said = " ".join(words)
    assert said.startswith("train end compopt:-o nospace sampling.temperature= end gspo end --json end complete ")
    assert "-F _turnwise turnwise" in said


def test_zsh_and_fish_read_their_scripts(environment: dict[str, str]) -> None:
    press = "turnwise completion fish | source; complete --do-complete 'turnwise train algorithm.loss=g'"
    if shutil.which("fish"):
        assert shell("fish", press, environment) == ["algorithm.loss=gspo"]
    if shutil.which("zsh"):
        press = """
autoload -Uz compinit && compinit -u; eval "$(turnwise completion zsh)"; echo $_comps[turnwise]
compadd() { print -r -- "compadd $@" }
press() { words=("$@"); CURRENT=$#; _turnwise }
press turnwise train algorithm.loss=g; press turnwise eval sampling.temp; press turnwise ''
"""
        said = " ".join(shell("zsh", press, environment))
        known = "_turnwise compadd -- algorithm.loss=gspo compadd -S -- sampling.temperature= compadd -- --help "
        assert said.startswith(known) and said.endswith(" train weights")
    assert all("__complete" in script for script in SCRIPTS.values())
