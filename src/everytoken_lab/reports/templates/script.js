"use strict";
// Hovering and the arrow keys. The page is complete without this script.
window.addEventListener("error", (event) => {
  document.documentElement.dataset.errors = (document.documentElement.dataset.errors || "") + event.message + "; ";
  const place = document.getElementById("page-errors");
  if (place) place.textContent += "This page has a fault: " + event.message;
});
// tables that scroll say so
const mark = () => {
  for (const box of document.querySelectorAll(".scroll")) box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
};
window.addEventListener("resize", mark);
mark();
const said = (value) => String(Number(value.toPrecision(4)));
const nearest = (points, x) => {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
};
const live = document.getElementById("live");
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const data = JSON.parse(svg.dataset.chart);
  const [left, top, right, bottom] = data.box;
  const [x0, x1] = data.x, [y0, y1] = data.y;
  const stops = [...new Set(data.series.flatMap((s) => s.p.map((p) => p[0])))].sort((a, b) => a - b);
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
  const py = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
  const layer = document.createElementNS("http://www.w3.org/2000/svg", "g");
  svg.append(layer);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  svg.parentElement.append(tip);
  let at = stops.length - 1;
  const show = (x, aloud) => {
    const rows = data.series.map((s) => ({ name: s.name, c: s.c, p: nearest(s.p, x) }));
    let marks = `<line class="cursor" x1="${px(x)}" x2="${px(x)}" y1="${top}" y2="${bottom}"/>`;
    for (const row of rows) marks += `<circle cx="${px(row.p[0])}" cy="${py(row.p[1])}" r="4" style="fill:var(--s${row.c})"/>`;
    layer.innerHTML = marks;
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = `epoch ${said(x)}`;
    tip.append(head);
    for (const row of rows) {
      const line = document.createElement("div"), colour = document.createElement("i");
      colour.style.background = `var(--s${row.c})`;
      line.append(colour, `${row.name}: ${said(row.p[1])}${data.unit}`);
      tip.append(line);
    }
    tip.hidden = false;
    const scale = svg.clientWidth / svg.viewBox.baseVal.width || 1, place = px(x) * scale;
    const width = tip.offsetWidth, room = svg.clientWidth - place;
    tip.style.left = `${Math.max(0, room > width + 12 ? place + 12 : place - width - 12)}px`;
    tip.style.top = `${top * scale}px`;
    if (aloud) live.textContent = tip.innerText.replaceAll("\n", ", ");
  };
  const hide = () => { tip.hidden = true; layer.replaceChildren(); };
  const follow = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const wanted = x0 + ((x - left) / (right - left)) * (x1 - x0);
    at = stops.indexOf(stops.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a)));
    show(stops[at], false);
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("focus", () => show(stops[at], true));
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") hide();
    if (step === undefined) return;
    event.preventDefault();
    at = Math.min(stops.length - 1, Math.max(0, at + step));
    show(stops[at], true);
  });
}
// A check of itself, for the browser test: how many charts there are, and how many have a mark that takes up space.
const charts = [...document.querySelectorAll("figure.chart svg")];
const drawn = charts.filter((svg) => [...svg.querySelectorAll(".mark")].some((mark) => {
  const box = mark.getBoundingClientRect(), style = getComputedStyle(mark.matches("g") ? mark.firstElementChild : mark);
  const seen = style.stroke !== "none" || style.fill !== "none";
  return seen && style.visibility === "visible" && Math.max(box.width, box.height) > 2;
}));
document.documentElement.dataset.charts = charts.length;
document.documentElement.dataset.drawn = drawn.length;
document.documentElement.dataset.wide = document.documentElement.scrollWidth > window.innerWidth + 1;
document.documentElement.dataset.images = [...document.images].filter((i) => i.complete && !i.naturalWidth).length;
