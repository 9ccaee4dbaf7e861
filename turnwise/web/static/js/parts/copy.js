// A button that copies a value as JSON and says whether that worked.
import { h } from "board/dom.js";

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
  const said = h("span", { role: "status" }, label);
  return h(
    "button",
    {
      class: "button",
      type: "button",
      onClick: async () => {
        said.textContent = (await copy(JSON.stringify(value, null, 2))) ? "Copied" : "The browser refused";
        setTimeout(() => {
          said.textContent = label;
        }, 1600);
      },
    },
    said,
  );
}
