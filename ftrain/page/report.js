"use strict";
// What the report does when it is touched: show another rank, find parameters. `report` is what --json prints.
const report = JSON.parse(document.getElementById("data").textContent);
const AXES = ["replicate", "tensor", "shard"];
const ranksOn = (axis) => report.mesh[axis] ?? 1;
const number = document.getElementById("rank");
const slide = document.getElementById("slide");
const cells = [...document.querySelectorAll(".map button")];
const items = [...document.querySelectorAll(".entries > li")];

// --- where a rank is and what it holds: MeshShape.coordinate and local_slices of ftrain/sharding.py -----------------

function coordinate(rank) {
  const rest = Math.floor(rank / ranksOn("tensor"));
  return {
    replicate: Math.floor(rest / ranksOn("shard")),
    tensor: rank % ranksOn("tensor"),
    shard: rest % ranksOn("shard"),
  };
}

function rankAt(at) {
  return (at.replicate * ranksOn("shard") + at.shard) * ranksOn("tensor") + at.tensor;
}

/** [start, stop) of a dim of `size` that `axes` split, at a place of the mesh. */
function part(size, axes, at) {
  let [start, stop] = [0, size];
  for (const axis of axes) {
    const height = Math.ceil((stop - start) / ranksOn(axis));
    [start, stop] = [Math.min(start + at[axis] * height, stop), Math.min(start + (at[axis] + 1) * height, stop)];
  }
  return [start, stop];
}

/** The place on the mesh that holds index `i` of such a dim; other axes stay as they are in `at`. */
function holderOf(i, size, axes, at) {
  let [start, stop] = [0, size];
  const place = { ...at };
  for (const axis of axes) {
    const height = Math.ceil((stop - start) / ranksOn(axis));
    place[axis] = Math.floor((i - start) / height);
    [start, stop] = [start + place[axis] * height, Math.min(start + (place[axis] + 1) * height, stop)];
  }
  return place;
}

// --- words, as in ftrain/report/html.py -----------------------------------------------------------------------------

const dimName = (dim) => ["rows", "columns"][dim] ?? `dim ${dim}`;
const range = (first, last) => (first === last ? `${first}` : `${first}–${last}`);

function holds(rank, row, at) {
  const parts = row.stored.map((axes, dim) => part(row.shape[dim], axes, at));
  if (parts.some(([start, stop]) => start === stop)) return `rank ${rank} holds nothing of it`;
  const named = parts.map(([start, stop], dim) => `${dimName(dim)} ${range(start, stop - 1)} of ${row.shape[dim]}`);
  return `rank ${rank} holds ${named.filter((_, dim) => row.stored[dim].length).join(", ") || "all of it"}`;
}

// --- the rank that is shown -----------------------------------------------------------------------------------------

let shown = report.rank;

function show(rank) {
  if (!Number.isInteger(rank) || rank < 0 || rank >= report.world_size) return;
  shown = rank;
  const at = coordinate(rank);
  slide.value = rank;
  if (document.activeElement !== number) number.value = rank;
  document.getElementById("at").textContent =
    Object.keys(report.mesh).map((axis) => `${axis} ${at[axis]}`).join(", ") || "the only one";
  let current = null;
  for (const cell of cells) {
    const spans = cell.dataset.at.split(",").map((span) => span.split("-").map(Number));
    const here = spans.every(([first, last], i) => first <= at[AXES[i]] && at[AXES[i]] <= last);
    cell.setAttribute("aria-checked", here);
    cell.tabIndex = here ? 0 : -1;
    if (here) current = cell;
  }
  if (!current && cells.length) cells[0].tabIndex = 0; // the rank's replica is not drawn
  for (const item of document.querySelectorAll(".bars > li")) {
    item.classList.toggle("here", Number(item.dataset.first) <= at.shard && at.shard <= Number(item.dataset.last));
  }
  items.forEach((item, i) => {
    const row = report.parameters[i];
    item.querySelector(".holds").textContent = holds(rank, row, at);
    for (const strip of item.querySelectorAll(".strip")) {
      const dim = Number(strip.dataset.dim);
      const [start, stop] = part(row.shape[dim], row.stored[dim], at);
      const held = strip.querySelector(".held");
      held.setAttribute("x", start);
      held.setAttribute("width", stop - start);
    }
  });
}

number.addEventListener("input", () => show(number.valueAsNumber));
number.addEventListener("blur", () => { number.value = shown; });
slide.addEventListener("input", () => show(slide.valueAsNumber));

for (const cell of cells) {
  const pick = () => show(Number(cell.dataset.rank));
  cell.addEventListener("click", pick);
  cell.addEventListener("focus", pick);
  cell.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") pick(); });
  cell.addEventListener("keydown", (event) => {
    const all = [...cell.parentElement.children];
    const grid = cell.parentElement.classList.contains("grid");
    const columns = grid ? Number(cell.parentElement.style.getPropertyValue("--columns")) : 1;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    const next = { Home: all[0], End: all.at(-1) }[event.key] ?? (step && all[all.indexOf(cell) + step]);
    if (next) next.focus();
    if (next || step) event.preventDefault();
  });
}

items.forEach((item, i) => {
  for (const strip of item.querySelectorAll(".strip")) {
    const row = report.parameters[i];
    const dim = Number(strip.dataset.dim);
    const pick = (event) => {
      const box = strip.getBoundingClientRect();
      const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1 - 1e-9);
      const place = holderOf(Math.floor(share * row.shape[dim]), row.shape[dim], row.stored[dim], coordinate(shown));
      show(rankAt(place));
    };
    strip.addEventListener("click", pick);
    strip.addEventListener("pointermove", (event) => { if (event.buttons) pick(event); });
  }
});

// --- search ---------------------------------------------------------------------------------------------------------

/** "layers.0-2,5.wq" -> the paths that it stands for. */
function paths(folded) {
  let all = [""];
  for (const piece of folded.split(".")) {
    const options = [];
    for (const span of /^[\d,-]+$/.test(piece) ? piece.split(",") : [piece]) {
      const ends = span.match(/^(\d+)-(\d+)$/);
      if (!ends) options.push(span);
      else for (let n = Number(ends[1]); n <= Number(ends[2]); n++) options.push(`${n}`);
    }
    all = all.flatMap((start) => options.map((option) => (start ? `${start}.${option}` : option)));
  }
  return all;
}

/** A pattern with * or ? is matched against the whole path, anything else against any part of it. */
function matcher(query) {
  const text = query.trim().toLowerCase();
  if (!/[*?]/.test(text)) return (path) => path.toLowerCase().includes(text);
  const source = text.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".");
  const glob = new RegExp(`^${source}$`);
  return (path) => glob.test(path.toLowerCase());
}

const find = document.getElementById("find");
const found = document.getElementById("found");
const everything = found.textContent;
find.addEventListener("input", () => {
  const matches = matcher(find.value);
  let n = 0;
  for (const item of items) {
    item.hidden = !(matches(item.dataset.path) || paths(item.dataset.path).some(matches));
    n += !item.hidden;
  }
  found.textContent = find.value.trim() ? `${n} of ${items.length} shown` : everything;
});

show(shown);
