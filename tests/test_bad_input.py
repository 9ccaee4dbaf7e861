"""Bad input by the hundred: each is answered with one clear line and exit code 2, and nothing is written."""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import turnwise as tw
from turnwise.commands.cli import main
from turnwise.config import Config
from turnwise.config.strict_yaml import parse_yaml, write_yaml
from turnwise.data.task_config import compose, configure
from turnwise.errors import ConfigError, TurnwiseError

SCRIPTED = (
    "eval", "eval.samples=2", "engine=scripted", "engine.script=['#### 9']", "rollout.tools=[calculate]",
    "rollout.interaction=null", "--no-transcript",
)  # fmt: skip
OWN_DATA = (*SCRIPTED, "task=null", "scoring.scorers={default: gsm8k}")
ROW = {
    "data_source": "arithmetic",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"ground_truth": "2"},
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def refused(*args: str) -> str:
    """The one line that a command ends with; it has left no trace in the current folder."""
    before = sorted(Path().rglob("*"))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    assert code == 2, (code, out.getvalue(), err.getvalue())
    (line,) = [text for text in err.getvalue().splitlines() if text]  # a progress bar leaves an empty one
    assert line.startswith(f"turnwise {args[0]}: ")
    written = [path for path in Path().rglob("*") if path not in before and "__pycache__" not in path.parts]
    assert written == []
    return line


def write(**files: str | bytes) -> None:
    for name, content in files.items():
        Path(name.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sampling.temperature=inf", "temperature must be a finite number, at least 0 and at most 100, not inf"),
        ("sampling.temperature=1e400", "not inf"),
        ("sampling.temperature=1e-40", "0 (greedy) or at least 0.001"),
        ("sampling.temperature=[1]", "sampling.temperature"),
        ("sampling.max_tokens=1e3", "sampling.max_tokens"),
        ("sampling.top_k=99999999999999999999999", "at most 9.01e+15"),
        ("seed=1e30", "seed"),
        ("seed=0x10", "seed"),
        ("seed=", "seed"),
        ("seed=null", "seed"),
        ("board.port=99999999", "at most 65535"),
        ("training.steps=-1", "training.steps must be at least 1"),
        ("training.save_every=-1", "at least 0"),
        ("training.keep=-1", "at least 1"),
        ("training.target=2", "at most 1"),
        ("training.max_minutes=-1", "more than 0"),
        ("training.max_lag=-1", "at least 0"),
        ("training.minibatches=0", "at least 1"),
        ("algorithm.clip_low=nan", "not nan"),
        ("algorithm.entropy=nan", "a finite number"),
        ("learner.lr=nan", "not nan"),
        ("learner.device=gpu", "must be auto, cpu, cuda or cuda:N"),
        ("sandbox.min_level=auto", "is a level"),
        ("scoring.weights.acc=nan", "scoring.weights"),
        ("tracking.to=[wandbb]", "did you mean 'wandb'?"),
        ("tracking.to=wandbb", "did you mean 'wandb'?"),
        ("engine=tortch", "did you mean 'torch'?"),
        ("engine.name=3", "is one of auto, torch, cuda, openai, scripted, sglang_server, vllm, vllm_server"),
        ("data.overlong=flter", "did you mean 'filter'?"),
        ("algorithm.advantage=grp", "did you mean 'grpo'?"),
        ("board.live=2", "is true or false"),
        ("runs_dir=", "text that is not empty"),
        ("data.prompt_key=' '", "text that is not empty"),
        ("run=a\0b", "cannot read"),
        ("run='a\0b'", "null characters"),
        ("engine.base_url=x", "an address such as"),
        ("engine.base_url='http://127.0.0.1:99999999/v1'", "an address such as"),
        ("engine.base_url='file:///etc/passwd'", "an address such as"),
        ("sandbox.url='http://[::1'", "an address such as"),
        ("scoring.url='http://'", "an address such as"),
        ("run=${seed}", "write the value itself"),
        ("run='${oc.env:HOME}'", "write the value itself"),
        ("run=${env:HOME}", "write the value itself"),
        ("run='???'", "write the value itself"),
        ("sampling.stop=['${oc.env:HOME}']", "write the value itself"),
        ("chat.template_kwargs.x=${oc.env:HOME}", "write the value itself"),
        ("scoring.options.gsm8k={x: [{y: '${oc.env:HOME}'}]}", "write the value itself"),
        ("a==b", "cannot read 'a==b': '=' cannot stand there (quote"),
        ("=x", "write key=value"),
        ("=", "write key=value"),
        ("~seed", "write key=value"),
        ("seed@pkg=1", "seed"),
        ("hydra.run.dir=x", "unknown key"),
        ("+user_file=given", "unknown key"),
        ("sampling.=1", "sampling."),
        ("seed=glob(*)", "seed"),
        ("seed=range(1,3)", "only key=value"),
        ("rollout.tools=[[a]]", "rollout.tools"),
        ("rollout.tools=[null]", "rollout.tools"),
        ("rollout.tools=null", "rollout.tools"),
        ("data.eval_files={a: b}", "data.eval_files"),
        ("sampling.max_tokens=null", "sampling.max_tokens must be a whole number, not null"),
        ("eval.samples=x", "eval.samples must be a whole number, not 'x'"),
        ("sampling.temperature=true", "must be a number, not 'True'"),
        ("sampling.stop={a: b}", "sampling.stop must be a list of texts"),
        ("sampling.stop=['']", "an empty text would end every turn"),
        ("scoring.weights=[1]", "scoring.weights must be a mapping of names to values"),
        ("scoring.weights.acc=x", "scoring.weights.acc must be a number, not 'x'"),
        ("scoring.scorers.arithmetic=null", "scoring.scorers.arithmetic must be text, not null"),
        ("scoring.options={gsm8k: 3}", "scoring.options.gsm8k must be options by name"),
        ("scoring.options.gsm8k=null", "scoring.options.gsm8k must be options by name"),
        ("chat.template_kwargs=3", "chat.template_kwargs must be a mapping of names to values"),
        ("rollout.tools=[null]", "rollout.tools[0] must be text, not null"),
        ("engine=null", "engine.name must be one of 'auto'"),
        ("engine=scripted", "set engine.script"),
        ("algorithm.overlong_tokens=500 rollout.max_tokens=100", "at most rollout.max_tokens=100"),
    ],
)  # fmt: skip
def test_values_on_the_command_line(override: str, expected: str) -> None:
    assert expected in refused("eval", *(override.split() if "rollout.max_tokens" in override else [override]))


