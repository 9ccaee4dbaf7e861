"""The call format of a model is the one that reads what its template writes; where none does, it is told with the text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_families import CHATML
from model_table import build, trl_templates
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from turnwise.chat import formats
from turnwise.chat.calls.detect_format import find_format
from turnwise.chat.formats import hermes
from turnwise.chat.tokenizer import Tokenizer
from turnwise.data.task_config import compose
from turnwise.errors import TemplateError
from turnwise.rollout.prepare import prepare

CALLS = (
    "{%- for c in m.tool_calls -%}{%- set name = c.function.name -%}{%- set given = c.function.arguments -%}"
    "CALL{%- endfor -%}"
)
EACH = "{%- for k, v in given.items() -%}"
JSON = '{"name": "{{ name }}", "arguments": {{ given | tojson }}}'
WRITTEN = {
    "hermes": "<tool_call>\n" + JSON + "\n</tool_call>",
    "llama3_json": '{"name": "{{ name }}", "parameters": {{ given | tojson }}}',
    "granite": "<|tool_call|>[" + JSON + "]",
    "apriel": "<tool_calls>[" + JSON + "]</tool_calls>",
    "minimax_m1": "<tool_calls>\n" + JSON + "\n</tool_calls>",
    "phi4_mini": "functools[" + JSON + "]",
    "mistral": "[TOOL_CALLS]{{ name }}[ARGS]{{ given | tojson }}",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ given | tojson }}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "pythonic": "[{{ name }}(" + EACH + "{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{%- endfor -%})]",
    "lfm2": "<|tool_call_start|>[{{ name }}("
    + EACH
    + "{{ k }}={{ \"'\" + v + \"'\" if v is string else v }}{{ '' if loop.last else ', ' }}{%- endfor -%})]<|tool_call_end|>",
    "qwen3_coder": "<tool_call>\n<function={{ name }}>\n"
    + EACH
    + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor -%}</function>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function={{ name }}>\n"
    + EACH
    + "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor -%}</function>\n</seed:tool_call>",
    "glm": "<tool_call>{{ name }}\n"
    + EACH
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor -%}</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="{{ name }}">\n'
    + EACH
    + '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor -%}</invoke>\n</minimax:tool_call>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{{ name }}">'
    + EACH
    + "]<]minimax[>[<{{ k }}>{{ v }}]<]minimax[>[</{{ k }}>{%- endfor -%}]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
}
"""A template that writes calls so, by the format that reads them."""
BY_TRIAL = "it reads the calls that the chat template writes"


def chatml(call: str, *, header: str = "<|im_start|>assistant\n", opening: str = "") -> str:
    """ChatML that shows tools and writes `call`s itself; `opening` is what a reply begins with."""
    return (
        "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}" + header + "{{ m.content or '' }}"
        "{%- if m.tool_calls -%}" + CALLS.replace("CALL", call) + "{%- endif -%}<|im_end|>\n"
        "{% else -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n" + opening + "{% endif -%}"
    )


Make = Callable[..., Tokenizer]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model's folder with this template and these special tokens."""
    from chat_families import _byte_level

    trained = _byte_level().to_str()

    def build_folder(template: str, *special: str) -> Path:
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(trained)
        backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in (*CHATML, *special)])
        wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)
        folder = tmp_path_factory.mktemp("model")
        wrapped.save_pretrained(folder)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        return folder

    return build_folder


@pytest.mark.parametrize("opening", ["", "<think>\n"])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_format_is_the_one_that_reads_what_the_template_writes(
    name: str, opening: str, made: Callable[..., Path]
) -> None:
    header = "<|im_start|>assistant\n<think>\n\n</think>\n\n" if opening and name != "minimax_m3" else ""
    template = chatml(WRITTEN[name], header=header or "<|im_start|>assistant\n", opening=opening if header else "")
    found = find_format(None, Tokenizer(made(template)), {})
    assert (found.name, found.reason, found.problem) == (name, BY_TRIAL, None)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen3", "hermes"), ("qwen3_5_think", "qwen3_coder"), ("glm4moe", "glm"), ("gptoss", "gpt_oss"),
        ("deepseekv3", "deepseek"), ("gemma4", "gemma"), ("gemma4_v2", "gemma"), ("llama3_1", "llama3_json"),
        ("lfm2_2_5", "lfm2"), ("lfm2_v2", "lfm2"), ("nemotron_3_nano", "qwen3_coder"),
    ],
)  # fmt: skip
def test_templates_that_trl_ships_are_read(template: str, name: str, tmp_path: Path) -> None:
    from chat_families import _byte_level

    folder = build(trl_templates() / f"{template}.jinja", tmp_path, _byte_level().to_str())
    found = find_format(None, Tokenizer(folder), {})
    assert (found.name, found.reason) == (name, BY_TRIAL)


def test_calls_that_nothing_reads_are_told_with_their_text(made: Callable[..., Path]) -> None:
    folder = made(chatml("<call tool={{ name }}>{{ given | tojson }}</call>"))
    found = find_format(None, Tokenizer(folder), {})
    assert found.problem is not None and "<call tool=look_up>" in found.problem and "<|im_end|>" not in found.problem
    assert "docs/formats.md" in found.problem and "only for conversations without tools" in found.reason


