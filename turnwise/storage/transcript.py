"""A trajectory for human eyes: who said what, in which tokens, and what came of it."""

import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.text import Text as Styled

from turnwise.storage.trajectories.ledger_columns import origin_counts
from turnwise.system.image_sources import is_inline, kept_name
from turnwise.types import (
    CallRecord,
    Image,
    Ledger,
    Message,
    Origin,
    Remark,
    Role,
    ToolCall,
    Trajectory,
    Turn,
    first_prompt,
)

STYLES = {
    Origin.PROMPT: "dim",
    Origin.POLICY: "green",
    Origin.TOOL: "cyan",
    Origin.USER: "yellow",
    Origin.TEMPLATE: "bright_black",
}
_REPLY_ORIGIN = {Role.TOOL: Origin.TOOL, Role.USER: Origin.USER}
Decode = Callable[[NDArray[np.int64]], str]

# Control characters would move the cursor or recolour the terminal, and direction marks reorder what is read. Each is
# shown as its picture or its code point; only line feed and tab pass.
_VISIBLE = str.maketrans(
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | {
        code: f"<U+{code:04X}>"
        for low, high in ((0x80, 0x9F), (0x200E, 0x200F), (0x2028, 0x202E), (0x2066, 0x2069), (0xD800, 0xDFFF))
        for code in range(low, high + 1)
    }
)


def transcript(trajectory: Trajectory, decode: Decode | None = None, *, raw: bool = False) -> Group:
    """What to print: the messages, the outcome and the token account; with `decode` also every token by its origin.

    `raw` shows the assistant's turns exactly as they were written, with their tags, instead of what was read from them.
    """
    lines: list[Styled] = [_title(trajectory)]
    lines += _conversation(trajectory.prompt, trajectory.turns, trajectory.remarks, raw)
    for branch in trajectory.branches:
        note = "" if branch.trained else ", not trained"
        lines.append(Styled.assemble("\n", (visible(f"branch {branch.name}"), "bold underline"), (note, "dim")))
        lines += _conversation(first_prompt(branch.messages, branch.turns), branch.turns, trajectory.remarks, raw)
    if decode is not None and trajectory.segments:
        for number, ledger in enumerate(trajectory.segments):
            label = "tokens as the model saw them" + (f", segment {number}" if len(trajectory.segments) > 1 else "")
            lines += [Styled(f"\n{label}", style="bold"), _tokens(ledger, decode)]
    return Group(*lines, *_outcome(trajectory))


def _conversation(
    prompt: Sequence[Message], turns: Sequence[Turn], remarks: Sequence[Remark], raw: bool
) -> Iterator[Styled]:
    for message in prompt:
        yield _heading(message.role.value, Origin.PROMPT)
        yield from _content(message, Origin.PROMPT)
    for turn in turns:
        yield from _turn(turn, raw)
        yield from _turn_scores(turn, remarks)


def visible(text: str) -> str:
    """Text that is safe to print: control characters are shown, not sent."""
    return text.translate(_VISIBLE)


def _title(trajectory: Trajectory) -> Styled:
    sample = trajectory.sample
    step = trajectory.step  # below 0 in a training run's evaluations, which must not draw the noise of its steps
    when = f"step {step}" if step >= 0 else f"evaluation at step {-1 - step}"
    where = f"{sample.data_source}, {when}, sibling {trajectory.sibling}"
    return Styled.assemble((visible(sample.id), "bold"), visible(f"  {where}"))


def _heading(label: str, origin: Origin, note: str = "", note_style: str = "dim") -> Styled:
    colour = "" if origin is Origin.PROMPT else STYLES[origin]
    return Styled.assemble(
        "\n", (visible(label), f"bold {colour}".strip()), (visible(note and f"  {note}"), note_style)
    )


def _content(message: Message, origin: Origin) -> Iterator[Styled]:
    if isinstance(message.content, str):
        yield Styled(visible(message.content), style=STYLES[origin])
        return
    for part in message.content:
        text = f"[image {_source(part)}]" if isinstance(part, Image) else part.text
        yield Styled(visible(text), style=STYLES[origin])


def _source(image: Image) -> str:
    if is_inline(image.source):
        return kept_name(image.source) or image.source.partition(";")[0].removeprefix("data:")
    return image.source[:80]


def _turn(turn: Turn, raw: bool) -> Iterator[Styled]:
    note = f"{turn.completion_tokens} tokens, {turn.finish_reason.value}, {turn.generate_seconds:.2f} s"
    yield _heading(f"assistant, turn {turn.index}", Origin.POLICY, note)
    yield from _as_written(turn.message) if raw else _as_read(turn.message)
    records = {record.call.id: record for record in turn.calls}
    answered = {reply.tool_call_id for reply in turn.replies}
    for record in turn.calls:
        if record.call.id not in answered:
            yield _heading(*_call_note(turn, record, "; the episode ended before its reply was read"))
    for reply in turn.replies:
        yield _reply_heading(turn, reply, records.get(reply.tool_call_id or ""))
        yield from _content(reply, _REPLY_ORIGIN.get(reply.role, Origin.TEMPLATE))


def _as_written(message: Message) -> Iterator[Styled]:
    yield Styled(visible(message.text), style=STYLES[Origin.POLICY])
    yield from (call_line(call) for call in message.tool_calls if call.problem is not None)


