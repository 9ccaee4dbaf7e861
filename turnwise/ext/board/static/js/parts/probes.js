// What a probe found: accuracy with the tools' images as they are and spoilt, with error bars, and the episodes behind it.
import { get, has, runPath } from "board/api.js";
import { fill, h } from "board/dom.js";
import { count, number, percent } from "board/format.js";
import { link } from "board/router.js";
import { rightBadge } from "board/parts/badges.js";
import { visible, visibleText } from "board/parts/visible.js";

const MEANING = {
  none: "As it is",
  blank: "Blank: one even grey in the place of each image of a tool",
  swap: "Swap: what tools showed for another sample",
  noise: "Noise: so much of it that nothing small can be read",
};

/** A probe's name with what it does, or in short. */
export function probeTitle(name, short = false) {
  const known = Object.hasOwn(MEANING, name) ? MEANING[name] : visibleText(name);
  return short ? known.split(":")[0] : known;
}

// share(0.5, 0.1): a bar with one standard error around its end, and the same in words.
function share(value, error, spoilt) {
  if (value === null) return "–";
  const within = (x) => Math.min(1, Math.max(0, x));
  const [low, high] = [within(value - (error ?? 0)), within(value + (error ?? 0))];
  return [
    `${percent(value)}${error === null ? "" : ` ± ${(100 * error).toFixed(1)}`}`,
    h("div", { class: "share-bar", "aria-hidden": "true" },
      h("span", { class: spoilt ? "share-fill spoilt" : "share-fill", style: { width: `${100 * within(value)}%` } }),
      error !== null && h("span", { class: "share-error", style: { left: `${100 * low}%`, width: `${100 * (high - low)}%` } })),
  ];
}

function change(one) {
  if (!one || one.change === null) return "–";
  const points = `${one.change > 0 ? "+" : one.change < 0 ? "−" : ""}${(100 * Math.abs(one.change)).toFixed(1)}`;
  return `${points}${one.change_stderr === null ? "" : ` ± ${(100 * one.change_stderr).toFixed(1)}`} points`;
}

function table(results, names) {
  const sources = [...new Set(results.map((one) => one.data_source))];
  const found = (source, name) => results.find((one) => one.data_source === source && one.probe === name);
  const head = ["Data source", "Episodes", "Looked", "As it is", ...names.map((name) => probeTitle(name, true))];
  const row = (source) => {
    const first = results.find((one) => one.data_source === source);
    return h("tr", null,
      h("th", { scope: "row" }, visible(source)),
      h("td", { class: "num" }, count(first.n)),
      h("td", { class: "num" }, first.n > 0 && first.looked !== null ? percent(first.looked / first.n, 0) : "–"),
      h("td", null, share(first.before, first.before_stderr, false)),
      names.map((name) => {
        const one = found(source, name);
        return h("td", null, share(one?.after ?? null, one?.after_stderr ?? null, true), h("div", { class: "muted small" }, change(one)));
      }));
  };
  return h("div", { class: "scroll" }, h("table", { class: "data probe-shares" },
    h("caption", { class: "sr" }, "accuracy by data source, as it is and under each probe"),
    h("thead", null, h("tr", null, head.map((text, index) => h("th", { scope: "col", class: index === 1 || index === 2 ? "num" : null }, text)))),
    h("tbody", null, sources.map(row))));
}

function pairTable(run, data, names) {
  const inside = (place) => has(runPath(run, "trajectory"), { shard: place.shard, row: String(place.row) });
  const cell = (pair, name) => {
    const place = pair.played[name];
    if (!place) return h("td", null, "–");
    const base = pair.played.none;
    const words = [rightBadge(place.right), " ", h("span", { dir: "auto" }, visible(place.answer || "(no answer)"))];
    if (!inside(place) || !inside(base)) return h("td", null, words);
    const href = name === "none" ? link(`/run/${run}/trajectory`, { shard: base.shard, row: base.row }) : link(`/run/${run}/beside`, { shard: base.shard, row: base.row, probe: name });
    return h("td", null, h("a", { href, title: name === "none" ? "this episode" : "before and after, side by side" }, words));
  };
  return h("div", { class: "scroll" }, h("table", { class: "data probe-pairs" },
    h("thead", null, h("tr", null, ["Question", "Data source", ...["none", ...names].map((name) => probeTitle(name, true))].map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", null, data.pairs.map((pair) => h("tr", null,
      h("th", { scope: "row", title: visibleText(pair.sample_id) }, visible(pair.question || pair.sample_id), pair.sibling ? ` (try ${pair.sibling + 1})` : null),
      h("td", null, visible(pair.data_source)), ["none", ...names].map((name) => cell(pair, name)))))));
}

/** The page of a probe, in the place of curves. */
export async function probeResults(node, run) {
  const data = await get(runPath(run, "probe"));
  const names = Object.keys(data.probes).filter((name) => name !== "none");
  fill(node, h("h1", { class: "sr" }, `Probe of ${run}`),
    h("section", { class: "results" },
      h("h2", null, "Accuracy before and after", h("span", { class: "section-note" }, "± is one standard error; an agent that answers by what it looked at falls to chance, one that guesses does not")),
      table(data.results, names),
      h("ul", { class: "muted small" }, names.map((name) => h("li", null, probeTitle(name)))),
      h("h2", null, "Episode by episode", h("span", { class: "section-note" }, data.pairs.length < data.total ? `${number(data.pairs.length)} of ${number(data.total)}, those that differ first` : "those that differ first")),
      pairTable(run, data, names)));
  return () => {};
}
