"""Tool-call parsers: fuzzed inputs without an exception, speed in MB/s, and time that grows with length and no faster.

    python benchmarks/parsers.py [--inputs 100000] [--formats hermes,glm]

The peer is the same text read by `json.loads` as one string: what looking at every character once costs.
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from turnwise.chat.calls.tool_format import ToolFormat, load_format
from turnwise.system.plugins import names_in
from turnwise.types import ToolCall

ARGUMENTS = {"query": 'tides "and" moons', "limit": 3, "deep": {"a": [1, "b", None]}, "ok": True}
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<parameter=x>",
    "</parameter>", "</function>",
    "<arg_key>x</arg_key>", "<arg_value>", "</arg_value>", "<|channel|>", "<|message|>",
    "<|call|>", "<|end|>", "<|start|>assistant",
    "to=functions.f ", "<|constrain|>json", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>",
    "```json\n", "```", "<｜tool▁call▁end｜>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="x" string="true">', "</｜DSML｜parameter>", "<minimax:tool_call>",
    '<invoke name="f">', "</invoke>",
    '<parameter name="x">', "<seed:tool_call>", "<|tool_call>", "call:f{", '<|"|>', "<tool_call|>",
    "<|channel>thought", "<channel|>",
    "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>",
    '\n{"name": "f", "parameters": {', "<code>", "</code>",
    "\n[f(x=", "g(", "='", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call|>", "functools", "<tool_calls>",
    "</tool_calls>", "]<]minimax[>[", "<mm:think>", "</mm:think>", "<x>", "</x>", "<item>",
    "<<", ">>", '{"name": "f", "arguments": {', '"', "\\", "{", "}", "[", "]", ",", ":", ";", "\n",
    " ", "é", "🙂", "1e999", "\x00",
)  # fmt: skip
UNITS = {
    "open tags": lambda tags: "".join(tags),
    "deep nesting": lambda tags: tags[0] + '{"a":[',
    "unclosed strings": lambda tags: tags[0] + '{"a": "x',
    "escaped quotes": lambda tags: tags[0] + '{"a": "\\"',
    "white space": lambda tags: tags[0] + " \n" * 8,
}
"""What an adversarial text repeats, of the opening tags of a format."""
OPENINGS = {
    "hermes": ["<tool_call>"],
    "qwen3_coder": ["<tool_call><function=f><parameter=x>", "<function=f>"],
    "glm": ["<tool_call>f<arg_key>x</arg_key><arg_value>"],
    "gpt_oss": ["<|channel|>commentary to=functions.f<|message|>", "to="],
    "kimi": ["<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"],
    "deepseek": ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"],
    "deepseek_v4": ['<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">'],
    "minimax": ['<minimax:tool_call><invoke name="f"><parameter name="x">'],
    "seed": ["<seed:tool_call><function=f><parameter=x>"],
    "gemma": ['<|tool_call>call:f{x:<|"|>', "{x:["],
    "llama3_json": ['\n{"name": "f", "parameters": {"x": [', "<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS][{"],
    "pythonic": ["\n[f(x=[", '<|python_start|>[f(x="'],
    "lfm2": ["<|tool_call_start|>[f(x=["],
    "granite": ["<|tool_call|>["],
    "phi4_mini": ["\nfunctools[", "<|tool_call|>["],
    "apriel": ["<tool_calls>["],
    "minimax_m1": ["<tool_calls>\n"],
    "minimax_m3": [']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<x>'],
    "code": ["<code>\n", "```python\n"],
    "calculator": ["<<"],
}
TOOL = {"code": "python", "calculator": "calculate"}
KEY = {"code": "code", "calculator": "expression"}
SIZES = (1, 2, 4, 8)
LENGTH = 50_000


def valid(name: str, form: ToolFormat) -> str:
    """A text of the format with a thought, words and two calls."""
    arguments = {KEY[name]: "1 + 1"} if name in KEY else ARGUMENTS
    call = form.render_call(ToolCall("t000c0000", TOOL.get(name, "search"), arguments))
    return f"{form.render_thought('let me see', is_open=False)}I look.\n{call}\n{call}"


def fuzzed(name: str, form: ToolFormat, inputs: int, seed: int = 0) -> Iterator[str]:
    """Valid texts with pieces cut, doubled, moved and replaced by tags, and strings of nothing but tags."""
    chance, text = random.Random(f"{name} {seed}"), valid(name, form)
    for _ in range(inputs):
        if chance.random() < 0.3:
            yield "".join(chance.choices(TAGS, k=chance.randrange(30)))
            continue
        mutated = text
        for _ in range(chance.randrange(1, 6)):
            start, end = sorted(chance.choices(range(len(mutated) + 1), k=2))
            end = min(end, start + chance.randrange(40))
            piece = chance.choice(("", mutated[start:end] * 2, chance.choice(TAGS), mutated[start:end][::-1]))
            mutated = mutated[:start] + piece + mutated[end:]
        yield mutated


def fuzz(name: str, inputs: int, seed: int = 0) -> tuple[int, int, int]:
    """(characters, calls, calls with a problem) of that many inputs; whatever parse raises is raised."""
    form, characters, calls, problems = load_format(name), 0, 0, 0
    for number, text in enumerate(fuzzed(name, form, inputs, seed)):
        message = form.parse(text, turn=number, in_reasoning=number % 4 == 0)
        assert message.text == text
        characters += len(text)
        calls += len(message.tool_calls)
        problems += sum(call.problem is not None for call in message.tool_calls)
    return characters, calls, problems


def seconds(read: Callable[[str], object], text: str) -> float:
    """The fastest of three readings, in time of this process."""
    best = float("inf")
    for _ in range(3):
        gc.collect()
        start = time.process_time()
        read(text)
        best = min(best, time.process_time() - start)
    return best


def growth(name: str, length: int = LENGTH) -> Iterator[tuple[str, list[float]]]:
    """(the adversary, seconds at n, 2n, 4n and 8n characters)."""
    read = partial(load_format(name).parse, turn=0, in_reasoning=False)
    for adversary, unit in UNITS.items():
        piece = unit(OPENINGS[name])
        yield adversary, [seconds(read, piece * (length * size // len(piece))) for size in SIZES]


def report(name: str, inputs: int) -> None:
    """Print what was seen."""
    form = load_format(name)
    start = time.perf_counter()
    characters, calls, problems = fuzz(name, inputs)
    took = time.perf_counter() - start
    text = valid(name, form) * 200
    spoken = seconds(partial(form.parse, turn=0, in_reasoning=False), text)
    ratio = spoken / seconds(json.loads, json.dumps(text))
    print(
        f"{name:<12} {inputs} inputs, {characters / 1e6:.1f} MB in {took:.1f} s, no exception; {calls} calls, "
        f"{problems} with a problem; valid text {len(text) / spoken / 1e6:.0f} MB/s ({ratio:.0f}x json.loads of it)"
    )
    for adversary, times in growth(name):
        grown = " ".join(f"{one / times[0]:.1f}" for one in times)
        print(f"    {adversary:<17} {times[0] * 1e3:7.2f} ms at {LENGTH} characters, times {grown} at 1 2 4 8 n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Every format, or those named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--formats", default=",".join(names_in("turnwise.chat.formats")))
    chosen = parser.parse_args(arguments)
    gc.disable()  # its passes grow with all that is kept, and would be taken for the parser's
    for name in chosen.formats.split(","):
        report(name, chosen.inputs)


if __name__ == "__main__":
    main()
