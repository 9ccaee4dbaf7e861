"""A GPU's memory is shared out once, before anything is loaded: side by side, in turns, or refused with advice."""

import pytest

from turnwise import Config, configure
from turnwise.engines import memory_plan
from turnwise.engines.devices import Gpu, VisibleGpus, choose
from turnwise.engines.kernels import paged_attention
from turnwise.engines.memory_plan import (
    OVERHEAD,
    MemoryHolder,
    MemoryPlan,
    ModelSize,
    Training,
    memory_here,
    plan_memory,
)
from turnwise.engines.model.image_features import KEPT_BYTES
from turnwise.errors import ConfigError

SMALL = ModelSize(weights=134_515_008, hidden=576, layers=30, vocabulary=49_152, cached=11_520)
SEVEN = ModelSize(weights=7_615_616_512, hidden=3584, layers=28, vocabulary=152_064, cached=28_672)
POLICY = Training()
LARGE, MIDDLE = Gpu("large", 140 * 2**30), Gpu("middle", 80 * 2**30)


def plan(
    *overrides: str,
    size: ModelSize = SMALL,
    gpu: Gpu = LARGE,
    training: Training | None = POLICY,
    shared: bool = True,
    apart: bool = False,
) -> MemoryPlan:
    config = configure("engine=cuda", "task=null", "data.eval_files=[x]", *overrides)
    return plan_memory(
        config, choose(config, VisibleGpus((gpu,))), gpu, size, 1536, training, shared=shared, apart=apart
    )


def held(found: MemoryPlan) -> int:
    """Of what is there at once."""
    fixed = found.weights + found.optimizer + found.others + OVERHEAD
    return fixed + (max(found.learning, found.cache) if found.takes_turns else found.learning + found.cache)


def test_a_small_model_and_its_learner_fit_side_by_side():
    found = plan()
    assert (found.weights, found.optimizer) == (2 * SMALL.weights, 12 * SMALL.weights) and not found.takes_turns
    assert found.cache == 2048 * 1536 * SMALL.cached * 2, "enough for every episode under way, and no more"
    assert not found.recompute and found.token_budget == 65_536 and held(found) <= found.usable
    assert "shared by sampler and learner" in "\n".join(found.lines())
    assert 14e9 < SMALL.activations(64 * 384, 2, recompute=False) < 20e9, "as measured, about 16 GB"


def test_a_sampler_that_runs_ahead_has_weights_of_its_own():
    assert plan("training.max_lag=1", shared=False).weights == 4 * SMALL.weights


def test_a_learner_in_a_process_of_its_own_shares_nothing_and_pays_for_cuda_twice():
    here = plan("training.max_lag=1", shared=False)
    found = plan("training.max_lag=1", shared=False, apart=True)
    assert found.weights == 4 * SMALL.weights and found.handover == found.writers == 2 * SMALL.weights
    assert here.learner_room - found.learner_room == OVERHEAD + found.handover
    kept = found.weights - found.writers + found.optimizer + found.others
    assert found.share(MemoryHolder.learner) == kept + found.learner_room + OVERHEAD, (
        "all of it, and nothing of the sampler's"
    )
    assert found.share(MemoryHolder.learner) + found.share(MemoryHolder.sampler) == found.usable
    assert "processes    4.0 GiB for CUDA in two, 0.3 GiB to hand weights over" in "\n".join(found.lines())
    assert not plan("learner.optimizer=adamw8bit", size=SMALL, apart=True, shared=False).takes_turns
    with pytest.raises(ConfigError, match="are missing.*learner.place=here"):
        plan("learner.optimizer=adamw8bit", size=SEVEN, gpu=MIDDLE, apart=True, shared=False)


def test_a_reference_and_a_critic_are_counted():
    both = plan(training=Training(critic=True, reference=True))
    assert both.others == SMALL.weights * (2 + 12) + SMALL.weights * 2
    lora = plan("learner.lora_rank=16", training=Training(reference=True), shared=False)
    assert lora.others == 0 and lora.weights == SMALL.weights * (2 + 4) and lora.optimizer < SMALL.weights


def test_moments_of_a_byte_and_an_optimizer_on_the_cpu_take_less():
    assert plan("learner.optimizer=adamw8bit").optimizer == 6 * SMALL.weights
    assert plan("learner.offload=optimizer").optimizer == 0


