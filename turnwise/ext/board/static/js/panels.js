// Decides which panels a run's metric names make: sections a person looks for, and everything else at the end.

const FAMILY = /^(.+)\/(mean|max|min)$/;
const REFERENCE_KL = /^actor\/(kl_|reward_kl)/; // written only where the policy is held to a reference

// panelSections(names, spreads) -> [{title, note, folded, panels: [{id, title, percent, stacked, kept, lines: [{label, dash, metric, low, high, error, spread}]}], searchable}]
// A line's low, high and error (a standard error) are metric names too; spread names a series of /spread, whose band replaces them.
// In order of use: what is looked at once in a while is folded. A panel that is kept is shown even when nothing in it varies.
export function panelSections(names, spreads = []) {
  const left = new Set(names);
  // Without a KL penalty these repeat the reward: they are kept, and at the end.
  const unpenalised = left.has("actor/reward_kl_penalty") ? [] : ["mean", "max", "min"].map((kind) => `critic/rewards/${kind}`).filter((name) => left.delete(name));
  const spread = new Set(spreads);
  const { looking, measured, counts } = measures(left);
  const severalTries = repeated(left);
  const heldOut = evaluatedRewards(left); // before accuracy, which takes what else begins with val/
  const { overall, others } = accuracy(left);
  const [first, ...parts] = reward(left, spread);
  const kl = named(left, [...left].filter((name) => REFERENCE_KL.test(name)));
  const learned = [...learning(left), ...named(left, ["actor/entropy"]), ...kl];
  const sections = [
    { title: "Fine-tuning", panels: fineTuning(left) },
    { title: "Reward and accuracy", note: "accuracy: train is the policy sampling, eval the held-out samples; first answers are those before the user speaks", panels: [first, ...overall, ...heldOut.overall].filter(Boolean) },
    { title: "Several episodes of a sample", note: "held-out samples: pass@k, one of k is right; pass^k, all k are; maj@k, the answer that most of k give is; avg@k, the mean of k", panels: severalTries },
    { title: "Learning", panels: learned },
    { title: "By data source", panels: [...others, ...heldOut.bySource] },
    { title: "Parts of the reward", panels: parts },
    { title: "Looking", note: "evidence: a crop showed a target of the ground truth; needless: a tool was called where none was needed", panels: looking },
    { title: "Measured by the task", panels: measured },
    { title: "Lengths and turns", note: "mean, with the shortest and longest as a band", panels: families(left, ["response_length/", "prompt_length/", "num_turns/", "tool_call_counts/", "segments/"]) },
    { title: "Time and throughput", folded: true, panels: time(left) },
    { title: "Staleness", folded: true, note: "age of a trained token: the steps between the weights that wrote it and those that learn from it", panels: staleness(left) },
    { title: "Sampler against learner", folded: true, note: "how far the log-probabilities of the engine that sampled are from those of the one that learns", panels: mismatch(left) },
    { title: "Learning in detail", folded: true, panels: families(left, LEARNING_TOO) },
    { title: "All other metrics", folded: true, panels: families(new Set([...left, ...unpenalised, ...counts]), [""]), searchable: true },
  ];
  return sections.filter((section) => section.panels.length > 0);
}

// Takes out the panels in which nothing varies: `constant` is {metric: its one value}. -> {sections, constant: [{title, metric, value}]}
export function withoutConstant(sections, constant) {
  const varies = (panel) => panel.kept || panel.lines.some((line) => !line.metric) || metricsOf(panel).some((metric) => !(metric in constant));
  const still = sections.flatMap((section) => section.panels.filter((panel) => !varies(panel))).flatMap((panel) =>
    panel.lines.map((line) => ({ title: panel.lines.length > 1 ? `${panel.title}: ${line.label}` : panel.title, metric: line.metric, value: constant[line.metric] })));
  const moving = sections.map((section) => ({ ...section, panels: section.panels.filter(varies) }));
  return { sections: moving.filter((section) => section.panels.length > 0), constant: still };
}

// Evaluations are made now and then: between two of them nothing was measured.
export function atEvaluations(metric) {
  return Boolean(metric?.startsWith("val/"));
}

