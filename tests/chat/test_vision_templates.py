"""Templates and processors of many families: what we render is what the processor makes of the same text, or refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import vision_processors as made
from vision_families import FIRST, QWEN_SHOWN, SEEING, UNFIT, write

from turnwise.chat.formats import hermes
from turnwise.chat.images.blocks import images_in, place_images
from turnwise.chat.images.pixels import unpack
from turnwise.chat.images.processor import NotShown, find_image_processor
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer, load_template
from turnwise.errors import TemplateError
from turnwise.ledger import check_places
from turnwise.system.image_bytes import data_url
from turnwise.types import Completion, FinishReason, Image, Ledger, Message, Origin, Role, Text, ToolCall

COUNTED = """\
{%- set seen = namespace(number=0) -%}
{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{%- set seen.number = seen.number + 1 -%}
{%- if add_vision_id %}Picture {{ seen.number }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
IMAGES_FIRST = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
IMAGES_LAST = IMAGES_FIRST.replace("{% endfor %}{% if add", "<|im_end|>{% endfor %}{% if add").replace(
    "selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}", "selectattr('type', 'equalto', 'nothing') %}"
).replace("<|im_end|>", "{% for part in message['content'] %}{% if part.type == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>")  # fmt: skip
PLAIN = made.QWEN_TEMPLATE


@dataclass(frozen=True)
class Case:
    """A family with one of its templates."""

    family: str
    template: str
    options: dict[str, Any] = field(default_factory=dict)
    instead: str | None = None
    """What `chat.template` names."""


SHOWING = {
    "numbered": Case("qwen2_vl", COUNTED, {"add_vision_id": True}),
    "not numbered": Case("qwen2_vl", COUNTED),
    "images before words": Case("llava", IMAGES_FIRST),
    "images behind words": Case("llava", IMAGES_LAST),
    **{name: Case(name, PLAIN) for name in SEEING},
    "ours, for qwen2_vl": Case("qwen2_vl", COUNTED, instead="chatml_hermes"),
    "ours, for llava": Case("llava", IMAGES_FIRST, instead="chatml_hermes"),
    "ours, for internvl": Case("internvl", PLAIN, instead="chatml_hermes"),
}
REFUSED = {
    "twice": (PLAIN.replace(QWEN_SHOWN, 2 * QWEN_SHOWN), "shows 4 images where the messages have 2"),
    "another token": (PLAIN.replace(QWEN_SHOWN, "<image>"), "shows 0 images where the messages have 2"),
    "as Python prints it": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}",
        "shows 0 images where the messages have 2",
    ),
    "the first one only": (
        PLAIN.replace("part.type == 'image'", "part.type == 'image' and loop.first"),
        "shows 1 images",
    ),
}
Open = Callable[[Case], Renderer]


@pytest.fixture(scope="module")
def open_case(tmp_path_factory: pytest.TempPathFactory) -> Open:
    def opened(case: Case) -> Renderer:
        folder = write(SEEING[case.family], tmp_path_factory.mktemp("family"), case.template)
        tokenizer = Tokenizer(folder, case.instead)
        images = find_image_processor(folder, tokenizer, None)
        return Renderer(tokenizer, hermes, template_kwargs=case.options, images=images)

    return opened


def image(seed: int, width: int = 32, height: int = 16) -> Image:
    url = data_url(made.encoded(made.picture(width, height, seed)))
    assert url is not None
    return Image(url)


def user(*parts: str | Image) -> Message:
    return Message(Role.USER, tuple(Text(part) if isinstance(part, str) else part for part in parts))


def tool(*parts: str | Image) -> Message:
    return Message(Role.TOOL, user(*parts).content, tool_call_id="t000c0000", name="probe")


PICTURES = [image(number, 16 + 8 * number) for number in range(6)]


