"""Questions of one to three hops over the shipped articles, answered with `search` and with citations."""

import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from turnwise.data.task import Task
from turnwise.data.write import write_rows
from turnwise.errors import DataError
from turnwise.errors.nearest_name import unknown
from turnwise.ext.research.corpus.articles import Article, Corpus, shipped
from turnwise.ext.research.corpus.relations import RELATIONS, VALUE, Relation, named
from turnwise.ext.research.scoring import citations, evidence_of, shown_ids
from turnwise.system.metrics import Reduction
from turnwise.types import ToolCall, Trajectory

if TYPE_CHECKING:
    from turnwise.engines.samplers.scripted import Script, ScriptRequest

NAME = "deep_research"
SYSTEM = (
    "Answer with the help of search, one step at a time. "
    "End with <answer>...</answer> and the [id] of each article you used."
)
SPLITS = ("train", "test")
MOST_HOPS = 3
TEST_SHARE = 5
"""One article in so many is where questions of the test begin, and none of the training."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One step: what the article of a thing says by one relation."""

    article: Article
    relation: Relation


@dataclass(frozen=True, slots=True)
class Question:
    """`Question("On which river does the town lie ...?", "River Gesaes", hops)`; its hops are its evidence."""

    text: str
    answer: str
    hops: tuple[Hop, ...]

    @property
    def evidence(self) -> list[str]:
        """The ids of the articles that hold the answer's steps."""
        return [hop.article.id for hop in self.hops]


def split_of(article: Article) -> str:
    """Which split asks about an article first, whatever the seed."""
    return "test" if hashlib.sha256(article.id.encode()).digest()[0] % TEST_SHARE == 0 else "train"


@functools.cache
def questions(split: str) -> dict[int, list[Question]]:
    """All questions of a split by their number of hops."""
    corpus = shipped()
    starts = [article for article in corpus.articles if split_of(article) == split]
    return {
        size: [_question(path, corpus) for start in starts for path in _paths(start, size, corpus)]
        for size in range(1, MOST_HOPS + 1)
    }


def _paths(start: Article, size: int, corpus: Corpus) -> Iterator[tuple[Hop, ...]]:
    """Every way of `size` steps that visits no article twice."""
    for relation in RELATIONS:
        if relation.name not in start.facts:
            continue
        if size == 1:
            yield (Hop(start, relation),)
        elif relation.object != VALUE:
            for rest in _paths(corpus.by_id[start.facts[relation.name]], size - 1, corpus):
                if all(hop.article is not start and _goal(hop) != start.id for hop in rest):
                    yield (Hop(start, relation), *rest)


def _goal(hop: Hop) -> str:
    return hop.article.facts[hop.relation.name]


def _question(hops: tuple[Hop, ...], corpus: Corpus) -> Question:
    about = named(hops[0].article.title, hops[0].article.kind)
    for hop in hops[:-1]:
        about = hop.relation.phrase.format(about)
    return Question(hops[-1].relation.question.format(about), _answer_of(hops[-1], corpus), hops)


def _answer_of(hop: Hop, corpus: Corpus) -> str:
    goal = _goal(hop)
    return goal if hop.relation.object == VALUE else corpus.by_id[goal].title


@functools.lru_cache(maxsize=8)
def order(split: str, seed: int) -> list[Question]:
    """A split's questions as a seed puts them: one hop, two, three, and again, until one kind is used up."""
    if split not in SPLITS:
        raise DataError(unknown(f"split of {NAME}", split, SPLITS))
    shuffled = []
    for size, drawn in questions(split).items():
        shuffled.append(list(drawn))
        random.Random(f"{seed}/{split}/{size}").shuffle(shuffled[-1])
    return [question for together in zip(*shuffled, strict=False) for question in together]


def rows(split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of a split, shaped as verl has them."""
    for index, question in enumerate(order(split, seed)):
        yield {
            "data_source": NAME,
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}],
            "ability": "research",
            "reward_model": {
                "style": "rule",
                "ground_truth": {"target": question.answer, "evidence": question.evidence},
            },
            "extra_info": {"split": split, "index": index, "seed": seed, "hops": len(question.hops)},
        }


def prepare(out: Path, *, seed: Annotated[int, "of the order"] = 0) -> dict[Path, int]:
    """Write train.parquet and test.parquet; returns the rows of each file."""
    return {out / f"{split}.parquet": write_rows(list(rows(split, seed)), out / f"{split}.parquet") for split in SPLITS}


def metrics(trajectory: Trajectory) -> dict[str, float]:
    """`searches`; `evidence_found`: the share of the evidence that searches showed; `citations` of the last message."""
    evidence = evidence_of(trajectory.sample)
    answer = trajectory.answers[-1].visible if trajectory.answers else ""
    return {
        "searches": float(sum(call.call.name == "search" for call in trajectory.calls)),
        "evidence_found": len(evidence & shown_ids(trajectory)) / len(evidence),
        "citations": float(len(citations(answer))),
    }


# --- traces to learn from before RL -------------------------------------------------------------------------------

HASTY = 0.3
"""Share of traces of several hops that take the last step but one for the answer."""
UNCITED = 0.3
"""Share of traces that cite only the last article."""
PASSAGES = 2
Action = Callable[["ScriptRequest"], str]


def script(seed: int) -> "Script":
    """A Script for samples of this task; the noise key decides every choice."""

    def say(request: "ScriptRequest") -> str:
        split, index = request.noise.sample.rsplit("/", 1)[-1].split(":")
        rng = random.Random(f"{request.noise.seed}/{request.noise.sample}/{request.noise.sibling}")
        actions = _actions(order(split, seed)[int(index)], rng)
        return actions[min(request.turn, len(actions) - 1)](request)

    return say


def _actions(question: Question, rng: random.Random) -> list[Action]:
    """A search for each hop, and the answer."""
    hops = question.hops
    if len(hops) > 1 and rng.random() < HASTY:
        hops = hops[:-1]
    cited = hops[-1:] if rng.random() < UNCITED else hops
    sources = " ".join(f"[{hop.article.id}]" for hop in cited)
    answer = f"<answer>{_answer_of(hops[-1], shipped())}</answer> {sources}"
    return [*(_search(hop) for hop in hops), lambda request: answer]


def _search(hop: Hop) -> Action:
    call = ToolCall("", "search", {"query": f"{hop.article.title} {hop.relation.words}", "k": PASSAGES})
    return lambda request: request.call_format.render_call(call)


TASK = Task(
    name=NAME,
    rows=rows,
    prepare=prepare,
    tools=("search",),
    scorer="cited_answer",
    reductions={"searches": Reduction.MEAN, "evidence_found": Reduction.MEAN, "citations": Reduction.MEAN},
    metrics=metrics,
    script="turnwise.ext.research.task:script",
    defaults={"sampling.max_tokens": 192, "training.groups": 16, "training.minibatches": 2},
)
