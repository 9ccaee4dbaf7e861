"""Which panels a run's metrics make, in which order, and what is folded, left out or only a point."""

import re

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:  # the browser fixture then skips or fails
    expect = None

SECTIONS = """async ([names, constant]) => {
  const { panelSections, withoutConstant } = await import("board/panels.js");
  const { sections, constant: left } = withoutConstant(panelSections(names), constant);
  const said = ({ title, folded, panels }) => ({ title, folded: Boolean(folded), panels: panels.map((panel) => [panel.title, panel.lines.map((line) => line.label)]) });
  return { sections: sections.map(said), left };
}"""


def test_sections_stand_in_order_of_use_and_several_tries_of_a_sample_have_panels(open_page):
    page = open_page("#/run/live/curves")
    tries = [f"val/{name}{source}" for name in ("pass@2", "pass@4", "pass^4", "maj@4") for source in ("", "/sums")]
    errors = [name.replace("@2", "@2_stderr").replace("@4", "@4_stderr") for name in tries[:4]]
    names = ["critic/score/mean", "val/accuracy", "val/accuracy/sums", "actor/grad_norm", "actor/lr", "timing_s/gen"]
    names += ["mismatch/a", "rollout_corr/kl", "actor/entropy", "num_turns/mean", "odd", *tries, *errors]
    made = page.evaluate(
        SECTIONS, [names, {"actor/lr": 0.001, "odd": 2, "val/accuracy/sums": 0, "critic/score/mean": 0}]
    )
    titles = [section["title"] for section in made["sections"]]
    assert titles == [
        "Reward and accuracy",
        "Several episodes of a sample",
        "Learning",
        "Lengths and turns",
        "Time and throughput",
        "Sampler against learner",
    ]
    assert [section["folded"] for section in made["sections"]] == [False] * 4 + [True] * 2
    assert [title for title, _ in made["sections"][0]["panels"]] == ["Reward", "Accuracy"], "kept, though constant"
    assert made["sections"][1]["panels"] == [["sums", ["pass@2", "pass@4", "pass^4", "maj@4"]]]
    assert [title for title, _ in made["sections"][2]["panels"]] == ["Gradient norm", "Entropy"]
    assert [(one["metric"], one["value"]) for one in made["left"]] == [("actor/lr", 0.001), ("odd", 2)]


def test_what_is_seldom_looked_at_is_folded_and_the_address_says_what_was_unfolded(open_page):
    page = open_page("#/run/live/curves")
    ages = page.locator("details", has=page.get_by_role("heading", name="Staleness", exact=True))
    learning = page.locator("details", has=page.get_by_role("heading", name="Learning", exact=True))
    expect(learning).to_have_attribute("open", "")
    assert page.evaluate("document.documentElement.scrollHeight") < 3200
    ages.locator("summary").click()
    learning.locator("summary").click()
    expect(page).to_have_url(re.compile("open=staleness&shut=learning"))
    page.reload()
    expect(ages).to_have_attribute("open", "")
    expect(learning).not_to_have_attribute("open", "")
    still = page.get_by_text(re.compile(r"^constant: \d+ metrics$"))
    still.click()
    expect(page.locator(".constants")).to_contain_text("Gradient norm 0.5")
    expect(page.get_by_role("heading", name="Gradient norm", exact=True)).to_have_count(0)


def test_evaluations_are_points_and_steps_a_line(open_page):
    page = open_page("#/run/live/curves")
    accuracy = page.locator(".panel", has=page.get_by_role("heading", name="Accuracy", exact=True))
    expect(accuracy.locator(".main-svg").first).to_be_visible()
    drawn = accuracy.locator(".plot").evaluate(
        "(plot) => plot.data.map((line) => [line.name, line.mode, line.line.dash])"
    )
    assert ["eval", "markers", "dot"] in drawn, "two evaluations are no line"
    assert [mode for name, mode, _ in drawn if name == "train"] == ["lines+markers"]
