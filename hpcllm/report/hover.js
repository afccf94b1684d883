// Shows the values of a picture's curves under the pointer. The numbers stand in data-hover of each figure, see
// figures.py: {steps, tokens, unit, times, log, panels: [{box: [left, top, right, bottom], x: [low, high], lines}]};
// a line is [name, colour, x or 0 for steps, y]; a box is in shares of the picture. Without it the page has its tables.
"use strict";
const tip = document.createElement("div"), hair = document.createElement("div");
tip.className = "tip";
hair.className = "hair";
const hide = () => { tip.remove(); hair.remove(); };
const digits = (value) => value === null ? "none" : Math.abs(value) >= 1e4
  ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(5)));

function large(value) { // "1.06 M"
  const [unit, size] = [[" T", 1e12], [" B", 1e9], [" M", 1e6], [" k", 1e3]].find(([, size]) => value >= size) || ["", 1];
  return Number((value / size).toPrecision(3)) + unit;
}

function nearest(sorted, value) { // index of the number nearest to a value
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) { low = middle; } else { high = middle; }
  }
  return value - sorted[low] <= sorted[high] - value ? low : high;
}

function entry(text, colour) {
  const line = document.createElement("div");
  line.textContent = text;
  if (colour) { line.style.borderLeftColor = colour; }
  tip.append(line);
}

function show(event, data, image) {
  const area = image.getBoundingClientRect();
  const across = (event.clientX - area.left) / area.width, down = (event.clientY - area.top) / area.height;
  const panel = data.panels.find(({box}) => across >= box[0] && across <= box[2] && down >= box[1] && down <= box[3]);
  if (!panel) { return hide(); }
  const [left, top, right, bottom] = panel.box, share = (across - left) / (right - left), [from, to] = panel.x;
  const wanted = data.log ? from * (to / from) ** share : from + share * (to - from);
  const place = nearest(data.steps, wanted), step = data.steps[place];
  tip.replaceChildren();
  entry("step " + step.toLocaleString("en")
    + (data.tokens ? ", " + large(step * data.tokens) + " tokens" : "")
    + (data.times ? ", " + Number(data.times[place].toPrecision(3)) + " " + data.unit : ""));
  for (const [name, colour, x, y] of panel.lines) {
    const k = nearest(x || data.steps, wanted);
    const where = x && x[k] !== step ? " (step " + x[k].toLocaleString("en") + ")" : "";
    entry(name + ": " + digits(y[k]) + where, colour);
  }
  document.body.append(tip, hair);
  const marked = data.log ? Math.log(step / from) / Math.log(to / from) : (step - from) / (to - from);
  hair.style.left = area.left + area.width * (left + marked * (right - left)) + "px";
  hair.style.top = area.top + area.height * top + "px";
  hair.style.height = area.height * (bottom - top) + "px";
  const room = window.innerWidth - tip.offsetWidth - 8;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, room)) + "px";
  tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 14) + "px";
}

for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const data = JSON.parse(figure.dataset.hover), image = figure.querySelector("img");
  for (const kind of ["pointermove", "pointerdown"]) {
    figure.addEventListener(kind, (event) => show(event, data, image));
  }
  figure.addEventListener("pointerleave", hide);
}
window.addEventListener("scroll", hide, {passive: true});
