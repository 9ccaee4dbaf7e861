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

AROUND = """async ([values, errors]) => {
  const { around } = await import("board/sheet.js");
  const round = (edge) => edge.map((value) => (value === null ? null : Math.round(10 * value) / 10));
  const { low, high } = around(values, errors, false);
  return { low: round(low), high: round(high) };
}"""


def test_sections_stand_in_order_of_use_and_several_tries_of_a_sample_have_panels(open_page):
    page = open_page("#/run/live/curves")
    tries = [f"val/{name}{source}" for name in ("pass@2", "pass@4", "pass^4", "maj@4") for source in ("", "/sums")]
    errors = [name.replace("@2", "@2_stderr").replace("@4", "@4_stderr") for name in tries[:4]]
    names = ["critic/score/mean", "val/accuracy", "val/accuracy/sums", "actor/grad_norm", "actor/lr", "timing_s/gen"]
    names += ["mismatch/a", "rollout_corr/kl", "actor/entropy", "num_turns/mean", "odd", *tries, *errors]
    made = page.evaluate(
        SECTIONS, [sorted(names), {"actor/lr": 0.001, "odd": 2, "val/accuracy/sums": 0, "critic/score/mean": 0}]
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
    assert made["sections"][1]["panels"] == [["sums", ["pass@2", "pass@4", "maj@4", "pass^4"]]]
    assert [title for title, _ in made["sections"][2]["panels"]] == ["Gradient norm", "Entropy"]
    assert [(one["metric"], one["value"]) for one in made["left"]] == [("actor/lr", 0.001), ("odd", 2)]


def test_held_out_rewards_of_several_sources_stand_by_source_and_sampled_before_greedy(open_page):
    page = open_page("#/run/live/curves")
    ends = ("", "/a", "/b")
    names = [
        f"val/{kind}{name}{end}" for kind in ("", "greedy_") for name in ("reward", "reward_stderr") for end in ends
    ]
    names += [f"{kind}task/{source}/looked" for kind in ("", "val/", "val/greedy_") for source in ("a", "b")]
    sections = {
        section["title"]: section["panels"] for section in page.evaluate(SECTIONS, [sorted(names), {}])["sections"]
    }
    assert sections["Reward and accuracy"] == [["Reward of held-out samples", ["eval", "eval, greedy"]]]
    assert sections["By data source"] == [
        ["Reward of held-out samples", ["a", "b"]],
        ["Reward of held-out samples, greedy", ["a", "b"]],
    ]
    assert sections["Measured by the task"] == [
        ["Looked", ["a", "b"]],
        ["Looked, eval", ["a", "b"]],
        ["Looked, greedy", ["a", "b"]],
    ]
    assert page.evaluate(AROUND, [[1.2, None], [0.3, None]]) == {"low": [0.9, None], "high": [1.5, None]}


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


MEAN = """async ([names, keys, kinds, all]) => {
  const { meanOf, seedGroups } = await import("board/seeds.js");
  return [seedGroups(names, keys, (name) => kinds[name]), all.map((series) => meanOf(series, [0, 1]))];
}"""


def series(steps, values, **more):
    return {"step": steps, "seconds": steps, "tokens": steps, "value": values, **more}


def test_runs_that_differ_in_their_seed_only_are_one_group_with_a_mean_where_all_have_a_value(open_page):
    page = open_page("#/run/live/curves")
    names = ["a", "b", "c", "d"]
    keys = [{"key": "seed", "values": {"a": 0, "b": 1, "c": 0, "d": 2}}]
    keys += [{"key": "learner.lr", "values": {"a": 1, "b": 1, "c": 2, "d": 1}}]
    same = series([1, 2, 3], [0.0, 0.5, 1.0]), series([2, 3, 4], [0.7, None, 1.0])
    thin = [0.0, 1.0]  # a thinned series has the range of each bucket
    thinned = series([0, 10], [0.0, 1.0], low=thin, high=thin), series([5, 10], [0.0, 1.0], low=thin, high=thin)
    alone = series([1], [0.5]), series([2], [0.5])
    groups, means = page.evaluate(
        MEAN, [names, keys, dict.fromkeys(names, "train") | {"d": "eval"}, [same, thinned, alone]]
    )
    assert [(group["names"], group["label"]) for group in groups] == [
        (["a", "b"], "mean of 2, learner.lr 1"),
        (["c"], "c"),
        (["d"], "d"),
    ]
    assert means[0]["series"] == series([2], [0.6]) and abs(means[0]["high"][0] - 0.6 - 0.2 / 2**0.5) < 1e-9
    assert means[1]["series"]["step"] == [10] and means[2] is None


def test_two_runs_of_one_config_are_a_mean_with_a_band_and_what_one_alone_measured_is_folded(open_page):
    page = open_page("#/compare?runs=live,other")
    reward = page.locator(".panel", has=page.get_by_role("heading", name="Reward", exact=True))
    expect(reward.locator(".main-svg").first).to_be_visible()
    drawn = "(plot) => plot.data.map((line) => [line.name ?? '', line.fill ?? ''])"
    lines = reward.locator(".plot").evaluate(drawn)
    assert ["mean of live and 1 more", ""] in lines and ["live", ""] in lines and ["", "tonexty"] in lines
    page.get_by_role("button", name="each run").click()
    expect(page).to_have_url(re.compile("seeds=each"))
    page.wait_for_function("() => document.querySelector('.plot').data.length === 2")
    sections = """async () => {
      const { singleSections } = await import("board/panels.js");
      const both = new Set(["critic/score/mean", "actor/entropy"]);
      const names = [...both, "reward_parts/sums/acc", "actor/lr"];
      return singleSections(names, (name) => both.has(name)).map((one) => [one.title, Boolean(one.folded), one.panels.length]);
    }"""
    assert page.evaluate(sections) == [
        ["Reward and accuracy", False, 1],
        ["Learning", False, 1],
        ["In one run only", True, 2],
    ]
