"""The weights that a training leaves for use, `RUN/policy`: its last ones, or those of a clearly better evaluation."""

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from turnwise.config.training import is_share
from turnwise.system.files import cannot, replacing

BEST, SHIPPED = "best", "shipped.json"
EVALUATION = "evaluation.json"
FOLDERS = ("policy", "policy_adapter")

Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The weights after a step, and what their evaluation found: `Evaluated(30, {"accuracy": 0.92})`.

    They are compared by `metric`, one of the numbers found.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    step: Annotated[int, Field(ge=0)]
    found: dict[str, Number]
    metric: str = "accuracy"

    @property
    def accuracy(self) -> float | None:
        return self.found.get("accuracy")

    @property
    def value(self) -> float | None:
        """What weights are compared by; None where the evaluation has no such number."""
        return self.found.get(self.metric)

    @property
    def stderr(self) -> float:
        """Its standard error; 0 of what tasks measure, which has none."""
        kind, slash, source = self.metric.partition("/")
        return self.found.get(f"{kind}_stderr{slash}{source}", 0.0)

    def is_clearly_better(self, other: "Evaluated") -> bool:
        """By more than the standard error of the difference: the better of two equal ones is often the luckier."""
        if self.value is None or other.value is None:
            return False
        return self.value - other.value > math.hypot(self.stderr, other.stderr)

    def __str__(self) -> str:
        if self.value is None:
            return f"no {self.metric}"
        if is_share(self.metric):
            return f"{self.value:.1%} ± {self.stderr:.1%}"
        return f"{self.value:.3g} ± {self.stderr:.2g}" if self.stderr else f"{self.value:.3g}"


@dataclass(frozen=True, slots=True)
class Shipped:
    """What `RUN/policy` is, and what the last weights were."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    policy: Evaluated
    last: Evaluated

    @property
    def is_last(self) -> bool:
        return self.policy.step == self.last.step

    def __str__(self) -> str:
        if self.is_last:
            return f"policy has the weights of step {self.last.step}, the last"
        return (
            f"policy has the weights of step {self.policy.step}, {self.policy.metric} {self.policy}: the last step, "
            f"{self.last.step}, has {self.last}. The best of several evaluations is a little too high"
        )


_EVALUATED, _SHIPPED = TypeAdapter(Evaluated), TypeAdapter(Shipped)


def keep_best(run: Path, evaluated: Evaluated, fill: Callable[[Path], None]) -> None:
    """Keep the weights of an evaluation, which `fill` writes, in place of those kept before."""

    def with_numbers(folder: Path) -> None:
        fill(folder)
        (folder / EVALUATION).write_text(json.dumps(asdict(evaluated)), encoding="utf-8")

    _replace_folder(run / BEST, with_numbers)


def read_best(run: Path) -> Evaluated | None:
    """Of which evaluation weights are kept; None where there are none, or it cannot be told."""
    try:
        return _EVALUATED.validate_json((run / BEST / EVALUATION).read_bytes())
    except (OSError, ValidationError):
        return None


def forget_best(run: Path) -> None:
    """What was evaluated after the step that a run is resumed at is evaluated again."""
    shutil.rmtree(run / BEST, ignore_errors=True)


def ship(run: Path, best: Evaluated | None, last: Evaluated, checkpoint: Path) -> Shipped:
    """Put weights into `RUN/policy`: the best that are kept if they are clearly better, else the checkpoint's."""
    is_best = best is not None and best.step != last.step and best.is_clearly_better(last)
    chosen = Shipped(best if is_best and best is not None else last, last)
    source = run / BEST if is_best else checkpoint
    for name in FOLDERS:
        if (source / name).is_dir():
            _replace_folder(run / name, lambda folder, name=name: link_files(source / name, folder))  # type: ignore[misc]
        else:
            shutil.rmtree(run / name, ignore_errors=True)
    with replacing(run / SHIPPED) as file:
        file.write(json.dumps(asdict(chosen), indent=2).encode())
    return chosen


def read_shipped(run: Path) -> Shipped | None:
    """What a run has shipped; None before its end, and of one that did not say."""
    try:
        return _SHIPPED.validate_json((run / SHIPPED).read_bytes())
    except (OSError, ValidationError):
        return None


def link_policy(checkpoint: Path, folder: Path) -> None:
    """The policy of a checkpoint, in another folder."""
    for name in FOLDERS:
        if (checkpoint / name).is_dir():
            link_files(checkpoint / name, folder / name)


def link_files(source: Path, target: Path) -> None:
    """The same files under another name, which takes no room; copies where the disk has no such thing.

    Files of a checkpoint are never written again, only removed with it.
    """
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        elif path.is_file() and not path.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, copy)
            except OSError:
                shutil.copyfile(path, copy)


def _replace_folder(final: Path, fill: Callable[[Path], None]) -> None:
    """A folder that appears complete or not at all."""
    mark = secrets.token_hex(4)
    temporary, old = (final.with_name(f".{final.name}.{mark}.{end}") for end in ("tmp", "old"))
    try:
        for leftover in final.parent.glob(f".{final.name}.*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        if final.exists():
            os.replace(final, old)
        os.replace(temporary, final)
    except OSError as error:
        raise cannot("write", final, error) from error
    finally:
        for folder in (temporary, old):
            shutil.rmtree(folder, ignore_errors=True)
