"""The section `conversations`: files to fine-tune on, and what of a conversation is learned."""

import enum
from dataclasses import dataclass

from turnwise.config.knobs import also, harmless, knob, only, path


class RowTools(enum.StrEnum):
    """Which tools the model is shown in a conversation that names none."""

    none = "none"
    """None."""
    rollout = "rollout"
    """Those of `rollout.tools`, as in reinforcement learning afterwards."""


@dataclass
class ConversationsConfig:
    """Conversations of files for `turnwise sft` (docs/ext/conversations.md)."""

    files: list[str] = knob([], path(), harmless())
    """Conversations to learn from: JSON lines, JSON, CSV, parquet, Arrow, folders, datasets that `save_to_disk` wrote
    or of the hub. Set it to start from a stronger model's or people's conversations."""
    eval_files: list[str] = knob([], path(), harmless())
    """Conversations that are not learned: their loss is measured before the first step, about ten times in between and
    after the last. Set it to see when the model begins to know the others by heart."""
    tools: RowTools = knob(RowTools.none, only("conversations.files", "*"), also("conversations.eval_files", "*"))
    """The tools shown in rows without a `tools` column. Take `rollout` when the rows call the tools of your task."""
    last_turn_only: bool = knob(False)
    """Learn the last message of the assistant only, also of recorded and scripted episodes. Set it when the earlier
    turns are another model's, or worse than the last."""
    leave_out_failed_calls: bool = knob(False)
    """Learn no turn with a call that failed: unreadable, of an unknown tool, with arguments that its schema refuses, or
    answered by an error. Set it when the failures are not worth imitating; the model still reads them."""
