"""Templates that write calls and results as each family does: schema -> prompt -> call -> text -> call -> result, in tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from chat_families import CHATML, Talk, _byte_level
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from turnwise.chat.calls.detect_format import find_format
from turnwise.chat.calls.format_words import by_signs, choose_format
from turnwise.chat.calls.tool_format import load_format
from turnwise.chat.renderer import CallForm, Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.errors import PluginError
from turnwise.types import FinishReason, Message, Origin, Role, ToolCall

SCHEMA = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}, "n": {"type": "integer"}}},
    },
}


def chatml(call: str, result: str) -> str:
    """ChatML whose system message shows the tools and how `call`s are written."""
    return (
        "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}\nWrite: " + call + "<|im_end|>\n{% endif -%}"
        "{%- for m in messages -%}"
        "{%- if m.role == 'tool' -%}" + result + "{%- else -%}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
    )


RESPONSE = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
GLM = (
    "[gMASK]<sop>{%- if tools -%}<|system|>\n{{ tools | tojson }}\n"
    "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "{%- if loop.previtem.role != 'tool' -%}<|observation|>{%- endif -%}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- else -%}<|{{ m.role }}|>{{ '\n' + m.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{{ '\n' }}{%- endif -%}"
)
HARMONY = (
    "{%- if tools -%}<|start|>developer<|message|>namespace functions {{ tools | tojson }}<|end|>{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{%- elif m.role == 'assistant' -%}"
    "{%- if '<|channel|>analysis<|message|>' in m.content or '<|channel|>final<|message|>' in m.content -%}"
    "{{ raise_exception('pass the thinking apart') }}{%- endif -%}"
    "{%- if m.thinking -%}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif -%}"
    "{%- if m.tool_calls -%}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{%- else -%}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- endif -%}"
    "{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
LLAMA = (
    "{{ bos_token }}{%- for m in messages -%}{%- set role = 'ipython' if m.role == 'tool' else m.role -%}"
    "<|start_header_id|>{{ role }}<|end_header_id|>{{ '\n\n' }}"
    "{%- if loop.first and tools -%}{{ 'Respond with {\"name\": ..., \"parameters\": ...}. ' + (tools | tojson) + '\n\n' }}{%- endif -%}"
    "{{ m.content | trim }}<|eot_id|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{%- endif -%}"
)
MISTRAL = (
    "{{ bos_token }}{%- if tools -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}[INST]{{ m.content }}[/INST]"
    "{%- elif m.role == 'tool' -%}"
    "{%- if loop.previtem.role == 'assistant' and not loop.previtem.tool_calls -%}{{ raise_exception('no call') }}{%- endif -%}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{%- elif m.tool_calls -%}{%- for c in m.tool_calls -%}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{%- endfor -%}{{ eos_token }}"
    "{%- else -%}{{ m.content }}{{ eos_token }}{%- endif -%}{%- endfor -%}"
)
KIMI = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n"
    "{{ m.content }}<|im_end|>{%- else -%}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}"
    "{%- if m.tool_calls -%}<|tool_calls_section_begin|>{%- for c in m.tool_calls -%}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{%- endfor -%}"
    "<|tool_calls_section_end|>{%- endif -%}<|im_end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
DEEPSEEK = (
    "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'user' -%}<｜User｜>{{ m.content }}"
    "{%- if loop.first and tools -%}{{ '\n' }}{{ tools | tojson }} <｜tool▁calls▁begin｜>{%- endif -%}"
    "{%- elif m.role == 'tool' -%}<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>"
    "{%- else -%}<｜Assistant｜>{{ m.content }}{{ eos_token }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<｜Assistant｜>{%- endif -%}"
)
GEMMA = (
    "{{ bos_token }}{%- if tools -%}<|turn>system\n{{ tools | tojson }} <|tool_call>call:NAME{}<tool_call|><turn|>\n{% endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}<|tool_response>response:{{ m.name }}{{ m.content }}<tool_response|>"
    "{%- if not (loop.nextitem and loop.nextitem.role == 'tool') -%}<turn|>\n{% endif -%}"
    "{%- else -%}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "{%- if not (loop.nextitem and loop.nextitem.role == 'tool') -%}<turn|>\n{% endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|turn>model\n{% endif -%}"
)


@dataclass(frozen=True)
class Case:
    """A family: its template, its control tokens, and how its turns end before a tool and before nobody."""

    template: str
    control: tuple[str, ...]
    ends: tuple[str, str]
    form: CallForm = CallForm.RAW
    thinks: bool = True
    calls: int = 2


XML = ("<tool_call>", "</tool_call>", "<think>", "</think>")
IM_END = ("<|im_end|>", "<|im_end|>")
CASES = {
    "hermes": Case(chatml("<tool_call>{...}</tool_call>", RESPONSE), (*CHATML, *XML), IM_END),
    "qwen3_coder": Case(
        chatml("<tool_call><function=NAME><parameter=KEY></parameter></function></tool_call>", RESPONSE),
        (*CHATML, *XML), IM_END,
    ),
    "seed": Case(chatml("<seed:tool_call>", RESPONSE), (*CHATML, "<seed:tool_call>", "</seed:tool_call>"), IM_END),
    "minimax": Case(chatml("<minimax:tool_call>", RESPONSE), (*CHATML, *XML, "<minimax:tool_call>"), IM_END),
    "minimax_m1": Case(chatml("<tool_calls>", RESPONSE), (*CHATML, *XML), IM_END),
    "minimax_m3": Case(chatml("]<]minimax[>[<tool_call>", RESPONSE), (*CHATML, "]<]minimax[>["), IM_END),
    "apriel": Case(chatml("<tool_calls>[...]", RESPONSE), (*CHATML, *XML), IM_END),
    "granite": Case(chatml("<|tool_call|>[...]", RESPONSE), (*CHATML, *XML, "<|tool_call|>"), IM_END),
    "phi4_mini": Case(chatml("functools[...]", RESPONSE), (*CHATML, *XML, "<|tool_call|>", "<|/tool_call|>"), IM_END),
    "lfm2": Case(
        chatml("<|tool_list_start|>", RESPONSE), (*CHATML, *XML, "<|tool_call_start|>", "<|tool_call_end|>"), IM_END
    ),
    "pythonic": Case(chatml("[func_name1(params)]", RESPONSE), (*CHATML, *XML), IM_END),
    "deepseek_v4": Case(chatml("<｜DSML｜tool_calls>", RESPONSE), (*CHATML, *XML, "｜DSML｜"), IM_END),
    "glm": Case(
        GLM, ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", *XML),
        ("<|observation|>", "<|user|>"),
    ),
    "gpt_oss": Case(
        HARMONY, ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        ("", "<|return|>"), CallForm.STRUCTURED, calls=1,
    ),
    "llama3_json": Case(
        LLAMA, ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        ("<|eot_id|>", "<|eot_id|>"),
    ),
    "mistral": Case(
        MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ("</s>", "</s>"), CallForm.STRUCTURED, thinks=False,
    ),
    "kimi": Case(
        KIMI,
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls_section_begin|>",
         "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", *XML[2:]),
        IM_END,
    ),
    "deepseek": Case(
        DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
         "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ),
    "gemma": Case(
        GEMMA, ("<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<tool_response|>"),
        ("<|tool_response>", "<turn|>"), 
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Renderer]:
    """The renderer of a family, its format inferred."""

    def build(name: str) -> Renderer:
        case, backend = CASES[name], _byte_level()
        for token in case.control:
            backend.add_tokens([AddedToken(token, special=token not in XML, normalized=False)])
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=case.ends[1], bos_token=case.control[0], chat_template=case.template
        )
        folder: Path = tmp_path_factory.mktemp(name)
        wrapped.save_pretrained(folder)
        tokenizer = Tokenizer(folder)
        found = find_format(None, tokenizer, {})
        assert found.name == name and found.is_known and found.reason and found.problem is None
        return Renderer(tokenizer, load_format(found.name))

    return build


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_with_calls_has_the_tokens_of_one_full_render(
    name: str, renderer: Callable[[str], Renderer]
) -> None:
    made, case = renderer(name), CASES[name]
    form, ids = made.call_format, made.tokenizer.added_ids
    assert made.call_form is case.form
    talk = Talk(made, [Message(Role.USER, "What is it?")], tools=(SCHEMA,))
    prompt = made.tokenizer.decode(talk.ledger.token_ids)
    assert all(word in prompt for word in ("probe", "Look something up.", '"n"')), "the schema is in the prompt"
    for turn, arguments in enumerate(({"x": "42", "n": 42}, {"x": 'a <b> é\n"c"', "n": -1})):
        calls = [ToolCall("", "probe", arguments | {"n": number}) for number in range(case.calls)]
        thought = form.render_thought("let me see", is_open=False) if case.thinks else ""
        said = thought + "\n".join(form.render_call(call) for call in calls)
        message = talk.say(said, ids[case.ends[0]] if case.ends[0] else None)
        read = made.read(talk.last, turn, None, [SCHEMA])
        assert [(one.name, one.arguments, one.problem) for one in read.tool_calls] == [
            ("probe", call.arguments, None) for call in calls
        ]
        assert read.reasoning == ("let me see" if case.thinks else None)
        results = [f"result {turn} {number}: {case.control[-1]}" for number in range(case.calls)]
        zipped = zip(message.tool_calls, results, strict=True)
        talk.append_replies(*(Message(Role.TOOL, text, tool_call_id=call.id, name="probe") for call, text in zipped))
        assert "result" in talk.text_of(Origin.TOOL, turn)
    talk.say(f"{form.ANSWER}It is 42.", ids[case.ends[1]])
    assert talk.messages[-1].answer == "It is 42."
    checked = made.check(talk.ledger, talk.messages, (SCHEMA,))
    assert checked.problem is None and (checked.same_text or case.form is CallForm.STRUCTURED), checked


def test_stops_are_tokens_where_they_can_be_and_strings_elsewhere(renderer: Callable[[str], Renderer]) -> None:
    made = renderer("gpt_oss")
    ids = made.tokenizer.added_ids
    assert {ids["<|call|>"], ids["<|return|>"]} <= made.stop_ids and made.stop_strings == ()
    elsewhere = Renderer(renderer("hermes").tokenizer, load_format("gpt_oss"))
    assert elsewhere.stop_strings == ("<|call|>", "<|return|>")
    assert renderer("hermes").stop_strings == ()


def test_what_ends_a_call_is_read_and_its_absence_is_a_problem(renderer: Callable[[str], Renderer]) -> None:
    made = renderer("gpt_oss")
    talk = Talk(made, [Message(Role.USER, "What is it?")], tools=(SCHEMA,))
    text = made.call_format.render_call(ToolCall("", "probe", {"x": "1"}))
    (call,) = talk.say(text, None).tool_calls
    assert call.problem is None and talk.last is not None
    (cut,) = talk.say(text.removesuffix("<|call|>"), None).tool_calls
    assert cut.problem == "the call has no <|call|>" and talk.last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("named", "ours"),
    [("gpt-oss", "gpt_oss"), ("qwen3_coder", "qwen3_coder"), ("deepseek_v4", "deepseek_v4"), ("gemma4", "gemma")],
)
def test_names_of_other_systems_are_understood(named: str, ours: str) -> None:
    assert choose_format(named).name == ours
    assert load_format(named) is load_format(ours)


def test_an_unknown_format_is_told_and_an_untold_one_is_hermes() -> None:
    with pytest.raises(PluginError, match="did you mean 'kimi'"):
        load_format("kimy")
    found = by_signs(["{{ messages }}"], ["<|im_end|>"])
    assert (found.name, found.is_known) == ("hermes", False) and "chat.tool_format" in found.reason
    assert by_signs(["{{ messages }}"], ["[TOOL_CALLS]"]).name == "mistral"
    assert choose_format("code").name == "code" and choose_format(None).name == "hermes"
