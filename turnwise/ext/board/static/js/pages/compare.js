// Several runs in one chart per metric, and what differs between their configurations.

import { get, runPath } from "board/api.js";
import { warm } from "board/charts.js";
import { h, fill } from "board/dom.js";
import { number } from "board/format.js";
import { atEvaluations, singleSections, withoutConstant } from "board/panels.js";
import { pairsBeside, resultsBeside } from "board/parts/results.js";
import { accuracy, badge } from "board/parts/run.js";
import { go, link, setParams } from "board/router.js";
import { meanOf, seedGroups } from "board/seeds.js";
import { around, sheet } from "board/sheet.js";

const COLOURS = 8; // the ninth run is drawn dashed in the first one's colour
const SEEDS = [["mean", "mean ± deviation"], ["each", "each run"]];

export async function render(node, { params, live }) {
  warm().catch(() => {}); // the panels say it
  const names = [...new Set((params.runs ?? "").split(",").filter(Boolean))];
  const all = (await get("/api/runs")).runs;
  fill(node, h("div", { class: "page-head" }, h("h1", null, "Compare runs"), h("span", { class: "grow" }), adder(all, names)));
  if (!names.length) {
    node.append(h("p", { class: "empty" }, "Choose runs to compare with the list above, or with the boxes on the ", h("a", { href: link("/") }, "runs page"), "."));
    return () => {};
  }
  const [abouts, diff] = await Promise.all([Promise.all(names.map((name) => get(runPath(name)))), get("/api/diff", { runs: names.join(",") })]);
  const loaded = new Map(names.map((name) => [name, {}]));
  const metrics = new Map(abouts.map((about) => [about.name, new Set(about.metrics)]));

  // One request for each run, with all its series that are in view.
  const load = (wanted, points) => Promise.all(names.map(async (name) => {
    const present = wanted.filter((metric) => metrics.get(name).has(metric));
    if (present.length) Object.assign(loaded.get(name), (await get(runPath(name, "series"), { names: present.join(","), points })).series);
  }));
  // Of a run without a config nothing is known: it stands alone.
  const kinds = new Map(abouts.map((about) => [about.name, about.task === null ? `run ${about.name}` : about.command]));
  const grouped = seedGroups(names, diff.keys, (name) => kinds.get(name));
  const several = grouped.some((group) => group.names.length > 1);
  const choose = (mode) => (mode === "each" ? names.map((name) => ({ names: [name], label: name })) : grouped);
  let groups = choose(params.seeds);
  const lines = (panel) => groups.flatMap((group, index) => {
    const look = { colour: colourOf(index), dash: index < COLOURS ? "solid" : "dash", points: atEvaluations(panel.lines[0].metric) };
    const members = group.names.map((name) => [name, loaded.get(name)]).filter(([, series]) => series[panel.lines[0].metric]);
    return members.length > 1 ? ofSeeds(panel, group, members, look) : members.map(([name, series]) => ofRun(panel, name, series, look));
  });
  const table = h("div");
  const results = h("div");
  const draw = (runs) => {
    fill(table, summary(runs, names, groups));
    const evaluations = runs.filter((run) => run.results);
    fill(results, evaluations.length ? resultsBeside(evaluations) : null);
  };
  draw(abouts);
  const answers = h("div");
  node.append(table, results, answers, differences(diff.keys, names));
  if (names.length === 2 && abouts.every(evaluated)) pairs(answers, names);
  if (abouts.every((about) => about.results)) {
    live(async () => draw(await Promise.all(names.map((name) => get(runPath(name))))));
    return () => {};
  }
  const modes = several ? [seedChoice(params.seeds, (mode) => {
    groups = choose(mode);
    draw(abouts);
    board.redraw();
  })] : [];
  const board = sheet(node, { params, seconds: Math.max(...abouts.map((about) => about.seconds ?? 0)), load, lines, extra: modes });
  const show = (runs) => {
    const { sections, constant } = panelsOf(runs);
    board.show(sections, constant);
  };
  show(abouts);

  live(async () => {
    const next = await Promise.all(names.map((name) => get(runPath(name))));
    for (const about of next) metrics.set(about.name, new Set(about.metrics));
    abouts.splice(0, abouts.length, ...next);
    draw(next);
    show(next);
    board.refresh();
  });
  return () => board.destroy();
}

const colourOf = (index) => `--series-${(index % COLOURS) + 1}`;

function ofRun({ percent, lines: [{ metric, error }] }, name, loaded, look) {
  const series = loaded[metric];
  const errors = loaded[error];
  const bars = errors?.value.length === series.value.length ? { ...around(series.value, errors.value, percent), whiskers: true } : {};
  return { name, series, ...bars, ...look };
}

