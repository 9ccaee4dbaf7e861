// Searches every message of a run, a slice of files per request, and can be stopped and resumed.
import { get, runPath } from "board/api.js";
import { fill, h } from "board/dom.js";
import { number } from "board/format.js";

// So many finds are more than anyone reads: the search waits to be told to go on.
const PAUSE_AFTER = 300;

/** A search in progress; `onNews(search)` is called after each slice. */
export class FullText {
  constructor(run, question, onNews) {
    this.run = run;
    this.question = question; // {text, filter, split}
    this.onNews = onNews;
    this.hits = [];
    this.searched = 0;
    this.of = null;
    this.cursor = null;
    this.state = "idle"; // idle | searching | stopped | paused | done | failed
    this.error = null;
    this.until = PAUSE_AFTER;
    this.abort = null;
  }

  async go() {
    this.state = "searching";
    this.until = this.hits.length + PAUSE_AFTER;
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.onNews(this, []);
    while (this.state === "searching") {
      let slice;
      try {
        slice = await get(runPath(this.run, "search"), { ...this.question, cursor: this.cursor }, signal);
      } catch (error) {
        if (error.name === "AbortError") return;
        this.state = "failed";
        this.error = error;
        this.onNews(this, []);
        return;
      }
      if (signal.aborted) return;
      this.#take(slice);
    }
  }

  #take(slice) {
    const fresh = slice.hits.map((hit) => ({ ...hit.entry, shard: hit.shard, row: hit.row, excerpt: hit.excerpt }));
    this.hits.push(...fresh);
    this.searched = slice.searched;
    this.of = slice.of;
    this.cursor = slice.cursor;
    if (slice.cursor === null) this.state = "done";
    else if (this.hits.length >= this.until) this.state = "paused";
    this.onNews(this, fresh);
  }

  stop() {
    if (this.state !== "searching") return;
    this.state = "stopped";
    this.abort.abort();
    this.onNews(this, []);
  }

  /** Ends without telling anyone: the page is gone. */
  drop() {
    this.state = "stopped";
    this.abort?.abort();
  }
}

/** How far a search is, with its buttons: {node, update(search)}. The buttons stay the same elements, so a click never misses. */
export function searchStatus(text, onBack) {
  let current = null;
  const found = h("span", null, "searching…");
  const bar = h("progress", { max: "1", value: 0, "aria-label": "files searched" });
  const stop = h("button", { type: "button", class: "mini", onClick: () => current?.stop() }, "Stop");
  const again = h("button", { type: "button", class: "mini", hidden: true, onClick: () => current?.go() }, "Go on");
  const back = h("button", { type: "button", class: "mini", onClick: onBack }, "Back to the list");
  const files = (search) => (search.of === null ? "searching…" : `searched ${number(search.searched)} of ${number(search.of)} files`);
  const update = (search) => {
    current = search;
    const searching = search.state === "searching";
    const word = { stopped: ", stopped", paused: ", paused: that is a lot", failed: `: ${search.error?.message}` }[search.state] ?? "";
    fill(found, h("b", null, number(search.hits.length)), " found for ", h("q", null, text), ` · ${files(search)}${word}`);
    bar.value = search.of ? search.searched / search.of : 0;
    bar.hidden = stop.hidden = !searching;
    again.hidden = searching || search.state === "done";
  };
  return { node: h("span", { class: "search-status" }, stop, again, found, bar, back), update };
}
