"""Episodes with images: what the sampler is given, whose every token is, budgets, and images that cannot be shown."""

import asyncio
import base64
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import vision_processors as made

import turnwise
from turnwise.chat.formats import hermes
from turnwise.chat.images.processor import ImageProcessor, find_image_processor
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config.choices import HistoryPolicy
from turnwise.errors import EpisodeError, PluginError
from turnwise.rollout.conversation import Conversation
from turnwise.system.image_bytes import data_url
from turnwise.types import (
    CallStatus,
    Image,
    Message,
    Origin,
    Role,
    Sample,
    StopReason,
    Text,
    ToolCall,
    ToolResult,
    Trajectory,
)

Seeing = Callable[..., Renderer]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    known: dict[str, tuple[Tokenizer, ImageProcessor]] = {}

    def build(name: str, history: HistoryPolicy = HistoryPolicy.refuse, template: str | None = None) -> Renderer:
        if name not in known or template is not None:
            folder = made.build(name, tmp_path_factory.mktemp(name))
            if template is not None:
                (folder / "chat_template.jinja").write_text(template)
            tokenizer = Tokenizer(folder)
            images = find_image_processor(folder, tokenizer, None)
            assert images is not None
            if template is not None:
                return Renderer(tokenizer, hermes, history=history, images=images)
            known[name] = tokenizer, images
        return Renderer(known[name][0], hermes, history=history, images=known[name][1])

    return build


def image(width: int = 32, height: int = 32, seed: int = 0) -> Image:
    url = data_url(made.encoded(made.picture(width, height, seed)))
    assert url is not None
    return Image(url)


def asks(*parts: Any, **fields: Any) -> Sample:
    given = tuple(Text(part) if isinstance(part, str) else part for part in parts)
    return Sample("test:0", (Message(Role.USER, given),), **{"data_source": "test", "ground_truth": "1", **fields})


@turnwise.tool
def zoom(number: int) -> ToolResult:
    """Look closer.

    Args:
        number: which.
    """
    return ToolResult(f"part {number}", (image(20 + number, 40, seed=number),))


def look(number: int) -> str:
    return hermes.render_call(ToolCall("", "zoom", {"number": number}))


def check_rendered(trajectory: Trajectory, name: str) -> None:
    """The others' templates write white space before an assistant's words, which the policy did not."""
    check = trajectory.render_check
    assert check is not None and check.problem is None and check.exact is name.startswith("qwen"), check


def images_at(trajectory: Trajectory) -> list[tuple[int, Origin, int]]:
    """(how many tokens, whose, in which turn) of each image of the last ledger."""
    ledger = trajectory.segments[-1]
    found = []
    for span in ledger.media:
        (origin,) = {Origin(one) for one in ledger.origins[span.start : span.end].tolist()}
        (turn,) = set(ledger.turns[span.start : span.end].tolist())
        found.append((span.end - span.start, origin, turn))
    return found


@pytest.mark.parametrize("name", made.KINDS)
def test_images_of_prompts_tools_and_users_stand_in_the_ledger_as_a_full_render_has_them(
    rollouts: Any, seeing: Seeing, name: str
) -> None:
    renderer = seeing(name)
    rollout = rollouts.make(
        [look(1), look(2), "done", "thanks"],
        tools=[zoom],
        renderer=renderer,
        samples=[asks("first ", image(), " and second ", image(64, 20, 7), " what?")],
        agent=f"{__file__}:with_a_user",
    )
    trajectory = rollout.play()
    assert trajectory.failure is None
    rollout.check_tokens(trajectory)
    check_rendered(trajectory, name)
    (ledger,) = trajectory.segments
    prompt = renderer.images.prepare(made.encoded(made.picture()))
    assert [origin for _, origin, _ in images_at(trajectory)] == [
        Origin.PROMPT, Origin.PROMPT, Origin.TOOL, Origin.TOOL, Origin.USER
    ]  # fmt: skip
    assert [turn for _, _, turn in images_at(trajectory)] == [0, 0, 0, 1, 2]
    assert ledger.media[0].media is prompt
    assert [len(request.media) for request in rollout.sampler.seen] == [2, 3, 4, 5]
    assert rollout.sampler.seen[-1].media == ledger.media
    messages = [message.images for message in trajectory.messages if message.images]
    assert [len(one) for one in messages] == [2, 1, 1, 1]


