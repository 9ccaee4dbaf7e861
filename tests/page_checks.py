"""Scripts that look for what nobody could read on a page: text without contrast, and what makes it scroll sideways."""

# The contrast of an element's text with what is behind it, by WCAG 2; colours with alpha are laid over one another.
CONTRAST = """() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const parse = (text) => {
    if (!known.has(text)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = text;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(text, [r, g, b, a / 255]);
    }
    return known.get(text);
  };
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let node = element; node; node = node.parentElement) layers.unshift(parse(getComputedStyle(node).backgroundColor));
    return layers.reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const low = [];
  const seen = new Set();
  for (const element of document.querySelectorAll("body *")) {
    if (element.closest("svg, option, :disabled, .off, [aria-hidden=true]")) continue;
    const text = [...element.childNodes].filter((node) => node.nodeType === 3 && node.textContent.trim()).map((node) => node.textContent.trim()).join(" ");
    if (!text || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const style = getComputedStyle(element);
    const key = [style.color, element.className, element.parentElement.className, element.tagName].join();
    if (seen.has(key)) continue;
    seen.add(key);
    const ground = behind(element);
    const [a, b] = [light(over(parse(style.color), ground)), light(ground)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${element.tagName}.${element.className}: ${text.slice(0, 40)}`);
  }
  return [low, seen.size];
}"""

# What makes the page scroll sideways: elements beyond its right edge that no box of their own scrolls or hides.
WIDE = """() => {
  const root = document.documentElement;
  if (root.scrollWidth <= root.clientWidth) return [];
  const held = (node) => node !== document.body && (getComputedStyle(node).overflowX !== "visible" || held(node.parentElement));
  const beyond = [...document.querySelectorAll("body *")].filter((node) => node.getBoundingClientRect().right > root.clientWidth);
  const loose = beyond.filter((node) => !held(node.parentElement));
  return [`${root.scrollWidth} px`, ...loose.slice(0, 5).map((node) => `${node.tagName}.${node.className}: ${node.textContent.slice(0, 40)}`)];
}"""
