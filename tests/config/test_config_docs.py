"""Every knob is documented where it is defined: what it does, its choices, its default, who reads it."""

import pytest

from turnwise.config import choices
from turnwise.config.choices import Advantage
from turnwise.config.docs import equivalent, field_docs, find, meanings, pages, read_by, section_docs, shown
from turnwise.data.task import builtin_tasks, config_values
from turnwise.errors import ConfigError

PAGES = pages({task: config_values(task) for task in builtin_tasks()})


def test_every_knob_and_every_choice_has_a_docstring() -> None:
    assert [key for key, page in PAGES.items() if len(page.text.split(". ")) < 2] == [], (
        "what it does. When to touch it"
    )
    assert [key for key, page in PAGES.items() if len(page.summary) > 160] == [], "the first sentence is for lists"
    assert [(key, choice) for key, page in PAGES.items() for choice, text in page.choices().items() if not text] == []
    assert all(section_docs().values())
    kinds = [kind for kind in vars(choices).values() if isinstance(kind, type) and kind.__module__ == choices.__name__]
    assert [kind.__name__ for kind in kinds if "" in meanings(kind).values()] == []


def test_a_page_says_default_type_range_and_readers() -> None:
    page = PAGES["training.max_lag"]
    assert page.summary == "Steps by which collection may run ahead of the weights; 0 is on-policy."
    assert page.takes == "a whole number, at least 0" and page.when is None
    assert PAGES["training.groups"].by_task["arithmetic"] == 24
    found = read_by("training.max_lag")
    assert "rollout/collector.py" in found and all(found.values())
    assert PAGES["algorithm.kl_target"].takes == "a number, more than 0, or null"
    assert PAGES["algorithm.kl_target"].when == "only when algorithm.kl_reward is set"
    assert PAGES["sandbox.level"].when == "only with sandbox.url=null"
    assert str(PAGES["engine.retries"].when).endswith(" or cluster=ray")
    assert PAGES["learner.precision"].takes == "float32 | bfloat16 | null"
    assert PAGES["algorithm.advantage"].choices() == meanings(Advantage)
    assert PAGES["algorithm.advantage"].choices()["rloo"] == "The mean of the other episodes of its group."


def test_a_name_is_found_as_key_section_entry_or_verls() -> None:
    assert [page.key for page in find("seed", PAGES)] == ["seed"]
    assert [page.key for page in find("swe", PAGES)] == ["swe.url"] == [page.key for page in find("swe.", PAGES)]
    assert [page.key for page in find("scoring.options.gsm8k", PAGES)] == ["scoring.options"]
    for name, hint in (
        ("traning.max_lag", "did you mean 'training.max_lag'?"),
        ("max_lag", "did you mean 'training.max_lag'?"),
        ("trainer.total_trainin_steps", "did you mean 'trainer.total_training_steps'?"),
    ):
        with pytest.raises(ConfigError) as caught:
            find(name, PAGES)
        assert hint in str(caught.value)
    assert equivalent("trainer.total_training_steps") == "training.steps" and equivalent("training.steps") is None


def test_members_without_a_string_below_them_have_no_docs() -> None:
    class Unwritten:
        a: int = 1
        b: int = 2
        """Only this one."""

    assert field_docs(Unwritten) == {}, "a class inside a function is not the module's"
    assert shown([1.0, None, True, Advantage.gae]) == "[1, null, true, gae]"
    assert "arithmetic" in builtin_tasks()