def _as_read(message: Message) -> Iterator[Styled]:
    """Thoughts, answer and calls; the text itself where a call in it could not be read."""
    if message.reasoning:
        yield Styled(visible(message.reasoning), style="dim italic")
    answer = message.visible
    if answer or not (message.reasoning or message.tool_calls):
        yield (
            Styled(visible(answer), style=STYLES[Origin.POLICY]) if answer else Styled("(nothing)", style="dim italic")
        )
    yield from map(call_line, message.tool_calls)
    if any(call.problem is not None for call in message.tool_calls) and answer != message.text:
        yield Styled("as written:", style="dim")
        yield Styled(visible(message.text), style=STYLES[Origin.POLICY])


def _turn_scores(turn: Turn, remarks: Sequence[Remark]) -> Iterator[Styled]:
    """What scoring thought of a turn, and the words that came with it."""
    if turn.scores:
        listing = ", ".join(f"{name} {value:g}" for name, value in turn.scores.items())
        yield Styled.assemble("\n", ("scored: ", "bold"), visible(listing))
    yield from (_remark(remark) for remark in remarks if remark.turn == turn.index)


def _remark(remark: Remark) -> Styled:
    value = "" if remark.value is None else f" {remark.value:g}"
    return Styled.assemble((visible(f"{remark.by}{value}: "), "bold"), (visible(remark.text), "italic"))


def call_line(call: ToolCall) -> Styled:
    """A call in one line, or why it cannot be read."""
    if call.problem is not None:
        return Styled.assemble(("-> ", "dim"), (visible(f"{call.name or 'a call'}: {call.problem}"), "red"))
    try:
        arguments = json.dumps(call.arguments, ensure_ascii=False, default=repr)
    except RecursionError:
        arguments = "(nested too deeply to show)"
    return Styled.assemble(("-> ", "dim"), (visible(call.name), "bold green"), (visible(f" {arguments}"), "green"))


def _reply_heading(turn: Turn, reply: Message, record: CallRecord | None) -> Styled:
    origin = _REPLY_ORIGIN.get(reply.role, Origin.TEMPLATE)
    if record is None:
        score = "" if turn.user_score is None or reply.role is not Role.USER else f"score {turn.user_score:g}"
        return _heading(f"{reply.role.value}, turn {turn.index}", origin, score)
    return _heading(*_call_note(turn, record))


def _call_note(turn: Turn, record: CallRecord, more: str = "") -> tuple[str, Origin, str, str]:
    note = f"{record.status.value}, {record.seconds:.2f} s" + (", truncated" if record.truncated else "")
    note += "" if record.score is None else f", score {record.score:g}"
    style = "red" if record.status.failed else "dim"
    name = f"tool {record.call.name}" if record.call.name else "no tool"
    return f"{name}, turn {turn.index}", Origin.TOOL, note + more, style


def _tokens(ledger: Ledger, decode: Decode) -> Styled:
    pieces = [(visible(decode(ids)), STYLES[origin]) for origin, _, ids in ledger.spans()]
    return Styled.assemble(*pieces)


def _outcome(trajectory: Trajectory) -> Iterator[Styled]:
    yield Styled.assemble("\n", ("stopped: ", "bold"), trajectory.stop_reason.value)
    if trajectory.reused_from is not None:
        yield Styled.assemble(("trained on again: ", "bold"), f"it is of step {trajectory.reused_from}")
    if trajectory.failure is not None:
        yield Styled.assemble(("failure: ", "bold red"), (visible(trajectory.failure), "red"))
    last = trajectory.turns[-1] if trajectory.turns else None
    if last is not None and last.user_score is not None and not last.replies:
        yield Styled.assemble(("user's score: ", "bold"), f"{last.user_score:g}")
    if trajectory.sample.ground_truth is not None:
        yield Styled.assemble(("ground truth: ", "bold"), visible(str(trajectory.sample.ground_truth)))
    parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.parts.items())
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    yield Styled.assemble(("reward: ", "bold"), visible(reward + (f" ({parts})" if parts else "")))
    yield from (_remark(remark) for remark in trajectory.remarks if remark.turn is None)
    yield _account(trajectory)


def _account(trajectory: Trajectory) -> Styled:
    """Tokens by origin, each in its colour."""
    line = Styled.assemble(("tokens: ", "bold"))
    if not trajectory.segments:
        written = sum(turn.completion_tokens for turn in trajectory.every_turn)
        return line.append(f"{written} written, as counted by the endpoint; no token ids were recorded")
    counts = origin_counts(trajectory.segments)
    for origin, count in counts.items():
        line.append(f"{origin.name.lower()} {count}", style=STYLES[origin]).append(", ")
    segments = "1 segment" if len(trajectory.segments) == 1 else f"{len(trajectory.segments)} segments"
    line.append(f"{sum(counts.values())} in {segments}")
    owners = np.concatenate([ledger.versions[ledger.loss_mask] for ledger in trajectory.segments])
    versions, each = np.unique(owners, return_counts=True)
    if len(versions) > 1:  # the weights were replaced while the episode went on
        wrote = ", ".join(f"{count} by version {version}" for version, count in zip(versions, each, strict=True))
        line.append(f"; the policy's: {wrote}")
    return line
