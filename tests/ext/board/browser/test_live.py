"""The board while a run goes on: new steps arrive, zooms are shared and linked, the list is filtered."""

import re

import pytest

try:
    from playwright.sync_api import expect
except ModuleNotFoundError:  # the browser fixture then skips or fails
    expect = None


def test_the_runs_are_listed_with_their_state_and_compared(open_page):
    page = open_page()
    live, done = (page.locator("tr", has=page.get_by_role("link", name=name)) for name in ("live", "other"))
    expect(live.locator(".badge")).to_have_text("running")
    expect(done.locator(".badge")).to_have_text("finished")
    for name in ("live", "other"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("button", name="Compare 2 runs").click()
    expect(page).to_have_url(re.compile(r"#/compare\?runs=.*other"))
    expect(page.locator(".plot .main-svg").first).to_be_visible()
    expect(page.locator(".legend-key").first).to_contain_text("at step")
    page.get_by_role("link", name="Runs").click()
    dead = page.locator("tr", has=page.get_by_role("link", name="dead"))
    expect(dead.locator(".why")).to_contain_text("the last thing it said")


def test_an_evaluation_is_a_table_and_two_are_compared_answer_by_answer(open_page):
    page = open_page("#/run/eval-a/curves")
    expect(page.get_by_role("link", name="Results")).to_be_visible()
    expect(page.get_by_role("row", name="accuracy, final answer")).to_contain_text(re.compile(r"\d\.\d% ± \d"))
    assert page.locator(".plot").count() == 0
    page.goto(page.url.partition("#")[0] + "#/compare?runs=eval-a,eval-b")
    expect(page.locator(".results:not(.pairs)").get_by_role("row", name="accuracy, final answer")).to_contain_text(
        "points"
    )
    pairs = page.locator(".pairs")
    expect(pairs.locator("tbody tr").first).to_contain_text("8")
    pairs.locator("summary").first.click()
    pairs.locator(".flips tbody tr").first.get_by_role("link").nth(1).click()
    expect(page).to_have_url(re.compile(r"#/run/eval-b/trajectory\?shard=eval/step_000000"))
    expect(page.locator(".timeline")).to_be_visible()


def test_a_run_opens_with_its_headline_and_the_count_of_what_to_watch(open_page):
    page = open_page("#/run/live/curves")
    headline = page.get_by_label("Headline", exact=True)
    expect(headline.locator(".figure").first).to_contain_text(re.compile(r"Accuracy.*55\.0% → 60\.0%.*steps 5 to 10"))
    expect(headline.locator(".headline-warnings")).to_contain_text("no learning signal <script>")
    expect(headline).to_contain_text("12.0k tokens written")
    count = page.locator("[data-tab=health] .tally")
    expect(count).to_contain_text("to watch")
    said = re.search(r"\((.*)\)", count.inner_text())[1]
    headline.get_by_role("link", name=said).click()
    expect(page.locator(".page-health")).to_contain_text("no learning signal <script>")
    page.go_back()
    page.locator(".figure", has_text="Worst episode of step 12").get_by_role("link").click()
    expect(page.locator(".timeline")).to_be_visible()
    page.get_by_role("link", name="Runs", exact=True).click()
    listed = page.locator("tr", has=page.get_by_role("link", name="live", exact=True))
    expect(listed.locator(".tally")).to_contain_text(said)
    expect(listed.locator(".note")).to_contain_text("<script>window.hacked = 1")
    expect(listed.locator(".tag")).to_have_text(["baseline", "<img src=x onerror=hacked=5>"])
    listed.get_by_role("button", name="baseline").click()
    expect(page.locator("table.runs tbody tr")).to_have_count(1)
    expect(page).to_have_url(re.compile("find=%23baseline"))


def test_an_episode_is_read_while_it_is_played(open_page):
    page = open_page("#/run/live/curves")
    page.get_by_role("link", name="episodes: 1 being played").click()
    episode = page.locator(".underway-episode")
    episode.locator("summary").click()
    expect(episode.locator(".underway-message")).to_have_count(5)
    expect(episode.locator(".is-tool")).to_contain_text("<script>window.hacked")


def test_a_panel_is_saved_as_a_picture_and_as_numbers(open_page, growing):
    page = open_page("#/run/live/curves")
    expect(page.locator(".plot .main-svg").first).to_be_visible()
    page.wait_for_selector('[aria-label^="Spread of the reward"]:not([aria-busy])')  # the bands come after the lines
    accuracy = page.get_by_role("heading", name="Accuracy", exact=True)
    assert accuracy.bounding_box()["y"] < 900, "on the first screen, beside the reward"
    titles = page.locator("h2, h3").all_inner_texts()
    assert not [title for title in titles if re.search("KL|critic", title)], "the run has neither"
    with page.expect_download() as saved:
        page.get_by_label("save the numbers: Reward", exact=True).click()
    lines = saved.value.path().read_text().splitlines()
    assert saved.value.suggested_filename == "reward.csv" and lines[0] == "series,step,value,low,high"
    values = [[float(one) for one in line.split(",")[2:]] for line in lines[1:]]
    assert len(values) == growing.step and all(0 <= low <= mean <= high <= 1 for mean, low, high in values)
    assert not [title for title in titles if re.search("stderr|_n\\b", title)], "they are parts of the accuracy"
    with page.expect_download() as saved:
        page.get_by_label("save the numbers: Accuracy", exact=True).click()
    assert f"eval,5,{0.55},{0.55 - 0.1},{0.55 + 0.1}" in saved.value.path().read_text()
    with page.expect_download() as saved:
        page.get_by_label("save as a picture: Reward", exact=True).click()
    assert saved.value.path().read_bytes().startswith(b"\x89PNG")


def test_the_age_of_trained_tokens_is_a_histogram_of_every_step(open_page, growing):
    page = open_page("#/run/live/curves?open=staleness")
    ages = page.locator(".panel", has=page.get_by_role("heading", name="Trained tokens by age", exact=True))
    ages.scroll_into_view_if_needed()
    expect(ages.locator(".main-svg").first).to_be_visible()
    expect(ages.locator(".legend-key")).to_have_count(2)
    expect(ages.locator(".legend-key").last).to_contain_text("1 step")
    tops = ages.locator(".plot").evaluate(
        "(plot) => plot.calcdata.map((trace) => trace.map((point) => point.sNorm ?? point.y))"
    )
    assert [round(value, 6) for value in tops[0]] == [round(1 / step, 6) for step in range(1, growing.step + 1)]
    assert [round(value, 6) for value in tops[1]] == [1.0] * growing.step, "the shares of a step stand on each other"
    with page.expect_download() as saved:
        page.get_by_label("save the numbers: Trained tokens by age", exact=True).click()
    assert "1 step,2,0.5" in saved.value.path().read_text()
    expect(page.get_by_role("heading", name="Age of trained tokens, steps", exact=True)).to_be_attached()
    for constant in ("Groups a step waited for 1", "Groups trained on again 2"):
        expect(page.locator(".constants")).to_contain_text(constant)


def test_episodes_trained_on_again_are_a_list_of_their_own_and_name_their_step(open_page, other):
    page = open_page("#/run/other/trajectories?split=reused")
    expect(page.locator(".list-status")).to_contain_text("10")
    page.get_by_role("button", name="Trained on again").click()
    page.locator("tbody tr").first.get_by_role("link").first.click()
    expect(page).to_have_url(re.compile(r"shard=reused/step_"))
    expect(page.locator(".fact-list")).to_contain_text(f"first in step {other.step - 1}")


def test_a_new_step_appears_without_a_reload(open_page, growing):
    page = open_page("#/run/live/curves")
    page.evaluate("window.sameDocument = true")
    reward = page.get_by_role("img", name=re.compile("^Reward: "))
    expect(reward).to_be_visible()
    listed = open_page("#/run/live/trajectories")
    expect(listed.locator(".list-status")).to_contain_text("of")
    growing.grow()
    expect(page.locator(".run-line .progress")).to_contain_text(str(growing.step))
    entropy = page.locator(".panel", has=page.get_by_role("heading", name="Entropy", exact=True))
    entropy.get_by_role("button", name="table").click()
    expect(entropy.locator("tbody tr")).to_have_count(growing.step)
    assert page.evaluate("window.sameDocument") is True
    expect(listed.get_by_role("button", name=re.compile(r"\d+ new trajectories: show"))).to_be_visible()
    listed.locator(".news").click()
    expect(listed.locator("tbody tr").first.locator(".cell-step")).to_have_text(str(growing.step))


@pytest.mark.long  # test_reach.py zooms by keyboard
def test_dragging_zooms_all_panels_and_the_link(open_page, growing):
    page = open_page("#/run/live/curves")
    plots = page.locator(".plot:has(.main-svg)")
    expect(plots.nth(2)).to_be_visible()
    drag, box = plots.first.locator(".nsewdrag"), None
    while box != (box := drag.bounding_box()):  # panels that are still coming may move this one
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, y, steps=6)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=\d.*to=\d"))
    edges = [float(x) for x in re.search(r"from=([\d.]+)&to=([\d.]+)", page.url).groups()]
    assert 1 < edges[0] < edges[1] < growing.step
    for n in range(3):
        page.wait_for_function(
            "([n, low]) => { const p = document.querySelectorAll('.plot:has(.main-svg)')[n];"
            " return Math.abs(p._fullLayout.xaxis.range[0] - low) < 0.01; }",
            arg=[n, edges[0]],
        )
    linked = open_page(page.url.partition("/#")[2] and "#" + page.url.partition("#")[2])
    expect(linked.get_by_role("button", name=re.compile("reset zoom"))).to_be_visible()
    linked.get_by_role("button", name=re.compile("reset zoom")).click()
    expect(linked).not_to_have_url(re.compile("from="))


