// The page "Tools & users": how tools answered, where evidence is lost, what feedback changed, why episodes ended.
import { get, runPath } from "board/api.js";
import { bars, chart, linkZoom } from "board/charts.js";
import { clear, h } from "board/dom.js";
import { count, percent } from "board/format.js";
import { link } from "board/router.js";
import { csvButton } from "board/parts/csv.js";
import { quoted } from "board/parts/filter_text.js";
import { everRan, failingSince, failingTools, isNoTool, STATUS_COLOURS, toolRows, toolTable, total } from "board/parts/tool_table.js";
import { visible } from "board/parts/visible.js";

// [key, name, what it means, colour over the steps]
const STAGES = [
  ["episodes", "episodes", "Every recorded episode but those that failed for want of infrastructure.", null],
  ["called", "called a tool", "The policy asked for a tool at least once, however badly.", "--series-1"],
  ["ran", "ran", "At least one of its calls came back without an error.", "--series-6"],
  ["evidence", "gave evidence", "A call that worked said something: its reply was not empty.", "--series-4"],
  ["used", "used it", "A number or a word of such a reply, not in the question, stands in what the policy wrote later.", "--series-2"],
  ["correct", "correct", "The final answer is right.", "--good"],
];

const LEADS = {
  funnel: "How far episodes came, by data source: how many, their share of all, and how many of the stage before were lost.",
  tools: "Calls by how they ended, and how long they took: half of them less than p50, nine in ten less than p90.",
  flips: "Evaluation episodes whose first answer, before the user said a word, was worth something else than the final one.",
  stops: "By stop reason.",
  failures: "Episodes that ended by no fault of the policy; they are left out of baselines.",
};

// A policy invents names of tools; the ones called most are drawn and listed.
const MOST_DRAWN = 6;
const MOST_SOURCES = 12;
const MUCH = 0.25; // a stage that loses a quarter is where to look first

export async function render(node, { run, live }) {
  const charts = chartShelf();
  const sections = layout();
  node.append(sections.root);
  let stopped = false;

  async function refresh() {
    const data = await get(runPath(run, "tools"));
    if (!stopped) draw(sections, charts, data, run);
  }

  const fail = (error) => sections.say(`The tools could not be read: ${error.message}`);
  await refresh().catch(fail);
  const unlisten = live(() => refresh().catch(fail));
  return () => {
    stopped = true;
    unlisten?.();
    charts.destroy();
  };
}

function layout() {
  const status = h("div", { class: "insight-status" }, h("p", { class: "loading", role: "status" }, "Reading the tool calls…"));
  const alarm = h("div", { class: "failing-tools" });
  const summary = h("dl", { class: "figures" });
  const bucket = h("p", { class: "lead bucket" });
  const names = ["funnel", "funnelSteps", "tools", "flips", "stops", "failures"];
  const places = Object.fromEntries(names.map((name) => [name, h("div")]));
  const downloads = Object.fromEntries(["funnel", "tools", "failures"].map((name) => [name, h("span", { class: "download" })]));
  const section = (name, title) =>
    h("section", { class: "insight-section" },
      h("div", { class: "title-line" }, h("h2", null, title), downloads[name]), LEADS[name] && h("p", { class: "lead" }, LEADS[name]), places[name]);
  const root = h(
    "div",
    { class: "insight" },
    h("h1", null, "Tools & users"),
    status,
    h(
      "div",
      { class: "insight-body", hidden: true },
      alarm,
      summary,
      bucket,
      section("funnel", "From call to correct answer"),
      section("funnelSteps", "The same over steps"),
      section("tools", "Tools"),
      h("div", { class: "insight-pair" }, section("flips", "Answers changed by feedback"), section("stops", "Why episodes ended")),
      section("failures", "Infrastructure failures"),
    ),
  );
  const say = (text) => status.replaceChildren(h("p", { class: "error", role: "alert" }, text));
  return { root, status, say, body: root.querySelector(".insight-body"), alarm, summary, bucket, downloads, ...places };
}