@pytest.mark.parametrize("words", ["<tool_call>", "<tool_calls>", "[TOOL_CALLS]"])
def test_words_of_a_template_do_not_make_a_format_known(words: str, made: Callable[..., Path]) -> None:
    """A mark of one format in a grammar of another's: what is written decides."""
    folder = made(chatml(f"~{words}~{{{{ name }}}}~{{{{ given | tojson }}}}"))
    assert find_format(None, Tokenizer(folder), {}).problem is not None


def test_a_configured_format_is_tried_too(made: Callable[..., Path]) -> None:
    tokenizer = Tokenizer(made(chatml(WRITTEN["hermes"])))
    assert find_format("hermes", tokenizer, {}).problem is None
    refused = find_format("kimi_k2", tokenizer, {})
    assert refused.name == "kimi" and refused.problem is not None
    assert (
        "chat.tool_format=kimi does not read" in refused.problem and "chat.tool_format=hermes reads" in refused.problem
    )
    for name in ("code", "calculator"):  # a task teaches these, whatever the template writes
        assert find_format(name, tokenizer, {}).problem is None


def test_arguments_are_handed_over_as_objects_and_as_texts(made: Callable[..., Path]) -> None:
    only_text = chatml('<tool_call>{"name": "{{ name }}", "arguments": {{ given + "" }}}</tool_call>')
    assert find_format(None, Tokenizer(made(only_text)), {}).name == "hermes"
    no_content = chatml("{%- if m.content is none -%}" + WRITTEN["granite"] + "{%- endif -%}")
    assert find_format(None, Tokenizer(made(no_content)), {}).name == "granite"


@pytest.mark.parametrize("spelling", ["{{ k }}={{ v }}", '{{ k }}="{{ v }}"', "{{ k }}={{ v | tojson }}"])
def test_a_template_that_spells_some_arguments_wrongly_is_still_known(spelling: str, made: Callable[..., Path]) -> None:
    """Some write texts without quotes, numbers with them, or no comma between two."""
    folder = made(chatml("[{{ name }}(" + EACH + spelling + "{%- endfor -%})]"))
    found = find_format(None, Tokenizer(folder), {})
    assert (found.name, found.reason) == ("pythonic", BY_TRIAL)


def test_arguments_of_the_template_count(made: Callable[..., Path]) -> None:
    both = "{%- if as_json -%}" + WRITTEN["hermes"] + "{%- else -%}" + WRITTEN["qwen3_coder"] + "{%- endif -%}"
    tokenizer = Tokenizer(made(chatml(both)))
    assert find_format(None, tokenizer, {}).name == "qwen3_coder"
    assert find_format(None, tokenizer, {"as_json": True}).name == "hermes"


def test_a_template_that_writes_no_calls_is_known_by_its_words_or_tokens(made: Callable[..., Path]) -> None:
    silent = chatml("").replace("{%- if tools -%}", "{#- WORDS -#}{%- if tools -%}")
    told = find_format(None, Tokenizer(made(silent.replace("WORDS", "<|tool_call|>"))), {})
    assert (told.name, told.problem) == ("granite", None) and "writes no calls itself" in told.reason
    by_token = find_format(None, Tokenizer(made(silent, "<|tool_call_start|>")), {})
    assert by_token.name == "lfm2" and "the tokenizer has" in by_token.reason
    guessed = find_format(None, Tokenizer(made(silent)), {})
    assert (guessed.name, guessed.is_known, guessed.problem) == ("hermes", False, None)
    assert find_format("gemma4", Tokenizer(made(silent)), {}).name == "gemma", "what the config says stands"


def _prepare(folder: Path, *overrides: str) -> Any:
    config = compose(["engine.name=scripted", f"engine.script={json.dumps(['#### 0'])}", f"model.path={folder}",
                      "rollout.interaction=null", *overrides]).config  # fmt: skip
    return prepare(config, "test", limit=2)


def test_a_run_with_tools_is_refused_before_a_model_is_loaded_and_one_without_is_not(made: Callable[..., Path]) -> None:
    folder = made(chatml("<call tool={{ name }}>{{ given | tojson }}</call>"))
    with pytest.raises(TemplateError, match="no tool-call format reads the calls of this model"):
        _prepare(folder, "rollout.tools=[calculate]")
    assert _prepare(folder, "rollout.tools=[]").renderer is not None
    assert _prepare(folder, "rollout.tools=[calculate]", "chat.tool_format=calculator").renderer is not None


def test_a_new_format_is_one_file_in_the_folder(
    made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no line of a table: a template that writes its calls is enough to find it."""
    tags = (("<tool_call>", "<plus_call>"), ("</tool_call>", "</plus_call>"))
    text = Path(hermes.__file__).read_text()
    for old, new in tags:
        text = text.replace(old, new)
    (tmp_path / "plus_signs.py").write_text(text)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    tokenizer = Tokenizer(made(chatml("<plus_call>\n" + JSON + "\n</plus_call>")))
    found = find_format(None, tokenizer, {})
    assert (found.name, found.reason, found.problem) == ("plus_signs", BY_TRIAL, None)