def test_the_axis_and_smoothing_are_in_the_link(open_page):
    page = open_page("#/run/live/curves?x=time&smooth=0.6")
    expect(page.get_by_role("button", name="time", exact=True)).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("slider")).to_have_value("0.6")
    page.get_by_role("button", name="tokens", exact=True).click()
    expect(page).to_have_url(re.compile("x=tokens"))


def test_the_list_opens_on_the_worst_of_the_last_training_step_and_says_so(open_page, growing):
    page = open_page("#/run/live/trajectories")
    expect(page.locator(".list-opened")).to_contain_text(f"The lowest rewards of step {growing.step}")
    expect(page.get_by_role("button", name=re.compile("^Train"))).to_have_attribute("aria-pressed", "true")
    assert set(page.locator("tbody .cell-step").all_inner_texts()) == {str(growing.step)}
    expect(page.locator("tbody .cell-reward").first).to_have_text("0")
    page.reload()
    page.get_by_role("button", name="Show all trajectories").click()
    expect(page).to_have_url(re.compile(r"trajectories\?split=all$"))
    page.reload()  # the address says all, so it is not opened on the worst again
    expect(page.get_by_role("button", name=re.compile("^All [0-9]"))).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".list-opened")).to_be_hidden()


def test_filters_by_expression_preset_and_search(open_page, growing):
    page = open_page("#/run/live/trajectories?split=all")
    status = page.locator(".list-status")
    page.get_by_label("Filter").fill("step == 3 and reward == 1")
    page.get_by_label("Filter").press("Enter")
    expect(status).to_contain_text("matched")
    expect(page).to_have_url(re.compile("filter="))
    steps = page.locator("tbody .cell-step").all_inner_texts()
    assert steps and set(steps) == {"3"} and len(steps) <= 16
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("group", name="presets: Machinery").get_by_role("button", name="infrastructure failure").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.get_by_label("Filter")).to_have_value("failure != null")
    for name, order in (("worst", "asc"), ("best", None)):  # one filter, told apart by the order
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.get_by_role("button", name=name, exact=True)).to_have_attribute("aria-pressed", "true")
        expect(page.locator("tbody .cell-reward").first).to_have_text("0" if order else "1")
        assert ("order=asc" in page.url) == bool(order) and "sort=reward" in page.url
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    lines = download.value.path().read_text().splitlines()
    assert lines[0].startswith("shard,row,split,") and len(lines) > 100
    page.get_by_role("button", name="best", exact=True).click()
    expect(page).not_to_have_url(re.compile("filter=|sort="))
    page.get_by_role("searchbox").fill("train:20")
    expect(page.locator("tbody tr")).to_have_count(4)
    page.get_by_role("searchbox").fill("What is")
    page.get_by_role("button", name="All messages").click()
    expect(page.locator("tbody tr").nth(3)).to_be_visible()