// One line for all seeds, with one standard deviation around it, and each of them faint behind it.
function ofSeeds({ percent, lines: [{ metric }] }, { label }, members, look) {
  const mean = meanOf(members.map(([, loaded]) => loaded[metric]), percent ? [0, 1] : undefined);
  const behind = members.map(([name, loaded]) => ({ name, series: loaded[metric], ...look, faint: mean !== null }));
  return mean ? [...behind, { name: label, ...mean, whiskers: look.points, ...look }] : behind;
}

// What two or more of the runs measured, without what is the same number in all that have it at every step.
function panelsOf(runs) {
  const count = new Map();
  for (const metric of runs.flatMap((run) => run.metrics)) count.set(metric, (count.get(metric) ?? 0) + 1);
  const same = (metric) => runs.every((run) => !run.metrics.includes(metric) || (metric in run.constant && run.constant[metric] === first[metric]));
  const first = Object.assign({}, ...runs.map((run) => run.constant));
  const constant = Object.fromEntries(Object.entries(first).filter(([metric]) => same(metric)));
  return withoutConstant(singleSections([...count.keys()], (metric) => runs.length < 2 || count.get(metric) > 1), constant);
}

function seedChoice(mode, choose) {
  const buttons = SEEDS.map(([name, title]) => h("button", { type: "button", "aria-pressed": name === (mode === "each" ? "each" : "mean"), onClick: () => {
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(SEEDS[index][0] === name)));
    setParams({ seeds: name === "mean" ? null : name });
    choose(name);
  } }, title));
  return h("span", { class: "field", role: "group", "aria-label": "Runs that differ in their seed only" }, h("span", { class: "muted" }, "Seeds"), h("span", { class: "segments" }, buttons));
}

const evaluated = (about) => about.shards.some((shard) => shard.split === "eval");

// May take a while on long runs; the rest of the page does not wait for it.
function pairs(node, names) {
  fill(node, h("p", { class: "loading", role: "status" }, "Pairing the answers…"));
  get("/api/pairs", { runs: names.join(",") }).then((body) => fill(node, pairsBeside(body, names)),
    (error) => fill(node, h("p", { class: "error", role: "alert" }, `The answers could not be paired: ${error.message}`)));
}

function adder(all, names) {
  const rest = all.filter((run) => !names.includes(run.name));
  if (!rest.length) return null;
  const select = h("select", { "aria-label": "Add a run", onChange: () => go("/compare", { runs: [...names, select.value].join(",") }) },
    h("option", { value: "" }, "Add a run…"), rest.map((run) => h("option", { value: run.name }, run.name)));
  return select;
}

// The legend of all charts below, with where each run stands.
function summary(runs, names, groups) {
  const without = (name) => names.filter((other) => other !== name).join(",");
  return h("div", { class: "scroll" }, h("table", null,
    h("thead", null, h("tr", null, ["Run", "State", "Step", "Reward", "Accuracy", ""].map((title, index) => h("th", { scope: "col", class: index > 1 ? "num" : null }, title || h("span", { class: "sr" }, "Remove"))))),
    h("tbody", null, runs.map((run) => h("tr", null,
      h("th", { scope: "row" }, h("span", { class: "run-key" }, h("i", { class: "swatch", style: { background: `var(${colourOf(groups.findIndex((group) => group.names.includes(run.name)))})` } }), h("a", { href: link(`/run/${run.name}/curves`) }, run.name))),
      h("td", null, badge(run.state)),
      h("td", { class: "num" }, run.command === "eval" ? "evaluation" : number(run.step), run.steps ? ` of ${number(run.steps)}` : null),
      h("td", { class: "num" }, number(run.reward)),
      h("td", { class: "num" }, accuracy(run)),
      h("td", { class: "num" }, h("button", { type: "button", class: "mini", "aria-label": `Leave ${run.name} out`, onClick: () => go("/compare", { runs: without(run.name) }) }, "✕")))))));
}

function differences(keys, names) {
  if (names.length < 2) return h("p", { class: "lead" }, "Add a second run to see what differs.");
  const title = keys.length ? `${keys.length} ${keys.length === 1 ? "setting differs" : "settings differ"}` : "Same configuration";
  if (!keys.length) return h("p", { class: "lead same" }, "These runs have the same configuration.");
  return h("details", { class: "fold", open: keys.length <= 12 }, h("summary", null, h("h2", null, title)),
    h("div", { class: "scroll" }, h("table", { class: "data diff" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Setting"), names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, keys.map((entry) => h("tr", null, h("th", { scope: "row", class: "mono" }, entry.key),
        names.map((name) => h("td", { class: "mono" }, value(entry.values[name])))))))));
}

function value(text) {
  return text === null || text === undefined ? h("span", { class: "muted" }, "not set") : String(text);
}
