"""The shipped corpus: what its generator gives, facts that fit, and a search that follows the formula."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.errors import DataError
from turnwise.ext.research.corpus.articles import K1, SHIPPED, B, Bm25, open_corpus, shipped, tokenise
from turnwise.ext.research.corpus.relations import BY_NAME, RELATIONS, VALUE, named
from turnwise.system.plugins import load

make_world: Any = load(
    f"{Path(__file__).parents[4] / 'examples' / 'research_articles' / 'world.py'}:make_world", "world"
)


def test_the_shipped_file_is_what_the_generator_gives():
    assert json.loads(SHIPPED.read_text("utf-8")) == make_world()
    assert SHIPPED.stat().st_size < 300_000
    assert make_world(7) != make_world()


def test_every_fact_stands_in_its_article_and_leads_to_one_of_the_right_kind():
    corpus = shipped()
    assert len({article.title for article in corpus.articles}) == len(corpus.articles) > 300
    for article in corpus.articles:
        assert article.facts
        for name, value in article.facts.items():
            relation = BY_NAME[name]
            assert relation.subject == article.kind
            if relation.object == VALUE:
                assert value in article.text
            else:
                assert corpus.by_id[value].kind == relation.object
                assert named(corpus.by_id[value].title, relation.object) in article.text
    assert {relation.name for relation in RELATIONS} == {name for a in corpus.articles for name in a.facts}


def test_the_years_of_the_world_fit_each_other():
    by_id = shipped().by_id
    for article in by_id.values():
        facts = article.facts
        if article.kind == "company":
            assert 20 <= int(facts["established"]) - int(by_id[facts["founder"]].facts["born"]) <= 50
        if article.kind == "invention":
            assert int(facts["shown"]) > int(by_id[facts["maker"]].facts["established"])
            assert 15 <= int(facts["shown"]) - int(by_id[facts["inventor"]].facts["born"]) <= 70


def test_the_name_of_a_thing_finds_its_article():
    corpus = shipped()
    first = [corpus.search(f"Tell me about {a.title}", 1)[0][0].id == a.id for a in corpus.articles]
    assert np.mean(first) > 0.9, "people share first names, so that a few come second"
    among = [a.id in {hit.id for hit, _ in corpus.search(a.title, 3)} for a in corpus.articles]
    assert np.mean(among) > 0.97


TEXTS = ["a red pen and a red hat", "a blue pen", "one long story about nothing red at all", ""]


@pytest.mark.parametrize("query", ["red", "red pen", "pen pen hat", "nowhere", ""])
def test_scores_follow_the_formula(query):
    words = [tokenise(text) for text in TEXTS]
    mean = sum(map(len, words)) / len(words)

    def score(text: list[str]) -> float:
        total = 0.0
        for word in tokenise(query):
            holding = sum(word in one for one in words)
            idf = math.log(1 + (len(words) - holding + 0.5) / (holding + 0.5))
            times = Counter(text)[word]
            total += idf * times * (K1 + 1) / (times + K1 * (1 - B + B * len(text) / mean))
        return total

    wanted = sorted(((score(text), -n) for n, text in enumerate(words) if score(text)), reverse=True)
    hits = Bm25(TEXTS).search(query, 10)
    assert [hit.index for hit in hits] == [-n for _, n in wanted]
    assert [hit.score for hit in hits] == pytest.approx([value for value, _ in wanted])


def test_words_are_found_whatever_their_case_and_accents():
    assert tokenise("Café ＡＢＣ, don't 1.5") == ["cafe", "abc", "don", "t", "1", "5"]
    assert Bm25([]).search("anything", 3) == []


def test_a_users_own_articles_are_read_in_both_forms(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"id": "x", "title": "Tea", "text": "hot"}\n\n{"id": 7, "contents": "\\"Ice\\"\\ncold"}\n'
    )
    corpus = open_corpus([tmp_path / "a.jsonl"])
    assert [(a.id, a.title, a.text) for a in corpus.articles] == [("x", "Tea", "hot"), ("7", "Ice", "cold")]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("nonsense", "a.jsonl:1: not JSON"),
        ("[1]", "a.jsonl:1: expected"),
        ('{"id": "x", "titel": "T", "text": "t"}', "needs the text 'title'"),
        ('{"id": "x]", "title": "T", "text": "t"}', "no brackets"),
        ('{"id": "x", "title": "T", "text": "t"}\n{"id": "x", "title": "T", "text": "t"}', "a.jsonl:2.*appears twice"),
        ("", "no articles"),
    ],
)
def test_wrong_articles_are_refused_by_line(tmp_path, content, problem):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=problem):
        open_corpus([tmp_path / "a.jsonl"])
    with pytest.raises(DataError, match="cannot be read"):
        open_corpus([tmp_path / "none.jsonl"])