def test_a_bad_expression_shows_its_error_and_keeps_the_list(open_page, watch):
    watch.expected = ("status of 400",)
    page = open_page("#/run/live/trajectories")
    before = page.locator("tbody tr").count()
    page.get_by_label("Filter").fill("step > 0 and rewrd > 0")
    page.get_by_label("Filter").press("Enter")
    problem = page.locator("#filter-problem")
    expect(problem.locator(".fault")).to_have_text("rewrd")
    expect(problem).to_contain_text("column 14: unknown field 'rewrd': did you mean 'reward'?")
    marked = "(input) => ['from', 'length'].map((name) => input.style.getPropertyValue(`--fault-${name}`))"
    assert page.get_by_label("Filter").evaluate(marked) == ["13", "5"]
    assert page.locator("tbody tr").count() == before
    page.get_by_label("Filter").fill("reward > 0")
    page.get_by_label("Filter").press("Enter")
    expect(problem).to_be_hidden()


def test_from_the_list_to_a_group_a_conversation_and_a_token(open_page):
    page = open_page("#/run/live/trajectories?filter=step == 2")
    page.locator(".group-link").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("What is")
    expect(page.locator(".copyable")).to_contain_text("train:")
    expect(page.locator(".sibling-head")).to_have_count(4)
    expect(page.locator(".outcome").first).to_contain_text("pass@1")
    page.locator(".sibling-link").nth(1).click()
    expect(page.locator(".timeline")).to_contain_text("What is")
    expect(page.locator(".timeline")).to_contain_text("calculate")
    question = page.get_by_role("heading", level=1).inner_text()
    assert question.startswith("What is") and page.title() == f"{question} · live · Turnwise board"
    page.get_by_role("link", name="Tokens", exact=True).click()
    expect(page).to_have_url(re.compile("view=tokens"))
    token = page.locator(".token").nth(1)
    token.hover()
    card = page.locator(".token-card")
    expect(card).to_be_visible()
    shown = page.evaluate(
        "async () => (await fetch(location.hash.replace(/^#.run.([^/]+).trajectory.(.*?)&view.*$/, '/api/runs/$1/tokens?$2'))).json()"
    )
    assert shown["ids_are_real"] is True
    expect(card.locator("dd").first).to_have_text(str(shown["segments"][0]["ids"][1]))
    page.get_by_role("button", name="3 sampler log-probability").click()
    expect(page).to_have_url(re.compile("colour=logprob"))
    expect(page.locator(".token-legend")).to_contain_text(re.compile("[0-9]"))