async def with_a_user(chat: Conversation) -> None:
    """Tools, then a user who shows another image, which nobody has prepared."""
    while (message := await chat.generate()).tool_calls:
        chat.add(await chat.call_tools(message))
    chat.add([Message(Role.USER, (Text("and "), image(30, 30, 9), Text("?")))])
    await chat.generate()


@pytest.mark.parametrize("name", made.KINDS)
def test_words_that_spell_image_tokens_stay_words(rollouts: Any, seeing: Seeing, name: str) -> None:
    """In a question, in what a tool says and in its name: only the template's own markers show images."""
    renderer = seeing(name)
    hostile = "".join(made.KINDS[name].control) + "<image><|image_pad|>"

    @turnwise.tool
    def quote() -> ToolResult:
        """Quote."""
        return ToolResult(hostile, (image(),))

    call = '<tool_call>\n{"name": "quote", "arguments": {}}\n</tool_call>'
    rollout = rollouts.make(
        [call, "done"],
        tools=[quote],
        renderer=renderer,
        samples=[asks(hostile, image(), hostile)],
    )
    trajectory = rollout.play()
    assert trajectory.failure is None
    check_rendered(trajectory, name)
    (ledger,) = trajectory.segments
    assert len(ledger.media) == 2
    takes = sum(span.media.features for span in ledger.media)
    assert (ledger.token_ids == renderer.images.image_token_id).sum() == takes, "no other token shows anything"
    assert renderer.tokenizer.decode(ledger.token_ids).count(hostile) == 3


@pytest.mark.parametrize("name", made.KINDS)
def test_an_image_token_that_the_policy_writes_is_a_token_like_any_other(
    rollouts: Any, seeing: Seeing, name: str
) -> None:
    renderer = seeing(name)
    token = renderer.images.image_token
    spelled = "".join(sorted(renderer.images.tokens - {token}))
    rollout = rollouts.make(
        [f"I see {token}{token} {spelled} {look(1)}", token],
        tools=[zoom],
        renderer=renderer,
        samples=[asks(image(), "?")],
    )
    trajectory = rollout.play()
    assert trajectory.failure is None
    rollout.check_tokens(trajectory)
    (ledger,) = trajectory.segments
    written = ledger.token_ids[ledger.loss_mask].tolist()
    assert written.count(renderer.images.image_token_id) == 3
    assert [origin for _, origin, _ in images_at(trajectory)] == [Origin.PROMPT, Origin.TOOL]
    check_rendered(trajectory, name)


REWRITES = made.QWEN_TEMPLATE.replace(
    "{%- for message in messages -%}",
    "{%- for message in messages -%}{%- if message.role == 'assistant' and not loop.last -%}<|im_start|>assistant\n"
    "{{ (show(message.content)).split('</think>')[-1] }}<|im_end|>\n{%- else -%}",
).replace("<|im_end|>\n{% endfor -%}\n{%- if add", "<|im_end|>\n{% endif %}{% endfor -%}\n{%- if add")


def test_a_second_sequence_keeps_the_images_at_their_new_places(rollouts: Any, seeing: Seeing) -> None:
    renderer = seeing("qwen2_5_vl", HistoryPolicy.segment, REWRITES)
    rollout = rollouts.make(
        [f"<think>hm <|image_pad|></think>{'<|image_pad|>' * 3}{look(1)}", f"<think>so</think>{look(2)}", "done"],
        tools=[zoom],
        renderer=renderer,
        samples=[asks("a", image(), "?")],
    )
    trajectory = rollout.play()
    assert trajectory.failure is None and len(trajectory.segments) > 1
    rollout.check_tokens(trajectory)
    for number, ledger in enumerate(trajectory.segments):
        assert len(ledger.media) == min(number + 1, 3)
        block = ledger.media[-1]
        assert ledger.token_ids[block.start - 1] == made.ids("qwen2_5_vl")["<|vision_start|>"], "not what was written"
    assert trajectory.segments[0].media[0].media is trajectory.segments[-1].media[0].media
    assert trajectory.render_check is not None and trajectory.render_check.problem is None


