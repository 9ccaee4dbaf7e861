// The controls above the trajectory list: search, filter expression with presets and fields, split.
import { fill, h } from "board/dom.js";
import { number } from "board/format.js";

const SPLITS = [
  ["all", "All"],
  ["train", "Train"],
  ["eval", "Eval"],
  ["greedy", "Greedy"],
];

function later(wait, action) {
  let timer = 0;
  const run = () => {
    clearTimeout(timer);
    timer = setTimeout(action, wait);
  };
  run.cancel = () => clearTimeout(timer);
  return run;
}

function searchForm(state, act) {
  const input = h("input", {
    type: "search",
    id: "list-search",
    value: state.text || state.search,
    placeholder: "question, answer or sample id",
    autocomplete: "off",
    spellcheck: "false",
  });
  const typed = later(180, () => act.search(input.value));
  input.addEventListener("input", typed);
  const form = h(
    "form",
    {
      class: "search-form",
      role: "search",
      onSubmit: (event) => {
        event.preventDefault();
        typed.cancel();
        act.fullText(input.value);
      },
    },
    h("label", { for: "list-search" }, "Search"),
    input,
    h("button", { type: "submit", title: "search every message of every file (Enter)" }, "All messages"),
  );
  return { form, input, typed };
}

/** Inserts a field's name at the caret. */
function insert(input, name) {
  const from = input.selectionStart ?? input.value.length;
  const before = input.value.slice(0, from);
  const gap = before !== "" && !/[\s(]$/.test(before) ? " " : "";
  input.setRangeText(`${gap}${name} `, from, input.selectionEnd ?? from, "end");
  input.focus();
}

function fieldList(fields, input) {
  return h(
    "details",
    { class: "fields" },
    h("summary", null, `${fields.length} fields`),
    h(
      "dl",
      null,
      fields.map((field) =>
        h(
          "div",
          null,
          h(
            "dt",
            null,
            h("button", { type: "button", class: "mini field-name", onClick: () => insert(input, field.name) }, field.name),
            h("span", { class: "muted" }, field.type),
          ),
          h("dd", null, field.doc),
        ),
      ),
    ),
  );
}

function filterForm(state, act) {
  const input = h("input", {
    type: "text",
    id: "list-filter",
    value: state.filter,
    placeholder: "reward > 0 and right == false",
    autocomplete: "off",
    spellcheck: "false",
    autocapitalize: "off",
    "aria-describedby": "filter-problem",
  });
  const typed = later(500, () => act.filter(input.value));
  input.addEventListener("input", typed);
  const submit = (event) => {
    event.preventDefault();
    typed.cancel();
    act.filter(input.value);
  };
  const form = h(
    "form",
    { class: "filter-form", onSubmit: submit },
    h("label", { for: "list-filter" }, "Filter"),
    input,
    h("button", { type: "submit" }, "Apply"),
    h("button", { type: "button", class: "clear-filter", title: "no filter", onClick: () => act.filter("") }, "Clear"),
  );
  return { form, input, typed };
}

function presetButton(preset, input, act) {
  const title = `${preset.doc ?? ""}\n${preset.filter}`.trim();
  const toggle = () => act.filter(input.value.trim() === preset.filter ? "" : preset.filter, preset.sort);
  return h(
    "button",
    { type: "button", class: "preset", title, dataset: { filter: preset.filter }, "aria-pressed": "false", onClick: toggle },
    preset.name,
  );
}

/** Which files are listed, with how many trajectories each kind has. */
function splitGroup(act) {
  const buttons = SPLITS.map(([split, label]) =>
    h("button", { type: "button", dataset: { split, label }, "aria-pressed": "false", onClick: () => act.split(split) }, label),
  );
  const node = h("div", { class: "segments", role: "group", "aria-label": "which files" }, buttons);
  const press = (split) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.split === split));
  };
  const setCounts = (counts) => {
    for (const button of buttons)
      fill(button, button.dataset.label, h("span", { class: "split-count" }, number(counts[button.dataset.split] ?? 0)));
    const pressed = (button) => button.getAttribute("aria-pressed") === "true";
    node.replaceChildren(
      ...buttons.filter((button) => counts[button.dataset.split] > 0 || button.dataset.split === "all" || pressed(button)),
    );
  };
  return { node, press, setCounts };
}

/** The bar: {node, splits, show(state, problem), setCounts(counts), stop}. `act` has search, fullText, filter and split. */
export function filterBar(state, known, act) {
  const search = searchForm(state, act);
  const filter = filterForm(state, act);
  const fields = fieldList(known.fields, filter.input);
  const presets = known.presets.map((preset) => presetButton(preset, filter.input, act));
  const splits = splitGroup(act);
  const problem = h("p", { class: "filter-problem", id: "filter-problem", role: "alert", hidden: true });
  const show = (now, message) => {
    if (document.activeElement !== filter.input || now.filter === "") filter.input.value = now.filter;
    filter.input.setAttribute("aria-invalid", String(message !== ""));
    problem.hidden = message === "";
    fill(problem, message);
    if (message !== "") fields.open = true;
    for (const button of presets) button.setAttribute("aria-pressed", String(button.dataset.filter === now.filter));
    splits.press(now.split);
  };
  const node = h(
    "div",
    { class: "filter-bar" },
    h("div", { class: "bar-line" }, search.form, splits.node),
    filter.form,
    problem,
    h("div", { class: "presets", role: "group", "aria-label": "presets" }, presets),
    fields,
  );
  const stop = () => {
    search.typed.cancel();
    filter.typed.cancel();
  };
  return { node, splits: splits.node, show, setCounts: splits.setCounts, searchInput: search.input, stop };
}
