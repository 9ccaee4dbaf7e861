// A long prompt is folded: who reads one trajectory after the other knows it. Whether it is open is kept in this browser.
import { h } from "board/dom.js";

const KEY = "prompt";

function isOpen() {
  try {
    return localStorage.getItem(KEY) === "open";
  } catch {
    return false; // a report opened from a file may have no storage
  }
}

function keep(open) {
  try {
    localStorage.setItem(KEY, open ? "open" : "folded");
  } catch {
    // then the choice lasts as long as the page
  }
}

/** A fold with what stands before the first turn; a short one is open and leaves the choice alone. */
export function promptFold(attributes, { summary, headed = null, short = false }, ...content) {
  const choose = () => {
    if (!short) keep(!node.open);
  };
  const node = h("details", { ...attributes, open: short || isOpen() }, h("summary", { ...headed, onClick: choose }, summary), content);
  return node;
}