def test_siblings_share_what_was_prepared_and_it_is_prepared_off_the_event_loop(
    rollouts: Any, seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = seeing("qwen3_vl")
    processor, threads = renderer.images, []
    real = processor._process

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return real(*given)

    monkeypatch.setattr(processor, "_process", noted)
    rollout = rollouts.make([look(5), "done"], tools=[zoom], renderer=renderer, samples=[asks(image(33, 29, 5), "?")])
    group = asyncio.run(rollout.group(4))
    ledgers = [trajectory.segments[0] for trajectory in group.trajectories]
    assert all(ledger.media[0].media is ledgers[0].media[0].media for ledger in ledgers)
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_a_budget_of_images_ends_the_episode(rollouts: Any, seeing: Seeing) -> None:
    rollout = rollouts.make(
        [look(1), look(2), "done"],
        tools=[zoom],
        renderer=seeing("qwen2_5_vl"),
        samples=[asks(image(), "?")],
        max_images=2,
    )
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.IMAGE_BUDGET
    assert len(trajectory.segments[0].media) == 2 and len(trajectory.turns) == 2
    assert len(trajectory.turns[1].replies[0].images) == 1, "recorded, though not shown"
    rollout = rollouts.make(
        ["done"], renderer=seeing("qwen2_5_vl"), samples=[asks(image(), image(), "?")], max_images=1
    )
    assert rollout.play().stop_reason is StopReason.IMAGE_BUDGET


BROKEN = Image("data:image/png;base64," + base64.b64encode(made.encoded(made.picture())[:-200]).decode())


def test_a_broken_image_of_a_tool_is_its_reply_and_of_a_sample_ends_the_episode(rollouts: Any, seeing: Seeing) -> None:
    @turnwise.tool
    def draw(what: str) -> ToolResult:
        """Draw.

        Args:
            what: line or scrap.
        """
        line = Image(data_url(made.encoded(made.picture(1000, 1))) or "")
        return ToolResult("here", (BROKEN if what == "scrap" else line,))

    calls = [hermes.render_call(ToolCall("", "draw", {"what": what})) for what in ("scrap", "line")]
    rollout = rollouts.make([*calls, "done"], tools=[draw], renderer=seeing("qwen2_5_vl"), samples=[asks("?")])
    trajectory = rollout.play()
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [call.status for call in trajectory.calls] == [CallStatus.ERROR, CallStatus.ERROR]
    said = [turn.replies[0].text for turn in trajectory.turns[:2]]
    assert "its image cannot be shown: the image cannot be read" in said[0]
    assert "takes no image of 1000x1 pixels" in said[1] and not trajectory.segments[0].media
    trajectory = rollouts.make(["done"], renderer=seeing("qwen2_5_vl"), samples=[asks(BROKEN, "?")]).play()
    assert trajectory.stop_reason is StopReason.FAILED and "the image cannot be read" in (trajectory.failure or "")
    gone = rollouts.make(["done"], renderer=seeing("qwen2_5_vl"), samples=[asks(Image("gone.png"), "?")]).play()
    assert "gone.png cannot be read" in (gone.failure or "")


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm"])
def test_a_tools_frame_stands_around_its_words_and_images(rollouts: Any, seeing: Seeing, kind: str) -> None:
    frame = {"zoom": {"frame": "<sandbox_output>{output}</sandbox_output>\nGo on."}}
    renderer = seeing(kind)
    rollout = rollouts.make(
        [look(1), "done"], tools=[zoom], renderer=renderer, samples=[asks(image(), "?")], tool_options=frame
    )
    trajectory = rollout.play()
    assert trajectory.failure is None
    check_rendered(trajectory, kind)
    (ledger,) = trajectory.segments
    before, behind = ledger.token_ids[: ledger.media[1].start], ledger.token_ids[ledger.media[1].end :]
    words = trajectory.turns[0].replies[0].text.partition("</sandbox_output>")[0]
    assert words.startswith("<sandbox_output>") and words in renderer.tokenizer.decode(before)
    assert "</sandbox_output>\nGo on." in renderer.tokenizer.decode(behind)


def test_a_template_that_shows_no_images_of_tools_leaves_a_note_in_their_place(rollouts: Any, seeing: Seeing) -> None:
    deaf = made.QWEN_TEMPLATE.replace(
        "<tool_response>\n{{ show(message.content) }}",
        "<tool_response>\n{{ message.content if message.content is string else message.content[0].text }}",
    )
    renderer = seeing("qwen2_5_vl", template=deaf)
    assert renderer.image_roles == {Role.USER, Role.SYSTEM}
    rollout = rollouts.make([look(1), "done"], tools=[zoom], renderer=renderer, samples=[asks(image(), "?")])
    trajectory = rollout.play()
    assert "1 images are not shown" in trajectory.turns[0].replies[0].text
    text_only = seeing("qwen2_5_vl", template="{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    assert not text_only.image_roles


def test_a_loop_by_ids_goes_on_from_the_rendered_prompt_only(rollouts: Any, seeing: Seeing) -> None:
    renderer, sample = seeing("qwen2_5_vl"), asks(image(), "?")
    rollout = rollouts.make(["one", "two"], renderer=renderer, samples=[sample], agent=f"{__file__}:by_ids")
    trajectory = rollout.play()
    assert trajectory.failure is None, trajectory.failure
    assert [len(request.media) for request in rollout.sampler.seen] == [1, 1]
    rollout = rollouts.make(["one", "two"], renderer=renderer, samples=[sample], agent=f"{__file__}:by_other_ids")
    with pytest.raises(PluginError, match="ids that are not the prompt's"):
        rollout.play()


async def by_ids(chat: Conversation) -> None:
    """Twice, from the prompt's ids."""
    media = {
        image: chat.backend.renderer.images.prepare(made.encoded(made.picture())) for image in chat.messages[0].images
    }
    prompt = chat.backend.renderer.prompt(chat.messages, chat.tools, media).ids
    first = await chat.generate_ids(prompt)
    await chat.generate_ids([*prompt, *first.token_ids.tolist(), 5])


async def by_other_ids(chat: Conversation) -> None:
    """From ids of its own."""
    await chat.generate_ids([1, 2, 3])


def test_prompts_that_could_not_be_shown_take_nothing_of_the_budget(rollouts: Any, seeing: Seeing) -> None:
    rollout = rollouts.make(
        ["done"],
        renderer=seeing("qwen2_5_vl"),
        samples=[asks(image(), "?")],
        agent=f"{__file__}:tries_again",
        max_images=1,
    )
    trajectory = rollout.play()
    assert trajectory.failure is None and trajectory.stop_reason is not StopReason.IMAGE_BUDGET
    assert sorted(trajectory.artifacts["said"]) == ["PluginError", "written"], "one writes, from its first moment on"
    assert len(trajectory.turns) == len(trajectory.segments) == len(trajectory.segments[0].media) == 1


async def tries_again(chat: Conversation) -> None:
    """With prompts that cannot be shown, then twice at once with one that can."""
    good = list(chat.messages)
    for _ in range(3):
        chat.reprompt(asks(BROKEN, "?").prompt)
        with contextlib.suppress(EpisodeError):
            await chat.generate()
    chat.reprompt(good)
    found = await asyncio.gather(chat.generate(), chat.generate(), return_exceptions=True)
    chat.artifacts["said"] = [type(one).__name__ if isinstance(one, Exception) else "written" for one in found]
