"""GSM8K for a very small model: short prompts, a calculator, a user who doubts, and the solutions as demonstrations.

`turnwise prepare examples/gsm8k_smollm2/task.py` writes the files. In a solution of GSM8K each `<<48/2=24>>` becomes a
call of `calculate`; `reciter` is an engine that says them, so that demonstrations are episodes like all others, with
the real tool, the real user and the real reward.
"""

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from turnwise import Task, ToolError
from turnwise.chat.formats import calculator
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config import Config
from turnwise.data.loader import load_samples
from turnwise.data.rows import read_rows
from turnwise.data.tasks import gsm8k
from turnwise.data.write import write_rows
from turnwise.engines.samplers.scripted import ScriptedSampler, ScriptRequest
from turnwise.rollout.tools.calculate import evaluate

HERE = Path(__file__).resolve().parent
SYSTEM = "Solve the problem step by step. End with #### and the number."
DOUBT = "Are you sure? Calculate the last step again."
END = "<|im_end|>"
_ANNOTATION = re.compile(r"<<([^<>]*)=([^<>=]*)>>")


def prepare(
    out: Path,
    *,
    source: Annotated[str, "a folder with train.jsonl and test.jsonl (or .parquet), or a hub id"] = gsm8k.HUB_ID,
) -> dict[Path, int]:
    """Write train.parquet and test.parquet, and demonstrations.parquet of the solutions that add up."""
    plain = gsm8k.prepare(out / "plain", source=source)
    rows = {path.stem: [_short(row.values) for row in read_rows(path)] for path in plain}
    rows["demonstrations"] = [row for row in rows["train"] if spoken(row["extra_info"]["answer"])]
    made = {out / f"{name}.parquet": found for name, found in rows.items()}
    return {path: write_rows(found, path) for path, found in made.items()}


def _short(row: dict[str, Any]) -> dict[str, Any]:
    question = row["extra_info"]["question"].strip()
    return row | {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]}


def spoken(answer: str) -> list[str]:
    """What the assistant says turn by turn: a solution up to each call, its end, then the last step again and the end.

    Empty for a solution that calculates nothing, or something else than it says.
    """
    solution, _, _ = answer.rpartition("####")
    pieces = _ANNOTATION.split(solution.strip())  # words, expression, result, words, expression, ...
    expressions, results, words = pieces[1::3], pieces[2::3], pieces[::3]
    values = [_value(expression, result) for expression, result in zip(expressions, results, strict=True)]
    truth = gsm8k.ground_truth(answer)
    if not values or truth is None or not all(values):
        return []
    for number, (value, result) in enumerate(zip(values, results, strict=True), start=1):
        if words[number].startswith(result):  # .5 where the calculator says 0.5
            words[number] = f"{value}{words[number].removeprefix(result)}"
    end = f"#### {truth}"
    said = [f"{before}<<{expression}>>" for before, expression in zip(words, expressions, strict=False)]
    return [*said, f"{words[-1]}\n{end}", f"{expressions[-1]} = <<{expressions[-1]}>>", f"{values[-1]}\n{end}"]


def _value(expression: str, result: str) -> str | None:
    """What the calculator says; None when that is not the result."""
    try:
        value = evaluate(expression)
        return value if Fraction(value) == Fraction(result.strip()) else None
    except (ToolError, ValueError):
        return None


def reciter(config: Config, source: object, tokenizer: Tokenizer) -> ScriptedSampler:
    """An engine that recites the solutions of the rows it is evaluated on."""
    samples = load_samples(config.data.eval_files, prompt_key=config.data.prompt_key)
    said = {sample.id: spoken(sample.info["extra_info"]["answer"]) for sample in samples}

    def say(request: ScriptRequest) -> str:
        return said[request.noise.sample][request.turn]

    (end,) = tokenizer.encode(END).ids
    return ScriptedSampler(tokenizer, say, end_id=end, call_format=calculator)


TASK = Task(
    name="gsm8k_smollm2",
    data_source=gsm8k.HUB_ID,
    prepare=prepare,
    tools=["calculate"],
    interaction="code_verify",
    scorer="gsm8k",
    reductions=gsm8k.TASK.reductions,
    metrics=gsm8k.metrics,
    defaults={
        "data.train_files": ["data/gsm8k_smollm2/train.parquet"],
        "data.eval_files": ["data/gsm8k_smollm2/test.parquet"],
        "chat.template": str(HERE / "chatml_calculator.jinja"),
        "chat.tool_format": "calculator",
        "rollout.interaction_kwargs": {"feedback_message": DOUBT},
        "rollout.max_assistant_turns": 12,
        "rollout.max_tokens": 400,
        "sampling.max_tokens": 128,
        "eval.samples": None,
        "training.samples": None,
    },
)
