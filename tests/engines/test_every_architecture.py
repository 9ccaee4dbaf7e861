"""The script that tries every class of transformers: a handful of classes, what a child may end in, and the page."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import transformers
from every_architecture import MARK, Found, Verdict, chosen, guarded, in_short, main, table, write_page
from tiny_configs import CONTEXT, HIDDEN, shrunk, tiny
from transformers import CONFIG_MAPPING

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def test_classes_that_no_other_test_has_are_equal_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each.kind: each for each in main(["--only", "^(jamba|zaya|muse_glimmer|falcon|gemma4_unified_text)$"])}
    assert {kind: each.verdict for kind, each in found.items()} == {
        "jamba": Verdict.EQUAL, "zaya": Verdict.EQUAL, "muse_glimmer": Verdict.EQUAL,
        "gemma4_unified_text": Verdict.EQUAL, "falcon": Verdict.REFUSED,
    }  # fmt: skip
    assert "takes attention from a list of its own" in found["falcon"].why
    printed = capsys.readouterr().out
    assert (
        re.search(r"^causal +jamba +equal", printed, re.MULTILINE)
        and "| language models | 3 | 0 | 1 | 0 | 0 | 4 |" in printed
    )


def test_a_child_that_crashes_hangs_or_raises_is_a_finding() -> None:
    def crash(family: str, kind: str, folder: Path) -> Found:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def hang(family: str, kind: str, folder: Path) -> Found:
        time.sleep(600)
        raise AssertionError

    def stumble(family: str, kind: str, folder: Path) -> Found:
        raise RuntimeError(kind)

    ends = [
        guarded("causal", "x", attempt, seconds) for attempt, seconds in ((crash, 60.0), (hang, 0.2), (stumble, 60.0))
    ]
    assert [end.verdict for end in ends] == [Verdict.DIFFERS] * 3
    assert "SIGKILL" in ends[0].why and "SIGKILL" in ends[1].why and "status 1" in ends[2].why


def test_configs_are_tiny_and_have_a_layer_of_every_kind() -> None:
    config = tiny("gemma2")
    assert config.hidden_size == HIDDEN and config.max_position_embeddings == CONTEXT
    assert config.layer_types == ["sliding_attention", "full_attention"] and config.num_hidden_layers == 2
    fields = shrunk(CONFIG_MAPPING["qwen3_vl"](), [0])
    assert fields["text_config"]["hidden_size"] == HIDDEN and fields["vision_config"]["deepstack_visual_indexes"] == [0]


def test_the_page_is_renewed_below_its_mark_and_groups_reasons(tmp_path: Path) -> None:
    why = [
        "AForCausalLM attends by code of its own, which (TypeError: x, in forward)",
        "BLMHeadModel attends by code of its own, which",
    ]
    found = [Found("causal", kind, Verdict.REFUSED, reason) for kind, reason in zip("ab", why, strict=True)]
    page = tmp_path / "page.md"
    page.write_text(f"# Words\n{MARK}\nold\n", encoding="utf-8")
    write_page(page, found)
    text = page.read_text(encoding="utf-8")
    assert text == f"# Words\n{MARK}\n\n{table(found)}" and "(2): a, b" in text
    assert in_short(why[0]) == in_short(why[1])


@pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in PAGE.read_text(encoding="utf-8"), reason="of another release"
)
def test_the_page_of_the_docs_has_every_class_and_none_that_differs() -> None:
    above, _, below = PAGE.read_text(encoding="utf-8").partition(MARK)
    words = set(re.findall(r"[\w.-]+", below))
    assert above and {kind.rstrip(".") for _, kind in chosen()} <= words
    assert "Different" not in below
