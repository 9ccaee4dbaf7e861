"""Episodes that looked at pictures, for the board's tests: crops with their way from the source, claims, and probes."""

import base64
import hashlib
import io
import json
from dataclasses import replace

import numpy as np
from PIL import Image as Pictures

from turnwise.chat.images.blocks import place_images
from turnwise.data.images.provenance import IDENTITY, Trail, turned
from turnwise.ledger import Media
from turnwise.rollout.sample_images import image_facts, stretched
from turnwise.storage.index import record
from turnwise.system.image_bytes import digest_of
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Image,
    Ledger,
    Message,
    Origin,
    Remark,
    Role,
    Sample,
    StopReason,
    Text,
    ToolCall,
    Trajectory,
    Turn,
)

SIDE, VIEW = 256, 64
TARGET = [64, 183, 69, 190]
FIRST, SECOND = (32, 160, 96, 224), (0, 128, 128, 256)
TOKENS = 16
PAD = 7


def url(picture):
    held = io.BytesIO()
    picture.save(held, "png")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def canvas(seed=0):
    pixels = np.full((SIDE, SIDE, 3), 240, np.uint8)
    for number, (y, x) in enumerate(np.random.default_rng(seed).integers(20, 220, (6, 2))):
        pixels[y : y + 14, x : x + 14] = (40 * number, 90, 220 - 30 * number)
    pixels[183:190, 64:69] = 0
    return Pictures.fromarray(pixels)


def crop_of(whole, box, turn=False):
    """(what the tool shows, its facts), as the tool `look` writes them."""
    trail = Trail("canvas_0.png", whole.size, IDENTITY).after("crop", {"box": list(box)}, (1, 0, box[0], 0, 1, box[1]))
    picture = whole.crop(box)
    if turn:
        picture = picture.transpose(Pictures.Transpose.ROTATE_270)
        trail = trail.after("rotate", {"angle": -90}, turned(4, (box[2] - box[0], box[3] - box[1])))
    trail = trail.after("resize", {"size": [VIEW, VIEW]}, stretched(picture.size, (VIEW, VIEW)))
    picture = picture.resize((VIEW, VIEW))
    return url(picture), image_facts("look", url(picture), (VIEW, VIEW), trail)


def media(source):
    content = base64.b64decode(source.partition(",")[2])
    return Media(digest_of(content), content, np.full(TOKENS, PAD), np.ones(TOKENS, bool), {})


def claimed(facts, origin, box):
    """The facts of an image whose code says something else than the pixels, as the tool `python` writes them."""
    claim = {"source": facts["source"], "box": box, "steps": [{"name": "crop", "arguments": {"box": box}}]}
    nothing = {"source": None, "box": None, "steps": [], "matrix": None}
    return facts | nothing | {"provenance": origin, "unverified": claim}


def call_of(index, facts, shown, name="look"):
    call = ToolCall(f"c{index}", name, {"box": [2, 10, 6, 14]})
    said = Message(Role.ASSISTANT, "Let me look.", (call,), answer="Let me look.")
    turn = Turn(index, said, FinishReason.STOP, 0, 30, 3)
    turn.calls = [CallRecord(call, CallStatus.OK, 0.01, info={"images": facts})]
    turn.replies = [Message(Role.TOOL, (Text("seen"), *(Image(one) for one in shown)), tool_call_id=call.id)]
    return turn


def episode(name, turns, *, right=True, whole=None, truth=None, tool="look", **more):
    """An episode with these looks and an answer; its ledger has every image at its place."""
    view = url((whole or canvas()).resize((VIEW, VIEW)))
    prompt = (Message(Role.USER, (Image(view), Text("digit at red"))),)
    answer = Message(Role.ASSISTANT, "7" if right else "3", answer="7" if right else "3")
    last = Turn(len(turns), answer, FinishReason.STOP, 0, 60, 1)
    kwargs = {tool: {"create_kwargs": {"image": url(whole or canvas())}}}
    truth = {"target": "7", "target_boxes": [TARGET]} if truth is None else truth
    sample = Sample(name, prompt, "tinylook/read", truth, images=(Image(view),), tools_kwargs=kwargs)
    ledger = Ledger()
    ledger.append([1, *[PAD] * TOKENS, 2], Origin.PROMPT, 0)
    place_images(ledger, [media(view)])
    for turn in turns:
        ledger.append([3, 4, 5], Origin.POLICY, turn.index, [-0.1] * 3, 0)
        for image in turn.replies[0].images if turn.replies[0].images else ():
            if image.source.startswith("data:image/png"):
                ledger.append([*[PAD] * TOKENS], Origin.TOOL, turn.index)
                place_images(ledger, [media(image.source)])
        ledger.append([2], Origin.TEMPLATE, turn.index)
    ledger.append([6], Origin.POLICY, last.index, [-0.1], 0)
    messages = [*prompt, *(message for turn in [*turns, last] for message in (turn.message, *turn.replies))]
    found = Trajectory(sample, 0, 0, messages, [*turns, last], [ledger], StopReason.ANSWERED, 1.0, **more)
    found.reward, found.parts = float(right), {"acc": float(right)}
    return found


