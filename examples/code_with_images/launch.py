"""Train code with images on a machine of a profile, or with --dry-run say what that would be; the scripts call it.

    python examples/code_with_images/launch.py h200 --dry-run
    python examples/code_with_images/launch.py h200 --save-path outputs training.steps=100

The config is codev_7b.yaml over the profile's file; key=value stands over both. The same command again goes on where
it was stopped.
"""

import argparse
import sys
from pathlib import Path

from turnwise.commands.cli import main as turnwise
from turnwise.config import Config
from turnwise.config.compose import Composed
from turnwise.config.sections import flat
from turnwise.data.task_config import compose
from turnwise.errors import TurnwiseError
from turnwise.reports.preflight import Outcome, preflight

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "codev_7b.yaml"
MODEL_FILES = "config.json, the tokenizer's and the processor's files"
OF_THE_MACHINE = ("finds no CUDA device", "has no package", "and this machine has", "cannot join the Ray cluster")
"""In findings that say nothing against the config: only this machine lacks what the profile is for."""


def overrides(profile: str, save_path: Path, given: list[str]) -> list[str]:
    """What is said to `turnwise train` beside the recipe."""
    file = HERE / f"{profile}.yaml"
    return [f"profile='{file}'", f"runs_dir='{save_path}'", f"run=codev_7b_{profile}", "resume=auto", *given]


def dry_run(asked: list[str]) -> int:
    """Print the config, the plan and all that `turnwise check` finds; 1 where something is wrong with them."""
    composed = compose(asked, RECIPE)
    path = Path(composed.config.model.path).expanduser()
    if not path.is_dir():
        sys.stderr.write(
            f"model.path={composed.config.model.path} (BASE_MODEL_PATH) is not a folder here, and a dry run needs the "
            f"model's small files: {MODEL_FILES}; no weights. tiny.py makes a folder that stands for it\n"
        )
        return 2
    _print_config(composed)
    report = preflight(composed)
    sys.stdout.write(f"\n{report.plan}\n")
    lacking = [one for one in report.errors if any(words in one.text for words in OF_THE_MACHINE)]
    for finding in report.findings:
        word = "not here" if finding in lacking else finding.outcome.value
        if finding.outcome is not Outcome.OK or finding.check != "environment":
            sys.stdout.write(f"{word:9}{finding.check}: {finding.text}\n")
    wrong = len(report.errors) > len(lacking)
    sys.stdout.write(f"{'FAILED' if wrong else 'the config resolves'}; nothing was written\n")
    return int(wrong)


def _print_config(composed: Composed) -> None:
    values, defaults = flat(composed.config), flat(Config())
    for key in (key for key in values if values[key] != defaults[key]):
        origin = composed.origins[key].replace(f"{HERE}/", "")
        sys.stdout.write(f"{key:32}{values[key]!s}   ({origin})\n")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, 1 for a failed check, 2 for a mistake in what was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", help="h200, l40s, ray, or another YAML file beside this one, without .yaml")
    parser.add_argument("--save-path", type=Path, default=Path("outputs"), help="the folder of runs (default outputs)")
    parser.add_argument("--dry-run", action="store_true", help="resolve config and plan; needs no GPU and no weights")
    parser.add_argument("given", nargs="*", metavar="key=value", help="config values")
    args = parser.parse_intermixed_args(argv)
    asked = overrides(args.profile, args.save_path, args.given)
    try:
        if args.dry_run:
            return dry_run(asked)
    except TurnwiseError as error:  # a mistake that a person can mend
        sys.stderr.write(f"{error}\n")
        return 2
    return turnwise(["train", "--config", str(RECIPE), *asked])


if __name__ == "__main__":
    sys.exit(main())
