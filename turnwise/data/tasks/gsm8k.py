"""GSM8K as rows: grade-school word problems, with or without tools and an interaction."""

import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from turnwise.data.number_answers import extract_answer, extract_loose, read_number
from turnwise.data.rows import Row, RowError, expand, read_rows
from turnwise.data.task import Task
from turnwise.data.write import write_rows
from turnwise.errors import ConfigError, DataError
from turnwise.errors.nearest_name import nearest, unknown
from turnwise.system.metrics import Reduction
from turnwise.types import Trajectory

HUB_ID = "openai/gsm8k"
HUB_CONFIG = "main"
SPLITS = ("train", "test")
AGENT = "tool_agent"
TOOLS = ("calculate", "python")
DEFAULT_INTERACTION = "gsm8k"

_INSTRUCTION = "Work it out one step at a time, then give the result on a last line that starts with ####."
_EXPERT = "You solve word problems in mathematics."
_WITH_TOOLS = (
    "First think about what has to be computed. Use the tools for the computing, as often as you need them, and check "
    "your result with them before you give it."
)
_WITH_USER = "The user may doubt or reject your answer; then go through your reasoning again and correct what is wrong."
_FORM = "Write the final answer as `#### <number>`."


def metrics(trajectory: Trajectory) -> dict[str, float]:
    """`marked`: whether the last message gives its answer after ####; `answers`: how many messages do; `retries`: how
    often it answered again; `first_acc`, `last_acc`: whether the first and the last of its answers are right; `loose`:
    whether the last is right in any form, which tells a wrong form from a wrong number."""
    answers = [message.visible for message in trajectory.answers if not message.tool_calls]
    marked = ["####" in answer.visible for answer in trajectory.answers]
    values = {"marked": float(bool(marked) and marked[-1]), "answers": float(sum(marked))}
    truth = read_number(str(trajectory.sample.ground_truth))
    right = [extract_answer(text) == truth for text in answers]
    if truth is not None and right:  # else it is scored by another rule
        loose = right[-1] or extract_loose(answers[-1]) == truth
        values |= {"first_acc": float(right[0]), "last_acc": float(right[-1]), "loose": float(loose)}
    return values | {"retries": float(max(0, len(answers) - 1))}


class Flavour(enum.StrEnum):
    """What the rows ask of the rollout."""

    PLAIN = "plain"
    """One question, one answer."""
    TOOL = "tool"
    """The model may call `calculate` and `python`."""
    INTERACTION = "interaction"
    """The interaction reacts to the answer."""
    TOOL_INTERACTION = "tool+interaction"
    """Both."""

    @property
    def has_tools(self) -> bool:
        """Whether the rows of this flavour choose tools."""
        return self in (Flavour.TOOL, Flavour.TOOL_INTERACTION)

    @property
    def has_interaction(self) -> bool:
        """Whether rows name an interaction."""
        return self in (Flavour.INTERACTION, Flavour.TOOL_INTERACTION)


def prepare(
    out: Path,
    *,
    source: Annotated[str, "a folder with train.jsonl and test.jsonl (or .parquet), or a hub id"] = HUB_ID,
    flavour: Annotated[Flavour | None, "plain (default), tool, interaction or tool+interaction"] = None,
    interaction: Annotated[str | None, "which one the rows name (default gsm8k), such as code_verify"] = None,
) -> dict[Path, int]:
    """Write train.parquet and test.parquet of GSM8K; nothing is written unless both can be made."""
    chosen = flavour or (Flavour.INTERACTION if interaction else Flavour.PLAIN)
    out = expand(out)
    folder = _local(source)
    if folder is not None and folder.resolve() == out.resolve():
        raise DataError(f"{out}: is the source itself; give another folder for the prepared files")
    read_from = str(_from_hub(source)) if folder is None else source
    files = {out / f"{split}.parquet": list(rows(split, read_from, chosen, interaction)) for split in SPLITS}
    return {path: write_rows(records, path) for path, records in files.items()}


def rows(split: str, source: str, flavour: Flavour, interaction: str | None) -> Iterator[dict[str, Any]]:
    """The rows of a split of the data in a folder. `interaction` None means `gsm8k` where one is needed."""
    if split not in SPLITS:
        raise DataError(unknown("split of gsm8k", split, SPLITS))
    name = _interaction_name(flavour, interaction)
    for index, row in enumerate(_read_folder(split, expand(source))):
        yield _make_row(row, split, index, flavour, name)


