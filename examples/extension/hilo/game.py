"""The game: rows with a hidden number, the tool that says higher or lower, and the reward."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hilo.config import HiloConfig
from turnwise import Config, Task, ToolContext, ToolError, ToolResult, Trajectory
from turnwise.config.sections import section


@dataclass(frozen=True)
class Guess:
    """The tool `guess`. It reads the run's config, so it is an object; a tool that does not is a plain function."""

    highest: int = HiloConfig.highest
    name = "guess"
    timeout = 5.0
    concurrency = 64

    @property
    def schema(self) -> dict[str, Any]:
        number = {"type": "integer", "description": f"from 1 to {self.highest}"}
        parameters = {"type": "object", "properties": {"number": number}, "required": ["number"]}
        about = "Say whether the hidden number is higher or lower, or found."
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    def for_run(self, config: Config) -> "Guess":
        return replace(self, highest=section(config, HiloConfig).highest)

    async def open(self, context: ToolContext) -> "Game":
        return Game(int(context.sample.ground_truth), self.highest)


@dataclass
class Game:
    """One episode's game."""

    hidden: int
    highest: int

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        number = arguments["number"]
        if not 1 <= number <= self.highest:
            raise ToolError(f"numbers are from 1 to {self.highest}")
        return ToolResult("found" if number == self.hidden else "higher" if number < self.hidden else "lower")

    async def close(self) -> None:
        return None


async def few_guesses(trajectory: Trajectory, *, each: float = 0.05) -> float:
    """1 for the right number after ####, less for every guess."""
    answer = trajectory.answers[-1].visible if trajectory.answers else ""
    right = answer.rpartition("####")[2].strip() == trajectory.sample.ground_truth
    return max(0.0, float(right) - each * len(list(trajectory.calls)))


def rows(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Without an end; the same seed gives the same rows."""
    numbers = random.Random(f"{split} {seed}")
    while True:
        prompt = "I think of a number from 1 to 100. Find it with guess, and end with #### and the number."
        hidden = str(numbers.randint(1, 100))
        yield {"prompt": [{"role": "user", "content": prompt}], "reward_model": {"ground_truth": hidden}}


guess = Guess()
TASK = Task(
    name="hilo",
    rows=rows,
    endless=True,
    tools=["guess"],
    scorer="few_guesses",
    defaults={"eval.samples": 16, "rollout.max_assistant_turns": 9, "sampling.max_tokens": 64},
)
