"""Scripts that run verl: what is read of them is what bash gives to Python, word for word."""

import asyncio
import base64
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.config.compose import other_names
from turnwise.errors import ConfigError
from turnwise.ext.sandbox.shell.pool import ShellPool
from turnwise.ext.sandbox.shell.session import ShellSession
from turnwise.ext.sandbox.zygote_process import SandboxUnavailable
from turnwise.ext.verl.translation.shell_scripts import ROOT, ScriptWords, run_script, words_of
from turnwise.ext.verl.translation.translate import FateKind, translate

SCRIPTS = Path(__file__).parent / "scripts"
STUB = r"""#!/bin/bash
case "${0##*/}" in
sleep) exit 0 ;;
nohup | timeout | env | uv | ray | exec)
  while (($#)) && [[ ${1##*/} != python* ]]; do shift; done
  (($#)) || exit 0 ;;
python*) set -- python "$@" ;;
*) set -- "${0##*/}" "$@" ;;
esac
[[ ${2-} == -c || ${2-} == - ]] && exit 1
printf '%s\0' "${@:2}" > "/scratch/seen/$EPOCHREALTIME"
"""
"""A program that notes its words; Python that is asked something has no package."""
STUBBED = "python python3 uv ray torchrun nohup timeout env pip pip3 huggingface-cli hf sleep git curl wget conda sudo srun nvidia-smi"
KEY = re.compile(r"[~+]{0,2}[A-Za-z_][\w./@-]*=.*|~[\w.]+", re.DOTALL)
UNSET = re.compile(r"\$\{[A-Za-z_]\w*\}")


async def truth_of(session: ShellSession, folder: Path, script: Path) -> list[list[str]]:
    """What plain bash starts, with every program a stub: the words after `-m MODULE` of each, where they are keys."""
    here = f"{ROOT}{folder}"
    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".sh", ".env") and path.is_file()):
        await session.run(
            argv=["bash", "-c", 'mkdir -p "${0%/*}"; cat > "$0"', f"{ROOT}{file}"], stdin=file.read_bytes()
        )
    await session.run(argv=["bash", "-c", "mkdir bin seen; cat > bin/stub; chmod +x bin/stub"], stdin=STUB.encode())
    await session.run(f"for name in {STUBBED}; do ln -sf stub bin/$name; done")
    start = f"cd {here}; PATH=/scratch/bin:/usr/bin:/bin HOME={ROOT}{Path.home()} exec bash {ROOT}{script} < /dev/null"
    await session.run(start, seconds=20)
    ran = await session.run("cd seen; ls | while read -r file; do base64 -w0 $file; echo; done", output=4_000_000)
    starts = [base64.b64decode(line).decode().replace(ROOT, "").split("\0")[:-1] for line in ran.output.split()]
    keys = [[word for word in words if KEY.fullmatch(word)] for words in starts]
    return [words for words in keys if any("." in word.partition("=")[0] for word in words)]


def read_of(words: ScriptWords) -> list[str]:
    """But for Hydra's flags, which are no keys on a command line."""
    return [f"{key}={text}" for key, text in words.overrides if key not in ("defaults", "hydra.searchpath")]


@pytest.fixture(scope="module")
def both(shells: Callable[..., ShellPool]) -> dict[str, tuple[list[list[str]], ScriptWords]]:
    """By script: what bash starts, and what is read."""

    async def main() -> dict[str, tuple[list[list[str]], ScriptWords]]:
        found = {}
        async with shells(seconds=20, output=4_000_000) as pool:
            for path in sorted(SCRIPTS.glob("*.sh")):
                async with pool.shell() as session:
                    truth = await truth_of(session, SCRIPTS, path)
                found[path.stem] = truth, words_of(path, await run_script(pool, path, (), {}))
        return found

    before = Path.cwd()
    os.chdir(SCRIPTS)
    try:
        return asyncio.run(main())
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.sh")))
def test_the_words_are_those_that_bash_gives(name: str, both: dict[str, tuple[list[list[str]], ScriptWords]]) -> None:
    truth, words = both[name]
    read = [UNSET.sub("", word) if name == "unset" else word for word in read_of(words)]
    training = [words for words in truth if any("actor_rollout_ref." in word for word in words)]
    assert [word.lstrip("+~") + ("=null" if word[0] == "~" else "") for word in training[-1]] == read


def test_what_a_person_should_know_is_said(both: dict[str, tuple[list[list[str]], ScriptWords]]) -> None:
    assert len(both["starters"][0]) == 4 and "4 programs get config keys" in both["starters"][1].notes[1]
    _, several = both["launches"]
    assert several.notes[1].startswith("3 programs get config keys; only the last that trains a policy is read:")
    assert "verl.trainer.fsdp_sft_trainer, started in line 6" in several.notes[1]
    _, unset = both["unset"]
    assert dict(unset.overrides)["data.train_files"] == "${NOBODY_SETS_DATA}/train.parquet"
    assert any("NOBODY_SETS_MODEL" in note for note in unset.notes)


def write(folder: Path, text: str) -> Path:
    file = folder / "run.sh"
    file.write_text(text)
    return file


LAUNCH = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=tiny"


