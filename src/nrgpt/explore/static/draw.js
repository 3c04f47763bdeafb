// Elements, scales and colours, and pictures that can be saved.
"use strict";

const $ = id => document.getElementById(id);
const isNumber = v => typeof v === "number" && Number.isFinite(v);

// Elements. A text is never markup: it becomes a text node.
function make(space, tag, attributes, children) {
  const made = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  made.append(...children.flat().filter(child => child !== null));
  return made;
}

const html = (tag, attributes = {}, ...children) =>
  make("http://www.w3.org/1999/xhtml", tag, attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  make("http://www.w3.org/2000/svg", tag, attributes, children);

// White space and control characters that one can see.
const VISIBLE = { "\n": "↵", "\r": "↵", "\t": "⇥", " ": "␣" };
const visible = text =>
  [...text.replace(/^ (?=\S)/, "")].map(c => VISIBLE[c] ?? (/\p{C}/u.test(c) ? "\ufffd" : c)).join("");

// Four significant digits, thousands apart, with a proper minus.
function number(v) {
  if (!isNumber(v)) return "–";
  const isPlain = v === 0 || (Math.abs(v) < 1e6 && Math.abs(v) >= 1e-3), short = +v.toPrecision(4);
  const text = isPlain ? short.toLocaleString("en-US", { maximumFractionDigits: 6 }) : v.toExponential(2);
  return text.replace("-", "−");
}
const percent = p => (p >= 0.9995 ? "100" : p < 0.0005 ? "0" : (100 * p).toFixed(p >= 0.1 ? 0 : 1)) + " %";

// Scales -----------------------------------------------------------------------------------------

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (isNumber(v)) [low, high] = [Math.min(low, v), Math.max(high, v)];
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

const linear = ([a, b], [p, q]) => v => p + (q - p) * (v - a) / (b - a);

function ticks([low, high], count = 4) {
  const rough = (high - low) / count, ten = 10 ** Math.floor(Math.log10(rough));
  const step = ten * [1, 2, 5, 10].find(k => k * ten >= rough * 0.8), found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step || 0);
  return found;
}

// Whole steps, not too many.
const stepTicks = (steps, most) => {
  const every = Math.max(1, Math.ceil(steps / most));
  return Array.from({ length: Math.floor(steps / every) + 1 }, (_, i) => i * every);
};

// Colours ----------------------------------------------------------------------------------------

// Pictures carry their colours with them, so that they can be saved: these are read from the page.
function theme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "ink", "soft", "line", "accent", "good", "warn", "bad"];
  return Object.fromEntries(names.map(name => [name, style.getPropertyValue("--" + name).trim()]));
}

const ENERGY = [[32, 37, 110], [52, 82, 158], [80, 128, 186], [138, 168, 176], [206, 178, 132], [238, 150, 76], [247, 209, 92]];
const POSITION = [[94, 60, 153], [58, 104, 174], [42, 147, 158], [88, 178, 118], [196, 190, 66]];
const CHANGE = [[20, 72, 140], [84, 148, 200], [186, 206, 216], [218, 150, 104], [166, 44, 28]];

function blend(stops, share) {
  const s = Math.min(1, Math.max(0, isNumber(share) ? share : 0)) * (stops.length - 1);
  const i = Math.min(Math.floor(s), stops.length - 2);
  return `rgb(${stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * (s - i)))})`;
}

// As a line on the page's paper, dark or light: there the ends of a ramp would hardly be seen.
function lineColour(stops, share) {
  const isDark = document.documentElement.dataset.theme === "dark";
  return blend(stops.map(rgb => rgb.map(v => (isDark ? v + 0.45 * (255 - v) : 0.85 * v))), share);
}

// Pictures ---------------------------------------------------------------------------------------

const FONT = "ui-sans-serif, system-ui, sans-serif", MONO = "ui-monospace, Menlo, Consolas, monospace";

function picture(width, height, label) {
  return svg("svg", {
    xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height,
    role: "img", "aria-label": label, "font-family": FONT, "font-size": 12,
  });
}

const write = (x, y, text, attributes = {}) => svg("text", { x, y, ...attributes }, text);
const stroke = (d, colour, width = 1, attributes = {}) =>
  svg("path", { d, fill: "none", stroke: colour, "stroke-width": width, "stroke-linejoin": "round", ...attributes });

// A curve through the finite points.
function curve(points) {
  let pen = "M", d = "";
  for (const [x, y] of points) {
    if (isNumber(y)) d += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = isNumber(y) ? "L" : "M";
  }
  return d;
}

// What belongs to the left edge stays there when a wide picture is moved sideways.
function stay(host, drawn) {
  const side = drawn.querySelector(".side"), hold = () => side.setAttribute("transform", `translate(${host.scrollLeft})`);
  drawn.append(side);
  host.onscroll = hold;
  hold();
}

// Axes with titles around a box {left, right, top, bottom}.
function axes(box, xs, ys, { x, y, xTitle, yTitle, trained = null }) {
  const colours = theme(), group = svg("g", { fill: colours.soft }), side = svg("g", { class: "side", fill: colours.soft });
  side.append(svg("rect", { y: box.top - 8, width: box.left - 4, height: box.bottom - box.top + 12, fill: colours.paper, opacity: 0.85 }));
  for (const v of ys) {
    group.append(stroke(`M${box.left} ${y(v)}H${box.right}`, colours.line));
    side.append(write(box.left - 6, y(v) + 4, number(v), { "text-anchor": "end", "font-size": 11 }));
  }
  for (const v of xs)
    group.append(write(x(v), box.bottom + 15, String(v), { "text-anchor": "middle", "font-size": 11 }));
  if (trained !== null)
    group.append(stroke(`M${x(trained)} ${box.top}V${box.bottom}`, colours.soft, 1, { "stroke-dasharray": "2 3" }));
  if (xTitle) group.append(write((box.left + box.right) / 2, box.bottom + 31, xTitle, { "text-anchor": "middle" }));
  group.append(side);
  if (yTitle) side.append(write(2, box.top - 8, yTitle, { "text-anchor": "start" }));
  return group;
}

// What was drawn, as a file.
function save(drawn, name, kind) {
  const copy = drawn.cloneNode(true), [, , width, height] = copy.getAttribute("viewBox").split(" ").map(Number);
  copy.querySelector(".side")?.removeAttribute("transform");
  copy.prepend(svg("rect", { width: "100%", height: "100%", fill: theme().paper }));
  const text = new XMLSerializer().serializeToString(copy);
  const offer = href => html("a", { href, download: `${name}.${kind}` }).click();
  const address = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  if (kind === "svg") return offer(address);
  const image = new Image(), canvas = html("canvas", { width: 2 * width, height: 2 * height });
  image.onload = () => {
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    offer(canvas.toDataURL("image/png"));
  };
  image.src = address;
}
