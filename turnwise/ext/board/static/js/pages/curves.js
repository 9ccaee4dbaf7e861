// One run's curves: every metric it wrote, in sections, live, smoothed, zoomed together, and linkable as seen.

import { frozen, get, runPath } from "board/api.js";
import { warm } from "board/charts.js";
import { h, fill } from "board/dom.js";
import { atEvaluations, panelSections, withoutConstant } from "board/panels.js";
import { headline } from "board/parts/headline.js";
import { probeResults } from "board/parts/probes.js";
import { resultTable } from "board/parts/results.js";
import { link, setParams } from "board/router.js";
import { around, sheet } from "board/sheet.js";

const BANDS = [["std", "± std"], ["range", "p10 to p90"], ["none", "none"]];
const CLOCK = "critic/score/mean"; // has a value at every training step: what a step is in seconds and tokens

export async function render(node, { run, params, live, info }) {
  warm().catch(() => {}); // the panels say it
  const loaded = { series: {}, spread: {} };
  let band = BANDS.some(([name]) => name === params.spread) ? params.spread : "std";
  const spreading = get(runPath(run, "spread")); // may take a while on a long run; the curves do not wait for it
  spreading.catch(() => {}); // told below, if the page gets that far
  const about = await info();
  if (about.results) return evaluation(node, run, about, live, info);
  if (about.probe) return probeResults(node, run);

  const load = async (metrics, points) => {
    // A report holds one answer with every metric; a live page asks for what is in view.
    const names = frozen ? "*" : [...new Set([...metrics, CLOCK])].filter((name) => about.metrics.includes(name)).join(",");
    if (names) Object.assign(loaded.series, (await get(runPath(run, "series"), frozen ? { names } : { names, points })).series);
  };
  const choice = bandChoice(band, (next) => {
    band = next;
    setParams({ spread: next === "std" ? null : next });
    board.redraw();
  });
  choice.setAttribute("aria-busy", "true"); // lines stand without their bands until the spread is here
  const episodes = (first, last) => link(`/run/${run}/trajectories`, { split: "train", filter: first === last ? `step == ${first}` : `step >= ${first} and step <= ${last}` });
  const head = headline(run);
  const empty = h("p", { class: "empty" }, about.command === "eval" || about.command === "probe" ? "The result table appears here when it is done." : "This run has written no metrics yet; they appear here as it does.");
  fill(node, h("h1", { class: "sr" }, `Curves of ${run}`), head.node, empty);
  const board = sheet(node, { params, seconds: about.seconds, load, lines: (panel) => panelLines(panel, loaded, band), extra: [choice], episodes });
  const show = (body) => {
    head.show(body);
    // What a fine-tuning learns from was played by another run: its rewards are no curve of this one.
    const sections = panelSections(body.metrics, body.command === "sft" ? [] : Object.keys(loaded.spread));
    empty.hidden = sections.length > 0;
    choice.hidden = !sections.some((section) => section.panels.some((panel) => panel.lines.some((line) => line.spread)));
    loaded.pending = Boolean(body.pending); // the spread is then of the newest steps only, and the metric tells more
    about.metrics = body.metrics;
    const { sections: moving, constant } = withoutConstant(sections, body.constant);
    board.show(moving, constant);
  };
  show(about);
  spreading.then((body) => {
    loaded.spread = body.series;
    show(about);
    board.redraw();
  }, (error) => node.append(h("p", { class: "error", role: "alert" }, `The spread of the rewards: ${error.message}`)))
    .finally(() => choice.removeAttribute("aria-busy"));

  live(async () => {
    const [body, next] = await Promise.all([info(), get(runPath(run, "spread"))]);
    if (body.results || body.probe) return dispatchEvent(new HashChangeEvent("hashchange")); // an evaluation that is done has a table instead of curves
    loaded.spread = next.series;
    show(body);
    board.refresh();
  });
  return () => board.destroy();
}

// An evaluation is one point in time: a table says more than curves of one dot.
function evaluation(node, run, about, live, info) {
  const head = headline(run);
  const table = h("div");
  fill(node, h("h1", { class: "sr" }, `Results of ${run}`), head.node, table);
  const draw = (body) => {
    head.show(body);
    fill(table, resultTable(body.results, run, !frozen));
  };
  draw(about);
  live(async () => {
    const body = await info();
    if (body.results) draw(body);
  });
  return () => {};
}

function bandChoice(band, choose) {
  const buttons = BANDS.map(([name, title]) => h("button", { type: "button", "aria-pressed": band === name, onClick: () => {
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(BANDS[index][0] === name)));
    choose(name);
  } }, title));
  return h("span", { class: "field", role: "group", "aria-label": "Spread of the reward over trajectories" }, h("span", { class: "muted" }, "Spread"), h("span", { class: "segments" }, buttons));
}

function panelLines(panel, loaded, band) {
  return panel.lines.flatMap((line) => {
    const spread = line.spread ? loaded.spread[line.spread] : null;
    const series = line.metric ? loaded.series[line.metric] : null;
    if (spread && (!series || (band !== "none" && !loaded.pending))) return [withSpread(line, spread, loaded, band)];
    if (!series) return [];
    const error = line.error ? loaded.series[line.error] : null;
    const points = atEvaluations(line.metric);
    if (error?.value.length === series.value.length) return [{ name: line.label, colour: line.colour, dash: line.dash, points, series, ...around(series.value, error.value, panel.percent), whiskers: true }];
    const low = line.low ? loaded.series[line.low]?.value : series.low;
    const high = line.high ? loaded.series[line.high]?.value : series.high;
    const fits = low && high && low.length === series.value.length && high.length === series.value.length;
    return [{ name: line.label, colour: line.colour, dash: line.dash, points, series, low: fits ? low : undefined, high: fits ? high : undefined }];
  });
}

// The spread of single trajectories around their mean, from the index: every step has its own.
function withSpread(line, spread, loaded, band) {
  const clock = loaded.series[CLOCK] ?? { step: [], seconds: [], tokens: [] };
  const series = {
    step: spread.step, value: spread.mean,
    seconds: spread.seconds ?? spread.step.map((step) => between(step, clock.step, clock.seconds)),
    tokens: spread.tokens ?? spread.step.map((step) => between(step, clock.step, clock.tokens)),
  };
  if (band === "none") return { name: line.label, series };
  const edges = band === "range" ? { low: spread.p10, high: spread.p90 } : { low: spread.std_low, high: spread.std_high };
  return { name: line.label, series, ...edges };
}

// The value at `step` on a thinned clock, by the straight line between its neighbours.
function between(step, steps, values) {
  if (!steps.length) return null;
  let right = steps.findIndex((one) => one >= step);
  if (right < 0) right = steps.length - 1;
  if (right === 0 || steps[right] <= step) return values[right];
  const share = (step - steps[right - 1]) / (steps[right] - steps[right - 1]);
  return values[right - 1] + share * (values[right] - values[right - 1]);
}
