"""No page is lost, given out twice, or read by somebody it was not computed for, whatever comes in whatever order."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from turnwise.engines.samplers.gpu.paged_cache import CachedConversation, PagedCache
from turnwise.engines.samplers.kv_cache import PREFIX_BLOCK, block_hashes

PAGES = 12
PROMPTS = [np.concatenate([np.full(PREFIX_BLOCK, t, dtype=np.int64) for t in name] + [np.zeros(3, dtype=np.int64)])
           for name in ((1,), (1, 2), (1, 2, 3), (4,), (4, 5, 6, 7), ())]  # fmt: skip


class Conversations(RuleBasedStateMachine):
    """Turns of five conversations come and go; the model is who holds which pages, and what lies in them."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(PAGES)
        self.running: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.contents: dict[int, bytes] = {}
        """What was computed into a page of a prompt, by its digest."""

    @rule(name=st.sampled_from("abcde"), tokens=st.sampled_from(PROMPTS), spare=st.integers(0, 3))
    def begin(self, name: str, tokens: np.ndarray, spare: int) -> None:
        if name in self.running:
            return
        kept = self.cache.get(name)
        if kept is not None:
            tokens = np.concatenate((kept.token_ids, np.ones(40, dtype=np.int64)))
        digests = [] if kept is not None else block_hashes(tokens)
        begun = self.cache.begin(name, digests, -(-len(tokens) // PREFIX_BLOCK), spare=spare)
        if begun is None:
            assert self.cache.get(name) is kept
            return
        pages, fed = begun
        if kept is not None:
            assert fed == kept.fed and pages[: len(kept.pages)].tolist() == kept.pages.tolist()
        else:
            shared = fed // PREFIX_BLOCK
            assert [self.contents[page] for page in pages[:shared].tolist()] == digests[:shared]
            self.contents.update(zip(pages[: len(digests)].tolist(), digests, strict=True))
            for page in pages[len(digests) :].tolist():
                self.contents.pop(page, None)
            self.cache.share(digests, pages[: len(digests)])
        self.running[name] = tokens, pages

    @rule(name=st.sampled_from("abcde"), count=st.integers(1, 4))
    def grow(self, name: str, count: int) -> None:
        if name in self.running and (more := self.cache.take(count)) is not None:
            assert len(more) == count
            for page in more.tolist():
                self.contents.pop(page, None)
            tokens, pages = self.running[name]
            self.running[name] = tokens, np.concatenate((pages, more))

    @rule(name=st.sampled_from("abcde"), keep=st.booleans())
    def end(self, name: str, keep: bool) -> None:
        if name not in self.running:
            return
        tokens, pages = self.running.pop(name)
        if keep:
            used = -(-(len(tokens) - 1) // PREFIX_BLOCK)
            self.cache.keep(name, CachedConversation(tokens, len(tokens) - 1, pages[:used]))
            pages = pages[used:]
        self.cache.give(pages)

    @rule(name=st.sampled_from("abcde"))
    def drop(self, name: str) -> None:
        self.cache.drop(name)

    @rule()
    def forget(self) -> None:
        if self.running:  # new weights stop them first
            return
        self.cache.forget()
        self.contents.clear()

    @invariant()
    def every_page_is_somewhere(self) -> None:
        kept = [self.cache.get(name) for name in "abcde"]
        held = Counter(page for _, pages in self.running.values() for page in pages.tolist())
        held.update(page for one in kept if one is not None for page in one.pages.tolist())
        assert self.cache.unused == PAGES - len(held)
        assert self.cache.kept_pages == sum(len(one.pages) for one in kept if one is not None)
        for page, holders in held.items():
            assert holders == 1 or page in self.contents, "only pages of prompts are shared"


def test_no_page_is_lost_or_given_out_twice() -> None:
    run_state_machine_as_test(Conversations, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


@given(st.integers(1, 20), st.integers(0, 25))
@settings(max_examples=50, deadline=None)
def test_pages_are_taken_whole_or_not_at_all(pages: int, wanted: int) -> None:
    cache = PagedCache(pages)
    taken = cache.take(wanted)
    assert (taken is None) == (wanted > pages)
    assert cache.unused == pages - (0 if taken is None else len(set(taken.tolist())))


def test_conversations_go_before_running_turns_and_the_oldest_first() -> None:
    cache = PagedCache(4)
    for name in ("old", "new"):
        pages = cache.take(2)
        assert pages is not None
        cache.keep(name, CachedConversation(np.zeros(50, dtype=np.int64), 49, pages))
    assert cache.take(5) is None and cache.evicted == 0, "in vain, so nobody loses anything"
    assert cache.take(1) is not None
    assert cache.get("old") is None and cache.get("new") is not None and cache.evicted == 1


def test_a_remembered_prompt_is_used_until_its_pages_are_needed() -> None:
    cache, digests = PagedCache(4), block_hashes(PROMPTS[2])
    pages, fed = cache.begin("a", digests, 4, spare=0) or (None, None)
    assert pages is not None and fed == 0
    cache.share(digests, pages[:3])
    cache.give(pages)
    again = cache.begin("b", digests, 4, spare=0)
    assert again is not None and again[1] == 3 * PREFIX_BLOCK and again[0][:3].tolist() == pages[:3].tolist()
    cache.give(again[0])
    assert cache.take(2) is not None and cache.known(digests) == 2, "its tail goes first"
