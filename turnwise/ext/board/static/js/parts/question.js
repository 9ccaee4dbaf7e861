// The question as the title of a page about one sample; without one (a picture alone, say) its id.
import { h } from "board/dom.js";
import { visibleText, visible } from "board/parts/visible.js";

const LONGEST = 140;
const LONGEST_IN_TAB = 60;

function shortened(text, most) {
  const line = text.trim().replace(/\s+/g, " ");
  const letters = [...line];
  return letters.length > most ? `${letters.slice(0, most - 1).join("").trimEnd()}…` : line;
}

/** The heading; the browser's tab says the same. `kind` stands before it: "Group". */
export function questionTitle(run, question, id, kind = null) {
  const text = question && question.trim() !== "" ? question : id;
  document.title = [visibleText(shortened(text, LONGEST_IN_TAB)), kind?.toLowerCase(), run, "Turnwise board"].filter(Boolean).join(" · ");
  return h(
    "h1",
    { class: "question-title" },
    kind && h("span", { class: "title-kind" }, kind),
    h("span", { dir: "auto" }, visible(shortened(text, LONGEST))),
  );
}
