"""What Turnwise does with the chat templates that others ship: a table with a line for each, as `turnwise check` has it.

    python tests/chat/model_table.py [FOLDER ...] [--only NAME] [--json FILE]

A FOLDER holds *.jinja files; without one it is TRL's, which is installed for the tests. Every template gets a small
tokenizer with its own control tokens, so the table is about templates and the framing of turns, not about vocabularies.
The tasks are a tool alone, and a tool and a simulated user; each is checked as it comes, and in every history mode.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
from chat_families import _byte_level
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from turnwise.chat.template import trials
from turnwise.chat.template.trials import Exchange
from turnwise.config.choices import HistoryPolicy
from turnwise.data.task_config import compose
from turnwise.errors import TurnwiseError
from turnwise.reports.preflight import Report, preflight
from turnwise.rollout.prepare import prepare
from turnwise.types import Message, Role, ToolCall

MODES = ("default", "refuse", "segment", "verbatim")
TASKS = ("tools", "tools and a user")
SWITCHES = {
    "preserve_thinking": True, "truncate_history_thinking": False, "clear_thinking": False, "enable_thinking": False,
    "xml_tools": None, "thinking": None, "thinking_mode": None, "reasoning_effort": None,
}  # fmt: skip
"""Arguments of templates that are about thoughts, and the value that changes what is kept; None: named only."""
KEEPS = ("preserve_thinking", "truncate_history_thinking", "clear_thinking")
CONTROL = re.compile(
    r"<\|[^\s<>|'\"{}]{1,60}\|?>|<[a-z_\"]{1,40}\|>|<｜[^\s<>'\"{}]{1,60}｜>|｜DSML｜|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>|<sep>"
    r"|<(?:start|end)_of_(?:turn|image)>|<(?:begin|beginning|end)_of_(?:document|sentence)>|\]~!?b[\]\[]|\[e~\[|\]<\]minimax\[>\["
    r"|</?s>|<bos>|<eos>|<seed:[be]os>|<SPECIAL_\d+>|<(?:start|end)_function_(?:call|response|declaration)>|<escape>"
)
COURSES = {
    "keep": "sampled tokens are kept", "segment at tools": "at every tool result", "segment at users": "when a user speaks",
    "segment later": "in longer conversations",
}  # fmt: skip
"""What is done by default, and the words of `turnwise check` that say so; else the template only appends."""
ROUNDS, CALLS = 4, 2
"""Of the conversation whose sequences are counted: what a user says, and calls before each answer."""
ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
BOS, EOS = "<s>", "</s>"
MARK = "Xmarkx"


@dataclass
class Row:
    """What was found of one template."""

    source: str
    name: str
    format: str = "-"
    """Of its calls; with a question mark where nothing tells."""
    switches: list[str] = field(default_factory=list)
    passed: dict[str, bool] = field(default_factory=dict)
    """By 'task, mode'."""
    handled: dict[str, str] = field(default_factory=dict)
    """What is said of its history, by 'task, mode'."""
    refused: dict[str, str] = field(default_factory=dict)
    """The first reason, by 'task, mode'."""
    switch: str = ""
    """The argument of the template's own that `turnwise check` offers."""
    prices: list[tuple[int, float]] = field(default_factory=list)
    """(sequences, times the tokens of one sequence) of a long conversation, with short and with long thoughts."""


def build(template: Path, folder: Path, trained: str) -> Path:
    """A folder with a tokenizer that has this template and the control tokens it writes."""
    source = template.read_text(encoding="utf-8")
    backend = Backend.from_str(trained)
    control = list(dict.fromkeys([BOS, EOS, *CONTROL.findall(source)]))
    ordinary = [word for word in ORDINARY if word in source]
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ordinary])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, bos_token=BOS, chat_template=source)
    closing = _closing(wrapped)
    ends = [text for text in control if text not in (BOS,) and closing.startswith(text)]
    wrapped.eos_token = max(ends, key=len, default=EOS)
    wrapped.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


def _closing(wrapped: Any) -> str:
    for words in (MARK, [{"type": "text", "text": MARK}]):
        talk = [{"role": role, "content": content} for role, content in (("user", "hello"), ("assistant", words))]
        with contextlib.suppress(Exception):  # a template is a program of the model's authors
            return str(wrapped.apply_chat_template(talk, tokenize=False).partition(MARK)[2].lstrip())
    return ""


def check(folder: Path, task: str, mode: str, switches: dict[str, Any]) -> tuple[Report | None, str]:
    """The report of `turnwise check`, or why there is none."""
    overrides = [
        *_overrides(folder, task),
        *([] if mode == MODES[0] else [f"chat.history={mode}"]),
        *([f"chat.template_kwargs={json.dumps(switches).replace(chr(34), '')}"] if switches else []),
    ]
    try:
        return preflight(compose(overrides)), ""
    except TurnwiseError as error:
        return None, str(error)


def _overrides(folder: Path, task: str) -> list[str]:
    return [
        "engine.name=scripted", "engine.script=['#### 0']", f"model.path={folder}", "rollout.tools=[calculate]",
        "eval.samples=2", "data.max_prompt_tokens=100000",
        "rollout.interaction=" + ("code_verify" if task == TASKS[1] else "null"),
    ]  # fmt: skip


