"""A task over a Gymnasium environment: walk over the frozen lake without falling in."""

from collections.abc import Iterator
from typing import Any

from turnwise import Task

RULES = (
    "You are on a frozen lake; brackets mark where. Walk from S to G over F, never into H. "
    "End each message with a line such as `Action: down` (left, down, right or up)."
)


def rows(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """The same lake each time; rows differ by their seed, which matters on slippery ice."""
    for number in range(8 if split == "test" else 64):
        yield {"prompt": [{"role": "user", "content": RULES}], "extra_info": {"seed": number}}


TASK = Task(
    name="lake",
    rows=rows,
    scorer="environment",
    defaults={
        "rollout.agent": "gym_env",
        "rollout.agent_options": {
            "env": "FrozenLake-v1",
            "env_kwargs": {"is_slippery": False, "render_mode": "ansi"},
            "actions": {"left": 0, "down": 1, "right": 2, "up": 3},
        },
        "eval.samples": None,
    },
)
