"""A tool-call format of the user's own: the page's example in a training, what is checked at load, endpoints' text."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import turnwise as tw
from turnwise.chat.calls.detect_format import find_format
from turnwise.chat.calls.tool_format import can_write, load_format
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.data.task_config import configure
from turnwise.errors import PluginError, TemplateError, TurnwiseError
from turnwise.reports.checks.rollouts import ANSWER, harmless_call
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import CallStatus, ToolCall

TINY = Path(next(iter(tw.__path__))) / "engines" / "bundled" / "tiny"
PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n# mine\.py\n(.*?)```", PAGE, re.DOTALL)
TEMPLATE = (
    "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}@{{ c.function.name }}{{ c.function.arguments | tojson }}@{%- endfor -%}"
    "<|im_end|>\n{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
CALL = ToolCall("t000c0000", "calculate", {"expression": "6*7"})


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """Writes a file; what names `fmt` in it."""

    def write(code: str) -> str:
        (tmp_path / "mine.py").write_text(code)
        (tmp_path / "mine.jinja").write_text(TEMPLATE)
        return f"{tmp_path}/mine.py:fmt"

    return write


def test_the_example_reads_and_writes(own: Any) -> None:
    form = load_format(own(EXAMPLE))
    message = form.parse('<think>@f{}@</think>So @f{"x": 1}@ and @g{]}@.', turn=2, in_reasoning=False)
    assert (message.reasoning, message.answer) == ("@f{}@", "So  and .")
    whole, broken = message.tool_calls
    assert whole == ToolCall("t002c0000", "f", {"x": 1})
    assert (
        broken.id == "t002c0001"
        and broken.problem is not None
        and broken.problem.startswith("the call is not valid JSON")
    )
    assert form.parse("Just words.", turn=0, in_reasoning=False).answer == "Just words."
    assert form.render_call(CALL) == '@calculate{"expression": "6*7"}@'
    cut = form.parse(form.render_malformed_call(CALL), turn=0, in_reasoning=False)
    assert not any(call.problem is None for call in cut.tool_calls)
    assert harmless_call(form, ["calculate"]) == '@turnwise_check{"code": "pass"}@'


def test_it_is_tried_with_the_template_as_ours_are(own: Any) -> None:
    spec = own(EXAMPLE)
    template = str(Path(spec).parent / "mine.jinja")
    assert find_format(spec, Tokenizer(TINY, template), {}).problem is None
    refused = find_format(spec, Tokenizer(TINY, "chatml_hermes"), {}).problem
    assert refused is not None and "chat.tool_format=hermes reads it" in refused


def test_one_that_a_task_teaches_need_not_read_the_templates_calls(own: Any) -> None:
    spec = own(EXAMPLE + "\nfmt.taught = True\n")
    assert find_format(spec, Tokenizer(TINY, "chatml_hermes"), {}).problem is None
    assert Renderer(Tokenizer(TINY, "chatml_hermes"), load_format(spec)).call_format.render_call(CALL).startswith("@")


def test_a_training_with_it(own: Any, tmp_path: Path) -> None:
    """Calls are read and run, tokens are compared with a full render, and the weights move."""
    spec = own(EXAMPLE)
    config = configure(
        f"chat.tool_format={spec}", f"chat.template={tmp_path}/mine.jinja", f"runs_dir={tmp_path}/runs", "run=r",
        "engine=scripted", 'engine.script=["@calculate{\\"expression\\": \\"6*7\\"}@", "#### 42"]',
        "rollout.tools=[calculate]", "rollout.interaction=null", "chat.check_share=1", "eval.samples=2",
    )  # fmt: skip
    report = tw.evaluate(config, console=Console(quiet=True))
    for trajectory in report.trajectories:
        assert [call.status for call in trajectory.calls] == [CallStatus.OK]
        assert trajectory.turns[0].replies[-1].text == "42"
    assert all(trajectory.render_check.problem is None for trajectory in report.trajectories)
    trained = configure(
        f"chat.tool_format={spec}", f"chat.template={tmp_path}/mine.jinja", f"runs_dir={tmp_path}/runs", "run=t",
        "rollout.tools=[calculate]", "rollout.interaction=null", "training.steps=1", "training.groups=2",
        "training.group_size=2", "training.eval_every=0", "training.save_every=0", "sampling.max_tokens=12",
        "engine.threads=1", "board.live=false", "eval.samples=2",
    )  # fmt: skip
    tw.train(trained, console=Console(quiet=True))
    assert len(read_trajectories(tmp_path / "runs/t/eval/step_000000.parquet")) == 2


READS_ONLY = (
    "from turnwise.types import ToolCall\n\ndef fmt(text): return [ToolCall('', 'f', {})] if text == 'f()' else []\n"
)


def test_a_function_that_only_reads_is_enough_for_an_endpoint(own: Any) -> None:
    form = load_format(own(READS_ONLY))
    assert not can_write(form) and harmless_call(form, []) == ANSWER
    assert form.parse("f()", turn=0, in_reasoning=False).tool_calls == (ToolCall("t000c0000", "f", {}),)
    with pytest.raises(PluginError, match="cannot write calls, but the template is tested with one.*fmt.write = write"):
        form.render_call(CALL)


def test_a_grammar_without_quotes_gets_the_schemas(own: Any) -> None:
    form = load_format(own("def fmt(text, tools): return [str(len(tools)), text]\n"))
    assert form.parse("hm", turn=0, in_reasoning=False, tools=[{}, {}]).answer == "hm"


OBJECT = """
from types import SimpleNamespace
from turnwise.chat.formats import hermes