@pytest.mark.usefixtures("shells")
def test_variables_that_are_not_set_are_named_and_those_of_the_environment_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS_OF_MINE", "24")
    monkeypatch.setenv("SOME_API_KEY", "hidden")
    monkeypatch.setenv("NOT_READ", "x")
    file = write(
        tmp_path,
        f"{LAUNCH} data.train_batch_size=${{ROWS_OF_MINE:-8}} data.train_files=$MISSING/a data.k=$SOME_API_KEY",
    )
    found = translate(file, other_names())
    assert found.values["training.groups"] == 24 and "from your environment: ROWS_OF_MINE" in found.notes
    fates = {fate.key: fate for fate in found.fates}
    assert fates["data.train_files"].kind is FateKind.NOT_SUPPORTED
    assert fates["data.train_files"].text.startswith("MISSING is set neither by the script nor in your environment")
    assert "hidden" not in str(found.fates)


@pytest.mark.usefixtures("shells")
def test_a_script_takes_arguments_and_one_that_runs_nothing_says_why(tmp_path: Path) -> None:
    usage = 'if [ $# -lt 2 ]; then echo "Usage: run.sh GPUS OUT"; exit 1; fi\n'
    file = write(tmp_path, f'{usage}OUT=$2; shift 2\n{LAUNCH} trainer.default_local_dir=$OUT "$@"\n')
    found = translate(Path(f"{file} 8 /out data.train_batch_size=6"), other_names())
    assert found.values["training.groups"] == 6
    assert {fate.key: fate.value for fate in found.fates}["trainer.default_local_dir"] == "/out"
    with pytest.raises(
        ConfigError, match=r"run\.sh: no program .*; the script ended with exit code 1 \(Usage: run\.sh GPUS OUT\)"
    ):
        translate(file, {})
    with pytest.raises(ConfigError, match=r"the script ended with exit code 2 \(line \d+: syntax error"):
        translate(write(tmp_path, "if then\n"), {})


@pytest.mark.usefixtures("shells")
def test_what_else_a_script_does_is_harmless_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.ext.verl.translation.shell_scripts.SECONDS", 4.0)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    lines = f"""
        set -e
        rm -rf {outside}; touch {outside}/made; cd {outside} && echo x > kept
        echo y > {outside}/kept
        mkdir -p /nowhere/at/all; cd /nowhere/at/all
        some-tool-of-ours --install; sudo rm -rf /; curl http://127.0.0.1:9 | sh
        source ./not-here.sh
        {LAUNCH} trainer.where=$PWD > /nowhere/log/train.log 2>&1
        while true; do sleep 60; done
    """
    found = translate(write(tmp_path, lines), other_names())
    assert {fate.key: fate.value for fate in found.fates}["trainer.where"] == "/nowhere/at/all"
    assert (outside / "kept").read_text() == "kept" and [path.name for path in outside.iterdir()] == ["kept"]
    assert "the script was stopped after 4 s" in found.notes
    assert "files that it reads and that are not here: /nowhere/at/all/not-here.sh" in found.notes


def test_without_a_sandbox_nothing_is_run_and_the_way_on_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(self: ShellPool) -> None:
        raise SandboxUnavailable("shell sessions need L3: user namespaces are switched off")

    monkeypatch.setattr(ShellPool, "_start", refused)
    with pytest.raises(ConfigError, match="need L3: user namespaces are switched off\n.*--cfg job --resolve"):
        translate(write(tmp_path, LAUNCH), {})


@pytest.mark.skipif(
    "TURNWISE_VERL_CHECKOUT" not in os.environ, reason="TURNWISE_VERL_CHECKOUT names no checkout of verl"
)
def test_every_script_of_a_checkout(shells: Callable[..., ShellPool], monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Path(os.environ["TURNWISE_VERL_CHECKOUT"]).resolve()
    scripts = [path for path in sorted(checkout.rglob("*.sh")) if "verl." in path.read_text(errors="replace")]

    async def main() -> dict[str, Any]:
        different = {}
        async with shells(seconds=20, output=4_000_000) as pool:
            for path in scripts:
                monkeypatch.chdir(path.parent)
                async with pool.shell() as session:
                    starts = await truth_of(session, path.parent, path)
                training = [words for words in starts if any("actor_rollout_ref." in word for word in words)]
                if not (training or starts):
                    continue  # it ends before it runs verl: for want of an argument or of a file
                read = read_of(words_of(path, await run_script(pool, path, (), {})))
                wanted = [word.lstrip("+") for word in (training or starts)[-1] if "hydra.searchpath=" not in word]
                name = str(path.relative_to(checkout))
                different[name] = [pair for pair in zip(wanted, read, strict=False) if not _same(*pair)]
                different[name] += [("number of words", len(wanted), len(read))] * (len(wanted) != len(read))
        return different

    different = asyncio.run(main())
    assert {name: words for name, words in different.items() if words} == {}
    assert len(different) > 50


def _same(wanted: str, read: str) -> bool:
    """But for the clock, and for what is not set, which keeps its name."""
    return re.sub(r"\d{2,}", "", wanted) == re.sub(r"\d{2,}", "", UNSET.sub("", read))


@pytest.mark.usefixtures("shells")
def test_what_bash_cannot_do_here_is_said(tmp_path: Path) -> None:
    found = translate(write(tmp_path, f'mapfile -t MORE < <(echo data.x=1)\n{LAUNCH} "${{MORE[@]}}"\n'), other_names())
    read = {fate.key for fate in found.fates}
    assert "data.x" in read or any(note.startswith("bash said: line 1: /dev/fd/") for note in found.notes)
