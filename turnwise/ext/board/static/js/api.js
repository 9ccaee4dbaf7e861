// Asks the server, or answers from what a report froze; the only module that talks to anything.

export const frozen = typeof globalThis.FROZEN === "object" && globalThis.FROZEN !== null;

const listeners = new Set();
let liveState = frozen ? "frozen" : "off"; // off | connecting | live | lost | refused | frozen

// The canonical address: parameters sorted by name, empty ones (null, undefined, "") left out.
export function url(path, params) {
  const kept = Object.entries(params ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  kept.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
  const query = kept.map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(value)}`).join("&");
  return query ? `${path}?${query}` : path;
}

// runPath("my run", "series") -> "/api/runs/my%20run/series"
export function runPath(run, tail) {
  const base = `/api/runs/${encodeURIComponent(run)}`;
  return tail ? `${base}/${tail}` : base;
}

// Whether an address is answered here: a report holds some trajectories, the board all of them.
export function has(path, params) {
  return !frozen || url(path, params) in globalThis.FROZEN;
}

// An error's `answer` is what the server said with it: a title, the place in a filter.
export async function get(path, params, signal) {
  const address = url(path, params);
  if (frozen) {
    if (address in globalThis.FROZEN) return globalThis.FROZEN[address];
    throw notInReport(path);
  }
  return ask(address, { signal, headers: { Accept: "application/json" } });
}

// Has the server do something: the only way a page changes anything, and only a board started with --replay takes it.
export function post(path, body, signal) {
  return ask(path, { method: "POST", signal, body: JSON.stringify(body), headers: { Accept: "application/json", "Content-Type": "application/json" } });
}

async function ask(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the board's server does not answer; is `turnwise board` still running?");
  }
  const text = await response.text();
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Error(`${response.status} ${response.statusText}: the answer is not JSON`);
  }
  if (!response.ok) throw Object.assign(new Error(body.error ?? `${response.status} ${response.statusText}`), { answer: body });
  return body;
}

export const NO_RUN = "No such run"; // as the server titles it

// A report holds one run; a link to another leads nowhere in it.
function notInReport(path) {
  const names = globalThis.FROZEN["/api/runs"].runs.map((run) => run.name);
  const asked = /^\/api\/runs\/([^/?]+)/.exec(path);
  if (!asked || names.some((name) => encodeURIComponent(name) === asked[1])) return Object.assign(new Error("not part of this report"), { answer: { title: "Not in this report" } });
  const words = `this report holds the run ${names.join(", ")}; there is no run ${decodeURIComponent(asked[1])} in it`;
  return Object.assign(new Error(words), { answer: { title: NO_RUN } });
}

// Calls onChange() whenever one of these runs' files changed, or any run's if none is named; returns stop(). A page that nobody
// sees is not told: a browser has six connections to a server, and a seventh tab would wait for ever.
export function live(runs, onChange) {
  if (frozen) return () => {};
  let source = null;
  const open = () => {
    if (source !== null || document.hidden) return;
    announce("connecting");
    source = new EventSource(url("/api/events", { runs: runs.join(",") }));
    let lost = false;
    source.onopen = () => {
      announce("live");
      if (lost) onChange(); // the server was away: what happened meanwhile
      lost = false;
    };
    source.onerror = () => {
      lost = true;
      announce(source.readyState === EventSource.CLOSED ? "refused" : "lost"); // of a lost one the browser tries again by itself
    };
    source.addEventListener("change", () => onChange());
  };
  const close = () => {
    source?.close();
    source = null;
    announce("off");
  };
  const turn = () => {
    if (document.hidden) return close();
    open();
    onChange(); // what happened meanwhile
  };
  document.addEventListener("visibilitychange", turn);
  open();
  return () => {
    document.removeEventListener("visibilitychange", turn);
    close();
  };
}

// Tells callback the connection's state now and on every change; returns stop().
export function onLive(callback) {
  listeners.add(callback);
  callback(liveState);
  return () => listeners.delete(callback);
}

function announce(state) {
  liveState = state;
  for (const callback of listeners) callback(state);
}
