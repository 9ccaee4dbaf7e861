"""Stand-ins for small parts of verl.utils: the trace decorator, timers, tokenizer loading and local paths."""

import contextlib
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
