"""Every causal and vision-language class of the installed transformers, tiny, held against plain transformers.

    python tests/engines/every_architecture.py [--only WORD] [--write docs/architectures.md] [--json FILE]

Each class is made with random weights from its default config (`tiny_configs.py`), written to a folder, opened as a run
opens it, and held against plain transformers as `test_conformance.py` does: logits, packed and alone, through the
sampler's cache in pieces, a gradient step, saved and loaded. Each has a process of its own with limits of time and
memory. Models that see are given text; `test_vision_families.py` gives them images.
"""

import argparse
import json
import os
import re
import resource
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import transformers
from architectures import HYBRID, SUPPORTED, config_of
from test_conformance import (
    LENGTHS,
    PARTS,
    SCORED,
    TEMPERATURE,
    TOKENS,
    close,
    copied,
    inputs,
    naive_scores,
    policy_loss,
)
from tiny_configs import tiny
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from vision_families import SEEING

from turnwise.config.choices import ModelImplementation
from turnwise.engines.model.attention import Chunk, Regime, packed
from turnwise.engines.model.loading import choose_implementation, model_facts, read_model
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.samplers.cpu.steps import decode, prefill
from turnwise.engines.samplers.kv_cache import ActiveRows
from turnwise.errors import EngineError, one_line

SECONDS, MEMORY, PARAMETERS = 240, 10 * 2**30, 120_000_000
"""Limits of one class: of time (and as much CPU time), of address space, and of what still counts as tiny."""
FAMILIES = {"causal": AutoModelForCausalLM, "images": AutoModelForImageTextToText}
CLASSES = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "images": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
MORE = re.compile(r"pixel_values|[Bb]box|flattened_patches|encoder_outputs|inputs_embeds|required positional argument")
"""What classes say that were given text alone and want more."""
MARK = "<!-- What follows is written by tests/engines/every_architecture.py --write. -->"


class Verdict(StrEnum):
    """What came of a class."""

    EQUAL = "equal"
    LEARNS = "equal, learns only"
    REFUSED = "refused"
    NOT_RUN = "not run"
    DIFFERS = "differs"


TITLES = {
    Verdict.EQUAL: "Equal",
    Verdict.LEARNS: "Equal, but refused for writing or for packing",
    Verdict.REFUSED: "Refused",
    Verdict.NOT_RUN: "Not run: no tiny model of it was made, or transformers does not run the one that was",
    Verdict.DIFFERS: "Different, or ended otherwise than in words",
}


@dataclass(frozen=True, slots=True)
class Found:
    """`Found("causal", "olmo3", Verdict.EQUAL, "")`."""

    family: str
    kind: str
    verdict: Verdict
    why: str


class Different(Exception):
    """Something is not as plain transformers has it."""


def try_out(family: str, kind: str, folder: Path) -> Found:
    """In this process; whatever else is raised is a bug of ours."""
    try:
        plain = build(family, kind)
        plain.save_pretrained(folder)
        expected = None if wants_more(plain) else logits_alone(plain)
    except Exception as error:  # the library's own code, with a config that its authors never saw
        return Found(family, kind, Verdict.NOT_RUN, one_line(error)[:200])
    if expected is not None and not bool(expected.isfinite().all()):
        return Found(family, kind, Verdict.NOT_RUN, "its logits are not finite")
    source = ModelSource(kind, folder)
    try:
        choice = choose_implementation(source, ModelImplementation.auto)
        model_facts(source, choice)
        model = read_model(source, choice, torch.float32)
        if expected is None:
            return Found(family, kind, Verdict.NOT_RUN, "it computes nothing of text alone")
        limits = compare(model, plain, expected, folder)
    except EngineError as error:
        return Found(family, kind, Verdict.REFUSED, str(error).replace(str(folder), kind))
    except Different as error:
        return Found(family, kind, Verdict.DIFFERS, str(error))
    except Exception as error:  # what a person would get as a traceback
        return Found(family, kind, Verdict.DIFFERS, f"traceback: {one_line(error)[:200]}")
    return Found(family, kind, Verdict.LEARNS if limits else Verdict.EQUAL, limits)


