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


def needs_verl(error: BaseException) -> bool:
    """Whether an import failed for want of verl."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "verl"


def advice(error: BaseException, spec: str) -> str:
    """The line that imports verl, and what to write instead; `spec` is what was named, if no file imports it."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        line = (frame.line or "").strip()
        if line.startswith(("from verl", "import verl")):
            where = f"{frame.filename}, line {frame.lineno}: `{line}`"
            instead = _instead(line.split()[1].rstrip(","))
            return f"{where} needs verl, which is not installed; {instead} ({DOCS})"
    return f"{spec} is a part of verl, which is not installed; {_instead(spec)} ({DOCS})"


def _instead(module: str) -> str:
    return next(text for start, text in INSTEAD.items() if module == start or module.startswith(f"{start}."))