def looked():
    """Two crops, the second turned, and one that is not what it claims to be; a judge spoke of the first."""
    whole = canvas()
    looks = [crop_of(whole, FIRST), crop_of(whole, SECOND, turn=True)]
    turns = [call_of(index, [facts], [shown]) for index, (shown, facts) in enumerate(looks)]
    shown, facts = crop_of(whole, (100, 0, 164, 64))
    turns.append(call_of(2, [claimed(facts, "contradicted", [16, 16, 48, 48])], [shown]))
    remark = Remark("llm", "the crop shows the digit", 0.75, 0)
    return episode("test:0", turns, whole=whole, remarks=[remark])


def hostile(evil):
    """Everything about its images is wrong, or meant to do harm."""
    _, facts = crop_of(canvas(), FIRST)
    boxes = [[-50, -50, 400, 400], [300, 300, 400, 400], [float("nan")] * 4, [90, 90, 10, 10], "all", [1e300] * 4]
    images = [facts | {"box": box, "name": evil} for box in boxes]
    gone = hashlib.blake2b(b"gone", digest_size=16).hexdigest()
    nothing = {key: one for key, one in facts.items() if key != "data"}
    images.append(nothing | {"file": f"images/{gone}.png", "name": "gone"})
    svg = base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg' onload='window.hacked=5'/>").decode()
    images.append(nothing | {"data": f"data:image/svg+xml;base64,{svg}", "name": "svg"})
    images.append(nothing | {"data": "data:image/png;base64,AAAA", "name": "broken", "source_size": [0, -1]})
    images.append(nothing | {"data": facts["data"], "provenance": evil, "matrix": [0] * 6, "size": [0, 0]})
    images.append(nothing | {"data": facts["data"], "unverified": {"source": 3, "box": 4, "steps": [evil, None, {}]}})
    turn = call_of(0, images, ["javascript:window.hacked=6", "http://example.org/a.png"], name=evil)
    boxes = [[-10, -10, 400, 400], ["x"] * 4, None, [float("inf")] * 4, [5, 5, 1, 1]]
    found = episode("test:evil", [turn], truth={"target": evil, "target_boxes": boxes}, tool=evil)
    found.remarks = [Remark(evil, evil, float("nan"), 0)]
    return found


def write_looked(run, evil=""):
    """A training with such episodes, and with the measures of a task with images."""
    run.write_text("config.yaml", "task: tinylook\n")
    made = [looked(), *([hostile(evil)] if evil else [])]
    record(run, "trajectories/step_000001.parquet", made)
    for step in (1, 2, 3):
        line = {"step": step, "seconds": 1.0 * step, "tokens": 10 * step, "critic/score/mean": 0.5}
        line |= {f"task/tinylook/read/{name}": step / 4 for name in ("looks", "evidence", "faithful", "episodes")}
        run.append_jsonl("metrics.jsonl", line | {"task/tinylook/none/needless": 1 / step})
        held = {
            "task/tinylook/read/faithful": 0.5,
            "greedy_task/tinylook/read/faithful": 0.6,
            "task/mine/looked_up": 0.7,
        }
        counts = {"task/tinylook/read/episodes": 8, "accuracy/tinylook/read": 0.5}
        line = {f"val/{name}": value for name, value in (held | counts).items()}
        run.append_jsonl("metrics.jsonl", {"step": step, "seconds": 1.0 * step, "tokens": 10 * step} | line)


def write_probed(run):
    """Two episodes, and the same with a grey image in the place of the tool's: one falls, one does not."""
    run.write_text("config.yaml", "task: tinylook\n")
    grey = url(Pictures.new("RGB", (VIEW, VIEW), (127, 127, 127)))
    before, after = [], []
    for number in range(2):
        whole = canvas(number)
        shown, facts = crop_of(whole, FIRST)
        before.append(episode(f"test:{number}", [call_of(0, [dict(facts)], [shown])], whole=whole))
        artifacts = {"probe": {"probe": "blank", "images": 1}}
        spoilt = episode(f"test:{number}", [call_of(0, [dict(facts)], [grey])], right=number == 0, whole=whole)
        after.append(replace(spoilt, artifacts=artifacts))
    record(run, "eval/step_000000.parquet", before)
    record(run, "probes/blank.parquet", after[::-1])  # found by sample, wherever it stands
    result = {"data_source": "tinylook/read", "probe": "blank", "n": 2, "samples": 2, "looked": 2}
    result |= {"before": 1.0, "before_stderr": 0.1, "after": 0.5, "after_stderr": 0.35, "answers_changed": 0.5}
    result |= {"change": -0.5, "change_stderr": 0.5}
    found = {"baseline": "eval/step_000000.parquet", "probes": {"blank": "probes/blank.parquet"}, "results": [result]}
    run.write_text("probe.json", json.dumps(found))
