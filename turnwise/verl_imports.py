"""What to write instead when a user's file imports verl, which is not needed here and need not be installed."""

import traceback

DOCS = "docs/coming-from-verl.md"
INSTEAD = {
    "verl.interactions.gsm8k_interaction": "the same interaction is built in: rollout.interaction=gsm8k",
    "verl.interactions": "write `from turnwise import BaseInteraction`; the methods stay as they are",
    "verl.tools": "verl's tool classes are not run here yet: write a typed function with @turnwise.tool, and name it "
    "in rollout.tools as file.py:function",
    "verl.utils.reward_score": "keep your compute_score without it; scoring.scorers names the built-in scorers",
    "verl.experimental.agent_loop": "verl's agent loops are not run here: write `async def loop(chat)`, and name it in "
    "rollout.agent as file.py:loop",
    "verl": "nothing of verl is needed here: remove the import",
}
"""Advice by the start of a module's name, the longest first."""


def needs_verl(error: ModuleNotFoundError) -> bool:
    """Whether an import failed for want of verl, or of a part that its newer versions do not have."""
    return _is_verl(error.name or "")


def advice(error: ModuleNotFoundError) -> str:
    """The line that imports verl, and what to write instead."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        words = (frame.line or "").replace(",", " ").split()
        if words[:1] in (["from"], ["import"]) and _is_verl(words[1]):
            where = f"{frame.filename}, line {frame.lineno}: `{frame.line}`"
            return f"{where} needs {error.name}, which is not installed; {instead(words[1])}"
    return f"it needs {error.name}, which is not installed; {instead(str(error.name))}"


def instead(module: str) -> str:
    """What to write instead of using a module of verl's."""
    text = next(text for start, text in INSTEAD.items() if module == start or module.startswith(f"{start}."))
    return f"{text} ({DOCS})"


def _is_verl(module: str) -> bool:
    return module.split(".")[0] == "verl"