// One metric a panel, for comparing runs: the same sections without the lines that share a panel. What only one of the
// runs measured (`several(metric)` is false) compares nothing: it is folded at the end.
export function singleSections(names, several = () => true) {
  const single = panelSections(names).map((section) => ({
    ...section,
    panels: section.panels.flatMap((panel) => panel.lines.map((line) => ({
      ...panel, stacked: false, id: line.metric, lines: [{ label: line.label, metric: line.metric, error: line.error }],
      title: panel.lines.length > 1 ? `${panel.title}: ${line.label}` : panel.title,
    }))),
  }));
  const alone = single.flatMap((section) => section.panels.filter((panel) => !several(panel.id)));
  const shared = single.map((section) => ({ ...section, panels: section.panels.filter((panel) => several(panel.id)) }));
  return [...shared, { title: "In one run only", folded: true, panels: alone }].filter((section) => section.panels.length > 0);
}

export function metricsOf(panel) {
  return panel.lines.flatMap((line) => [line.metric, line.low, line.high, line.error]).filter(Boolean);
}

function reward(left, spread) {
  const panels = [];
  const score = take(left, "critic/score/mean");
  ["critic/score/max", "critic/score/min"].forEach((name) => left.delete(name));
  panels.push(score || spread.has("reward") ? panel("Reward", [{ label: "reward", metric: score, spread: "reward" }], { kept: true }) : null);
  const parts = new Map();
  for (const name of takeAll(left, "reward_parts/")) {
    const path = name.split("/").slice(1); // a data source may have slashes of its own, a part has none
    const part = path.pop();
    parts.set(part, [...(parts.get(part) ?? []), { label: path.join("/") || part, metric: name }]);
  }
  for (const key of spread) if (key.startsWith("part/") && !parts.has(key.slice(5))) parts.set(key.slice(5), []);
  for (const [part, bySource] of parts) {
    const band = spread.has(`part/${part}`) ? `part/${part}` : null;
    const lines = bySource.length === 1 ? [{ ...bySource[0], label: part, spread: band }] : bySource;
    if (band && bySource.length !== 1) lines.unshift({ label: "all sources", metric: null, spread: band });
    panels.push(panel(`Part: ${part}`, lines));
  }
  const after = take(left, "critic/rewards/mean");
  ["critic/rewards/max", "critic/rewards/min"].forEach((name) => left.delete(name));
  if (after) panels.push(panel("Reward after the KL penalty", [{ label: "reward", metric: after }]));
  return panels;
}

const EVALUATED_REWARD = /^val\/(greedy_)?reward(_stderr|_n)?(?:\/(.+))?$/;

// Of held-out samples: over all beside the accuracy, and below it a line for each of several data sources.
function evaluatedRewards(left) {
  const found = [...left].map((name) => EVALUATED_REWARD.exec(name)).filter(Boolean);
  found.forEach((match) => left.delete(match[0]));
  const measured = found.filter(([, , detail]) => !detail).sort(([, a = ""], [, b = ""]) => a.length - b.length); // sampled, then greedy
  const line = ([metric, greedy = "", , source = ""], label) => ({ label, metric, error: `val/${greedy}reward_stderr${source && `/${source}`}`, colour: source ? null : ACCURACIES[greedy ? 2 : 1].colour });
  const overall = measured.filter(([, , , source]) => !source).map((match) => line(match, match[1] ? "eval, greedy" : "eval"));
  const sources = measured.filter(([, , , source]) => source);
  const several = new Set(sources.map(([, , , source]) => source)).size > 1;
  const bySource = ["", "greedy_"].map((kind) => sources.filter(([, greedy = ""]) => several && greedy === kind)).filter((matches) => matches.length)
    .map((matches) => panel(`Reward of held-out samples${matches[0][1] ? ", greedy" : ""}`, matches.map((match) => line(match, match[3]))));
  return { overall: overall.length ? [panel("Reward of held-out samples", overall)] : [], bySource };
}

const ACCURACIES = [["train/accuracy", "train"], ["val/accuracy", "eval"], ["val/greedy_accuracy", "eval, greedy"], ["val/first_accuracy", "eval, first answer", "dot"], ["val/greedy_first_accuracy", "greedy, first answer", "dot"]]
  .map(([prefix, label, dash], index) => ({ prefix, label, dash, colour: `--series-${index + 1}` })); // the same colour whichever of them a run has

