// One sample over the steps of a run, and in the other runs on the board: how its episodes ended each time it was played.
import { frozen, get, has, runPath } from "board/api.js";
import { chart } from "board/charts.js";
import { fill, h } from "board/dom.js";
import { number } from "board/format.js";
import { link } from "board/router.js";
import { badge } from "board/parts/badges.js";
import { copyableId } from "board/parts/copy.js";
import { csvButton } from "board/parts/csv.js";
import { questionTitle } from "board/parts/question.js";
import { answersOf } from "board/parts/siblings.js";
import { backToList } from "board/parts/trail.js";
import { visibleText, visible } from "board/parts/visible.js";

const MOST_RUNS = 24; // looked at before a person asks for more
const MOST_LINES = 8;
const MOST_ANSWERS = 4;
const WAIT = 300;

export async function render(node, { run, params, live }) {
  const page = new SamplePage(run, params.sample ?? "");
  fill(node, h("p", { class: "loading late", role: "status" }, "Loading the sample…"));
  await page.read();
  fill(node, page.node);
  if (!frozen) page.lookAround();
  const unlisten = live(() => page.read());
  return () => {
    unlisten?.();
    page.stop();
  };
}

class SamplePage {
  constructor(run, sample) {
    this.run = run;
    this.sample = sample;
    this.stopped = false;
    this.figure = null;
    this.own = null;
    this.others = []; // [{name, history}]
    this.head = h("header", { class: "trajectory-head" });
    this.plot = h("div", { class: "panels" });
    this.table = h("div");
    this.around = h("div", { class: "runs-beside" });
    this.status = h("p", { class: "muted", role: "status" });
    this.more = h("p");
    const beside = frozen ? null : h("section", null, h("h2", null, "In other runs"), this.status, this.more, this.around);
    this.node = h("article", { class: "sample-page" }, this.head, this.plot, h("section", null, h("h2", null, "Over steps"), this.table), beside);
  }

  stop() {
    this.stopped = true;
    this.figure?.destroy();
  }

  async read() {
    this.own = await this.history(this.run);
    if (this.stopped) return;
    this.draw();
  }

  /** What a run says about the sample; a long run is read in slices, and asked again until it was read to its end. */
  async history(run) {
    for (;;) {
      const found = await get(runPath(run, "sample"), { sample: this.sample });
      if (found.pending === 0 || this.stopped) return found;
      fill(this.status, `Reading ${run}: ${number(found.pending)} files left`);
      await new Promise((resolve) => setTimeout(resolve, WAIT));
    }
  }

  /** One run after the other, the newest first: no more is read at once than one page would. */
  async lookAround(from = 0) {
    const { runs } = await get("/api/runs");
    const names = runs.map((one) => one.name).filter((name) => name !== this.run);
    const until = Math.min(names.length, from + MOST_RUNS);
    fill(this.more);
    for (let index = from; index < until; index += 1) {
      fill(this.status, `Looking into ${visibleText(names[index])}, run ${number(index + 1)} of ${number(names.length)}…`);
      const history = await this.history(names[index]).catch((error) => ({ error: error.message, groups: [] }));
      if (this.stopped) return;
      if (history.groups.length > 0 || history.error) {
        this.others.push({ name: names[index], history });
        this.draw();
      }
    }
    const played = this.others.filter((one) => !one.history.error).length;
    const looked = `${number(until)} other ${until === 1 ? "run" : "runs"}`;
    fill(this.status, names.length === 0 ? "There is no other run on this board." : `${number(played)} of ${looked} played a sample of this id.`);
    const rest = names.length - until;
    if (rest > 0) fill(this.more, h("button", { type: "button", onClick: () => this.lookAround(until) }, `Look into ${number(Math.min(rest, MOST_RUNS))} more`));
  }

  isSame({ history }) {
    return history.question === this.own.question && history.data_source === this.own.data_source;
  }

  draw() {
    fill(this.head, heading(this.run, this.own, this.sample));
    fill(this.table, this.own.groups.length === 0 ? h("p", { class: "empty" }, "This run has no episode of this sample.") : historyTable(this.run, this.own));
    fill(this.around, this.others.map((one) => beside(one, this.isSame(one))));
    const lines = [{ name: this.run, history: this.own }, ...this.others.filter((one) => !one.history.error && this.isSame(one))].flatMap(linesOf);
    if (!lines.some((line) => line.x.length > 1) && lines.length < 2) return;
    const traces = lines.slice(0, MOST_LINES);
    const note = lines.length > MOST_LINES ? `the first ${MOST_LINES} of ${lines.length} lines` : "mean over its episodes of a step";
    if (this.figure) this.figure.update(traces);
    else this.figure = chart(this.plot, { title: "Reward of this sample", note, traces, xTitle: "step", yTitle: "mean reward" });
  }
}

