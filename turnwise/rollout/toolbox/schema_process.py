"""The host's end of the schema checkers: a few processes, so that no pattern and no schema holds the run."""

import asyncio
from pathlib import Path
from typing import Any

from turnwise.system.children import ClockedProcesses, NoAnswer

PROCESSES = 2
SECONDS = 1.0
"""CPU time of one check; the honest ones take a thousandth of it."""
QUESTIONS = 100_000


class CheckTookTooLong(Exception):
    """A check that its clock ended, or that nobody answered."""


class SchemaCheckers(ClockedProcesses):
    """All processes of this one that check schemas."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).with_name("schema_checker.py"), PROCESSES, QUESTIONS)

    def problem(self, schema: str, **arguments: Any) -> str | None:
        """What is wrong with a schema, or with `arguments` for it; from a thread that may wait."""
        seconds = SECONDS
        try:
            problem: str | None = self.ask({"schema": schema, **arguments}, seconds)["problem"]
        except NoAnswer as error:
            raise CheckTookTooLong(f"took longer than {seconds:g} s" if error.too_much else str(error)) from error
        return problem

    async def problem_soon(self, schema: str, **arguments: Any) -> str | None:
        """The same without holding the event loop."""
        return await asyncio.wrap_future(self.submit(self.problem, schema, **arguments))


checkers = SchemaCheckers()
