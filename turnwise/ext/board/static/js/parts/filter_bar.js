// The controls above the trajectory list: search, filter expression with presets and fields, split.
import { fill, h } from "board/dom.js";
import { number } from "board/format.js";

const SPLITS = [
  ["all", "All"],
  ["train", "Train"],
  ["eval", "Eval"],
  ["greedy", "Greedy"],
  ["reused", "Trained on again"],
  ["probe", "Probed"],
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
  input.addEventListener("scroll", () => input.style.setProperty("--scrolled", `${input.scrollLeft}px`));
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

function presetButton(preset, act) {
  const order = preset.sort ? `\nsorted by ${preset.sort}, ${preset.order === "asc" ? "smallest" : "largest"} first` : "";
  const toggle = () => act.preset(button.getAttribute("aria-pressed") === "true" ? null : preset);
  const title = `${preset.doc}\n${preset.filter}${order}`;
  const button = h("button", { type: "button", class: "preset", title, "aria-pressed": "false", onClick: toggle }, preset.name);
  const press = (now) => {
    const sorted = !preset.sort || (now.sort === preset.sort && now.order === preset.order);
    button.setAttribute("aria-pressed", String(now.filter === preset.filter && sorted));
  };
  return { button, press, group: preset.group };
}

/** The expression again with the wrong part marked; `place` is {message, column, end}, columns counting characters from 1. */
function faultOf(expression, { message, column, end }) {
  const letters = [...expression];
  const part = (from, to) => letters.slice(from, to).join("");
  const wrong = part(column - 1, end - 1);
  return [
    h("code", { class: "fault-text" }, part(0, column - 1), h("mark", { class: "fault" }, wrong === "" ? "\u2003" : wrong), part(end - 1)),
    h("span", null, `column ${column}: ${message}`),
  ];
}

/** Underlines the wrong part inside the input too, whose letters are all equally wide. */
function underline(input, place) {
  input.classList.toggle("has-fault", place !== null);
  if (place === null) return;
  input.style.setProperty("--fault-from", String(place.column - 1));
  input.style.setProperty("--fault-length", String(place.end - place.column));
  input.style.setProperty("--scrolled", `${input.scrollLeft}px`);
}

/** The presets in their groups, each under its name. */
function presetGroups(presets) {
  const groups = [...new Set(presets.map((preset) => preset.group))];
  return h(
    "div",
    { class: "presets" },
    groups.map((group) =>
      h(
        "div",
        { class: "preset-group", role: "group", "aria-label": `presets: ${group}` },
        h("span", { class: "preset-kind", "aria-hidden": "true" }, group),
        presets.filter((preset) => preset.group === group).map((preset) => preset.button),
      ),
    ),
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

/** The bar: {node, splits, show(state, error), setCounts(counts), stop}. `act` has search, fullText, filter, preset and split. */
export function filterBar(state, known, act) {
  const search = searchForm(state, act);
  const filter = filterForm(state, act);
  const fields = fieldList(known.fields, filter.input);
  const presets = known.presets.map((preset) => presetButton(preset, act));
  const splits = splitGroup(act);
  const problem = h("div", { class: "filter-problem", id: "filter-problem", role: "alert", hidden: true });
  const show = (now, error = null) => {
    const place = error?.answer?.filter ?? null;
    if (document.activeElement !== filter.input || now.filter === "") filter.input.value = now.filter;
    filter.input.setAttribute("aria-invalid", String(error !== null));
    underline(filter.input, place?.column ? place : null);
    problem.hidden = error === null;
    fill(problem, error === null ? null : place?.column ? faultOf(now.filter, place) : error.message);
    if (error !== null) fields.open = true;
    for (const preset of presets) preset.press(now);
    splits.press(now.split);
  };
  const node = h(
    "div",
    { class: "filter-bar" },
    h("div", { class: "bar-line" }, search.form, splits.node),
    filter.form,
    problem,
    presetGroups(presets),
    fields,
  );
  const stop = () => {
    search.typed.cancel();
    filter.typed.cancel();
  };
  return { node, splits: splits.node, show, setCounts: splits.setCounts, searchInput: search.input, stop };
}
