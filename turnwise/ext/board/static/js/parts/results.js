// The result table of an evaluation as the command line prints it, alone or beside others, with what differs.

import { h } from "board/dom.js";
import { count, number, percent, seconds } from "board/format.js";
import { link } from "board/router.js";
import { visible } from "board/parts/visible.js";

const INTERVAL = "± is one standard error; episodes of one sample count as one cluster";

// What is behind a row of the table: its trajectories.
const BEHIND = {
  "failed episodes": "failure != null", "accuracy, final answer": "right == false", "flipped wrong -> right": "first_right == false and right == true",
  "flipped right -> wrong": "first_right == true and right == false", "tool calls": "failed_calls > 0",
};

export function resultTable(results, run, linked) {
  const { sources, rows } = results;
  const cell = (row, index) => {
    const said = value(row, index, results);
    const filter = linked && row.values[index] ? BEHIND[row.label] : null;
    if (!filter) return h("td", { class: kindClass(row) }, said);
    const both = `${filter} and data_source == ${JSON.stringify(sources[index])}`;
    return h("td", { class: "num" }, h("a", { href: link(`/run/${run}/trajectories`, { filter: both, split: "eval" }), title: both }, said));
  };
  return h("figure", { class: "results" }, h("figcaption", { class: "muted" }, caption(results)),
    h("div", { class: "scroll" }, h("table", { class: "data" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, h("span", { class: "sr" }, "Measured")), sources.map((name) => h("th", { scope: "col", class: "num" }, visible(name))))),
      h("tbody", null, rows.map((row) => h("tr", null, rowHead(row.label), sources.map((_, index) => cell(row, index))))))));
}

// One table a data source: a column for each run and, of two, the difference.
export function resultsBeside(runs) {
  const sources = [...new Set(runs.flatMap((run) => run.results.sources))];
  const labels = [...new Set(runs.flatMap((run) => run.results.rows.map((row) => row.label)))];
  return h("section", { class: "results" }, h("h2", null, "Results", h("span", { class: "section-note" }, INTERVAL)), sources.map((source) => {
    const found = runs.map((run) => new Map(run.results.rows.map((row) => [row.label, row])));
    const places = runs.map((run) => run.results.sources.indexOf(source));
    const said = (label, index) => (places[index] < 0 || !found[index].has(label) ? "" : value(found[index].get(label), places[index], runs[index].results));
    const kind = (label) => kindClass(found.map((rows) => rows.get(label)).find(Boolean));
    return h("div", { class: "scroll" }, h("table", { class: "data" }, h("caption", null, visible(source)),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, h("span", { class: "sr" }, "Measured")), runs.map((run) => h("th", { scope: "col", class: "num" }, run.name)),
        runs.length === 2 ? h("th", { scope: "col", class: "num" }, "difference") : null)),
      h("tbody", null, labels.map((label) => h("tr", null, rowHead(label), runs.map((_, index) => h("td", { class: kind(label) }, said(label, index))),
        runs.length === 2 ? h("td", { class: "num" }, difference(found.map((rows) => rows.get(label)), places)) : null)))));
  }));
}

