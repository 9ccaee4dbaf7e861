// Paper: while a page is printed its theme is light and everything folded is open; afterwards it is as it was.

/** `redraw` draws the charts in the theme of the moment. */
export function lightWhenPrinted(redraw) {
  let opened = [];
  let theme = null;
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("main details:not([open])")];
    for (const folded of opened) folded.open = true;
    theme = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    redraw();
  });
  addEventListener("afterprint", () => {
    for (const folded of opened) folded.open = false;
    document.documentElement.dataset.theme = theme;
    redraw();
  });
}
