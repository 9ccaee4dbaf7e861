// What a run was told to do: its values, its configuration file, its plan, and the end of its log.

import { get, runPath } from "board/api.js";
import { h, fill } from "board/dom.js";
import { count, number } from "board/format.js";
import { setParams } from "board/router.js";

export async function render(node, { run, params, live, info }) {
  const [config, about] = await Promise.all([get(runPath(run, "config")), info()]);
  const rows = h("tbody");
  const tally = h("span", { class: "muted" });
  const find = h("input", { type: "search", placeholder: "Find a setting or value", "aria-label": "Find a setting or value", value: params.find ?? "", onInput: () => {
    setParams({ find: find.value });
    draw();
  } });
  const entries = Object.entries(config.values);
  const draw = () => {
    const words = find.value.trim().toLowerCase();
    const matching = entries.filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(words));
    fill(tally, words ? `${matching.length} of ${entries.length} settings` : `${entries.length} settings`);
    fill(rows, matching.length ? matching.map(([key, value]) => h("tr", null, h("th", { scope: "row", class: "mono" }, keyParts(key)), h("td", { class: "mono" }, shown(value))))
      : h("tr", null, h("td", { colspan: 2, class: "muted" }, "Nothing in the configuration matches.")));
  };
  draw();
  const log = h("pre", { class: "log", tabIndex: 0, "aria-label": "The log's last lines" }, about.log);
  const facts = h("dl", { class: "facts" });
  fill(facts, factList(about));
  fill(node, h("div", { class: "page-head" }, h("h1", null, "Configuration"), tally, h("span", { class: "grow" }), find),
    facts,
    h("div", { class: "config-columns" },
      h("div", { class: "scroll config-values" }, h("table", { class: "data" }, h("thead", null, h("tr", null, h("th", { scope: "col" }, "Setting"), h("th", { scope: "col" }, "Value"))), rows)),
      h("div", { class: "config-texts" },
        block("Plan", about.plan, true), h("section", { class: "panel text-block" }, h("header", { class: "panel-head" }, h("h2", null, "Log"), h("span", { class: "muted small" }, "the last 200 lines")), log),
        block("config.yaml", config.text, false))));
  log.scrollTop = log.scrollHeight;

  live(async () => {
    const body = await info().catch(() => null);
    if (!body) return;
    fill(facts, factList(body));
    if (body.log === log.textContent) return;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 30;
    log.textContent = body.log;
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
  return () => {};
}

function factList(about) {
  const facts = [
    ["command", about.command], ["trajectories", about.pending ? [count(about.trajectories), " ", h("span", { class: "muted", role: "status" }, `so far: reading, ${number(about.pending)} files left`)] : count(about.trajectories)], ["data sources", (about.sources ?? []).join(", ")],
    ["metrics", number((about.metrics ?? []).length)], ["checkpoints", (about.checkpoints ?? []).length ? `${about.checkpoints.length}, last ${about.checkpoints.at(-1)}` : "none"],
  ];
  return facts.filter(([, value]) => value).map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)));
}

function block(title, text, open) {
  return h("details", { class: "panel text-block fold", open }, h("summary", null, h("h2", null, title)),
    text ? h("pre", { tabIndex: 0, "aria-label": title }, text) : h("p", { class: "muted" }, "This run has none."));
}

// The section is quieter than the knob's own name.
function keyParts(key) {
  const cut = key.lastIndexOf(".") + 1;
  return [cut ? h("span", { class: "muted" }, key.slice(0, cut)) : null, key.slice(cut)];
}

function shown(value) {
  if (value === null || value === undefined || value === "null") return h("span", { class: "muted" }, "not set");
  return String(value) === "" ? h("span", { class: "muted" }, "empty") : String(value);
}
