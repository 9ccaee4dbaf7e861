"""Calls whose parameters stand between tags: what is not closed is no value, and swallows no other."""

import pytest

from turnwise.chat.calls.tool_format import load_format
from turnwise.errors import TemplateError
from turnwise.types import ToolCall

TAGGED = {
    "qwen3_coder": ("<tool_call>", "<function=f>", "<parameter={}>", "</parameter>", "</function>", "</tool_call>"),
    "seed": ("<seed:tool_call>", "<function=f>", "<parameter={}>", "</parameter>", "</function>", "</seed:tool_call>"),
    "glm": ("<tool_call>", "f", "<arg_key>{}</arg_key><arg_value>", "</arg_value>", "", "</tool_call>"),
    "minimax": ("<minimax:tool_call>", '<invoke name="f">', '<parameter name="{}">', "</parameter>", "</invoke>",
                "</minimax:tool_call>"),
    "deepseek_v4": ("<｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="{}" string="true">',
                    "</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜tool_calls>"),
}  # fmt: skip


@pytest.mark.parametrize("gap", ["", "\n"])
@pytest.mark.parametrize("name", TAGGED)
def test_an_unclosed_parameter_is_a_problem_and_not_another_ones_text(name: str, gap: str) -> None:
    block, call, opened, closed, end, unblock = TAGGED[name]
    city, state = opened.format("city"), opened.format("state")
    pieces = [block, call, city, "Dallas", closed, state, "TX", closed, end, unblock]
    (whole,) = load_format(name).parse(gap.join(pieces), turn=0, in_reasoning=False).tool_calls
    assert (whole.problem, {key: value.strip() for key, value in whole.arguments.items()}) == (
        None,
        {"city": "Dallas", "state": "TX"},
    )
    for missing in (4, 7):
        text = gap.join(piece for number, piece in enumerate(pieces) if number != missing)
        (read,) = load_format(name).parse(text, turn=0, in_reasoning=False).tool_calls
        assert read.arguments == {} and read.problem == f"parameter {('city', 'state')[missing > 4]!r} has no {closed}"


@pytest.mark.parametrize("name", ["qwen3_coder", "seed"])
def test_a_call_without_its_block_swallows_no_other_one(name: str) -> None:
    text = "<function=f><parameter=x>1</function>\n<function=g><parameter=y>2</parameter></function>"
    calls = load_format(name).parse(text, turn=0, in_reasoning=False).tool_calls
    assert calls and all(call.problem and not call.arguments for call in calls)


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("which", [1, 2, 4])
def test_a_text_that_spells_a_tag_of_the_call_is_refused_and_never_read_as_another(name: str, which: int) -> None:
    tag = TAGGED[name][which].format("state")
    if not tag.startswith("<"):
        return
    form = load_format(name)
    with pytest.raises(TemplateError, match=f"chat.tool_format={name}"):
        form.render_call(ToolCall("t000c0000", "f", {"city": f"Dallas{tag}TX"}))


@pytest.mark.parametrize("name", TAGGED)
def test_a_text_with_tags_of_others_is_kept(name: str) -> None:
    form, value = load_format(name), "<div><parameters>a < b</parameters></div>"
    (read,) = form.parse(form.render_call(ToolCall("", "f", {"x": value})), turn=0, in_reasoning=False).tool_calls
    assert (read.problem, read.arguments) == (None, {"x": value})