function draw(sections, charts, data, run) {
  clear(sections.status);
  sections.body.hidden = false;
  sections.alarm.replaceChildren(...failingTools(data.tools, run));
  sections.summary.replaceChildren(...figures(data));
  const { downloads } = sections;
  downloads.funnel.replaceChildren(csvButton(`${run}-funnel`, () => funnelRows(data.funnel)));
  downloads.tools.replaceChildren(csvButton(`${run}-tools`, () => toolRows(data.tools)));
  downloads.failures.replaceChildren(csvButton(`${run}-failures`, () => failureRows(data.failures)));
  const together = `Each point of a chart is ${data.bucket} steps taken together: counts are added, shares and seconds averaged.`;
  sections.bucket.textContent = data.bucket > 1 ? together : "";
  drawFunnel(sections.funnel, data.funnel, run);
  drawFunnelSteps(sections.funnelSteps, charts, data.funnel_steps);
  drawTools(sections.tools, charts, data.tools);
  drawFlips(sections.flips, charts, data.flips, run);
  drawStops(sections.stops, charts, data.stop_reasons);
  drawFailures(sections.failures, data.failures, run);
  charts.link();
}

// ---- the figures on top ----

function figures(data) {
  const tools = Object.values(data.tools);
  const real = tools.filter((tool) => !isNoTool(tool)).length;
  const calls = tools.reduce((sum, tool) => sum + total(tool.calls), 0);
  const failed = tools.reduce((sum, tool) => sum + total(tool.failed), 0);
  const sources = Object.values(data.funnel.sources);
  const episodes = sources.reduce((sum, source) => sum + source.episodes, 0);
  const called = sources.reduce((sum, source) => sum + source.called, 0);
  const better = total(data.flips.wrong_to_right);
  const worse = total(data.flips.right_to_wrong);
  const failures = data.failures.reduce((sum, failure) => sum + failure.count, 0);
  const where = data.funnel.split === "eval" ? "evaluation" : "training";
  return [
    figure("tool calls", count(calls), `of ${real} ${real === 1 ? "tool" : "tools"}`),
    figure("failed", calls ? percent(failed / calls) : "none", `${count(failed)} calls`),
    figure("episodes with a call", episodes ? percent(called / episodes) : "none", `of ${count(episodes)} in ${where}`),
    figure("flipped to right", count(better), `${count(worse)} to wrong, in evaluations`),
    figure("infrastructure failures", count(failures), failures ? "see below" : "none"),
  ];
}

function figure(name, value, note) {
  return h("div", { class: "figure" }, h("dt", null, name), h("dd", null, h("strong", null, value), h("span", null, note)));
}

// ---- the funnel ----

function drawFunnel(place, funnel, run) {
  const sources = Object.entries(funnel.sources);
  const open = place.querySelector("details")?.open ?? false;
  const focused = [...place.querySelectorAll("a, button, summary")].indexOf(document.activeElement);
  if (!sources.length) {
    place.replaceChildren(nothing("No episode was recorded yet."));
    return;
  }
  place.replaceChildren(
    h("div", { class: "funnels" }, sources.map(([source, stages]) => funnelOf(source, stages, funnel.split, run))),
    h(
      "details",
      { class: "definitions", open },
      h("summary", null, "What each stage means"),
      h("p", null, "An episode counts for a stage only if it passed the one before."),
      h("dl", null, STAGES.map(([, name, meaning]) => [h("dt", null, name), h("dd", null, meaning)])),
    ),
  );
  if (focused >= 0) place.querySelectorAll("a, button, summary")[focused]?.focus();
}

