"""Questions over the invented world: one answer each, splits that share nothing, and traces that are played and scored."""

import asyncio
import itertools
from collections import Counter

import pytest
from rich.console import Console

from turnwise.data.loader import load_samples
from turnwise.data.task_config import configure
from turnwise.errors import DataError
from turnwise.ext.research.corpus.articles import shipped
from turnwise.ext.research.scoring import cited_answer
from turnwise.ext.research.task import HASTY, metrics, order, questions, rows, script
from turnwise.ext.research.task import prepare as prepare_files
from turnwise.rollout.collector import run_group
from turnwise.rollout.prepare import open_context, prepare
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.train import train
from turnwise.types import CallStatus, Trajectory


def test_every_question_has_one_answer_that_its_evidence_gives():
    corpus = shipped()
    asked: dict[str, str] = {}
    for question in itertools.chain(*questions("train").values(), *questions("test").values()):
        assert asked.setdefault(question.text, question.answer) == question.answer
        assert len(set(question.evidence)) == len(question.hops)
        assert question.answer not in question.text
        for hop, after in itertools.pairwise(question.hops):
            assert hop.article.facts[hop.relation.name] == after.article.id
            assert after.article.title not in question.text, "a later step is found, not told"
        assert question.answer in corpus.by_id[question.evidence[-1]].text
    assert len(asked) > 5000


@pytest.mark.parametrize("seeds", [(0, 0), (1, 5)])
def test_train_and_test_begin_at_different_articles_whatever_the_seed(seeds):
    begin = [
        {q.hops[0].article.id for q in order(split, seed)} for split, seed in zip(("train", "test"), seeds, strict=True)
    ]
    texts = [{q.text for q in order(split, seed)} for split, seed in zip(("train", "test"), seeds, strict=True)]
    assert not begin[0] & begin[1]
    assert not texts[0] & texts[1]


def test_rows_are_reproducible_differ_by_seed_and_hold_all_hops(tmp_path):
    first = list(itertools.islice(rows("test", 1), 30))
    assert first == list(itertools.islice(rows("test", 1), 30))
    assert first != list(itertools.islice(rows("test", 2), 30))
    assert Counter(row["extra_info"]["hops"] for row in first) == {1: 10, 2: 10, 3: 10}
    with pytest.raises(DataError, match="did you mean 'test'"):
        next(rows("tset", 1))
    written = prepare_files(tmp_path)
    (sample, *_) = load_samples([tmp_path / "test.parquet"], prompt_key="prompt")
    assert sample.prompt[-1].text == order("test", 0)[0].text
    assert min(written.values()) > 500


def test_scripted_traces_search_answer_and_are_scored():
    config = configure("task=deep_research")
    prepared = prepare(config, "train", limit=60)

    async def play() -> list[Trajectory]:
        async with open_context(prepared, script(config.seed)) as context:
            groups = [await run_group(sample, [0], step=0, context=context) for sample in prepared.samples]
        return [group.trajectories[0] for group in groups]

    trajectories = asyncio.run(play())
    assert all(t.render_check is not None and t.render_check.exact for t in trajectories)
    assert {call.status for t in trajectories for call in t.calls} == {CallStatus.OK}
    scores = [asyncio.run(cited_answer(t)) for t in trajectories]
    right = sum(score.parts["acc"] for score in scores)
    assert 0.6 * len(scores) < right < (1 - HASTY / 3) * len(scores), "some stop one step early"
    assert sum(score.reward == 1.0 for score in scores) > 0.3 * len(scores)
    measured = [metrics(t) for t in trajectories]
    assert {one["searches"] for one in measured} == {1.0, 2.0, 3.0}
    assert sum(one["evidence_found"] for one in measured) > 0.8 * len(measured)


@pytest.mark.long  # scripted traces are played and scored above
def test_the_embedded_model_is_trained_on_it(tmp_path):
    small = (
        "training.steps=2",
        "training.groups=1",
        "training.group_size=2",
        "training.minibatches=1",
        "eval.samples=1",
    )
    quick = ("sampling.max_tokens=24", "rollout.max_assistant_turns=2", "training.eval_every=0", "engine.threads=1")
    config = configure("task=deep_research", f"runs_dir={tmp_path}", *small, *quick)
    report = train(config, console=Console(quiet=True))
    (recorded, *_) = read_trajectories(report.run / "trajectories" / "step_000002.parquet")
    assert recorded.sample.ground_truth["evidence"]
    assert set(recorded.parts) == {"acc", "f1", "citation_precision", "citation_recall", "format"}
    assert "evidence_found" in (report.run / "metrics.jsonl").read_text()
