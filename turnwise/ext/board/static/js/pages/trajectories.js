// The list of a run's trajectories: search, filter, presets, order, pages; every state of it is a link.
import { frozen, get, runPath, url } from "board/api.js";
import { fill, h } from "board/dom.js";
import { number } from "board/format.js";
import { link, setParams } from "board/router.js";
import { csvButton } from "board/parts/csv.js";
import { filterBar } from "board/parts/filter_bar.js";
import { FullText, searchStatus } from "board/parts/full_text.js";
import { columnsFor } from "board/parts/list_columns.js";
import { listRow, listTable, rowKeys } from "board/parts/list_table.js";
import { leaveTrail } from "board/parts/trail.js";

const LIMIT = 50;
const START = { split: "all", filter: "", search: "", text: "", sort: "step", order: "desc", offset: 0 };
// These read best from the smallest up when first clicked.
const SMALL_FIRST = new Set(["question", "sibling", "stop_reason", "data_source", "right"]);

export async function render(node, context) {
  const known = frozen ? { fields: [], presets: [] } : await get(runPath(context.run, "fields"));
  const page = new ListPage(context, known, frozen ? null : openingOf(await context.info()));
  fill(node, page.node);
  await page.load();
  return () => page.stop();
}

// A report holds lists by filter and split, in one order.
const HELD = frozen ? ["split", "filter", "offset"] : Object.keys(START);

/** What a link that asks for nothing opens on: the worst episodes of the last training step, which teach most.
 * The conversations of a fine-tuning have no worst: all are listed. */
function openingOf({ command, shards }) {
  if (command === "sft") return null;
  const steps = shards.filter((shard) => shard.split === "train").map((shard) => shard.step);
  if (steps.length === 0) return null;
  return { ...START, split: "train", filter: `step == ${Math.max(...steps)}`, sort: "reward", order: "asc" };
}

/** What the link asks for. */
function stateOf(params) {
  const state = { ...START };
  for (const name of HELD) if (params[name] !== undefined) state[name] = params[name];
  state.offset = Math.max(0, Number.parseInt(state.offset, 10) || 0);
  return state;
}

function empty({ total, damaged }) {
  if (total > 0) return "Nothing matches. Try another filter, or search all messages.";
  return damaged?.length > 0 ? "No trajectory could be read; the files are named above." : "No trajectories yet.";
}

class ListPage {
  constructor({ run, params, live, info }, known, opening) {
    this.run = run;
    this.known = known;
    const asked = stateOf(params);
    const nothing = HELD.every((name) => params[name] === undefined);
    this.state = nothing && opening ? opening : asked;
    this.opening = opening && Object.keys(START).every((name) => name === "offset" || this.state[name] === opening[name]) ? opening : null;
    this.serial = 0;
    this.search = null;
    this.total = null;
    this.timer = 0;
    this.info = info;
    this.bar = filterBar(this.state, known, {
      search: (text) => this.change({ search: text, text: "" }),
      fullText: (text) => this.change(text.trim() === "" ? { text: "", search: "" } : { text: text.trim(), search: "" }),
      filter: (text) => this.change({ filter: text.trim() }),
      preset: (preset) => this.choose(preset),
      split: (split) => this.change({ split }),
    });
    this.status = h("p", { class: "list-status", role: "status" });
    this.news = h("button", {
      type: "button",
      class: "news",
      hidden: true,
      onClick: () => {
        this.news.hidden = true;
        this.renew();
      },
    });
    this.download = h("span", { class: "download" });
    this.opened = h("p", { class: "list-opened", hidden: true });
    this.place = h("div", { class: "list-place" });
    this.pages = h("nav", { class: "pages", "aria-label": "pages" });
    this.node = h(
      "div",
      { class: "trajectories" },
      h("div", { class: "page-head" }, h("h1", null, "Trajectories")),
      frozen ? this.chosen() : this.bar.node,
      this.opened,
      h("div", { class: "list-line" }, this.status, this.news, this.download),
      this.place,
      this.pages,
    );
    this.stopKeys = rowKeys(this.node);
    this.stopLive = live(() => this.look());
    if (!frozen) this.counts(); // the run's numbers are not the report's
    if (!frozen) this.keep();
    this.sayOpening();
  }

  stop() {
    this.serial += 1;
    clearTimeout(this.timer);
    this.search?.drop();
    this.bar.stop();
    this.stopKeys();
    this.stopLive?.();
  }