// One panel beside the reward; where there are several data sources, one for each below.
function accuracy(left) {
  const names = new Set(left);
  const bySource = new Map();
  const whole = [];
  for (const { prefix, ...look } of ACCURACIES) {
    // How sure each one is: an error is drawn with its line, a count has no curve of its own.
    for (const detail of [`${prefix}_stderr`, `${prefix}_n`]) {
      take(left, detail);
      takeAll(left, `${detail}/`);
    }
    const error = (end) => (names.has(`${prefix}_stderr${end}`) ? `${prefix}_stderr${end}` : null);
    if (take(left, prefix)) whole.push({ ...look, metric: prefix, error: error("") });
    for (const name of takeAll(left, `${prefix}/`)) {
      const source = name.slice(prefix.length + 1);
      bySource.set(source, [...(bySource.get(source) ?? []), { ...look, metric: name, error: error(`/${source}`) }]);
    }
  }
  const sources = [...bySource].map(([source, lines]) => panel(bySource.size === 1 ? "Accuracy" : source, lines, { percent: true, kept: true }));
  const more = families(left, ["val/", "train/"]);
  if (bySource.size === 1) return { overall: sources, others: more };
  if (whole.length) return { overall: [panel("Accuracy: all sources", whole, { percent: true, kept: true })], others: [...sources, ...more] };
  return { overall: sources.slice(0, MOST_BESIDE), others: [...sources.slice(MOST_BESIDE), ...more] };
}

const REPEATED = /^val\/((?:pass[@^]|(?:maj|avg)@)\d+)(_stderr|_n)?(?:\/(.+))?$/;

// A panel for each data source (and one over all), with a line for each measure; an error is drawn with its line.
function repeated(left) {
  const bySource = new Map();
  const matches = [...left].sort((a, b) => b.startsWith("val/pass@") - a.startsWith("val/pass@")).map((name) => REPEATED.exec(name));
  for (const match of matches.filter(Boolean)) {
    const [name, label, detail, source = ""] = match;
    left.delete(name);
    if (detail) continue;
    const end = source && `/${source}`;
    bySource.set(source, [...(bySource.get(source) ?? []), { label, metric: name, error: `val/${label}_stderr${end}` }]);
  }
  if (bySource.size <= 2) bySource.delete(""); // of one source all is said by its own
  return [...bySource].map(([source, lines]) => panel(source || "all sources", lines, { percent: true, kept: true }));
}

const MOST_BESIDE = 2; // accuracies beside the reward when there is none over all sources

function named(left, names) {
  return names.filter((name) => take(left, name)).map((name) => panel(words(name), [{ label: words(name), metric: name }]));
}

const TURN = /^(.+\/)turn_(\d+)\/(.+)$/;

// What was measured turn by turn is one panel with a line for each turn.
function mismatch(left) {
  const turns = new Map();
  for (const name of [...left].filter((one) => TURN.test(one)).sort((a, b) => TURN.exec(a)[2] - TURN.exec(b)[2])) {
    const [, before, turn, rest] = TURN.exec(take(left, name));
    turns.set(before + rest, [...(turns.get(before + rest) ?? []), { label: `turn ${turn}`, metric: name }]);
  }
  const byTurn = [...turns].map(([base, lines]) => panel(`${words(base)} by turn`, lines));
  return [...families(left, ["rollout_corr/", "mismatch/", "training/rollout_probs_diff"]), ...byTurn];
}

const AGE = /^staleness\/age_(\d+)(_up)?$/;

// The histogram of every step as a column of shares, and the spread of the ages beside it.
function staleness(left) {
  const lines = [...left].filter((name) => AGE.test(name)).sort((a, b) => AGE.exec(a)[1] - AGE.exec(b)[1]).map((name) => {
    const [, age, up] = AGE.exec(take(left, name));
    return { label: `${age}${up ? " and more" : ""} ${age === "1" ? "step" : "steps"}`, metric: name };
  });
  if (!lines.length) return []; // on-policy: lines of zeros, among all other metrics
  const shares = panel("Trained tokens by age", lines, { percent: true, stacked: true });
  return [shares, ...families(left, ["staleness/", "groups/waited_for", "groups/ahead", "replay/"])];
}

const LOOKING = new Map([
  ["faithful", ["P(evidence | correct)", true]], ["evidence", ["P(evidence)", true]], ["needless", ["Needless tool use", true]], ["looks", ["Tool calls per episode", false]],
]);
const MEASURED = /^(val\/(greedy_)?)?task\/(.+)\/([^/]+)$/;

