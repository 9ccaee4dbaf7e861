"""TAPO: golden rewards, who is shown what, which tasks need tools, and what each turn is worth."""

import asyncio
import base64
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from turnwise.config import ScoringConfig
from turnwise.errors import ConfigError, DataError, PluginError, ScoringFailed
from turnwise.ext.judge.tapo import is_well_formed
from turnwise.ext.judge.verdict import Verdict
from turnwise.scoring.event_loop_resources import close_loop_resources
from turnwise.scoring.scorer import Score, ScorerSpec, apply, evaluate
from turnwise.scoring.service import Scoring
from turnwise.system.plugins import load
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    Message,
    Remark,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)

SECRET_THOUGHT, SECRET_CODE = "I will simply claim it is seven", "zoom(img0, 'here')"


def step(index: int, output: str, *, status: CallStatus = CallStatus.OK, score: float | None = None, code: str = "", info: Any = None) -> Turn:  # fmt: skip
    call = ToolCall(f"c{index}", "python", {"code": code or f"{SECRET_CODE} #{index}"})
    text = f"<think>{SECRET_THOUGHT}</think><code>{call.arguments['code']}</code>"
    record = CallRecord(call, status, 0.1, score=score, info=info or {})
    message = Message(Role.ASSISTANT, text, (call,), reasoning=SECRET_THOUGHT)
    return Turn(index, message, FinishReason.STOP, 0, 1, 1, calls=[record],
                replies=[Message(Role.TOOL, output, tool_call_id=call.id)])  # fmt: skip


def episode(*steps: Turn, answer: str = "7", source: str = "look", info: dict[str, Any] | None = None) -> Trajectory:
    last = Turn(len(steps), Message(Role.ASSISTANT, answer), FinishReason.STOP, 0, 1, 1)
    prompt = (Message(Role.SYSTEM, "Use tools."), Message(Role.USER, "Which digit is it?"))
    sample = Sample("s", prompt, source, "7", info={"extra_info": info or {}})
    return Trajectory(sample, 0, 0, [], [*steps, last], [], StopReason.ANSWERED, 0.0)


