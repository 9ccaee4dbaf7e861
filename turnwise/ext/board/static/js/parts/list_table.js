// The rows of the trajectory list: a table on a wide page, cards on a narrow one, the same elements in both.
import { h } from "board/dom.js";
import { link } from "board/router.js";
import { visible } from "board/parts/visible.js";

/** The pieces of a text around each place where `needle` occurs, those in <mark>. */
function marked(text, needle) {
  if (!needle) return visible(text);
  const nodes = [];
  const low = text.toLowerCase();
  const find = needle.toLowerCase();
  let from = 0;
  // Lower case may change a text's length (İ); then positions are off and nothing is marked.
  for (let at = low.length === text.length ? low.indexOf(find) : -1; at >= 0; at = low.indexOf(find, from)) {
    nodes.push(visible(text.slice(from, at)), h("mark", null, visible(text.slice(at, at + find.length))));
    from = at + find.length;
  }
  nodes.push(visible(text.slice(from)));
  return nodes;
}

// An answer's result stands at its end, and one line is all there is.
const ANSWER = 46;

function ending(text) {
  return text.length > ANSWER ? `…${text.slice(-ANSWER)}` : text;
}

function mainCell(run, row, needle) {
  return h(
    "td",
    { class: "what" },
    h(
      "a",
      { class: "row-link", href: link(`/run/${run}/trajectory`, { shard: row.shard, row: row.row }) },
      h("span", { class: "question", dir: "auto" }, row.question === "" ? visible(row.sample_id) : marked(row.question, needle)),
    ),
    row.excerpt !== undefined
      ? h("span", { class: "excerpt", dir: "auto" }, marked(row.excerpt, needle))
      : h(
          "span",
          { class: "answer", dir: "auto" },
          row.answer === "" ? h("i", null, "no answer") : marked(needle ? row.answer : ending(row.answer), needle),
        ),
  );
}

function heading(column, state, onSort) {
  const current = state.sort === column.name;
  const order = current ? (state.order === "asc" ? "ascending" : "descending") : null;
  const attributes = { class: [column.num && "num", column.wide && "wide"], scope: "col", "aria-sort": order };
  if (!onSort) return h("th", attributes, column.label);
  const arrow = current && h("span", { "aria-hidden": "true" }, state.order === "asc" ? "↑" : "↓");
  return h("th", attributes, h("button", { type: "button", onClick: () => onSort(column.name) }, column.label, arrow));
}

/** One row. A click anywhere on it opens it, unless text is being selected or the click was on a link. */
export function listRow(run, row, columns, needle) {
  return h(
    "tr",
    {
      class: "row",
      onClick: (event) => {
        if (event.target.closest("a, button") || String(getSelection()) !== "" || event.defaultPrevented) return;
        event.currentTarget.querySelector(".row-link").click();
      },
    },
    columns.map((column) =>
      column.main
        ? mainCell(run, row, needle)
        : h(
            "td",
            { class: [column.num && "num", column.wide && "wide", `cell-${column.name}`], dataset: { label: column.label } },
            column.cell(row),
          ),
    ),
  );
}

/** The whole table; `onSort` null means the order is fixed. */
export function listTable(run, rows, columns, state, onSort, needle) {
  const body = h(
    "tbody",
    null,
    rows.map((row) => listRow(run, row, columns, needle)),
  );
  const table = h(
    "table",
    { class: "list" },
    h("caption", { class: "sr" }, "trajectories"),
    h(
      "thead",
      null,
      h(
        "tr",
        null,
        columns.map((column) => heading(column, state, onSort)),
      ),
    ),
    body,
  );
  return { node: h("div", { class: "scroll list-box" }, table), body };
}

/** j and k move along the rows' links; returns a function that stops. */
export function rowKeys(node) {
  const press = (event) => {
    if (
      (event.key !== "j" && event.key !== "k") ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      event.target.closest("input, textarea, select")
    )
      return;
    const links = [...node.querySelectorAll(".row-link")];
    const at = links.indexOf(document.activeElement?.closest("tr")?.querySelector(".row-link"));
    const next = links[event.key === "j" ? at + 1 : Math.max(0, at - 1)];
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  };
  document.addEventListener("keydown", press);
  return () => document.removeEventListener("keydown", press);
}
