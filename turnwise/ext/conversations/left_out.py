"""Which turns of an episode are not learned: rules that the config turns on."""

from collections.abc import Collection

from turnwise.config import Config
from turnwise.config.sections import section
from turnwise.ext.conversations.config import ConversationsConfig
from turnwise.types import Trajectory


def all_but_the_last(config: Config, trajectory: Trajectory) -> Collection[int]:
    """With `last_turn_only`, every turn but the last of each conversation that is learned from."""
    if not section(config, ConversationsConfig).last_turn_only:
        return ()
    conversations = [trajectory.turns, *(branch.turns for branch in trajectory.branches if branch.trained)]
    return {turn.index for turns in conversations for turn in turns[:-1]}


def with_failed_calls(config: Config, trajectory: Trajectory) -> Collection[int]:
    """With `leave_out_failed_calls`, the turns with a call that is known to have failed."""
    if not section(config, ConversationsConfig).leave_out_failed_calls:
        return ()
    return {turn.index for turn in trajectory.every_turn if any(record.status.failed for record in turn.calls)}
