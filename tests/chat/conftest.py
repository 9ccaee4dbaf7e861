"""Renderers of every family, each tokenizer trained once a session."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # test files are imported by path; what they share is found by name
from chat_families import FAMILIES, Talk

from turnwise.chat.formats import hermes
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config.choices import HistoryPolicy
from turnwise.types import Message, Role

OpenTalk = Callable[..., Talk]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The saved tokenizer of a family."""
    made: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in made:
            made[name] = FAMILIES[name].build(tmp_path_factory.mktemp(name))
        return made[name]

    return build


@pytest.fixture(scope="session")
def renderer(folder: Callable[[str], Path]) -> Callable[..., Renderer]:
    """A renderer by family, history policy and template arguments."""
    tokenizers: dict[str, Tokenizer] = {}
    made: dict[tuple[Any, ...], Renderer] = {}

    def build(name: str, history: HistoryPolicy = HistoryPolicy.refuse, **kwargs: Any) -> Renderer:
        key = (name, history, *sorted(kwargs.items()))
        if name not in tokenizers:
            tokenizers[name] = Tokenizer(folder(name))
        if key not in made:
            made[key] = Renderer(tokenizers[name], hermes, history=history, template_kwargs=kwargs)
        return made[key]

    return build


@pytest.fixture(scope="session")
def talk(renderer: Callable[..., Renderer]) -> OpenTalk:
    """A conversation that begins with a system prompt, where the family has one, and a question."""

    def build(
        name: str, history: HistoryPolicy = HistoryPolicy.refuse, question: str = "What is it?", **kwargs: Any
    ) -> Talk:
        system = [Message(Role.SYSTEM, "Be brief.")] if FAMILIES[name].system else []
        return Talk(renderer(name, history, **kwargs), [*system, Message(Role.USER, question)])

    return build
