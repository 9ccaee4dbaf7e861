"""What the checks find: lines of a report, and the error that an eval or a training makes of them."""

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from turnwise.engines.memory_plan import MemoryPlan
from turnwise.errors import TurnwiseError


class Outcome(enum.StrEnum):
    """How one check of the report ended."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: a check, how it ended, and what it says."""

    check: str
    outcome: Outcome
    text: str
    kind: type[TurnwiseError] = TurnwiseError
    """What is raised when it is an error that nobody reads in a report."""


@dataclass(slots=True)
class Report:
    """What was found. `plan` is empty when an error kept it from being made."""

    findings: list[Finding] = field(default_factory=list)
    plan: str = ""
    memory: MemoryPlan | None = None
    """Of the GPU, where one is used."""

    @property
    def errors(self) -> list[Finding]:
        """The findings that must be mended before a run."""
        return [finding for finding in self.findings if finding.outcome is Outcome.ERROR]

    @property
    def passed(self) -> bool:
        """Whether no check ended in an error."""
        return not self.errors

    def add(self, check: str, outcome: Outcome, text: str) -> None:
        """Note one finding; one that is there already, such as of both splits, is not noted again."""
        self._note(Finding(check, outcome, text))

    def refuse(self, check: str, error: TurnwiseError) -> None:
        """Note an error that was raised."""
        self._note(Finding(check, Outcome.ERROR, str(error), type(error)))

    def _note(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    @contextlib.contextmanager
    def recording(self, check: str) -> Iterator[None]:
        """An error inside is a finding; what comes after is still tried."""
        try:
            yield
        except TurnwiseError as error:
            self.refuse(check, error)

    def raise_errors(self) -> None:
        """Stop a run that has no report to show: the first error, and how many more there are."""
        if not self.errors:
            return
        first, more = self.errors[0], len(self.errors) - 1
        rest = f" (and {more} more: `turnwise check` lists them)" if more else ""
        raise first.kind(f"{first.check}: {first.text}{rest}")
