"use strict";
// Draws the lanes of a step from the spans in #data: [phase, layer, start, end], in milliseconds.
const timeline = JSON.parse(document.getElementById("data").textContent);
const lanes = document.getElementById("lanes");
const about = document.getElementById("about");

function element(tag, className, parent, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  parent.append(made);
  return made;
}

const scroll = element("div", "scroll", lanes);
const sheet = element("div", "sheet", scroll);
const ruler = element("div", "ruler", sheet);
const spans = []; // for each row, its buttons in the order of time

for (const lane of timeline.lanes) {
  const group = element("div", "lane", sheet);
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", lane.title);
  element("b", "", group, lane.title);
  for (const row of lane.rows) {
    const line = element("div", "row", group);
    const buttons = row.map(([phase, layer, start, end]) => {
      const button = element("button", phase, line, layer.replace(/^layers\./, ""));
      button.type = "button";
      button.tabIndex = -1;
      button.style.left = `${(100 * start) / timeline.length}%`;
      button.style.width = `calc(${(100 * (end - start)) / timeline.length}% - 1px)`;
      const says =
        `${timeline.words[phase]} ${layer}: ${(end - start).toFixed(2)} ms, from ${start.toFixed(2)} to ${end.toFixed(2)}`;
      button.setAttribute("aria-label", says);
      const tell = () => { about.textContent = says; };
      button.addEventListener("focus", tell);
      button.addEventListener("pointerenter", tell);
      button.addEventListener("click", () => button.focus());
      Object.assign(button, { middle: (start + end) / 2 });
      return button;
    });
    spans.push(buttons);
  }
}
if (spans.length) spans[0][0].tabIndex = 0;

lanes.addEventListener("keydown", (event) => {
  const row = spans.findIndex((buttons) => buttons.includes(event.target));
  if (row < 0) return;
  const i = spans[row].indexOf(event.target);
  const along = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: spans[row].length - 1 }[event.key];
  const across = { ArrowUp: row - 1, ArrowDown: row + 1 }[event.key];
  if (along === undefined && across === undefined) return;
  event.preventDefault();
  const distance = (button) => Math.abs(button.middle - event.target.middle);
  const next = across === undefined ? spans[row][along]
    : spans[across]?.reduce((best, button) => (distance(button) < distance(best) ? button : best));
  if (!next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

// --- zoom: the sheet grows inside its own scroll area, about the middle of what is seen ------------------------------

const zoom = document.getElementById("zoom");

/** A step of 1, 2 or 5 times a power of ten that makes about `most` parts of `length`. */
function niceStep(length, most) {
  const power = 10 ** Math.floor(Math.log10(length / most));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => length / step <= most);
}

function draw() {
  const before = (scroll.scrollLeft + scroll.clientWidth / 2) / sheet.offsetWidth;
  sheet.style.width = `${100 * 2 ** zoom.valueAsNumber}%`;
  scroll.scrollLeft = before * sheet.offsetWidth - scroll.clientWidth / 2;
  const step = niceStep(timeline.length, Math.max(sheet.offsetWidth / 80, 2));
  ruler.replaceChildren();
  for (let n = 0; n * step < timeline.length; n++) {
    const tick = element("span", "", ruler, `${Number((n * step).toPrecision(6))}`);
    tick.style.left = `${(100 * n * step) / timeline.length}%`;
  }
}

zoom.addEventListener("input", draw);
addEventListener("resize", draw);
draw();