fmt = SimpleNamespace(**{name: getattr(hermes, name) for name in dir(hermes) if not name.startswith("__") and name != LEFT})
"""


def test_an_object_or_a_file_with_the_names_of_a_format(own: Any, tmp_path: Path) -> None:
    form = load_format(own("LEFT = ''" + OBJECT))
    assert form.parse(form.render_call(CALL), turn=0, in_reasoning=False).tool_calls == (CALL,)
    (tmp_path / "whole.py").write_text("from turnwise.chat.formats.hermes import *\n")
    assert load_format(f"{tmp_path}/whole.py").THINK == "<think>"


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("LEFT = 'render_thought'" + OBJECT, "has no render_thought; a format is a function"),
        ("class fmt: pass", "a format is a function"),
        ("fmt = 3", "has no .*parse"),
        ("def fmt(): return []", r"must take a text, as fmt\(text\) or fmt\(text, tools\)"),
        ("def fmt(text): return text", "returned 'Hello.'; it must return a list of the words"),
        ("def fmt(text): return [1]", r"returned \[1\]; it must return a list"),
        ("def fmt(text): return 1 / 0", "failed on 'Hello.': ZeroDivisionError"),
        (READS_ONLY.replace("'f()'", "'Hello.'"), "reads a call in 'Hello.'"),
        (READS_ONLY + "fmt.write = lambda call: 'f()'", "cannot be written so that it is read back as the same call"),
        (READS_ONLY + "fmt.write = lambda call: 3", "write returned 3, not text"),
        (READS_ONLY + "fmt.write = lambda call: 1 / 0", "failed: ZeroDivisionError"),
        ("LEFT = ''" + OBJECT + "fmt.parse = lambda text, **_: 1 / 0", "parse' failed: ZeroDivisionError"),
        ("LEFT = ''" + OBJECT + "fmt.parse = lambda text, **_: None", "parse returned None, not a Message"),
        ("LEFT = ''" + OBJECT + "fmt.render_call = lambda call: 3", "render_call returned 3, not a str"),
        ("LEFT = ''" + OBJECT + "fmt.STOPS = (3,)", "CALL_ENDS are texts, not .*3"),
        ("def fmt(text): raise SystemExit", "failed on 'Hello.': SystemExit"),
    ],
)
def test_what_cannot_be_one_is_told_at_load(own: Any, code: str, complaint: str) -> None:
    with pytest.raises((PluginError, TemplateError), match=complaint) as caught:
        load_format(own(code))
    assert "mine.py:fmt" in str(caught.value)


def test_it_is_told_before_a_run_begins(own: Any, tmp_path: Path) -> None:
    config = configure(f"chat.tool_format={own('def fmt(): pass')}", f"runs_dir={tmp_path}/runs", "eval.samples=1")
    with pytest.raises(TurnwiseError, match="must take a text"):
        tw.evaluate(config, console=Console(quiet=True))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(PluginError, match="no such file"):
        load_format("nowhere.py:fmt")