// What tasks measure of their episodes (`task/SOURCE/looks`), in training and then in evaluations: a line for each data source.
function measures(left) {
  const lines = new Map(); // by measure: [of training, of evaluations, of greedy ones]
  const counts = [];
  for (const name of [...left].sort()) {
    const [found, val, greedy, source, measure] = MEASURED.exec(name) ?? [];
    if (!found) continue;
    left.delete(name);
    if (measure === "episodes") counts.push(name);
    else {
      if (!lines.has(measure)) lines.set(measure, [[], [], []]);
      lines.get(measure)[greedy ? 2 : val ? 1 : 0].push({ label: source, metric: name });
    }
  }
  const panels = (measure, title, percent) => {
    const [trained, held, greedy] = lines.get(measure) ?? [[], [], []];
    return [[title, trained], ...evaluated(title, held, greedy)].filter(([, of]) => of.length).map(([name, of]) => panel(name, of, { percent }));
  };
  return {
    looking: [...LOOKING].flatMap(([measure, [title, percent]]) => panels(measure, title, percent)),
    measured: [...lines.keys()].filter((measure) => !LOOKING.has(measure)).flatMap((measure) => panels(measure, words(measure), false)),
    counts,
  };
}

// Sampled and greedy evaluations share a panel where each is one line.
function evaluated(title, held, greedy) {
  if (held.length > 1 || greedy.length > 1) return [[`${title}, eval`, held], [`${title}, greedy`, greedy]];
  return [[`${title}, eval`, [...held, ...greedy.map((line) => ({ ...line, label: `${line.label}, greedy` }))]]];
}

const LEARNING = [
  ["Policy loss", ["actor/pg_loss"]], ["Clipped share", ["actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac"]],
  ["Policy change per update", ["actor/ppo_kl"]], ["Gradient norm", ["actor/grad_norm", "critic/grad_norm"]], ["Learning rate", ["actor/lr", "critic/lr"]],
  ["Value loss", ["critic/vf_loss"]], ["Explained variance of the values", ["critic/vf_explained_var"]],
];

const LEARNING_TOO = ["critic/advantages/", "critic/returns/", "critic/values/", "actor/", "critic/", "loss"];

const FINE_TUNING = [["Loss", "sft/loss"], ["Gradient norm", "sft/grad_norm"], ["Learning rate", "sft/lr"], ["Tokens learned from", "sft/policy_tokens"]];

function fineTuning(left) {
  return FINE_TUNING.filter(([, name]) => take(left, name)).map(([title, name]) => panel(title, [{ label: title, metric: name }], { kept: name === "sft/loss" }));
}

function learning(left) {
  return LEARNING.map(([title, names]) => [title, names.filter((name) => take(left, name))])
    .filter(([, names]) => names.length)
    .map(([title, names]) => panel(title, names.map((name) => ({ label: words(name), metric: name }))));
}

function time(left) {
  const phases = [...left].filter((name) => /^timing_s\/[^/]+$/.test(name));
  phases.forEach((name) => left.delete(name));
  const panels = phases.length ? [panel("Seconds per phase", phases.map((name) => ({ label: words(name), metric: name })))] : [];
  return [...panels, ...families(left, ["perf/throughput", "perf/", "gpu/", "timing_s/", "timing_per_token_ms/"])];
}

// Panels for every name with one of the prefixes; mean, max and min of one thing are a line with a band.
function families(left, prefixes) {
  return prefixes.flatMap((prefix) => {
    const bases = new Map();
    for (const name of takeAll(left, prefix)) {
      const [, base, kind] = FAMILY.exec(name) ?? [null, name, "only"];
      bases.set(base, { ...bases.get(base), [kind]: name });
    }
    return [...bases].map(([base, member]) => {
      const main = member.only ?? member.mean ?? member.max ?? member.min;
      const lines = [{ label: words(base), metric: main, low: member.mean && member.min, high: member.mean && member.max }];
      if (member.only && member.mean) lines.push({ label: `${words(base)} mean`, metric: member.mean });
      return panel(prefix === "" ? base : words(base), lines, { percent: /(ratio|rate|share|frac)$/.test(base) && !base.endsWith("ppl_ratio") });
    });
  });
}