  /** What a report says instead of the controls: it holds what was chosen when it was made. */
  chosen() {
    const { filter } = this.state;
    return h(
      "div",
      { class: "filter-bar" },
      h(
        "p",
        { class: "lead" },
        "The trajectories chosen for this report",
        filter === "" ? "." : [" that match ", h("code", null, filter), "."],
      ),
      filter === ""
        ? this.bar.splits
        : h("p", null, h("a", { href: link(`/run/${this.run}/trajectories`) }, "All trajectories of this report")),
    );
  }

  /** How many trajectories each split has, on its button. */
  async counts() {
    const body = await this.info().catch(() => null); // the shell says what is wrong with the run
    if (body === null) return;
    const counts = { all: 0 };
    for (const { split, size } of body.shards) {
      counts[split] = (counts[split] ?? 0) + size;
      counts.all += size;
    }
    this.bar.setCounts(counts);
  }

  /** Another choice of the reader's. */
  change(partial) {
    return this.enter({ ...this.state, offset: 0, ...partial }, null);
  }

  /** Takes a new state into the link and shows it; `opening` is the page's own choice that it is, null if a reader's. */
  enter(state, opening) {
    this.state = state;
    this.opening = opening;
    this.keep();
    this.sayOpening();
    return this.load();
  }

  /** The link names what is not as at first, and always the split: a link without anything opens on the worst. */
  keep() {
    const changed = {};
    for (const [name, value] of Object.entries(this.state)) changed[name] = value === START[name] && name !== "split" ? null : value;
    setParams(changed);
  }

  /** What a page shows that nobody asked for is said, with the way to everything. */
  sayOpening() {
    this.opened.hidden = this.opening === null;
    if (this.opening === null) return;
    const step = this.opening.filter.replace("step == ", "");
    fill(
      this.opened,
      h("b", null, `The lowest rewards of step ${step}`),
      ", the last of training. ",
      h("button", { type: "button", class: "mini", onClick: () => this.change({ ...START }) }, "Show all trajectories"),
    );
  }

  /** Takes in what is new: the opening goes on to the newest step. */
  async renew() {
    const opening = this.opening && openingOf(await this.info());
    return this.enter(opening ?? { ...this.state, offset: 0 }, opening);
  }

  /** A preset brings its order along; without one the list is as it was at first, so that switching it off undoes it. */
  choose(preset) {
    const { sort, order } = preset?.sort ? preset : START;
    return this.change({ filter: preset?.filter ?? "", sort, order });
  }

  query(offset = this.state.offset) {
    const { split, filter, search, sort, order } = this.state;
    return { split, filter, search, sort, order, offset, limit: LIMIT };
  }

  async load() {
    const serial = ++this.serial;
    clearTimeout(this.timer);
    this.search?.drop();
    this.search = null;
    if (this.state.text !== "") return this.searchAll();
    this.place.setAttribute("aria-busy", "true");
    let body;
    try {
      body = await get(runPath(this.run, "trajectories"), this.query());
    } catch (error) {
      if (serial === this.serial) this.fail(error);
      return;
    }
    if (serial !== this.serial) return;
    this.bar.show(this.state);
    this.total = body.total;
    this.show(body);
    // Files without an index line are read in slices; the list fills up meanwhile.
    if (body.pending > 0) this.timer = setTimeout(() => this.load(), 1000);
  }

  fail(error) {
    this.place.removeAttribute("aria-busy");
    fill(this.pages);
    fill(this.download);
    if (error.answer?.filter && !frozen) {
      this.bar.show(this.state, error);
      fill(this.status, "The filter was not understood.", this.total === null ? null : " Below is what the last one found.");
      this.place.classList.add("stale");
      return;
    }
    fill(this.status);
    fill(this.place, h("p", { class: "error", role: "alert" }, error.message));
  }

  show(body) {
    const { offset } = this.state;
    const columns = columnsFor(this.run, this.state, this.known.fields, body.rows);
    const onSort = frozen ? null : (name) => this.sort(name);
    leaveTrail(this.run, location.hash, body.rows, offset, body.matched);
    this.place.removeAttribute("aria-busy");
    this.place.classList.remove("stale");
    const range = body.rows.length > 0 ? `${number(offset + 1)}–${number(offset + body.rows.length)} of ` : "";
    const all = body.matched === body.total ? "" : ` ${frozen ? "in this report" : "matched"}, of ${number(body.total)}`;
    const pending = body.pending > 0 ? ` · ${number(body.pending)} files still to be read` : "";
    fill(this.status, range, h("b", null, number(body.matched)), all, pending);
    const focused = document.activeElement?.closest("th")?.cellIndex;
    if (body.rows.length === 0) fill(this.place, h("p", { class: "empty" }, empty(body)));
    else fill(this.place, listTable(this.run, body.rows, columns, this.state, onSort, this.state.search).node);
    if (focused !== undefined) this.place.querySelectorAll("th")[focused]?.querySelector("button")?.focus();
    fill(this.pages, this.steps(body));
    fill(this.download, body.matched > 0 && body.pending === 0 && this.csv(body));
  }