def test_a_sample_over_steps_and_in_other_runs(open_page):
    page = open_page("#/run/live/trajectories?filter=sample_id == 'test:1'")
    page.locator(".row-link").first.click()
    page.get_by_role("link", name="Over steps and runs").click()
    own = page.locator("section", has=page.get_by_role("heading", name="Over steps", exact=True))
    expect(own.locator("tbody tr th")).to_have_text(["10", "5"])
    beside = page.locator(".run-beside", has=page.get_by_role("link", name="other", exact=True))
    expect(beside.locator("tbody tr")).to_have_count(1)
    expect(beside).to_contain_text("The id is the same, the question is not")  # these runs made up their own
    expect(page.locator("section [role=status]")).to_contain_text("3 of 4 other runs played")
    beside.locator(".episode").click()
    expect(page).to_have_url(re.compile("#/run/other/trajectory"))


def test_on_paper_everything_is_light_open_and_whole(open_page):
    page = open_page("#/run/live/trajectory?shard=trajectories/step_000012&row=16", theme="dark")
    folded = page.locator("main details:not([open])").count()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for hidden in (".top", ".tabs", ".views", ".moves"):
        expect(page.locator(hidden).first).to_be_hidden()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    expect(page.locator("main details:not([open])")).to_have_count(0)
    cut = "[...document.querySelectorAll('main *')].filter((one) => getComputedStyle(one).overflowY === 'auto').length"
    assert folded > 0 and page.evaluate(cut) == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(page.locator("main details:not([open])")).to_have_count(folded)


def test_a_tool_that_fails_in_every_call_is_told_from_one_that_works(open_page):
    page = open_page("#/run/live/tools")
    since = """async (tools) => {
      const { failingSince, failingTools } = await import("board/parts/tool_table.js");
      const lines = failingTools(tools, "live").map((line) => line.textContent);
      return [Object.values(tools).map((tool) => failingSince(tool)?.step ?? null), lines];
    }"""
    steps, ok = [1, 2, 3], [0, 0, 0]
    tools = {
        "always": {"step": steps, "calls": [1, 0, 1], "failed": [1, 0, 1], "statuses": {"error": [1, 0, 1]}},
        "since": {"step": steps, "calls": [4, 3, 3], "failed": [1, 3, 3], "statuses": {"timeout": [1, 3, 3]}},
        "chance": {"step": steps, "calls": [4, 3, 1], "failed": [0, 0, 1], "statuses": {"error": [0, 0, 1]}},
        "made up": {"step": steps, "calls": [2, 2, 2], "failed": [2, 2, 2], "statuses": {"unknown_tool": [2, 2, 2]}},
        "works": {"step": steps, "calls": [2, 2, 2], "failed": ok, "statuses": {"ok": [2, 2, 2]}},
    }
    found, lines = page.evaluate(since, tools)
    assert found == [1, 2, None, None, None]
    assert lines[0].startswith("always failed in all of its 2 calls (error 2)") and "6 calls since step 2" in lines[1]