def test_text_that_looks_like_a_number_stays_as_it_was_written() -> None:
    given = ("engine=openai", "engine.model=0.10", "run=1e3", "sampling.stop=[a]", "data.eval_files=007")
    config = configure(*given, "trackers.project=true")
    assert (config.engine.model, config.run, config.data.eval_files) == ("0.10", "1e3", ["007"])
    assert config.trackers.project == "true"
    with pytest.raises(ConfigError, match="sampling.stop is text: put quotes"):
        configure("sampling.stop=[1.50]")


YAML = {
    "seed: 1\nseed: 2\n": "the key 'seed' appears twice, again in line 2",
    "sampling:\n  top_k: 1\n  top_p: 0.5\n  top_k: 2\n": "the key 'top_k' appears twice, again in line 4",
    "scoring:\n  options:\n    gsm8k: {wrong: 1, wrong: 2}\n": "appears twice",
    'seed: 1\n"seed": 2\n': "appears twice",
    "sampling:\n\ttop_k: 1\n": "not YAML",
    "- a\n": "expected a mapping",
    "hello\n": "expected a mapping",
    "run: \x07\n": "not YAML",
    "a: [1\n": "not YAML",
    "seed: 1\n---\nseed: 2\n": "not YAML",
    "seed: *x\n": "undefined alias",
    "run: !!python/object/apply:os.system [touch x]\n": "could not determine a constructor",
    "run: !!binary aGVsbG8=\n": "holds a bytes",
    "sampling: {stop: !!set {a, b}}\n": "holds a set",
    "? [a]\n: b\n": "unhashable key",
    "<<: 3\n": "not YAML",
    "1: 2\n": "a key is a name, not 1",
    "null: 2\n": "a key is a name, not None",
    '"": 2\n': "a key is a name",
    "sampling.top_k: 5\n": "sampling.top_k",
    "sampling: {temperature: .inf}\n": "not inf",
    "learner: {lr: .nan}\n": "not nan",
    "training: {steps: -1}\n": "training.steps must be at least 1",
    "rollout: {max_seconds: 1:30}\n": "rollout.max_seconds",
    "seed: 2020-01-01\n": "seed",
    "seed: 1.5\n": "seed",
    "run: true\n": "put quotes around True",
    "sampling: {stop: [1.5]}\n": "put quotes around",
    "sampling: {stop: [true]}\n": "put quotes around",
    "sampling: {stop: [null]}\n": "sampling.stop",
    "run: [a]\n": "run",
    "run: {a: b}\n": "run",
    "seed: null\n": "seed",
    "engine: {name: tortch}\n": "did you mean 'torch'?",
    "engine: {name: true}\n": "is one of auto, torch, cuda, openai, scripted, sglang_server, vllm, vllm_server",
    "board: {live: maybe}\n": "is true or false",
    "board: true\n": "'board' is called board.live now",
    "cluster: {samplers: 2}\n": "'cluster.samplers' is called ray.samplers now",
    "board: false\nengine: {replicas: 2}\nsft: {out: a}\n": (
        "'board' is called board.live now; 'engine.replicas' is called servers.replicas now; instead of 'sft.out': run"
    ),
    "sampling: [1]\n": "is a section",
    "defaults: [a]\n": "unknown key 'defaults'",
    "run: ${oc.env:HOME}\n": "write the value itself",
    "chat: {template_kwargs: {a: [{b: '${oc.env:HOME}'}]}}\n": "write the value itself",
    "chat: {template_kwargs: {'${oc.env:HOME}': 1}}\n": "write the value itself",
    "run: ???\n": "write the value itself",
    "run: " + "[" * 3000 + "]" * 3000 + "\n": "nested too deeply",
    "chat:\n  template_kwargs: &a\n    x: *a\n": "an alias of itself",
    "seed: " + "9" * 5000 + "\n": "not YAML",
    "# " + "x" * 1_000_000 + "\n": "more than 1000000 bytes",
}