def ground_truth(answer: str) -> str | None:
    """The number after the last `####` without its commas; None when there is none."""
    _, mark, tail = answer.rpartition("####")
    return tail.replace(",", "").strip() or None if mark else None


def _make_row(row: Row, split: str, index: int, flavour: Flavour, interaction: str | None) -> dict[str, Any]:
    question, answer = (_text(row, column) for column in ("question", "answer"))
    truth = ground_truth(answer)
    if truth is None:
        raise RowError(row, "answer", "no number after ####")
    record: dict[str, Any] = {
        "data_source": HUB_ID,
        "prompt": [{"role": "user", "content": f"{question}\n\n{_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }
    if flavour is Flavour.PLAIN:
        return record
    record["agent_name"] = AGENT  # other trainers run a single turn without it, and do not say so
    system = [_EXPERT, _WITH_TOOLS if flavour.has_tools else "", _WITH_USER if flavour.has_interaction else "", _FORM]
    record["prompt"].insert(0, {"role": "system", "content": " ".join(sentence for sentence in system if sentence)})
    if flavour.has_tools:
        # Our tools need nothing from the row; the empty objects are left out of the file.
        record["extra_info"] |= {"need_tools_kwargs": False, "tools_kwargs": {tool: {} for tool in TOOLS}}
        record["extra_info"]["tool_selection"] = list(TOOLS)
    if interaction is not None:
        record["extra_info"]["interaction_kwargs"] = {"name": interaction, "query": question, "ground_truth": truth}
    return record


def _text(row: Row, column: str) -> str:
    value = row.values.get(column)
    if not isinstance(value, str) or not value.strip():
        hint = "" if column in row.values else f": {nearest(column, row.values)}"
        raise RowError(row, column, f"expected text{hint}")
    return value


def _interaction_name(flavour: Flavour, interaction: str | None) -> str | None:
    if not flavour.has_interaction and interaction is not None:
        raise ConfigError(f"flavour {flavour} has no interaction: leave {interaction!r} out or choose another flavour")
    if interaction is not None and not interaction.strip():
        raise ConfigError("the name of the interaction is empty")
    return (interaction or DEFAULT_INTERACTION) if flavour.has_interaction else None


def _local(source: str) -> Path | None:
    """The folder that `source` names; None when it can only be a hub id."""
    folder = expand(source)
    try:
        if source.strip() and folder.is_dir():
            return folder
        is_file = folder.is_file()
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror}") from error
    if is_file:
        raise DataError(f"{source}: is a file; give the folder that holds train.jsonl and test.jsonl")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source):
        raise DataError(f"{source!r}: no such folder, and not a hub id like {HUB_ID}")
    return None


def _read_folder(split: str, folder: Path) -> Iterator[Row]:
    """Rows from `train.jsonl` or `train.parquet`, or from the parts of a downloaded copy (main/train-0000*.parquet)."""
    try:
        whole = [path for path in (folder / f"{split}.jsonl", folder / f"{split}.parquet") if path.exists()]
        parts = [sorted(parent.glob(f"{split}-*.parquet")) for parent in (folder, folder / HUB_CONFIG)]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error
    if len(whole) > 1:
        raise DataError(f"{folder}: holds {whole[0].name} and {whole[1].name}; remove the one that is not the source")
    paths = whole or parts[0] or parts[1]
    if not paths:
        raise DataError(f"{folder}: holds neither {split}.jsonl nor {split}.parquet")
    for path in paths:
        yield from read_rows(path)


def _from_hub(source: str) -> Path:
    """The folder in the hub's local cache that holds a data set's parquet files, downloaded when they are not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, repo_type="dataset", allow_patterns=[f"{HUB_CONFIG}/*.parquet"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise DataError(
            f"{source!r} is not a folder here, and the hub does not give it: {reason}; "
            "download it elsewhere and give --source the folder that holds train.jsonl and test.jsonl"
        ) from error


TASK = Task(
    name="gsm8k",
    data_source=HUB_ID,
    prepare=prepare,
    scorer="gsm8k",
    reductions=dict.fromkeys(("marked", "answers", "retries", "first_acc", "last_acc", "loose"), Reduction.MEAN),
    metrics=metrics,
    defaults={
        "data.train_files": ["data/gsm8k/train.parquet"],
        "data.eval_files": ["data/gsm8k/test.parquet"],
        "sampling.max_tokens": 512,
    },
)