function heading(run, own, sample) {
  return [
    h("div", { class: "head-line" }, h("a", { class: "back", href: backToList(run) }, "← Trajectories"), h("span", { class: "muted" }, "one sample over steps and runs")),
    questionTitle(run, own.question, sample, "Sample"),
    h("div", { class: "outcome" },
      h("span", null, h("b", null, number(own.episodes)), ` ${own.episodes === 1 ? "episode" : "episodes"} in ${number(own.groups.length)} ${own.groups.length === 1 ? "file" : "files"}`),
      own.data_source !== null && h("span", { class: "muted" }, visible(own.data_source)),
      h("span", { class: "muted" }, "sample ", copyableId(sample)),
      own.shown < own.episodes && badge(`the newest ${number(own.shown)} are shown`, "warn"),
      own.left_out && badge(`older files, up to step ${number(own.left_out.step)}, are not in memory`, "warn"),
      own.groups.length > 0 && csvButton(`${run}-sample`, () => rowsOf(run, own))),
  ];
}

/** Training is a line; evaluations are points, as among the curves. */
function linesOf({ name, history }) {
  return ["train", "eval", "greedy", "reused", "probe"].map((split) => {
    const groups = history.groups.filter((group) => group.split === split && group.mean !== null).reverse();
    return { name: split === "train" ? name : `${name}, ${split}`, x: groups.map((group) => group.step), y: groups.map((group) => group.mean), points: split !== "train", mode: "lines+markers" };
  }).filter((line) => line.x.length > 0);
}

function historyTable(run, history) {
  const heads = [["Step", true], ["Split"], ["Right", true], ["Reward", true], ["Episodes"], ["Answers"]];
  return h("div", { class: "scroll" }, h("table", { class: "history" },
    h("caption", { class: "sr" }, `episodes of this sample in ${run}`),
    h("thead", null, h("tr", null, heads.map(([text, num]) => h("th", { scope: "col", class: num ? "num" : null }, text)))),
    h("tbody", null, history.groups.map((group) => historyRow(run, history, group)))));
}

function historyRow(run, history, group) {
  const href = link(`/run/${run}/group`, { shard: group.shard, sample: history.sample_id });
  const inside = has(runPath(run, "group"), { shard: group.shard, sample: history.sample_id });
  return h("tr", null,
    h("th", { scope: "row", class: "num" }, inside ? h("a", { href, title: "the group side by side" }, String(group.step)) : String(group.step)),
    h("td", null, group.split),
    h("td", { class: "num" }, group.scored > 0 ? `${group.right} of ${group.scored}` : "–"),
    h("td", { class: "num" }, number(group.mean)),
    h("td", { class: "episodes" }, group.episodes.map((episode) => episodeLink(run, group, episode))),
    h("td", { class: "answers" }, answers(group.episodes)));
}

function answers(episodes) {
  const { distinct } = answersOf(episodes);
  const shown = distinct.slice(0, MOST_ANSWERS).map((answer) =>
    h("span", { class: "answer-chip", dir: "auto", title: visibleText(answer.text) }, answer.text === "" ? h("i", null, "no answer") : visible(answer.text), answer.count > 1 && h("span", { class: "muted" }, ` ×${answer.count}`)));
  return [shown, distinct.length > MOST_ANSWERS && h("span", { class: "muted" }, `and ${distinct.length - MOST_ANSWERS} others`)];
}

function episodeLink(run, group, episode) {
  const [sign, tone, text] = { true: ["✓", "good", "right"], false: ["✗", "bad", "wrong"] }[String(episode.right)] ?? ["·", "plain", "not graded"];
  const place = { shard: group.shard, row: episode.row };
  const title = `sibling ${episode.sibling}: ${text}, reward ${number(episode.reward)}, ${episode.turns} turns, ${episode.calls} calls, ${episode.stop_reason.replaceAll("_", " ")}`;
  const words = [h("span", { "aria-hidden": "true", class: `tone-${tone}` }, sign), `#${episode.sibling}`, h("span", { class: "sr" }, ` ${text}`)];
  if (!has(runPath(run, "trajectory"), place)) return h("span", { class: "episode", title: `${title}; not part of this report` }, words);
  return h("a", { class: "episode", href: link(`/run/${run}/trajectory`, place), title }, words);
}

/** Another run's episodes; an equal id with another question is another sample, which is said. */
function beside({ name, history }, same) {
  const title = h("h3", null, h("a", { href: link(`/run/${name}/sample`, { sample: history.sample_id ?? "" }) }, visible(name)));
  if (history.error) return h("section", { class: "run-beside" }, title, h("p", { class: "error" }, history.error));
  const other = same ? null : h("p", { class: "failure" }, "The id is the same, the question is not: ", h("q", { dir: "auto" }, visible(history.question ?? "")));
  return h("section", { class: "run-beside" }, title, other, historyTable(name, history));
}

function rowsOf(run, history) {
  const names = ["row", "sibling", "reward", "advantage", "right", "answer", "stop_reason", "turns", "calls"];
  const rows = history.groups.flatMap((group) => group.episodes.map((episode) => [run, group.shard, group.split, group.step, ...names.map((name) => episode[name])]));
  return [["run", "shard", "split", "step", ...names], ...rows];
}