@pytest.mark.parametrize("text", YAML, ids=lambda text: text[:30])
def test_yaml_files(text: str) -> None:
    write(mine__yaml=text)
    line = refused("eval", "--config", "mine.yaml")
    assert YAML[text] in line and "mine.yaml" in line


def test_a_small_file_that_grows_to_a_billion_values() -> None:
    tens = [f"    b{n}: &b{n} {{{', '.join(f'k{i}: *b{n - 1}' for i in range(10))}}}\n" for n in range(1, 9)]
    write(mine__yaml="scoring:\n  options:\n    b0: &b0 {x: 1}\n" + "".join(tens))
    assert "holds more than 100000 values" in refused("eval", "--config", "mine.yaml")


@pytest.mark.parametrize("content", [b"run: caf\xe9\n", "seed: 1\n".encode("utf-16"), b"\x1f\x8b\x08\x00", b"\xef\xbb\xbfsead: 1"])  # fmt: skip
def test_files_that_are_no_text(content: bytes) -> None:
    write(mine__yaml=content)
    assert "mine.yaml: " in refused("eval", "--config", "mine.yaml")


def test_files_that_are_none() -> None:
    os.symlink("loop.yaml", "loop.yaml")
    os.mkfifo("pipe.yaml")
    for name in ("none.yaml", ".", "", "loop.yaml", "pipe.yaml", "a\0b.yaml", "x" * 5000, "/dev/zero"):
        assert refused("eval", "--config", name)


def test_words_mean_the_same_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "\ufeffrun: no\nboard: {live: yes}\nseed: 010\nlearner: {lr: 1e-5}\nscoring: {options: {x: {y: 2020-01-01}}}\n"
    )
    config = compose([], file).config
    assert (config.run, config.board.live, config.seed, config.learner.lr) == ("no", True, 10, 1e-5)
    assert config == configure(
        "run=no", "board.live=yes", "seed=010", "learner.lr=1e-5", "scoring.options.x.y='2020-01-01'"
    )


def test_written_yaml_reads_back_whatever_the_text_looks_like() -> None:
    texts = [
        "1e3",
        "007",
        "no",
        "true",
        "1:30",
        "2020-01-01",
        "null",
        "~",
        "",
        "1_000",
        "=",
        "<<",
        ".inf",
        "0x1f",
        "a\nb",
    ]
    value = {"texts": texts, "numbers": [1e-5, 3, -2.5, 1e300], "flags": [True, False, None]}
    assert parse_yaml(write_yaml(value)) == value


# --- data ---------------------------------------------------------------------------------------------------------


