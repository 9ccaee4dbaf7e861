// Reads and writes the hash: which page of which run is shown, and everything a deep link must keep.

const pages = new Map();

// Registers a page: module is {render(node, context) -> cleanup}; main.js does this once at start.
export function on(name, module) {
  pages.set(name, module);
}

export function page(name) {
  return pages.get(name) ?? null;
}

// link("/run/a b/curves", { x: "time" }) -> "#/run/a%20b/curves?x=time"; path segments are given raw, empty parameters left out.
export function link(path, params) {
  const segments = path.split("/").map(encodeURIComponent).join("/");
  const query = Object.entries(params ?? {})
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => `${encode(name)}=${encode(value)}`)
    .join("&");
  return query ? `#${segments}?${query}` : `#${segments}`;
}

// "#/run/NAME/curves?x=time" -> {page: "curves", run: "NAME", path: "/run/NAME/curves", params: {x: "time"}}
export function parse(hash) {
  const text = (hash || "#/").replace(/^#/, "");
  const cut = text.indexOf("?");
  const path = cut < 0 ? text : text.slice(0, cut);
  const params = {};
  if (cut >= 0) {
    for (const [name, value] of new URLSearchParams(text.slice(cut + 1).replaceAll("+", "%2B"))) params[name] = value;
  }
  const parts = path.split("/").filter(Boolean).map(decode);
  if (parts.length === 0) return { page: "runs", run: null, path: "/", params };
  if (parts[0] === "run" && parts.length >= 2) {
    return { page: parts[2] ?? "curves", run: parts[1], path: `/run/${parts[1]}/${parts[2] ?? "curves"}`, params };
  }
  return { page: parts[0], run: null, path: `/${parts.join("/")}`, params };
}

export function current() {
  return parse(location.hash);
}

// Changes parameters in place (null or "" removes one): the link is deep, the page is not drawn again, Back is not filled.
export function setParams(partial) {
  const here = current();
  history.replaceState(history.state, "", link(here.path, { ...here.params, ...partial }));
}

export function go(path, params) {
  location.hash = link(path, params);
}

// Calls show(route) now and whenever the hash changes.
export function start(show) {
  addEventListener("hashchange", () => show(current()));
  show(current());
}

// Commas and slashes are harmless after the hash and keep links readable.
function encode(value) {
  return encodeURIComponent(value).replaceAll("%2C", ",").replaceAll("%2F", "/");
}

function decode(segment) {
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment; // a hand-typed stray % is shown as typed
  }
}