def test_a_large_model_takes_turns_with_its_cache_and_one_too_large_is_refused_with_advice():
    found = plan("learner.optimizer=adamw8bit", "engine.max_batch=2048", size=SEVEN, gpu=LARGE)
    assert (
        found.takes_turns
        and held(found) <= found.usable
        and "freed while the learner learns" in "\n".join(found.lines())
    )
    with pytest.raises(
        ConfigError, match=r": .* GiB are missing.*learner.offload=optimizer, learner.optimizer=adamw8bit"
    ):
        plan(size=SEVEN, gpu=MIDDLE)
    assert plan("learner.offload=optimizer", size=SEVEN, gpu=MIDDLE).cache > 0


def test_sleep_is_taken_as_it_is_set():
    assert plan("engine.sleep=true").takes_turns and not plan("engine.sleep=false").takes_turns
    smaller = plan("engine.sleep=false", "engine.max_batch=2048", "learner.optimizer=adamw8bit", size=SEVEN)
    assert not smaller.takes_turns and held(smaller) <= smaller.usable


def test_an_evaluation_has_weights_and_a_cache():
    found = plan(training=None)
    assert found.learning == found.optimizer == 0 and found.weights == 2 * SMALL.weights
    assert [line.split()[0] for line in found.lines()][1:] == ["weights", "cache"]
    assert found.as_json()["cached_tokens"] == 2048 * 1536
    with pytest.raises(ConfigError, match="GiB are missing"):
        plan(training=None, size=SEVEN, gpu=Gpu("small", 16 * 2**30))


def test_the_plan_of_a_config_is_made_from_its_model_s_files():
    seen = VisibleGpus((LARGE,))
    assert memory_here(Config(), Training(), visible=VisibleGpus()) is None
    assert memory_here(configure("engine=torch"), None, visible=seen) is None
    found = memory_here(Config(), Training(), visible=seen)
    assert found is not None and 0 < found.weights < 50e6 and found.optimizer == 6 * found.weights
    tuned = memory_here(configure("engine=torch"), Training(), samples=False, visible=seen)
    assert tuned is not None and tuned.cache == 0 and tuned.weights == found.weights
    written = memory_here(configure("learner.device=cpu"), Training(), visible=seen)
    assert written is not None and written.learning == 0 and written.cache > 0


def test_a_sampler_that_is_elsewhere_has_nothing_to_give_back():
    seen = VisibleGpus((LARGE,))
    asked = configure("engine=torch", "engine.sleep=true", "training.max_lag=0")
    found = memory_here(asked, Training(), visible=seen)
    assert found == memory_here(configure("engine=torch", "training.max_lag=0"), Training(), visible=seen)
    assert found is not None and not found.takes_turns and found.cache == 0
    assert memory_here(configure("engine.sleep=true"), Training(), samples=False, visible=seen) is not None


def test_what_is_lacking_is_said_in_full():
    tight = Gpu("tight", 20 * 2**30)
    for knobs in (("training.max_lag=0", "engine.sleep=true"), ("training.max_lag=0", "engine.sleep=false"), ()):
        with pytest.raises(
            ConfigError, match=r"tight, 20 GiB, engine.memory_fraction=0.9 of it: [1-9][\d.]* GiB are missing"
        ):
            plan(*knobs, size=SEVEN, gpu=tight)
    with pytest.raises(
        ConfigError, match=r": 0\.[5-9] GiB are missing; what helps: .*a larger engine.memory_fraction$"
    ):
        plan("engine.memory_fraction=0.08", gpu=tight, training=None)


def test_the_plan_and_the_kernels_mean_the_same_page() -> None:
    assert memory_plan.PAGE == paged_attention.PAGE


def test_a_tower_is_counted_among_the_weights_and_trained_only_when_asked_to():
    sees = ModelSize(SMALL.weights + 10**8, SMALL.hidden, SMALL.layers, SMALL.vocabulary, SMALL.cached, vision=10**8)
    found, trained = plan(size=sees), plan("learner.train_vision=true", size=sees)
    assert (found.weights, found.optimizer) == (2 * sees.weights, 12 * SMALL.weights)
    assert trained.optimizer == 12 * sees.weights
    assert sees.activations(1024, 2, recompute=False) == SMALL.activations(1024, 2, recompute=False)
    assert memory_plan.KEPT_FEATURES == KEPT_BYTES
    assert found.vision == 2 * 10**8 and "0.2 GiB of it for vision" in "\n".join(found.lines())
    both = plan("learner.lora_rank=16", size=sees, training=Training(critic=True), shared=False)
    assert both.others == sees.weights * 4 + SMALL.weights * 8
