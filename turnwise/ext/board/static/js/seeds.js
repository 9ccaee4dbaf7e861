// Runs that differ in nothing but their seed are one experiment: which they are, and their mean with its spread.

const OWN = new Set(["seed", "run", "runs_dir", "resume"]); // settings that every run has for itself

// seedGroups(["a", "b", "c"], keys of /api/diff) -> [{names: ["a", "b"], label: "mean of 2, learner.lr 0.001"}, {names: ["c"], label: "c"}]
// in the order of their first runs. Only runs of one kind are put together, as kind(name) tells.
export function seedGroups(names, keys, kind = () => "") {
  const telling = keys.filter((entry) => !OWN.has(entry.key));
  const groups = new Map();
  for (const name of names) {
    const settings = JSON.stringify([kind(name), ...telling.map((entry) => entry.values[name] ?? null)]);
    groups.set(settings, [...(groups.get(settings) ?? []), name]);
  }
  return [...groups.values()].map((members) => ({ names: members, label: labelOf(members, groups.size > 1 ? telling : []) }));
}

// By the one setting that tells the groups apart, else by the first run.
function labelOf(members, telling) {
  if (members.length === 1) return members[0];
  if (telling.length === 1) return `mean of ${members.length}, ${telling[0].key} ${telling[0].values[members[0]] ?? "not set"}`;
  return `mean of ${members[0]} and ${members.length - 1} more`;
}

// The mean of several series {step, seconds, tokens, value} where all of them have a value, and one standard deviation
// around it, within the limits that there are: {series, low, high}; null when they share no step. Thinned series stand at other steps each: the values
// between two of their points are taken from the straight line.
export function meanOf(all, [lowest, highest] = [-Infinity, Infinity]) {
  const thinned = all.some((series) => series.low);
  const at = (axis) => all.map((series) => (thinned ? (step) => along(series.step, series[axis], step) : exact(series, axis)));
  const [values, seconds, tokens] = ["value", "seconds", "tokens"].map(at);
  const mean = { series: { step: [], seconds: [], tokens: [], value: [] }, low: [], high: [] };
  for (const step of all[0].step) {
    const here = values.map((read) => read(step));
    if (here.some((value) => value === null)) continue;
    const middle = average(here);
    const deviation = Math.sqrt(here.reduce((sum, value) => sum + (value - middle) ** 2, 0) / Math.max(1, here.length - 1));
    mean.series.step.push(step);
    mean.series.value.push(middle);
    mean.series.seconds.push(average(seconds.map((read) => read(step))));
    mean.series.tokens.push(average(tokens.map((read) => read(step))));
    mean.low.push(Math.max(lowest, middle - deviation));
    mean.high.push(Math.min(highest, middle + deviation));
  }
  return mean.series.step.length ? mean : null;
}

function average(values) {
  return values.some((value) => value === null) ? null : values.reduce((sum, value) => sum + value, 0) / values.length;
}

function exact(series, axis) {
  const byStep = new Map(series.step.map((step, index) => [step, series[axis][index]]));
  return (step) => byStep.get(step) ?? null;
}

// The value at a step by the straight line between its neighbours; null outside, and in gaps.
function along(steps, values, step) {
  const right = steps.findIndex((one) => one >= step);
  if (right < 0) return null;
  if (steps[right] === step) return values[right];
  if (right === 0 || values[right] === null || values[right - 1] === null) return null;
  const share = (step - steps[right - 1]) / (steps[right] - steps[right - 1]);
  return values[right - 1] + share * (values[right] - values[right - 1]);
}
