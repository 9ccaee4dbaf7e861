// Buttons that copy a text, or a value as JSON, and say whether that worked.
import { h } from "board/dom.js";
import { visible } from "board/parts/visible.js";

/** Where the page is not a secure context (another host, plain http) only the old way exists. */
function copyOldWay(text) {
  const area = h("textarea", { class: "off-screen", "aria-hidden": "true", value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

async function copy(text) {
  if (!navigator.clipboard) return copyOldWay(text);
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyOldWay(text); // the permission was refused
  }
}

export function copyButton(value, label) {
  return copying(() => JSON.stringify(value, null, 2), label, { class: "button" });
}

/** An id as text, with a small button that copies it. */
export function copyableId(id) {
  return h("span", { class: "copyable" }, h("code", null, visible(id)), copying(() => id, "copy", { class: "mini", title: "copy the id" }));
}

function copying(text, label, attributes) {
  const said = h("span", { role: "status" }, label);
  return h(
    "button",
    {
      ...attributes,
      type: "button",
      onClick: async () => {
        said.textContent = (await copy(text())) ? "Copied" : "The browser refused";
        setTimeout(() => {
          said.textContent = label;
        }, 1600);
      },
    },
    said,
  );
}