function funnelOf(source, stages, split, run) {
  const whole = stages.episodes;
  const rows = STAGES.map(([key, name, meaning], index) => {
    const here = stages[key];
    const before = index ? stages[STAGES[index - 1][0]] : null;
    const share = whole ? here / whole : 0;
    const width = `${(100 * share).toFixed(2)}%`;
    return h(
      "li",
      { class: `stage stage-${key}` },
      h("button", { class: "stage-name", type: "button", "aria-label": `${name}: ${meaning}`, dataset: { meaning } }, name),
      h("span", { class: "stage-track", "aria-hidden": "true" }, h("span", { class: "stage-bar", style: { width } })),
      h("span", { class: "stage-count" }, count(here), h("small", null, ` ${percent(share)}`)),
      lost(before, here),
    );
  });
  const filter = `data_source == ${quoted(source)} and failure == null`;
  const href = link(`/run/${run}/trajectories`, { filter, split });
  return h("article", { class: "source-funnel" }, h("h3", null, h("a", { href }, visible(source))), h("ol", null, rows));
}

function lost(before, here) {
  const much = before > 0 && (before - here) / before >= MUCH;
  return h("span", { class: ["stage-lost", much && "is-much"] }, lostText(before, here));
}

function lostText(before, here) {
  if (before === null || before === 0) return "";
  if (here === before) return "none lost";
  if (here > before) return `${count(here - before)} more`;
  return `−${percent((before - here) / before)}`;
}

function drawFunnelSteps(place, charts, funnelSteps) {
  const sources = Object.entries(funnelSteps).slice(0, MOST_SOURCES);
  if (!sources.length) return place.replaceChildren(nothing("No step was recorded yet."));
  place.parentElement.hidden = sources.every(([, series]) => series.step.length < 2); // one dot says no more than the bars above
  if (place.parentElement.hidden) return;
  for (const [source, series] of sources) {
    const traces = STAGES.slice(1).map(([key, name, , colour]) => ({
      name,
      x: series.step,
      y: series[key],
      colour,
    }));
    charts.draw(place, `funnel ${source}`, chart, { title: source, traces, xTitle: "step", percent: true });
  }
}

// ---- tools, flips, stop reasons, failures ----

function drawTools(place, charts, tools) {
  // What fails in every call comes first, however seldom it was called.
  const fails = (tool) => Number(failingSince(tool) !== null);
  const used = Object.entries(tools).sort(([, a], [, b]) => fails(b) - fails(a) || total(b.calls) - total(a.calls));
  if (!used.length) return place.replaceChildren(nothing("No tool was called in this run."));
  let table = place.querySelector(".scroll");
  if (!table) {
    table = h("div", { class: "scroll" });
    place.replaceChildren(table);
  }
  table.replaceChildren(toolTable(used));
  for (const [name, tool] of used.slice(0, MOST_DRAWN)) {
    const statuses = Object.entries(tool.statuses).filter(([, values]) => total(values) > 0);
    const traces = statuses.map(([status, values]) => ({
      name: status.replaceAll("_", " "),
      x: tool.step,
      y: values,
      colour: STATUS_COLOURS[status],
    }));
    charts.draw(place, `calls ${name}`, bars, { title: `${name}: calls by status`, traces, xTitle: "step", yTitle: "calls" });
    if (!everRan(tool)) continue;
    const latency = [
      { name: "p50", x: tool.step, y: tool.p50, colour: "--series-1" },
      { name: "p90", x: tool.step, y: tool.p90, colour: "--series-4" },
    ];
    charts.draw(place, `latency ${name}`, chart, { title: `${name}: latency`, ...inReadableTime(latency), xTitle: "step" });
  }
}

const TIMES = [["seconds", 1], ["milliseconds", 1e3], ["microseconds", 1e6]];

/** Seconds in the unit in which the longest of them is at least one, and its name beside the axis. */
function inReadableTime(traces) {
  const longest = Math.max(...traces.flatMap((trace) => trace.y));
  const [unit, scale] = TIMES.find(([, times]) => longest * times >= 1) ?? TIMES[0];
  return { traces: traces.map((trace) => ({ ...trace, y: trace.y.map((value) => (value === null ? null : value * scale)) })), yTitle: unit };
}

// ---- the tables as CSV ----

function funnelRows({ split, sources }) {
  const keys = STAGES.map(([key]) => key);
  return [["data_source", "split", ...keys], ...Object.entries(sources).map(([source, stages]) => [source, split, ...keys.map((key) => stages[key])])];
}