@pytest.mark.parametrize("name", SHOWING)
def test_turns_with_images_are_what_the_processor_makes_of_the_whole_text(open_case: Open, name: str) -> None:
    renderer = open_case(SHOWING[name])
    images = renderer.images
    assert images is not None and {Role.USER, Role.TOOL} <= renderer.image_roles
    media = {one: images.prepare(made.encoded(made.picture(16 + 8 * n, 16, n))) for n, one in enumerate(PICTURES)}
    call = hermes.render_call(ToolCall("", "probe", {"x": "1"}))
    messages: list[Message] = [user("what ", PICTURES[0], " or ", PICTURES[1], "?")]
    turns = [
        (call, tool("see ", PICTURES[2])), (call, tool(PICTURES[3], "and", PICTURES[4])), ("fine", user("sure?")),
        ("yes", user(PICTURES[5], "and this?")),
    ]  # fmt: skip
    prompt = renderer.prompt(messages, (), media)
    ledger = Ledger()
    ledger.append(prompt.ids, Origin.PROMPT, 0)
    ledger.place_at(prompt.media)
    for turn, (words, reply) in enumerate(turns):
        ids = renderer.tokenizer.encode(words, after="").ids + ([] if renderer.end_id is None else [renderer.end_id])
        completion = Completion.of(tuple(ids), [0.0] * len(ids), FinishReason.STOP, version=0)
        assistant = renderer.read(completion, turn, ledger.token_ids)
        ledger.append(tuple(ids), Origin.POLICY, turn, completion.logprobs, completion.versions)
        ledger.append_given(renderer.extend(messages, assistant, completion, [reply], (), media), turn)
        place_images(ledger, [media[one] for one in reply.images])
        messages += [assistant, reply]
    check = renderer.check(ledger, messages, (), media)
    assert check.problem is None, check
    pictures = [unpack(media[one].content, None).picture for one in images_in(messages)]
    text = renderer.render(messages, (), reply=True)
    whole = images._processor(images=pictures, text=[text], return_tensors="np")["input_ids"][0].tolist()
    assert whole == renderer.prompt(messages, (), media).ids
    check_places(ledger.media, ledger.token_ids)
    assert [span.media for span in ledger.media] == list(media.values())


def test_the_bundled_template_shows_images_as_the_model_s_own_does(tmp_path: Path) -> None:
    folder = write(SEEING["qwen2_vl"], tmp_path)
    (text,) = Tokenizer(folder, "chatml_hermes").templates.values()
    assert text.startswith('{%- set shown_image = "<|vision_start|><|image_pad|><|vision_end|>" -%}')
    write(SEEING["qwen2_vl"], tmp_path, text)  # as a policy is saved that was trained with it
    assert Tokenizer(folder, "chatml_hermes").templates == {"default": text}
    write(SEEING["qwen2_vl"], tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert Tokenizer(folder, "chatml_hermes").templates == {"default": load_template("chatml_hermes")}


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_do_not_show_every_image_once_are_refused(open_case: Open, name: str) -> None:
    template, said = REFUSED[name]
    renderer = open_case(Case("qwen2_vl", template))
    assert not renderer.image_roles and renderer.images is not None
    media = dict.fromkeys(PICTURES, renderer.images.blank)
    with pytest.raises(TemplateError, match=said) as found:
        renderer.prompt([user(PICTURES[0], "or", PICTURES[1], "?")], (), media)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", UNFIT)
def test_a_processor_that_does_not_fit_says_why_in_one_line(tmp_path: Path, name: str) -> None:
    reasons = {
        "gemma3": "could merge with the text beside them", "paligemma": "could merge with the text beside them",
        "idefics2": "depend on the text around it", "mllama": "depend on the text around it",
        "minicpmv4_6": "cannot be made",
    }  # fmt: skip
    folder = write(UNFIT[name], tmp_path)
    with pytest.raises(NotShown, match=reasons[name]) as found:
        find_image_processor(folder, Tokenizer(folder), None)
    assert "\n" not in str(found.value) and len(str(found.value)) < 400


def test_the_token_that_takes_features_is_the_config_s(tmp_path: Path) -> None:
    folder = write(SEEING["deepseek_vl"], tmp_path)
    plain = find_image_processor(folder, Tokenizer(folder), None)
    for written, found in (('{"image_token_id": 7}', 7), ('{"image_token_index": 7}', 7), ("{}", FIRST)):
        (folder / "config.json").write_text(written)
        if found == 7:
            with pytest.raises(NotShown, match="gives nothing for 64x64 pixels"):
                find_image_processor(folder, Tokenizer(folder), None)
            continue
        images = find_image_processor(folder, Tokenizer(folder), None)
        assert images is not None and plain is not None and images._feature_ids == plain._feature_ids == [found]