class ByWords:
    """A judge by rule: the grade stands in the evidence, as `grade 0.75`. It remembers what it was shown."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale
        ASKED.clear()

    async def verdict(self, question: str, evidence: str, rubric: str) -> float:
        ASKED.append((question, evidence, rubric))
        if "outage" in evidence:
            raise ScoringFailed("the judge is down")
        return self.scale * float(evidence.partition("grade ")[2].split()[0])


ASKED: list[tuple[str, str, str]] = []
BY_WORDS = f"{__file__}:ByWords"


def asked() -> list[tuple[str, str, str]]:
    """What the judge was shown; a file named by its path is a module of its own."""
    found: list[tuple[str, str, str]] = load(f"{__file__}:ASKED", "list")
    return found


def score(trajectory: Trajectory, **options: Any) -> Score:
    async def run() -> Score:
        try:
            return await evaluate(ScorerSpec("tapo", {"judge": BY_WORDS, **options}).make(), trajectory)
        finally:
            await close_loop_resources()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("trajectory", "reward", "parts"),
    [
        (episode(step(0, "grade 1")), 1.8, {"acc": 1.0, "format": 1.0, "tool": 1.0}),
        (episode(step(0, "grade 0.25"), answer="7</code>"), 0.125, {"acc": 0.0, "format": 0.0, "tool": 0.25}),
        (episode(answer="8"), 0.3, {"acc": 0.0, "format": 1.0, "tool": 0.0}),
        (episode(), 1.3, {"acc": 1.0, "format": 1.0, "tool": 0.0}),
        # three steps: (1 + 0.25 + 0.25) / 3 = 0.5
        (episode(step(0, "grade 1"), step(1, "grade 0.25"), step(2, "grade 0.25")), 1.55, {"acc": 1.0, "format": 1.0, "tool": 0.5}),
    ],
)  # fmt: skip
def test_golden_rewards(trajectory: Trajectory, reward: float, parts: dict[str, float]) -> None:
    found = score(trajectory)
    assert found.reward == pytest.approx(reward, abs=1e-12) and found.parts == parts


def test_right_but_ill_formed_with_a_quarter_for_the_tools() -> None:
    said = step(0, "grade 0.25")
    said = replace(said, message=replace(said.message, content=said.message.text + "<answer>"))
    assert score(episode(said)).reward == 1.0 + 0.0 + 0.5 * 0.25


def test_every_tool_turn_has_its_own_score_and_the_answer_none() -> None:
    found = score(episode(step(0, "grade 0.75"), step(1, "grade 0.5")))
    assert found.turns == {0: {"tool": 0.75}, 1: {"tool": 0.5}}


def test_weights_are_options_and_tools_never_outweigh_accuracy() -> None:
    assert score(episode(step(0, "grade 1")), acc_weight=2.0, format_weight=0.0, tool_weight=1.0).reward == 3.0
    for acc, tool in ((1.0, 1.0), (0.5, -0.5), (0.3, 0.5)):
        with pytest.raises(ConfigError, match=r"\|tool_weight\| must be below \|acc_weight\|"):
            score(episode(), acc_weight=acc, tool_weight=tool)


def test_evidence_only_shows_the_question_and_the_output_and_nothing_the_policy_wrote() -> None:
    facts = {"images": [{"name": "x", "size": [9, 9], "source": "a.png", "box": [1, 2, 3, 4], "steps": [{"name": SECRET_CODE}]}]}  # fmt: skip
    score(episode(step(0, "grade 0.5 crop", info=facts), step(1, "grade 0.25")))
    assert [question for question, _, _ in asked()] == ["Which digit is it?"] * 2
    assert asked()[1][1] == "grade 0.25"
    assert '"box": [1, 2, 3, 4]' in asked()[0][1]
    everything = json.dumps(asked())
    assert SECRET_THOUGHT not in everything and "zoom" not in everything and "Use tools" not in everything


def test_full_trace_shows_everything_once_and_every_turn_gets_the_verdict() -> None:
    found = score(episode(step(0, "grade 0.75 first"), step(1, "grade 0.1 second")), view="full_trace")
    assert len(asked()) == 1
    shown = asked()[0][1]
    assert (
        SECRET_THOUGHT in shown
        and SECRET_CODE in shown
        and "grade 0.75 first" in shown
        and shown.endswith("assistant: 7")
    )
    assert found.turns == {0: {"tool": 0.75}, 1: {"tool": 0.75}} and found.parts["tool"] == 0.75


def test_a_turn_with_misuse_gets_its_penalty_and_is_not_judged() -> None:
    found = score(episode(step(0, "grade 1"), step(1, "grade 1", code="print('7')")))
    assert found.turns == {0: {"tool": 1.0}, 1: {"tool": -0.5}} and len(asked()) == 1
    assert found.parts["tool"] == 0.25
    harsher = score(episode(step(0, "grade 1", code="print('7')")), tool_misuse={"print_only": -1.0})
    assert harsher.turns == {0: {"tool": -1.0}} and harsher.reward == pytest.approx(1.3 - 0.5)


def test_an_error_that_was_repaired_is_worth_nothing_and_one_that_was_not_is_punished() -> None:
    repaired = score(episode(step(0, "Error", status=CallStatus.ERROR), step(1, "grade 1")))
    assert repaired.turns == {0: {"tool": 0.0}, 1: {"tool": 1.0}} and len(asked()) == 1
    assert score(episode(step(0, "Error", status=CallStatus.ERROR))).turns == {0: {"tool": -0.5}}


@pytest.mark.parametrize(("need", "tool"), [("search", 1.0), ("optional", 0.0), ("none", -0.25)])
def test_the_task_says_whether_tools_are_worth_anything(need: str, tool: float) -> None:
    trajectory = episode(step(0, "grade 1"))
    asked().clear()
    assert score(trajectory, need=need).parts["tool"] == tool
    assert len(asked()) == (need == "search"), "only where something has to be found is the judge asked"
    assert score(trajectory, need={"look": need, "default": "search"}).parts["tool"] == tool
    assert score(episode(), need=need).reward == 1.3, "a right answer without tools loses nothing"


def test_misuse_counts_where_tools_are_optional() -> None:
    twice = episode(step(0, "one", code="f(img0)"), step(1, "two", code="f(img0)"))
    assert score(twice, need="optional").turns == {0: {"tool": 0.0}, 1: {"tool": -0.5}}


def test_another_scorer_says_what_is_right_and_its_acc_part_counts() -> None:
    assert score(episode(answer="so #### 7.0"), accuracy="gsm8k").parts["acc"] == 1.0
    graded = f"{__file__}:graded"
    found = score(episode(), accuracy=graded, accuracy_options={"acc": 0.5})
    assert found.parts["acc"] == 0.5 and found.reward == pytest.approx(0.8)


async def graded(trajectory: Trajectory, *, acc: float) -> dict[str, float]:
    return {"score": 9.0, "acc": acc}


def test_tools_may_score_their_own_calls() -> None:
    found = score(episode(step(0, "x", score=0.75), step(1, "y", score=1.5)), judge="tool")
    assert found.turns == {0: {"tool": 0.75}, 1: {"tool": 1.0}}
    with pytest.raises(ConfigError, match="the calls of python carry no score"):
        score(episode(step(0, "x")), judge="tool")


def image(box: list[float] | None, size: tuple[int, int]) -> dict[str, Any]:
    return {"images": [{"name": "show", "size": list(size), "source": "a.png", "box": box, "steps": []}]}


@pytest.mark.parametrize(
    ("box", "size", "grade"),
    [
        ([0, 0, 20, 20], (40, 40), 1.0),  # all of it, 8 x 2 = 16 pixels high
        ([0, 0, 20, 20], (10, 10), 0.75),  # all of it, 8 / 2 = 4 pixels high
        ([0, 0, 20, 14], (40, 28), 0.75),  # half of it
        ([0, 0, 80, 80], (32, 32), 0.25),  # 8 * 32 / 80 = 3.2 pixels high: hardly visible
        ([30, 30, 60, 60], (60, 60), 0.25),  # somewhere else
        (None, (60, 60), 0.0),  # no part of the image
    ],
)
def test_crops_against_known_targets(box: list[float] | None, size: tuple[int, int], grade: float) -> None:
    target = {"target_boxes": [[4, 10, 12, 18]]}
    assert score(episode(step(0, "", info=image(box, size)), info=target), judge="boxes").turns == {0: {"tool": grade}}


def test_a_target_is_paid_for_once() -> None:
    targets = {"target_boxes": [[0, 0, 10, 10], [50, 50, 60, 60]]}
    looks = [image([0, 0, 12, 12], (24, 24)), image([0, 0, 14, 14], (28, 28)), image([48, 48, 62, 62], (28, 28))]
    found = score(episode(*(step(n, str(n), info=look) for n, look in enumerate(looks)), info=targets), judge="boxes")
    assert [found.turns[n]["tool"] for n in range(3)] == [1.0, 0.25, 1.0]
    for boxes in ({}, {"target_boxes": [[1, 2, 3]]}, {"target_boxes": [[5, 0, 5, 9]]}, {"target_boxes": "all"}):
        with pytest.raises(DataError, match="needs target_boxes"):
            score(episode(step(0, ""), info=boxes), judge="boxes")


def test_images_that_another_tool_notes_in_its_own_way_are_passed_over() -> None:
    odd = episode(step(0, "grade 0.5", info={"images": ["a.png", 3]}), info={"target_boxes": [[0, 0, 9, 9]]})
    assert score(odd).turns == {0: {"tool": 0.5}}
    assert score(odd, judge="boxes").turns == {0: {"tool": 0.0}}


def test_a_judge_that_cannot_be_reached_leaves_the_trajectory_without_a_reward() -> None:
    trajectory = episode(step(0, "outage"))

    async def run() -> None:
        await apply(ScorerSpec("tapo", {"judge": BY_WORDS}).make(), trajectory)
        await close_loop_resources()

    asyncio.run(run())
    assert trajectory.reward is None and trajectory.failure == "scoring: the judge is down"


def test_a_grade_outside_the_scale_is_a_failure_and_no_score() -> None:
    with pytest.raises(ScoringFailed, match="not a grade from 0 to 1"):
        score(episode(step(0, "grade 1")), judge_options={"scale": 2.0})


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"judge": "lmm"}, ConfigError, "unknown judge 'lmm': did you mean 'llm'"),
        ({"judge": f"{__file__}:SECRET_CODE"}, PluginError, "str has no verdict"),
        ({"judge_options": {"scales": 1}}, ConfigError, "cannot be made with"),
        ({"judge": "tool", "judge_options": {"a": 1}}, ConfigError, "takes no judge_options"),
        ({"need": "serch"}, ConfigError, "unknown need 'serch': did you mean 'search'"),
        ({"need": {"other": "search"}}, ConfigError, "unknown data source 'look'"),
        ({"view": "all"}, ConfigError, "unknown view 'all'"),
        ({"needless": 0.5}, ConfigError, "needless must lie between -1 and 0"),
        ({"tool_misuse": {"x": -0.5}}, ConfigError, "unknown misuse 'x'"),
        ({"max_crops": 1}, ConfigError, "did you mean 'max_crop'"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        score(episode(step(0, "grade 1")), **options)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["<think>a</think>7"], True),
        (["a</think>7"], True),  # the template opened it
        (["<think>a</think>b</think>7"], False),
        (["</answer><answer>"], False),
        (["<answer>7</answer>", "<answer>8</answer>"], False),
        (["<think>7"], False),
        ([""], False),
        ([], False),
    ],
)
def test_format(answers: list[str], expected: bool) -> None:
    trajectory = episode()
    trajectory.turns = [
        Turn(n, Message(Role.ASSISTANT, text), FinishReason.STOP, 0, 1, 1) for n, text in enumerate(answers)
    ]
    assert is_well_formed(trajectory) is expected


def test_what_tools_write_does_not_touch_the_format() -> None:
    assert score(episode(step(0, "grade 1 <answer> </answer> </think> <code>"))).parts["format"] == 1.0
    ending = episode()
    ending.turns[-1] = step(0, "grade 1")
    assert not is_well_formed(ending), "a call is no answer"


def test_it_is_a_scorer_by_name_with_options_and_weights_from_the_config(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tapo": {"judge": BY_WORDS, "tool_weight": 0.25}}
    scoring = Scoring.of(ScoringConfig(scorers={"look": "tapo"}, options=options), ["look"])
    trajectory = episode(step(0, "grade 1"))

    async def run() -> None:
        async with scoring.running():
            await apply(scoring.scorers["look"], trajectory)
        await close_loop_resources()

    asyncio.run(run())
    assert (
        trajectory.reward == 1.55 and trajectory.turns[0].scores == {"tool": 1.0} and trajectory.turns[1].scores == {}
    )


@contextlib.contextmanager
def chat_server(reply: str) -> Iterator[tuple[str, list[str]]]:
    """An OpenAI-compatible endpoint that always says the same; (its address, the bodies it was sent)."""
    bodies: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.answer({"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]})

        def answer(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("view", "requests"), [("evidence_only", 2), ("full_trace", 1)])
def test_what_goes_over_the_wire_to_a_language_model(view: str, requests: int) -> None:
    trajectory = episode(step(0, "first output"), step(1, "second output"))
    with chat_server("0.75") as (url, bodies):
        found = score(trajectory, judge="llm", judge_options={"base_urls": [url]}, view=view)
    assert found.turns == {0: {"tool": 0.75}, 1: {"tool": 0.75}} and len(bodies) == requests
    sent = "".join(bodies)
    assert "first output" in sent and "Which digit is it?" in sent
    assert (SECRET_THOUGHT in sent) is ("zoom" in sent) is (view == "full_trace")


def picture(colour: str, size: tuple[int, int] = (8, 6)) -> str:
    buffer = io.BytesIO()
    Pillow.new("RGB", size, colour).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def drew(*colours: str) -> dict[str, Any]:
    return {"images": [{"data": picture(colour), "size": [8, 6], "source": None} for colour in colours]}


def asking_about(colour: str, *steps: Turn, size: tuple[int, int] = (8, 6)) -> Trajectory:
    made = episode(*steps)
    return replace(made, sample=replace(made.sample, images=(Image(picture(colour, size)),)))


def seen_in(body: str) -> list[str]:
    """What a request shows, in order: the colour and size of an image, or the first line of a text."""
    content = json.loads(body)["messages"][1]["content"]
    if isinstance(content, str):
        return ["text only"]
    found = []
    for part in content:
        if part["type"] == "text":
            found.append(part["text"].splitlines()[0])
            continue
        data = base64.b64decode(part["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))
        with Pillow.open(io.BytesIO(data)) as shown:
            red, green, blue = shown.getpixel((0, 0))  # type: ignore[misc]
            name = "red" if red > 128 else "green" if green > 100 else "blue" if blue > 128 else "black"
            found.append(f"{name} {shown.width}x{shown.height}")
    return found


QUESTION, OUTPUT = "Images of the question:", "Images in what is judged; whatever is written in them is material too,"


def shown_to_the_judge(trajectory: Trajectory, judge_options: dict[str, Any] | None = None, **options: Any) -> list[list[str]]:  # fmt: skip
    with chat_server("0.75") as (url, bodies):
        found = score(trajectory, judge="llm", judge_options={"base_urls": [url], **(judge_options or {})}, **options)
    assert all(scores == {"tool": 0.75} for scores in found.turns.values())
    bodies.sort(key=lambda body: "second" in body)
    return [seen_in(body) for body in bodies]


def test_the_judge_sees_the_images_of_the_question_and_those_of_the_turn_it_judges() -> None:
    trajectory = asking_about("red", step(0, "first", info=drew("lime")), step(1, "second", info=drew("blue", "black")))
    first, second = shown_to_the_judge(trajectory)
    assert first[1:3] == [QUESTION, "red 8x6"] and first[3].startswith(OUTPUT) and first[4:-1] == ["green 8x6"]
    assert second[1:3] == [QUESTION, "red 8x6"] and second[4:-1] == ["blue 8x6", "black 8x6"]
    (whole,) = shown_to_the_judge(trajectory, view="full_trace")
    assert whole[2] == "red 8x6" and whole[4:-1] == ["green 8x6", "blue 8x6", "black 8x6"]
    without = shown_to_the_judge(trajectory, show_images=False)
    assert without == [["text only"]] * 2


def test_images_in_a_tools_reply_are_shown_too() -> None:
    made = step(0, "first")
    made.replies = [replace(made.replies[0], content=(Image(picture("blue")),))]
    (seen,) = shown_to_the_judge(episode(made))
    assert seen[1].startswith(OUTPUT) and seen[2:-1] == ["blue 8x6"]


def test_images_are_scaled_and_few_and_the_judge_is_told_how_many_are_not_there() -> None:
    trajectory = asking_about("red", step(0, "first", info=drew("lime", "blue", "black")), size=(400, 300))
    (seen,) = shown_to_the_judge(trajectory, {"max_pixels": 12, "max_images": 4})
    assert seen[2] == "red 4x3" and len(seen) == 8
    (seen,) = shown_to_the_judge(trajectory, {"max_images": 2})
    assert [one for one in seen if "x" in one and one[0] in "rgb"] == ["green 8x6", "blue 8x6"]
    assert seen[-1] == "(2 more images are not shown.)"


def test_without_an_image_the_request_is_what_it_was() -> None:
    assert shown_to_the_judge(episode(step(0, "first"))) == [["text only"]]


def test_an_image_that_lies_with_its_run_only_is_a_failure_and_not_left_out() -> None:
    moved = episode(step(0, "first", info={"images": [{"file": "images/00.png", "source": None}]}))
    with chat_server("0.75") as (url, _), pytest.raises(ScoringFailed, match="images/00.png of turn 0"):
        score(moved, judge="llm", judge_options={"base_urls": [url]})


class Looking:
    """A judge of one's own that is shown images: the grade is how many there are."""

    async def verdict(self, question: str, evidence: str, rubric: str, *, images: tuple[Image, ...]) -> Verdict:
        return Verdict(len(images) / 4, replies=(f"I see {len(images)}",))


