// All runs in one list: which are alive, why the others are not, how they score, and which to compare.

import { get, runPath } from "board/api.js";
import { h, fill } from "board/dom.js";
import { ago, moment, number, seconds } from "board/format.js";
import { accuracy, badge, notes, progress, sparkline, watchBadge } from "board/parts/run.js";
import { go, link, setParams } from "board/router.js";

const COLUMNS = [
  { key: "name", title: "Run", value: (run) => run.name },
  { key: "state", title: "State", value: (run) => run.state },
  { key: "step", title: "Progress", value: (run) => run.step ?? -1 },
  { key: "reward", title: "Reward", number: true, value: (run) => run.reward ?? -Infinity },
  { key: "accuracy", title: "Accuracy", number: true, value: (run) => run.accuracy ?? -Infinity },
  { key: null, title: "Reward or loss over steps" },
  { key: "updated", title: "Updated", number: true, value: (run) => run.updated ?? 0 },
];
const SEARCH_FROM = 6; // fewer runs are found faster by eye
const CHECKED = 24; // of the newest runs it is asked what there is to watch, one after the other
const SLICES = 12; // a long run is read in slices; one that takes more is checked when it is opened

export async function render(node, { params, live }) {
  const view = { runs: (await get("/api/runs")).runs, sort: params.sort ?? "updated", order: params.order ?? "desc", text: params.find ?? "", chosen: new Set() };
  const compare = h("button", { type: "button", class: "primary", onClick: () => go("/compare", { runs: [...view.chosen].join(",") }) });
  const find = h("input", { type: "search", placeholder: "Find a run", "aria-label": "Find a run", value: view.text, onInput: () => {
    view.text = find.value;
    setParams({ find: find.value });
    draw();
  } });
  view.choose = (tag) => {
    find.value = `#${tag}`;
    find.dispatchEvent(new Event("input"));
  };
  const tally = h("span", { class: "muted" });
  const body = h("div");
  fill(node, h("div", { class: "page-head" }, h("h1", null, "Runs"), tally, h("span", { class: "grow" }), find, compare), body);

  const draw = () => {
    const focused = document.activeElement?.dataset?.focus ?? null;
    find.hidden = view.runs.length < SEARCH_FROM && !view.text && !view.runs.some((run) => run.tags.length || run.note);
    compare.hidden = view.runs.length < 2;
    compare.disabled = view.chosen.size < 2;
    fill(compare, view.chosen.size < 2 ? "Choose runs to compare" : `Compare ${view.chosen.size} runs`);
    fill(tally, summary(view.runs));
    fill(body, view.runs.length ? table(view, draw) : nothing());
    if (focused) body.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  };
  draw();

  let left = false;
  let asking = false;
  const check = async () => {
    if (asking) return;
    asking = true;
    for (const run of [...view.runs].slice(0, CHECKED)) {
      for (let slice = 0; slice < SLICES && !run.watch && !left; slice += 1) {
        const found = await get(runPath(run.name, "watch")).catch(() => ({ alarm: 0, watch: 0, pending: 0 })); // its row tells what is wrong
        if (!found.pending) run.watch = found;
      }
      const cell = body.querySelector(`[data-watch="${CSS.escape(run.name)}"]`);
      if (cell) fill(cell, watched(run));
    }
    asking = false;
  };
  check();
  live(async () => {
    view.runs = (await get("/api/runs")).runs;
    draw();
    await check();
  });
  return () => { left = true; };
}

function watched(run) {
  const mark = run.watch && watchBadge(run.watch);
  return mark && h("a", { href: link(`/run/${run.name}/health`) }, mark);
}

function summary(runs) {
  const states = new Map();
  for (const run of runs) states.set(run.state, (states.get(run.state) ?? 0) + 1);
  return [...states].sort((a, b) => b[1] - a[1]).map(([state, n]) => `${n} ${state}`).join(", ");
}

function nothing() {
  return h("div", { class: "empty" }, h("p", null, "There is no run here yet."), h("p", null, "Start one and it appears by itself: ", h("code", null, "turnwise train run=first")));
}

function table(view, draw) {
  const column = COLUMNS.find((one) => one.key === view.sort) ?? COLUMNS.at(-1);
  const words = view.text.trim().toLowerCase();
  const rows = view.runs.filter((run) => !words || `${run.name} ${run.task ?? ""} ${run.model ?? ""} ${run.state} ${run.tags.map((tag) => `#${tag}`).join(" ")} ${run.note}`.toLowerCase().includes(words));
  const sign = view.order === "asc" ? 1 : -1;
  rows.sort((a, b) => {
    const [left, right] = [column.value(a), column.value(b)];
    return sign * (left < right ? -1 : left > right ? 1 : 0);
  });
  if (!rows.length) return h("p", { class: "empty" }, `No run matches “${view.text}”.`);
  return h("div", { class: "scroll runs-box" }, h("table", { class: "runs" },
    h("thead", null, h("tr", null, h("th", null, h("span", { class: "sr" }, "Compare")), COLUMNS.map((one) => heading(one, view, draw)))),
    h("tbody", null, rows.map((run) => row(run, view, draw)))));
}

function heading(column, view, draw) {
  if (!column.key) return h("th", { scope: "col" }, column.title);
  const active = column.key === view.sort;
  const sort = () => {
    view.order = active && view.order === "desc" ? "asc" : active ? "desc" : column.number || column.key === "step" ? "desc" : "asc";
    view.sort = column.key;
    setParams({ sort: view.sort, order: view.order });
    draw();
  };
  return h("th", { scope: "col", class: column.number ? "num" : null, "aria-sort": active ? (view.order === "asc" ? "ascending" : "descending") : null },
    h("button", { type: "button", dataset: { focus: `sort-${column.key}` }, onClick: sort }, column.title, active ? (view.order === "asc" ? " ↑" : " ↓") : ""));
}

// A fine-tuning has a loss and no reward.
const isTuned = (run) => typeof run.loss === "number" && run.reward === null;

function row(run, view, draw) {
  const box = h("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, checked: view.chosen.has(run.name), dataset: { focus: `box-${run.name}` }, onChange: () => {
    if (box.checked) view.chosen.add(run.name);
    else view.chosen.delete(run.name);
    draw();
  } });
  const about = [run.task, run.model, run.seconds ? seconds(run.seconds) : null].filter(Boolean).join(" · ");
  const why = run.reason && run.state !== "running" && run.state !== "finished" ? h("div", { class: `why why-${run.state}` }, run.reason) : null;
  return h("tr", null,
    h("td", { class: "pick" }, box),
    h("td", { class: "name" }, h("a", { href: link(`/run/${run.name}/curves`), dataset: { focus: `run-${run.name}` } }, run.name), h("span", { dataset: { watch: run.name } }, watched(run)), h("div", { class: "muted small" }, about), notes(run, view.choose), why),
    h("td", { class: "state" }, badge(run.state)),
    h("td", { class: "steps" }, progress(run)),
    h("td", { class: "num", dataset: { label: isTuned(run) ? "loss" : "reward" } }, isTuned(run) ? [h("span", { class: "muted wide" }, "loss "), number(run.loss)] : number(run.reward)),
    h("td", { class: "num", dataset: { label: "accuracy" } }, accuracy(run)),
    h("td", { class: "shape" }, sparkline(run.spark ?? [], { of: isTuned(run) ? "loss" : "reward" })),
    h("td", { class: "num muted when", title: moment(run.updated) }, h("span", { dataset: { updated: run.updated } }, ago(run.updated))));
}