def rows(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def changed(**fields: Any) -> str:
    return rows(ROW | fields)


def message(**fields: Any) -> str:
    return changed(prompt=[{"role": "user", "content": "x"} | fields])


DATA = {
    "empty": ("", "the file is empty"),
    "blank": ("\n\n", "the file has no rows"),
    "one bad line": (rows(ROW) + '{"a": \n', "d.jsonl:2: not valid JSON"),
    "a list": ("[1]\n", "a row is an object"),
    "not UTF-8": (b'{"a": "\xff"}\n', "not UTF-8"),
    "half a character": (changed(prompt="@").replace("@", "\\ud800"), "not valid Unicode"),
    "packed": (b"\x1f\x8b\x08\x00\x00", "not UTF-8"),
    "no prompt": (rows({"data_source": "a"}), "prompt: missing"),
    "no messages": (changed(prompt=[]), "prompt: empty"),
    "a number as prompt": (changed(prompt=3), "expected a list of messages"),
    "an unknown role": (message(role="usr"), "did you mean 'user'?"),
    "no content": (message(content=None), "content: missing"),
    "no data source": (changed(data_source=None), "data_source: missing"),
    "text for an object": (changed(reward_model="x"), "expected an object"),
    "half an index": (changed(extra_info={"index": 1.5}), "extra_info.index"),
    "arguments of no tool": (changed(extra_info={"tools_kwargs": {"calculater": {"a": 1}}}), "did you mean 'calculate'?"),
    "a selection of no tool": (changed(extra_info={"tool_selection": ["calculater"]}), "did you mean 'calculate'?"),
    "an unknown user": (changed(extra_info={"interaction_kwargs": {"name": "gsm8"}}), "did you mean 'gsm8k'?"),
    "an unknown loop": (changed(agent_name="tool_agnt"), "unknown agent loop"),
    "too deep": (rows(ROW)[:-2] + ', "a": ' + "[" * 200 + "]" * 200 + "}\n", "nested deeper"),
    "far too deep": (rows(ROW)[:-2] + ', "a": ' + "[" * 100000 + "]" * 100000 + "}\n", "nested too deeply"),
    "a huge prompt": (changed(prompt="lorem ipsum " * 2_500_000), "all 1 prompts are longer"),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_rows(name: str) -> None:
    content, expected = DATA[name]
    write(d__jsonl=content)
    assert expected in refused(*OWN_DATA, "data.eval_files=[d.jsonl]")


def test_a_huge_prompt_among_good_ones_is_named() -> None:
    write(d__jsonl=rows(ROW) + changed(prompt="a" * 30_000_000))
    line = refused(*OWN_DATA, "data.eval_files=[d.jsonl]", "data.overlong=error")
    assert "d.jsonl:1: the prompt has at least 300000 tokens" in line


def test_places_that_hold_no_data() -> None:
    write(good__jsonl=rows(ROW), table__csv="a,b\n", list__json="[1]", junk__parquet=os.urandom(300))
    Path("folder.parquet").mkdir()
    os.symlink("loop.jsonl", "loop.jsonl")
    os.symlink("good.jsonl", "same.jsonl")
    os.mkfifo("pipe.jsonl")
    for name in ("none.jsonl", "table.csv", "list.json", "junk.parquet", "folder.parquet", "loop.jsonl", "pipe.jsonl",
                 "good", "*.jsonl", "'~nobodyhere/x.jsonl'", "''", "x" * 5000 + ".jsonl"):  # fmt: skip
        assert refused(*OWN_DATA, f"data.eval_files=[{name}]")
    assert "given twice" in refused(*OWN_DATA, "data.eval_files=[good.jsonl, ./good.jsonl]")
    assert "given twice" in refused(*OWN_DATA, "data.eval_files=[good.jsonl, same.jsonl]")


@pytest.mark.parametrize(
    ("columns", "cut", "expected"),
    [
        ({"prompt": ["a"] * 3, "data_source": ["a"] * 3}, 60, "not a readable parquet file"),
        ({"data_source": ["a"]}, 0, "prompt: missing"),
        ({"prompt": pyarrow.array([], pyarrow.string())}, 0, "no rows"),
        ({"prompt": [1, 2], "data_source": ["a", "a"]}, 0, "expected a list of messages"),
        ({"prompt": ["a", None], "data_source": ["arithmetic"] * 2}, 0, "row 1: prompt: missing"),
    ],
)
def test_parquet(columns: dict[str, Any], cut: int, expected: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), "d.parquet")
    if cut:
        Path("d.parquet").write_bytes(Path("d.parquet").read_bytes()[:cut])
    assert expected in refused(*OWN_DATA, "data.eval_files=[d.parquet]")


# --- code of others -----------------------------------------------------------------------------------------------

CODE = {
    "raises": ("1/0\n", "ZeroDivisionError"),
    "in several lines": ("raise ValueError('a\\nb\\nc')\n", "ValueError: a b c"),
    "without a word": ("raise ValueError\n", "ValueError"),
    "leaves": ("import sys; sys.exit()\n", "SystemExit"),
    "an exception of another kind": ("class Odd(BaseException): pass\nraise Odd('x')\n", "Odd: x"),
    "a generator's end": ("raise GeneratorExit\n", "GeneratorExit"),
    "a group": ("raise ExceptionGroup('g', [ValueError(1)])\n", "ValueError: 1"),
    "no end": ("def f(): f()\nf()\n", "RecursionError"),
    "a slip": ("def (\n", "SyntaxError"),
    "null characters": ("x = 1\0\n", "null bytes"),
    "no such name": ("y = 1\n", "has no 'x'"),
    "in a circle": ("import second_of_two\nx = 1\n", "AttributeError"),
    "nothing to call": ("x = 3\n", ""),
}


@pytest.mark.parametrize("name", CODE)
def test_plug_ins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, expected = CODE[name]
    write(p__py=code, second_of_two__py="import sys\nnext(m for n, m in sys.modules.items() if '_user_p_' in n).x\n")
    monkeypatch.syspath_prepend(".")
    for key in ("rollout.tools=[p.py:x]", "scoring.scorers={default: p.py:x}", "rollout.interaction=p.py:x",
                "rollout.agent=p.py:x", "task=p.py:x"):  # fmt: skip
        assert expected in refused(*SCRIPTED, key)
    monkeypatch.delitem(__import__("sys").modules, "second_of_two", raising=False)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def x(split, seed):\n    raise ValueError('boo')\n", "ValueError: boo"),
        (
            "def x(split, seed):\n    yield {'data_source': 'a', 'prompt': 'x'}\n    raise KeyError('late')\n",
            "KeyError",
        ),
        ("def x(split, seed):\n    yield 3\n", "row 0: a row is an object, this is a number"),
        ("def x(split, seed):\n    yield {}\n", "prompt: missing"),
        ("def x(split, seed):\n    return None\n", "TypeError"),
        ("def x(split, seed):\n    return []\n", "there are no samples"),
        ("def x():\n    return []\n", "takes 0 positional arguments"),
    ],
)
def test_tasks(code: str, expected: str) -> None:
    write(p__py=code)
    assert expected in refused(*SCRIPTED, "task=p.py:x", "scoring.scorers={default: gsm8k}")