  /** The whole list as it is filtered and sorted; a report holds what is inside it. */
  csv(body) {
    const title = `all ${number(body.matched)} rows of this list, with every field`;
    if (frozen) return csvButton(`${this.run}-trajectories`, () => this.rowsInReport(body), title);
    const { split, filter, search, sort, order } = this.state;
    const href = url(runPath(this.run, "trajectories.csv"), { split, filter, search, sort, order });
    return h("a", { class: "button", href, download: "", title }, "CSV");
  }

  async rowsInReport({ matched }) {
    const rows = [];
    for (let offset = 0; offset < matched; offset += LIMIT) rows.push(...(await get(runPath(this.run, "trajectories"), this.query(offset))).rows);
    const names = ["shard", "row", ...Object.keys(rows[0]).filter((name) => name !== "shard" && name !== "row" && name !== "parts")];
    const parts = [...new Set(rows.flatMap((row) => Object.keys(row.parts ?? {})))];
    const cells = (row) => [...names.map((name) => row[name]), ...parts.map((part) => row.parts?.[part])];
    return [[...names, ...parts.map((part) => `parts.${part}`)], ...rows.map(cells)];
  }

  steps(body) {
    if (body.matched <= LIMIT && this.state.offset === 0) return null;
    const { offset } = this.state;
    const step = (label, to, off) => h("button", { type: "button", disabled: off, onClick: () => this.turn(to) }, label);
    const last = Math.max(0, Math.floor((body.matched - 1) / LIMIT) * LIMIT);
    return [
      step("« First", 0, offset === 0),
      step("← Previous", Math.max(0, offset - LIMIT), offset === 0),
      h("span", { class: "muted" }, `page ${number(Math.floor(offset / LIMIT) + 1)} of ${number(Math.floor(last / LIMIT) + 1)}`),
      step("Next →", offset + LIMIT, offset + LIMIT >= body.matched),
      step("Last »", last, offset >= last),
    ];
  }

  async turn(offset) {
    await this.enter({ ...this.state, offset }, this.opening);
    this.status.scrollIntoView({ block: "nearest" });
  }

  sort(name) {
    const { sort, order } = this.state;
    const first = SMALL_FIRST.has(name) ? "asc" : "desc";
    this.change({ sort: name, order: sort === name ? (order === "desc" ? "asc" : "desc") : first });
  }

  /** The run changed: say how many trajectories came in, without moving what is being read. */
  async look() {
    this.counts();
    if (this.total === null || this.state.text !== "") return;
    const serial = this.serial;
    const body = await get(runPath(this.run, "trajectories"), { ...this.query(0), limit: 1 }).catch(() => null);
    if (body === null || serial !== this.serial || body.total <= this.total) return;
    const fresh = body.total - this.total;
    this.news.textContent = `${number(fresh)} new ${fresh === 1 ? "trajectory" : "trajectories"}: show`;
    this.news.hidden = false;
  }

  searchAll() {
    const { text, filter, split } = this.state;
    const state = { ...this.state, sort: "", order: "" };
    const columns = columnsFor(this.run, state, this.known.fields, []).filter((column) => column.label !== "");
    const table = listTable(this.run, [], columns, state, null, text);
    table.node.hidden = true;
    fill(this.pages);
    fill(this.download);
    fill(this.place, table.node);
    this.place.removeAttribute("aria-busy");
    this.place.classList.remove("stale");
    const status = searchStatus(text, () => {
      this.bar.searchInput.value = "";
      this.change({ text: "", search: "" });
    });
    fill(this.status, status.node);
    this.search = new FullText(this.run, { text, filter, split }, (search, fresh) => {
      table.body.append(...fresh.map((row) => listRow(this.run, row, columns, text)));
      table.node.hidden = search.hits.length === 0;
      leaveTrail(this.run, location.hash, search.hits, 0, search.hits.length);
      this.bar.show(this.state, search.error);
      status.update(search);
    });
    this.search.go();
  }
}