function panel(title, lines, more) {
  const id = lines.map((line) => line.metric ?? line.spread).join(" ");
  return { id, title, lines, percent: false, stacked: false, kept: false, ...more };
}

function take(left, name) {
  return left.delete(name) ? name : null;
}

function takeAll(left, prefix) {
  const names = [...left].filter((name) => name.startsWith(prefix)).sort();
  names.forEach((name) => left.delete(name));
  return names;
}

// Names that say less than a person would; those of verl keep "critic" for what needs none.
const PLAIN = {
  "actor/ppo_kl": "KL to the policy before the update", "actor/kl_loss": "KL to the reference", "actor/kl_coef": "KL coefficient",
  "actor/reward_kl_penalty": "KL to the reference, as taken from the reward", "actor/reward_kl_penalty_coeff": "KL coefficient of the reward",
  "critic/advantages": "Advantages", "critic/returns": "Returns", "critic/values": "Values of the critic", "critic/vpred_mean": "Mean value of the critic",
  "critic/vf_clipfrac": "critic", "critic/grad_norm": "critic", "critic/lr": "critic", "actor/grad_norm": "policy", "actor/lr": "policy",
  "actor/pg_clipfrac": "policy", "actor/pg_clipfrac_lower": "policy, lower bound", "rollout_corr/kl": "KL of sampler and learner", "rollout_corr/k3_kl": "KL of sampler and learner, k3 estimate",
  "training/rollout_probs_diff_max": "Largest probability difference", "training/rollout_probs_diff_mean": "Mean probability difference", "training/rollout_probs_diff_std": "Deviation of the probability difference",
  "timing_s/gen": "rollouts", "timing_s/update_actor": "update", "timing_s/step": "whole step", "timing_s/loop_lag_max": "longest wait of the event loop",
  "timing_s/agent_loop/generate_sequences": "Generating, seconds per episode", "timing_s/agent_loop/tool_calls": "Waiting for tools and users, seconds per episode",
  "staleness": "Age of trained tokens, steps", "staleness/left_out": "Episodes left out as too old", "groups/waited_for": "Groups a step waited for", "groups/ahead": "Groups ready before their step",
  "replay/age": "Age of groups trained on again, steps", "replay/groups": "Groups trained on again", "replay/kept": "Groups kept for later steps", "replay/trajectories": "Episodes trained on again",
  "rollout/engine_lost": "Tries whose engine was lost", "response_length/clip_ratio": "Truncated share", "tool_call_counts": "Tool calls", "perf/total_num_tokens": "Tokens of the step", "perf/sampler_tokens_per_second": "Tokens the sampler writes per second", "gpu/idle_share": "GPU without work", "gpu/memory_gib": "GPU memory at most, GiB", "critic/ref_reward": "Reference reward", "critic/valid_reward": "Validation reward",
};
const SPELT_OUT = [
  [/abs_diff_max$/, "largest log-prob difference"], [/abs_diff_mean$/, "mean log-prob difference"], [/abs_diff_p99$/, "log-prob difference, 99th percentile"],
  [/log_ppl_abs_diff$/, "log perplexity, absolute difference"], [/log_ppl_diff$/, "log perplexity, difference"], [/log_ppl_diff_max$/, "log perplexity, largest difference"], [/log_ppl_diff_min$/, "log perplexity, smallest difference"],
  [/log_ppl/, "log perplexity"], [/ppl/, "perplexity"], [/chi2_seq$/, "chi-squared of sequences"], [/chi2_token$/, "chi-squared of tokens"],
];
const SAID_BY_SECTION = /^(actor|timing_s|perf|rollout_corr|mismatch|agent_loop)\//;

// "actor/ppo_kl" -> "PPO KL": the name as a person says it; the exact one is in the panel's tooltip.
function words(name) {
  if (Object.hasOwn(PLAIN, name)) return PLAIN[name];
  let rest = name;
  while (SAID_BY_SECTION.test(rest)) rest = rest.replace(SAID_BY_SECTION, "");
  for (const [short, long] of SPELT_OUT) rest = rest.replace(short, long);
  const text = rest.replaceAll("/", " ").replaceAll("_", " ").replace(/^num /, "").replace(/\b(kl|ppo|pg|lr|vf|mfu|ess|ppl)\b/g, (word) => word.toUpperCase());
  return text.charAt(0).toUpperCase() + text.slice(1);
}