@pytest.mark.parametrize("text", ["a: [\n", "- 1\n", "", "interaction:\n- 3\n", "interaction:\n- {class_name: no.No}\n",
                                  "interaction: []\ninteraction: [{class_name: x.Y}]\n"])  # fmt: skip
def test_registries_of_users(text: str) -> None:
    write(r__yaml=text)
    assert refused(*SCRIPTED, "verl.interactions_file=r.yaml", "rollout.interaction=a")


# --- models -------------------------------------------------------------------------------------------------------


def member(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda old: json.dumps(json.loads(old) | fields).encode()


MODELS: dict[str, tuple[str, Callable[[bytes], bytes] | None]] = {
    "no tokenizer": ("tokenizer.json", None),
    "junk for a tokenizer": ("tokenizer.json", lambda old: b"junk"),
    "an empty tokenizer": ("tokenizer.json", lambda old: b""),
    "an object for a tokenizer": ("tokenizer.json", lambda old: b"{}"),
    "half a tokenizer": ("tokenizer.json", lambda old: old[: len(old) // 2]),
    "a tokenizer of no kind": ("tokenizer.json", member(model={"type": "Nope"})),
    "junk for its config": ("tokenizer_config.json", lambda old: b"junk"),
    "a list for its config": ("tokenizer_config.json", lambda old: b"[]"),
    "no template": ("chat_template.jinja", None),
    "a broken template": ("chat_template.jinja", lambda old: b"{% for %}"),
    "a template that refuses": ("chat_template.jinja", lambda old: b"{{ raise_exception('a\nb') }}"),
    "a template without end": ("chat_template.jinja", lambda old: b"{% for i in range(10**9) %}x{% endfor %}"),
    "a template that divides": ("chat_template.jinja", lambda old: b"{{ 1 // 0 }}"),
    "a template in no language": ("chat_template.jinja", lambda old: b"\xff\xfe"),
    "junk for a config": ("config.json", lambda old: b"junk"),
    "a list for a config": ("config.json", lambda old: b"[]"),
    "an unknown architecture": ("config.json", member(model_type="nope")),
    "a billion layers": ("config.json", member(num_hidden_layers=10**9)),
    "no weights": ("model.safetensors", None),
    "junk for weights": ("model.safetensors", lambda old: b"junk"),
    "half the weights": ("model.safetensors", lambda old: old[: len(old) // 2]),
}


def copy_of_tiny() -> Path:
    source = Path(tw.__file__ or "").parent / "engines" / "bundled" / "tiny"
    shutil.copytree(source, "m", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return Path("m")


@pytest.mark.parametrize("name", MODELS)
def test_model_folders(name: str) -> None:
    file, change = MODELS[name]
    path = copy_of_tiny() / file
    path.write_bytes(change(path.read_bytes())) if change is not None else path.unlink()
    assert refused("eval", "eval.samples=2", "model.path=m", "rollout.tools=[]", "rollout.interaction=null")


def test_a_tokenizer_of_another_model() -> None:
    path = copy_of_tiny() / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first = 1 + max(token["id"] for token in tokenizer["added_tokens"])
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    words = [*(f"zz{number}" for number in range(200)), "Solve the problem"]
    tokenizer["added_tokens"] += [{"id": first + at, "content": word, **plain} for at, word in enumerate(words)]
    path.write_text(json.dumps(tokenizer))
    line = refused("eval", "eval.samples=2", "model.path=m", "rollout.tools=[]", "rollout.interaction=null")
    assert "they do not belong together" in line


# --- places to write, commands, Python ------------------------------------------------------------------------------


@pytest.mark.parametrize("override", [
    "run=a/b", "run=..", "run=-x", "run=~x", "run=' '", "run=" + "x" * 300, "run='a\nb'", "runs_dir=~/x", "runs_dir=file",
    "runs_dir=file/x", "runs_dir=/proc/x",
])  # fmt: skip
def test_places_to_write(override: str) -> None:
    write(file="x")
    Path("folder").mkdir()
    assert refused(*SCRIPTED, override)


@pytest.mark.parametrize("file", ["folder", "file/x.jsonl", "/proc/x.jsonl"])
def test_places_for_episodes(file: str) -> None:
    write(file="x")
    Path("folder").mkdir()
    assert refused(*SCRIPTED, "--out", file)


@pytest.mark.parametrize("override", ["sft.script=os:getcwd",
                                      "sft.script=os:nope", "sft.script=builtins:int", "sft.recorded=[file]", "sft.recorded=[.]", "sft.recorded=[no*]", "sft.lr=nan"])  # fmt: skip
def test_fine_tuning(override: str) -> None:
    write(file="x")
    assert refused(
        "sft", "sft.steps=1", "sft.traces=2", "rollout.tools=[calculate]", "rollout.interaction=null", override
    )


@pytest.mark.parametrize("override", [
    "training.steps=0", "training.epochs=0", "training.group_size=0", "training.samples=1", "training.minibatches=999",
    "training.max_logprob_gap=nan", "algorithm.kl_loss=-1", "algorithm.kl_reward=nan", "learner.lr=inf", "learner.token_budget=0",
    "learner.lora_rank=-1", "learner.lora_rank=100000000000", "learner.grad_clip=0", "resume=auto",
])  # fmt: skip
def test_training(override: str) -> None:
    assert refused("train", "rollout.tools=[calculate]", "rollout.interaction=null", override)


@pytest.mark.parametrize("command", [
    "show nope", "show .", "prepare gsm9k", "prepare gsm8k --source nope", "report nope", "report .", "report . --out /",
    "report . --trajectories -1", "rescore nope", "rescore .", "rescore . --options a=1", "rescore . --weights a",
    "filter nope --out x.jsonl", "filter . --out o.jsonl --max-accuracy 2", "filter . --out o.jsonl --min-accuracy nan",
    "judge check --scorer nope", "judge check x", "sandbox serve --port 99999999", "sandbox serve --port -1",
    "sandbox serve --host 0.0.0.0", "sandbox serve sandbox.seconds=-1", "board nope", "board . --port 99999999",
    "board . --host 0.0.0.0", "import-jsonl nope --out runs/x", "import-jsonl . --out runs/x", "eval --nope", "eval x",
    "check --config nope.yaml", "train --jsn", "check sandbx",
])  # fmt: skip
def test_commands(command: str) -> None:
    assert refused(*command.split())


@pytest.mark.parametrize(("command", "expected"), [
    ("evall", "turnwise: unknown command 'evall': did you mean 'eval'?"),
    ("sandbox sreve", "turnwise sandbox: unknown action 'sreve': did you mean 'serve'?"),
    ("show", "turnwise show: the following arguments are required: RUN ("),
    ("rescore", "turnwise rescore: the following arguments are required: RUN ("),
    ("board --port x", "turnwise board: argument --port: invalid int value: 'x'"),
    ("eval --config", "turnwise eval: argument --config: expected one argument"),
    ("train --steps 3", "turnwise train: '--steps' is not an option: config values are written key=value, as in training.steps="),
    ("sft --steps 3", "turnwise sft: '--steps' is not an option: config values are written key=value, as in sft.steps="),
    ("train training.seed=1", "turnwise train: command line: unknown key 'training.seed': did you mean 'seed'?"),
    ("train training.keep_checkpoints=1", "turnwise train: command line: unknown key 'training.keep_checkpoints': did you mean 'training.keep'?"),
    ("train group_sise=1", "turnwise train: command line: unknown key 'group_sise': did you mean 'eval.group_size' or 'training.group_size'?"),
    ("eval --jsn", "turnwise eval: unknown argument of `turnwise eval` '--jsn': did you mean '--json'?"),
    ("prepare gsm8k --flavor tool", "turnwise prepare: unknown argument of `turnwise prepare gsm8k` '--flavor': did you mean '--flavour'?"),
])  # fmt: skip
def test_words_that_make_no_command(command: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(expected)


def test_words_before_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nope"]) == 2
    assert capsys.readouterr().err == "turnwise: unknown argument '--nope': valid: --help, --version, -h.\n"


def quiet() -> Config:
    return configure("engine=scripted", "engine.script=[x]", "rollout.tools=[]", "rollout.interaction=null")


SAMPLE = tw.Sample("a", (tw.Message(tw.Role.USER, "x"),), "arithmetic")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: tw.evaluate("x"), "expected a Config"),
        (lambda: tw.evaluate(None), "expected a Config"),
        (lambda: tw.evaluate({}), "expected a Config"),
        (lambda: tw.configure(3), "overrides are texts"),
        (lambda: tw.configure(["seed=1"]), "overrides are texts"),
        (lambda: tw.configure(config_file=3), "config_file is a path"),
        (lambda: tw.configure(config_file="none.yaml"), "no config file none.yaml"),
        (lambda: tw.evaluate(quiet(), samples=3), "samples is a list of Sample, not int"),
        (lambda: tw.evaluate(quiet(), samples="abc"), "samples is a list of Sample, not str"),
        (lambda: tw.evaluate(quiet(), samples=[{"prompt": "x"}]), "samples[0] is not a Sample but dict"),
        (lambda: tw.evaluate(quiet(), samples=[]), "there are no samples"),
        (lambda: tw.evaluate(quiet(), samples=[SAMPLE, SAMPLE]), "samples[1]: another sample has the id 'a'"),
        (lambda: tw.evaluate(quiet(), tools="calculate"), "tools is a list of tools, not str"),
        (lambda: tw.evaluate(quiet(), tools=len), "tools is a list of tools"),
        (lambda: tw.evaluate(quiet(), tools=[3]), "3 is not a tool"),
        (lambda: tw.evaluate(quiet(), scorer=3), "int cannot be called"),
        (lambda: tw.evaluate(quiet(), scorer="gsm8k"), "str cannot be called"),
        (lambda: tw.evaluate(quiet(), scorer=lambda: 1), "it must take (trajectory)"),
    ],
)  # fmt: skip
def test_python(call: Callable[[], Any], expected: str) -> None:
    with pytest.raises(TurnwiseError) as caught:
        call()
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("runs").exists()
