"""The limits of an episode: its turns, tokens and images, counted over all of its conversations together.

Its seconds are counted where it is played (`rollout/episode.py`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from turnwise.config import RolloutConfig
from turnwise.types import Image, StopReason

if TYPE_CHECKING:
    from turnwise.rollout.conversation import Conversation


class EpisodeLimits:
    """What `rollout.max_*` leaves to an episode. A conversation that writes holds the tokens it may need."""

    def __init__(self, rollout: RolloutConfig, conversations: "Sequence[Conversation]") -> None:
        self._rollout, self._conversations = rollout, conversations
        self.images = 0
        """Shown to the model in any of its conversations."""
        self._turns = 0
        self._user_turns = 0
        self._held = 0

    # --- turns -------------------------------------------------------------------------------------------------------

    @property
    def turns_are_used(self) -> bool:
        """Whether no further turn may begin."""
        limit = self._rollout.max_assistant_turns
        return limit is not None and self._turns >= limit

    def count_turn(self) -> None:
        """A turn of the policy begins."""
        self._turns += 1

    def cancel_turn(self) -> None:
        """Gives back a turn that was counted and then not written."""
        self._turns -= 1

    @property
    def user_turns_are_used(self) -> bool:
        """Whether the simulated user may say no more."""
        limit = self._rollout.max_user_turns
        return limit is not None and self._user_turns >= limit

    def count_user_turn(self) -> None:
        """The simulated user said something."""
        self._user_turns += 1

    # --- images ------------------------------------------------------------------------------------------------------

    def may_show(self, images: Sequence[Image]) -> bool:
        """Whether there is room for all of them; asked before they are prepared, which takes long."""
        limit = self._rollout.max_images
        return not images or limit is None or self.images + len(images) <= limit

    # --- tokens ------------------------------------------------------------------------------------------------------

    def tokens_left(self) -> int | None:
        """Tokens that nobody has used; None without a limit."""
        limit = self._rollout.max_tokens
        if limit is None:
            return None
        return limit - sum([conversation.backend.used() for conversation in self._conversations])

    def tokens_free(self) -> int | None:
        """Those that nobody holds either."""
        left = self.tokens_left()
        return None if left is None else left - self._held

    @property
    def tokens_are_held(self) -> bool:
        """Whether conversations that write hold tokens they may not need."""
        return self._held > 0

    def hold_tokens(self, wanted: int) -> int | None:
        """How many of these tokens are held now, fewer where fewer are left; None: others hold them for now."""
        left = self.tokens_left()
        granted = wanted if left is None else min(wanted, left)
        if left is not None and 0 < left < granted + self._held:
            return None
        self._held += max(0, granted)
        return granted

    def release_tokens(self, held: int) -> None:
        """Hold them no more; what was written is counted by the backend."""
        self._held -= max(0, held)


def turn_limit(own: int, left: int | None, room: int | None, *, is_callers: bool) -> tuple[int, StopReason | None]:
    """(most tokens of one turn, why it ends there): its own limit, what the episode has left, room in the context.

    `is_callers`: its own limit is the agent loop's, which gives no reason to end the episode.
    """
    limit, reason = own, None if is_callers else StopReason.TURN_TRUNCATED
    if left is not None and left < limit:
        limit, reason = left, StopReason.TOKEN_BUDGET
    if room is not None and room < limit:
        limit, reason = room, StopReason.CONTEXT_FULL
    return limit, reason