function failureRows(failures) {
  const keys = ["text", "count", "first_step", "last_step"];
  return [keys, ...failures.map((failure) => keys.map((key) => failure[key]))];
}

function drawFlips(place, charts, flips, run) {
  if (!flips.step.length) {
    return place.replaceChildren(nothing("No evaluation has told first answers from final ones; that needs a simulated user."));
  }
  if (!place.querySelector(".links")) {
    const to = (text, filter) =>
      h("a", { href: link(`/run/${run}/trajectories`, { filter, split: "eval" }) }, text);
    place.replaceChildren(
      h(
        "p",
        { class: "links" },
        to("Episodes flipped to right", "first_right == false and right == true"),
        to("Episodes flipped to wrong", "first_right == true and right == false"),
      ),
    );
  }
  const x = flips.step.map((step) => `step ${step}`);
  const traces = [
    { name: "wrong to right", x, y: flips.wrong_to_right, colour: "--good" },
    { name: "right to wrong", x, y: flips.right_to_wrong, colour: "--bad" },
  ];
  const title = "Answers flipped, by evaluation";
  charts.draw(place, "flips", bars, { title, traces, xTitle: "evaluation", yTitle: "episodes", stacked: false });
}

function drawStops(place, charts, stops) {
  const reasons = Object.entries(stops.reasons).filter(([, values]) => total(values) > 0);
  if (!reasons.length) return place.replaceChildren(nothing("No step was recorded yet."));
  const traces = reasons.map(([reason, values], index) => ({
    name: reason.replaceAll("_", " "),
    x: stops.step,
    y: values,
    colour: reason === "failed" ? "--bad" : `--series-${(index % 8) + 1}`,
  }));
  charts.draw(place, "stops", bars, { title: "Stop reasons", traces, xTitle: "step", yTitle: "episodes" });
}

function drawFailures(place, failures, run) {
  if (!failures.length) return place.replaceChildren(h("p", { class: "all-well" }, "No episode failed for want of infrastructure."));
  const rows = failures.map((failure) => {
    const href = link(`/run/${run}/trajectories`, { filter: failure.filter, split: "all" });
    const { first_step: first, last_step: last } = failure;
    const steps = first === last ? String(first) : `${first} to ${last}`;
    return h(
      "tr",
      null,
      h("td", { class: "failure-text" }, visible(failure.text)),
      h("td", { class: "num" }, count(failure.count)),
      h("td", { class: "num" }, steps),
      h("td", null, failure.filter && h("a", { href, "aria-label": `Show the ${failure.count} episodes: ${failure.text}` }, "show")),
    );
  });
  const head = h(
    "tr",
    null,
    h("th", { scope: "col" }, "what was said"),
    h("th", { scope: "col", class: "num" }, "episodes"),
    h("th", { scope: "col", class: "num" }, "steps"),
    h("th", { scope: "col" }, h("span", { class: "sr" }, "trajectories")),
  );
  const table = h("table", null, h("thead", null, head), h("tbody", null, rows));
  place.replaceChildren(h("div", { class: "scroll" }, table));
}

const nothing = (text) => h("p", { class: "empty" }, text);

// ---- charts that live as long as the page ----

function chartShelf() {
  const made = new Map();
  let linked = 0;
  return {
    draw(place, key, kind, options) {
      const there = made.get(key);
      if (there) return there.update(options.traces, { yTitle: options.yTitle });
      if (!place.querySelector(":scope > .panels")) {
        place.querySelector(":scope > .empty")?.remove();
        place.append(h("div", { class: "panels" }));
      }
      made.set(key, kind(place.querySelector(":scope > .panels"), options));
    },
    link() {
      if (made.size === linked) return;
      linked = made.size;
      linkZoom([...made.entries()].filter(([key]) => key !== "flips").map(([, one]) => one));
    },
    destroy() {
      for (const one of made.values()) one.destroy();
    },
  };
}
