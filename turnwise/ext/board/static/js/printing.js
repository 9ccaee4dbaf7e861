// Paper: while a page is printed its theme is light and everything folded is open; afterwards it is as it was.
import { drawForPaper } from "board/charts.js";

// Two charts beside one another fit the narrower of A4 and Letter with the margins of print.css.
const CHART_WIDTH = 300;

export function lightWhenPrinted() {
  let opened = [];
  let theme = null;
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("main details:not([open])")];
    for (const folded of opened) folded.open = true;
    theme = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    drawForPaper(CHART_WIDTH);
  });
  addEventListener("afterprint", () => {
    for (const folded of opened) folded.open = false;
    document.documentElement.dataset.theme = theme;
    drawForPaper(null);
  });
}