// The same questions in two evaluations: how many answers flipped, and which.
export function pairsBeside({ sources, flips, alone }, names) {
  if (!sources.length) return null;
  const head = ["Data source", "Same questions", names[0], names[1], "difference", "wrong to right", "right to wrong"];
  const place = (name, one) => h("a", { href: link(`/run/${name}/trajectory`, { shard: one.shard, row: one.row }) }, visible(one.answer || "(no answer)"));
  const list = (towards, title) => {
    const rows = flips.filter((flip) => flip.right_now === towards);
    if (!rows.length) return null;
    return h("details", { class: "fold" }, h("summary", null, h("h3", null, `${title}: ${rows.length} listed`)), h("div", { class: "scroll" }, h("table", { class: "data flips" },
      h("thead", null, h("tr", null, ["Question", `Answer in ${names[0]}`, `Answer in ${names[1]}`].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", null, rows.map((flip) => h("tr", null, h("th", { scope: "row", title: flip.sample }, visible(flip.question || flip.sample), flip.sibling ? ` (try ${flip.sibling + 1})` : null),
        h("td", null, place(names[0], flip.first)), h("td", null, place(names[1], flip.second))))))));
  };
  const only = names.map((name, index) => (alone[index] ? `${count(alone[index])} only in ${name}` : null)).filter(Boolean);
  return h("section", { class: "results pairs" }, h("h2", null, "Answer by answer", h("span", { class: "section-note" }, "the newest evaluation of each; ± is one standard error of the paired difference")),
    h("div", { class: "scroll" }, h("table", { class: "data" }, h("thead", null, h("tr", null, head.map((text, index) => h("th", { scope: "col", class: index ? "num" : null }, text)))),
      h("tbody", null, sources.map((one) => h("tr", null, h("th", { scope: "row" }, visible(one.name)), h("td", { class: "num" }, count(one.pairs)), h("td", { class: "num" }, percent(one.first)), h("td", { class: "num" }, percent(one.second)),
        h("td", { class: "num" }, points(one.difference, one.error)), h("td", { class: "num" }, count(one.to_right)), h("td", { class: "num" }, count(one.to_wrong))))))),
    only.length ? h("p", { class: "muted small" }, `Left out: ${only.join(", ")}.`) : null,
    list(true, "Wrong to right"), list(false, "Right to wrong"));
}

function caption(results) {
  const parts = ["evaluation", results.seconds === null ? null : seconds(results.seconds), results.tokens_per_second === null ? null : `${count(Math.round(results.tokens_per_second))} policy tokens/s`, INTERVAL];
  return parts.filter(Boolean).join(", ");
}

// A tool's row belongs to the one of all calls above it.
function rowHead(label) {
  return h("th", { scope: "row", class: label.startsWith("  ") ? "sub" : null }, visible(label.trim()));
}

const kindClass = (row) => (row.kind === "text" ? "said" : "num");

function value(row, index, { n, samples }) {
  const [found, error] = [row.values[index], row.errors[index]];
  if (typeof found === "string") {
    const [first, ...rest] = found.split("\n");
    return [visible(first), rest.length ? h("div", { class: "muted small" }, visible(rest.join(" "))) : null];
  }
  if (row.kind === "part" && found !== null && n[index] !== null) return `${count(Math.round(found * n[index]))} of ${count(n[index])}`;
  if (row.kind === "share" || row.kind === "part") return error === null ? percent(found) : `${percent(found)} ± ${(100 * error).toFixed(1)}${row.n ? howMany(row.n[index], null) : howMany(n[index], samples[index])}`;
  return number(found, 2);
}

// howMany(128, 64) -> " (n=128, 64 samples)"
function howMany(n, samples) {
  if (n === null) return "";
  return samples === null || samples === n ? ` (n=${count(n)})` : ` (n=${count(n)}, ${count(samples)} samples)`;
}

function difference([left, right], [first, second]) {
  if (!left || !right || first < 0 || second < 0) return "";
  const [a, b] = [left.values[first], right.values[second]];
  if (typeof a !== "number" || typeof b !== "number") return "";
  if (left.kind !== "share" && left.kind !== "part") return a === b ? "0" : signed(number(b - a, 2), b - a);
  const errors = [left.errors[first], right.errors[second]];
  return points(b - a, errors.includes(null) ? null : Math.hypot(...errors));
}

// points(0.025, 0.16) -> "+2.5 ± 16.2 points"
function points(share, error) {
  return `${signed(`${(100 * Math.abs(share)).toFixed(1)}`, share)}${error === null ? "" : ` ± ${(100 * error).toFixed(1)}`} points`;
}

function signed(text, x) {
  const bare = text.replace(/^[−-]/, "");
  return x > 0 ? `+${bare}` : x < 0 ? `−${bare}` : bare;
}