def build(family: str, kind: str) -> PreTrainedModel:
    """Plain transformers with random weights that are large enough to hide nothing."""
    if family == "causal" and kind in SUPPORTED | HYBRID:
        config = config_of(kind)
    elif family == "images" and (known := [each for each in SEEING.values() if each.model_type == kind]):
        config = AutoConfig.for_model(kind, **known[0].config)
    else:
        config = tiny(kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.device("meta"):
            size = FAMILIES[family].from_config(config).num_parameters()
        if size > PARAMETERS:
            raise ValueError(f"its smallest config has {size:,} parameters")
        model = FAMILIES[family].from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
                elif parameter.numel() > 1 and 0 < (spread := float(parameter.std())) < 0.15:
                    parameter.mul_(0.25 / spread)
    made: PreTrainedModel = model
    return made


def wants_more(plain: PreTrainedModel) -> bool:
    """Whether the class refuses text alone."""
    try:
        logits_alone(plain)
    except (TypeError, ValueError) as error:
        return MORE.search(str(error)) is not None and plain.get_input_embeddings() is not None
    return False


def logits_alone(plain: PreTrainedModel) -> Tensor:
    """Each sequence by itself, through all that the family's own code does."""
    with torch.no_grad():
        return _logits(plain)


def _logits(plain: PreTrainedModel) -> Tensor:
    return torch.cat([plain(input_ids=part[None], use_cache=False).logits[0].float() for part in PARTS])


def compare(model: PolicyModel, plain: PreTrainedModel, expected: Tensor, folder: Path) -> str:
    """Raise `Different`, or say what is refused of a model that is equal."""
    shape = model.shape
    if expected.std() < 0.05:
        raise Different("nothing: its logits have no contrast")
    with torch.no_grad():
        alone = torch.cat([_alone(model, part) for part in PARTS])
        _check(alone, expected, "logits")
        if shape.no_packing is None:
            _check(model.logits(model(inputs(), packed(LENGTHS))), expected, "packed logits")
    if shape.no_caching is None:
        _check_pieces(model, expected)
    _check_step(model, plain)
    _check_saved(model, type(plain), folder / "saved")
    return "; ".join(dict.fromkeys(limit for limit in (shape.no_packing, shape.no_caching) if limit))


def _alone(model: PolicyModel, part: Tensor) -> Tensor:
    return model.logits(model(inputs((len(part),), part), packed([len(part)])))


def _check(found: Tensor, expected: Tensor, what: str) -> None:
    if not close(found, expected):
        raise Different(
            f"{what}: {float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9)):.1g} off"
        )


def _check_pieces(model: PolicyModel, expected: Tensor) -> None:
    whole, tokens = expected.split(LENGTHS), [part.numpy() for part in PARTS]
    rows, regime = ActiveRows.of(model, 3), Regime(4, 2, 32)
    rows.reserve(3, max(LENGTHS) + 3)
    with torch.inference_mode():
        for pieces in ([Chunk(0, 0, 20), Chunk(1, 0, 5), Chunk(2, 0, 11)], [Chunk(0, 20, 34), Chunk(2, 11, 21)]):
            fed = [tokens[piece.row][piece.start : piece.end] for piece in pieces]
            wanted = torch.stack([whole[piece.row][piece.end - 1] for piece in pieces])
            _check(prefill(model, rows, pieces, fed, regime), wanted, "logits of a prompt in pieces")
        for places in (np.array([34, 5, 21]), np.array([35, 6, 22]), np.array([36, 7, 23])):
            found = decode(model, rows, np.array([t[p] for t, p in zip(tokens, places, strict=True)]), places, regime)
            _check(
                found, torch.stack([part[at] for part, at in zip(whole, places, strict=True)]), "logits token by token"
            )


def _check_step(model: PolicyModel, plain: PreTrainedModel) -> None:
    """One step of plain gradient descent moves every weight as autograd through plain transformers says."""
    for parameter in plain.parameters():
        parameter.requires_grad_(True)
    policy_loss(*naive_scores(_logits(plain))).backward()
    trained = {parameter for parameter in plain.parameters() if parameter.grad is not None}
    wanted = revert_weight_conversion(
        plain,
        {
            n: p.grad if p in trained and p.grad is not None else torch.zeros_like(p)
            for n, p in plain.named_parameters()
        },
    )
    before = copied(model)
    if model.shape.no_packing is None:
        hidden = model(inputs(), packed(LENGTHS), rows=SCORED - 1)
    else:
        hidden = torch.cat([model(inputs((len(part),), part), packed([len(part)])) for part in PARTS])[SCORED - 1]
    policy_loss(*model.scores(hidden, TOKENS[SCORED], temperature=TEMPERATURE, chunk=13)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.sub_(parameter.grad)
        for name, after in copied(model).items():
            _check(before[name] - after, wanted.get(name, torch.zeros_like(after)), f"the gradient of {name}")
            before[name] = after


def _check_saved(model: PolicyModel, plain: type[PreTrainedModel], folder: Path) -> None:
    """Behind the step: what is written is what transformers reads."""
    folder.mkdir()
    model.save(folder)
    loaded = plain.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        _check(logits_alone(loaded), torch.cat([_alone(model, part) for part in PARTS]), "logits of what was saved")


# --- a process for each ------------------------------------------------------------------------------------------------


def guarded(
    family: str, kind: str, attempt: Callable[[str, str, Path], Found] = try_out, seconds: float = SECONDS
) -> Found:
    """The same in a child, whose crash or endless loop is a finding like another."""
    with tempfile.TemporaryDirectory() as made:
        answer = Path(made, "found.json")
        child = os.fork()
        if child == 0:
            _be_child(family, kind, attempt, Path(made), answer, seconds)
        status = _wait(child, time.monotonic() + seconds)
        if answer.exists():
            fields = json.loads(answer.read_text(encoding="utf-8"))
            return Found(family, kind, Verdict(fields["verdict"]), fields["why"])
    ended = f"ended by signal {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return Found(family, kind, Verdict.DIFFERS, f"the process {ended}")


def _be_child(
    family: str, kind: str, attempt: Callable[[str, str, Path], Found], folder: Path, answer: Path, seconds: float
) -> None:
    """Never returns."""
    status = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        torch.set_num_threads(1)
        (folder / "model").mkdir()
        found = attempt(family, kind, folder / "model")
        part = answer.with_suffix(".part")
        part.write_text(json.dumps(asdict(found)), encoding="utf-8")
        part.replace(answer)
        status = 0
    finally:
        os._exit(status)


def _wait(child: int, end: float) -> int:
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- the table ---------------------------------------------------------------------------------------------------------


def in_short(why: str) -> str:
    """A reason without the names that only hold for one class."""
    without = re.sub(r" \([^()]*(\([^()]*\)[^()]*)*, in \w+\)$", "", why)
    without = re.sub(r"\b(\w*For[A-Z]\w*|\w*LMHeadModel|\w*DecoderModel|\w+Attention\w*)\b", "the class", without)
    without = re.sub(r"'\w+_text_model'|\. did you mean .*$", "", without).replace("  ", " ")
    return re.sub(r"^[\w.-]+: |^(the class|[\w.-]+) (?=hides|says)", "", without).strip()


def table(found: Sequence[Found]) -> str:
    """The page's table: how many of each family, then the classes by verdict and reason."""
    lines = [f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}:", ""]
    lines += ["| | " + " | ".join(Verdict) + " | all |", "|---" * (len(Verdict) + 2) + "|"]
    for family, title in (("causal", "language models"), ("images", "vision-language models, with text")):
        some = [each.verdict for each in found if each.family == family]
        lines.append(
            f"| {title} | " + " | ".join(str(some.count(verdict)) for verdict in Verdict) + f" | {len(some)} |"
        )
    for verdict, title in TITLES.items():
        reasons: dict[str, list[str]] = {}
        for each in found:
            if each.verdict is verdict:
                name = each.kind if each.family == "causal" else f"*{each.kind}*"
                reasons.setdefault(in_short(each.why), []).append(name)
        lines += ["", f"## {title}"] if reasons else []
        for reason, names in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
            text = f"- {reason.replace('|', '/')} ({len(names)}): " if reason else ""
            lines += textwrap.wrap(
                text + ", ".join(names), 120, subsequent_indent="  " if reason else "", break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"


def write_page(page: Path, found: Sequence[Found]) -> None:
    """Renew what stands below the mark."""
    above, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise SystemExit(f"{page} has no line {MARK}")
    page.write_text(f"{above}{MARK}\n\n{table(found)}", encoding="utf-8")


def chosen(only: str = "") -> Iterable[tuple[str, str]]:
    """(family, model_type) of all classes, or of those whose model_type fits."""
    return ((family, kind) for family, kinds in CLASSES.items() for kind in kinds if re.search(only, kind))


def main(arguments: Sequence[str] | None = None) -> list[Found]:
    """A line for each class, then the totals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression for model types")
    parser.add_argument("--write", type=Path, help="a page whose table is renewed")
    parser.add_argument("--json", type=Path, help="where all that was found is written")
    options = parser.parse_args(arguments)
    found: list[Found] = []
    for family, kind in chosen(options.only):
        found.append(guarded(family, kind))
        print(f"{family:7} {kind:28} {found[-1].verdict:19} {found[-1].why}", flush=True)
    print("\n" + "\n".join(table(found).splitlines()[2:6]))
    if options.write:
        write_page(options.write, found)
    if options.json:
        content: Any = [asdict(each) for each in found]
        options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
