"""Stand-ins for small parts of verl.utils: the trace decorator, timers, tokenizers, local paths and event loops."""

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def rollout_trace_op(func: Function) -> Function:
    """Nothing: every turn and call is recorded anyway."""
    return func


@contextlib.contextmanager
def rollout_trace_attr(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Nothing: every turn and call is recorded anyway."""
    yield


@contextlib.contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of the block to an entry of the dict."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


def copy_to_local(src: str, *args: Any, **kwargs: Any) -> str:
    """The path itself: only local files are read here."""
    if "://" in src:
        raise ValueError(f"{src} is not local: copy it here first")
    return str(Path(src).expanduser())


def hf_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The tokenizer of a folder, with a padding token."""
    from transformers import AutoTokenizer

    kwargs.pop("correct_pad_token", None)
    kwargs.pop("correct_gemma2", None)
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def hf_processor(name_or_path: str, **kwargs: Any) -> None:
    """None: the engine reads text only."""


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The loop that runs here, or else a new one for this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def auto_await(func: Callable[..., Any]) -> Callable[..., Any]:
    """Where a loop runs, what the function gives is awaited by its caller; where none does, it is run to its end."""

    @functools.wraps(func)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not inspect.iscoroutine(result):
            return result
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(result)
        return result

    return called


def resolve_config_path(config_path: str) -> str:
    """The file, from the current folder."""
    if not (path := Path(config_path).absolute()).exists():
        raise FileNotFoundError(f"no file {config_path} (from {Path.cwd()})")
    return str(path)


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """A tool's reply as gpt-oss reads it."""
    header = f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary"
    return f"{header}<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """The text, and the words that ask gpt-oss for a reply."""
    return f"{message_content}<|start|>assistant"