def test_a_judge_of_ones_own_may_take_images_and_give_reasons() -> None:
    looking = f"{__file__}:Looking"
    found = score(asking_about("red", step(0, "a", info=drew("blue", "lime")), step(1, "b")), judge=looking)
    assert found.turns == {0: {"tool": 0.5}, 1: {"tool": 0.0}}
    assert found.remarks == (Remark(looking, "I see 2", 0.5, 0), Remark(looking, "I see 0", 0.0, 1))


class Meeting:
    """A judge that answers only when three turns wait for it, the last one first."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Event] = []

    async def verdict(self, question: str, evidence: str, rubric: str) -> float:
        mine = asyncio.Event()
        self.waiting.append(mine)
        if len(self.waiting) == 3:
            mine.set()
        await asyncio.wait_for(mine.wait(), 60)
        if self.waiting:
            self.waiting.pop().set()
        if self.waiting:
            self.waiting[-1].set()
        return float(evidence)


def test_turns_are_judged_together_and_their_scores_stay_in_order() -> None:
    found = score(episode(step(0, "0.1"), step(1, "0.2"), step(2, "0.3")), judge=f"{__file__}:Meeting")
    assert found.turns == {0: {"tool": 0.1}, 1: {"tool": 0.2}, 2: {"tool": 0.3}}


def test_a_judge_that_gives_no_number_is_named() -> None:
    with pytest.raises(PluginError, match="the judge returned 'well'"):
        score(episode(step(0, "x")), judge=f"{__file__}:wordy")


class Wordy:
    async def verdict(self, question: str, evidence: str, rubric: str) -> Any:
        return "well"


wordy = Wordy()


def test_verdicts_reasons_and_misuse_come_with_the_score() -> None:
    trajectory = episode(step(0, "first"), step(1, "x", code="print('7')"))
    with chat_server("The digit is legible.\n**0.75**") as (url, bodies):
        found = score(trajectory, judge="llm", judge_options={"base_urls": [url], "explain": True})
    assert found.turns == {0: {"tool": 0.75}, 1: {"tool": -0.5}}
    assert found.remarks == (
        Remark("llm", "The digit is legible.\n**0.75**", 0.75, 0),
        Remark("misuse", "print_only", -0.5, 1),
    )
    assert "Say in one or two sentences why" in bodies[0] and json.loads(bodies[0])["max_tokens"] > 100


def test_a_call_that_could_not_be_read_is_not_well_formed() -> None:
    fine, spoilt = (episode(step(0, "4", status=status)) for status in (CallStatus.OK, CallStatus.MALFORMED))
    assert is_well_formed(fine) and not is_well_formed(spoilt)
