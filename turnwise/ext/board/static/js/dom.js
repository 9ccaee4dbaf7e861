// Makes elements out of plain calls; text always becomes text nodes, so nothing a model wrote is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "open", "selected", "indeterminate", "hidden", "tabIndex", "textContent"]);
const ADDRESSES = new Set(["href", "src"]);

// h("a", { class: "x", href: "#/", onClick: go }, "text", child, [more]) -> Element.
// attrs: class (string or array), text, style (object), dataset (object), on<Event> functions, aria-*, anything else an attribute.
export function h(tag, attrs, ...children) {
  return build(document.createElement(tag), attrs, children);
}

export function svg(tag, attrs, ...children) {
  return build(document.createElementNS(SVG, tag), attrs, children);
}

export function clear(node) {
  node.replaceChildren();
  return node;
}

// Replaces what is inside `node`; strings become text.
export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

function build(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value === null || value === undefined) continue;
    setOne(node, name, value);
  }
  append(node, children);
  return node;
}

function setOne(node, name, value) {
  if (typeof value === "function" && name.startsWith("on")) {
    node.addEventListener(name.slice(2).toLowerCase(), value);
  } else if (name === "class" || name === "className") {
    const words = Array.isArray(value) ? value.filter(Boolean).join(" ") : value;
    if (words) node.setAttribute("class", words);
  } else if (name === "text") {
    node.textContent = String(value);
  } else if (name === "dataset") {
    for (const [key, one] of Object.entries(value)) if (one !== null && one !== undefined) node.dataset[key] = one;
  } else if (name === "style" && typeof value === "object") {
    for (const [key, one] of Object.entries(value)) {
      if (key.startsWith("--")) node.style.setProperty(key, one);
      else node.style[key] = one;
    }
  } else if (PROPERTIES.has(name)) {
    node[name] = value;
  } else if (name.startsWith("aria-")) {
    node.setAttribute(name, String(value)); // "false" is a value for aria, absence is not
  } else if (value === true) {
    node.setAttribute(name, "");
  } else if (value !== false) {
    if (ADDRESSES.has(name)) checkAddress(String(value));
    node.setAttribute(name, String(value));
  }
}

// A run's data may end in an address; only these kinds can never run code.
function checkAddress(address) {
  if (/^(#|\/(?!\/)|blob:|data:image\/(png|jpeg|jpg|gif|webp|bmp);)/.test(address)) return;
  throw new Error(`not an address of this board: ${address.slice(0, 60)}`);
}

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false || child === true) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : String(child));
  }
}
