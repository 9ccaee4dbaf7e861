// A table as CSV to download, safe to open in a spreadsheet: what a model wrote never becomes a formula.
import { h } from "board/dom.js";

const NUMBER = /^[+-]?\d+(\.\d+)?$/;
const FORMULA = /^ *[=+\-@\t\r\n＝＋－＠]/;

/** A cell's text; what begins like a formula gets an apostrophe, as `safe_cell` of ext/board/export.py does. */
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  const text = Array.isArray(value) ? value.join(" ") : String(value);
  const safe = FORMULA.test(text) && !NUMBER.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** Rows of values, the first being the header, as CSV. */
export function csvOf(rows) {
  return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

/** A button that downloads what `rows()` gives (or promises) as NAME.csv. */
export function csvButton(name, rows, title = null) {
  const save = async () => {
    const address = URL.createObjectURL(new Blob([csvOf(await rows())], { type: "text/csv;charset=utf-8" }));
    h("a", { href: address, download: `${name}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  };
  return h("button", { type: "button", class: "button csv", title, onClick: save }, "CSV");
}