def look_at(template: Path, source: str, folder: Path, modes: Sequence[str]) -> Row:
    """The line of one template."""
    text = template.read_text(encoding="utf-8")
    row = Row(source, template.stem, switches=[word for word in SWITCHES if re.search(rf"\b{word}\b", text)])
    for task in TASKS:
        for mode in modes:
            report, why = check(folder, task, mode, {})
            _note(row, f"{task}, {mode}", report, why)
        keeping = {word: SWITCHES[word] for word in row.switches if word in KEEPS}
        if keeping:
            report, why = check(folder, task, MODES[0], keeping)
            _note(row, f"{task}, switched", report, why)
    if "segment" in course(row, TASKS[1]):
        row.prices = list(prices(folder))
    return row


def prices(folder: Path) -> Iterator[tuple[int, float]]:
    """What the sequences of a conversation with users and tools hold, against one sequence that keeps every token."""
    config = compose(_overrides(folder, TASKS[1])).config
    prepared = prepare(config, "test", limit=1)
    renderer, route = prepared.renderer, next(iter(prepared.plan.routes))
    assert renderer is not None
    schemas, form = prepared.toolbox.schemas(route.tools), renderer.call_format
    text = form.render_call(ToolCall("t000c0000", "calculate", {"expression": "6*7"}))
    call = form.parse(text, turn=0, in_reasoning=False).tool_calls[0]
    result = Message(Role.TOOL, "It is forty-two. " * 5, tool_call_id=call.id, name=call.name)
    asking = Exchange("", text, [result], thinks=True)
    answer = Exchange("", form.ANSWER + "It is forty-two. " * 5, [Message(Role.USER, "And now? " * 5)], thinks=True)
    for words in (10, 200):
        with mock.patch.object(trials, "THOUGHT", " ".join(["six"] * words)):
            talk = [*[asking] * CALLS, answer] * ROUNDS
            split, whole = (
                trials.play(renderer.with_history(mode), prepared.samples[0].prompt, schemas, talk, {})
                for mode in (HistoryPolicy.auto, HistoryPolicy.verbatim)
            )
        yield len(split), sum(map(len, split)) / sum(map(len, whole))


def _note(row: Row, key: str, report: Report | None, why: str) -> None:
    row.passed[key] = report is not None and not report.errors
    if report is None or report.errors:
        row.refused[key] = why or " ".join(str(report.errors[0].text if report else "").split())
        return
    if found := re.search(r"(\w+) calls as (text|tool_calls)(?:, history (.*))?", report.plan or ""):
        row.format = found[1] + ("?" if f"warning      {found[1]} calls" in (report.plan or "") else "")
    told = [finding.text for finding in report.findings if finding.check == "chat template"]
    row.handled[key] = " ".join(told)
    if offered := re.search(r"chat\.template_kwargs=(\{[^}]*\})", row.handled[key]):
        row.switch = offered[1]


def course(row: Row, task: str) -> str:
    """What happens by default, in a word."""
    key = f"{task}, {MODES[0]}"
    if not row.passed[key]:
        return "refused"
    told = row.handled.get(key, "")
    found = [word for word, said in COURSES.items() if said in told]
    return ", ".join(found) or "append"


def print_table(rows: Sequence[Row], modes: Sequence[str]) -> None:
    """One line for each template, then how many pass."""
    print("| source | template | calls | tools | tools and a user | by default | a user | switches | price | why not |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = ["/".join("ok" if row.passed[f"{task}, {mode}"] else "no" for mode in modes) for task in TASKS]
        reason = next(iter(row.refused.values()), "")[:160].replace("|", "\\|")
        price = " to ".join(f"{times:.1f}" for _, times in sorted(row.prices, key=lambda one: one[1]))
        courses = " | ".join(course(row, task) for task in TASKS)
        switches = ", ".join(filter(None, [row.switch, *row.switches]))
        print(
            f"| {row.source} | {row.name} | {row.format} | {' | '.join(cells)} | {courses} | {switches} | {price} | {reason} |"
        )
    print(f"\nmodes: {'/'.join(modes)}")
    for source in dict.fromkeys(row.source for row in rows):
        some = [row for row in rows if row.source == source]
        for task in TASKS:
            counts = ", ".join(f"{mode} {sum(row.passed[f'{task}, {mode}'] for row in some)}" for mode in modes)
            print(f"{source}: {len(some)} templates, {task}: {counts}")


def templates(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """(where from, the file) of every template; TRL's own copies for training are other templates of the same models."""
    for folder in folders:
        for path in sorted(folder.glob("*.jinja")):
            if not path.stem.endswith("_training"):
                yield ("trl" if folder.name == "chat_templates" else folder.name), path


def trl_templates() -> Path:
    """The folder of the templates that TRL ships."""
    from importlib.util import find_spec

    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        raise SystemExit("TRL is not installed: name a folder of *.jinja files")
    return Path(spec.origin).parent / "chat_templates"


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Every template of the folders, or those whose name holds a word."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--only", default="", help="templates whose name holds this")
    parser.add_argument("--modes", default=",".join(MODES), help="history modes to check, default is the first")
    parser.add_argument("--json", type=Path, help="where all that was found is written")
    chosen = parser.parse_args(arguments)
    modes, rows = chosen.modes.split(","), list[Row]()
    trained = _byte_level().to_str()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as made:
        for number, (source, path) in enumerate(templates(chosen.folders or [trl_templates()])):
            if chosen.only not in path.stem:
                continue
            with contextlib.redirect_stderr(io.StringIO()):
                folder = build(path, Path(made, str(number)), trained)
                rows.append(look_at(path, source, folder, modes))
    print_table(rows, modes)
    if chosen.json:
        chosen.json.write_text(
            json.dumps([asdict(row) for row in rows], ensure_ascii=False, indent=1), encoding="utf-8"
        )
    return rows


if __name__ == "__main__":
    main()
