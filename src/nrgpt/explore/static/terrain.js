// The landscape of the followed token, drawn: a map with contours, a surface to turn, a list of starts.
"use strict";

// Lines where a grid has a level, by marching squares: segments in grid coordinates.
function contour(grid, level) {
  const segments = [];
  const cross = (a, b) => (level - a) / (b - a);
  for (let j = 0; j + 1 < grid.length; j++)
    for (let i = 0; i + 1 < grid[j].length; i++) {
      const [a, b, c, d] = [grid[j][i], grid[j][i + 1], grid[j + 1][i + 1], grid[j + 1][i]];
      const hits = [];
      if (a < level !== b < level) hits.push([i + cross(a, b), j]);
      if (b < level !== c < level) hits.push([i + 1, j + cross(b, c)]);
      if (d < level !== c < level) hits.push([i + cross(d, c), j + 1]);
      if (a < level !== d < level) hits.push([i, j + cross(a, d)]);
      for (let k = 0; k + 1 < hits.length; k += 2) segments.push([hits[k], hits[k + 1]]);
    }
  return segments;
}

const levels = ([low, high], count) => Array.from({ length: count }, (_, i) => low + (high - low) * (i + 0.5) / count);

function shades(grid, range) {
  const count = grid.length, canvas = html("canvas", { width: count, height: count }), c = canvas.getContext("2d");
  grid.forEach((row, j) => row.forEach((v, i) => {
    c.fillStyle = blend(ENERGY, (v - range[0]) / (range[1] - range[0]));
    c.fillRect(i, count - 1 - j, 1, 1);
  }));
  return canvas.toDataURL();
}

// What both pictures of a section are given: what lies in it, with the energies of its path and minima.
function sectionOf(land, name) {
  const section = land.sections[name] ?? land.sections.path;
  const minima = section.minima.map(({ which, at }) => ({ ...land.minima[which], at }));
  return { ...section, minima, pathEnergy: land.pathEnergy };
}

const titlesOf = land => ["towards the minimum below", land.minima.length > 1 ? "towards another minimum" : "towards its start"];

function drawMap(host, see, land) {
  const colours = theme(), width = Math.max(200, host.clientWidth), height = Math.min(440, width + 40);
  const side = Math.min(width - 70, height - 76), box = { left: 56, right: 56 + side, top: 28, bottom: 28 + side };
  const far = land.axis.at(-1), count = land.axis.length, range = extent(land.energy.flat());
  const x = linear([-far, far], [box.left, box.right]), y = linear([-far, far], [box.bottom, box.top]);
  const gx = i => x(land.axis[0] + i * (2 * far) / (count - 1)), gy = j => y(land.axis[0] + j * (2 * far) / (count - 1));
  const said = land.minima.map(m => visible(see.label(m.said[0]))).join(" and ");
  const drawn = picture(width, Math.max(height, box.bottom + 80), `Map of the energy around token ${see.A + 1}, with its path; at the ${land.minima.length > 1 ? "two minima" : "minimum"} it would say ${said}`);
  const half = side / (count - 1) / 2;  // pixels are centred on their points
  drawn.append(svg("image", { href: shades(land.energy, range), x: box.left - half, y: box.top - half, width: side + 2 * half, height: side + 2 * half, preserveAspectRatio: "none" }));
  const lines = (grid, which, colour, attributes) => which.forEach(level => drawn.append(stroke(
    contour(grid, level).map(([p, q]) => `M${gx(p[0]).toFixed(1)} ${gy(p[1]).toFixed(1)}L${gx(q[0]).toFixed(1)} ${gy(q[1]).toFixed(1)}`).join(""), colour, 1, attributes)));
  lines(land.energy, levels(range, 14), "#fff", { opacity: 0.35 });
  if (land.own) lines(land.own, levels(extent(land.own.flat()), 8), "#fff", { opacity: 0.9, "stroke-dasharray": "5 4" });
  drawn.append(axes(box, [], [], { x, y, xTitle: titlesOf(land)[0], yTitle: titlesOf(land)[1] }));
  const t = timeOf(see, see.A), last = land.path.length - 1, i = Math.min(Math.floor(t), last), j = Math.min(i + 1, last);
  const at = [0, 1].map(k => land.path[i][k] + (t - i) * (land.path[j][k] - land.path[i][k]));
  const place = ([a, b]) => [x(a), y(b)];
  drawn.append(stroke(curve(land.path.map(place)), "#fff", 2));
  for (const [a, b] of land.path.map(place)) drawn.append(svg("circle", { cx: a, cy: b, r: 2, fill: "#fff" }));
  for (const m of land.minima) {
    const [a, b] = place(m.at);
    drawn.append(write(a, b + 6, "★", { "text-anchor": "middle", "font-size": 18, fill: "#ffe9a8", stroke: "#222", "stroke-width": 0.7 }));
    drawn.append(write(a, b - 11, visible(see.label(m.said[0])), { "text-anchor": "middle", "font-family": MONO, "font-size": 14, fill: "#fff", stroke: "#222", "stroke-width": 3, "paint-order": "stroke" }));
  }
  if (land.pass) {
    const [a, b] = place(land.pass);
    drawn.append(write(a, b + 5, "✕", { "text-anchor": "middle", "font-size": 14, fill: "#fff", stroke: "#222", "stroke-width": 0.7 }));
  }
  const [a, b] = place(at);
  drawn.append(svg("circle", { cx: a, cy: b, r: 6, fill: colours.accent, stroke: "#fff", "stroke-width": 2 }));
  const legend = ["● token", "─ its path", "★ minimum", ...(land.pass ? ["✕ pass"] : []), ...(land.own ? ["┄ your energy"] : [])];
  legend.forEach((text, i) => drawn.append(write(4 + i * (width - 8) / legend.length, box.bottom + 52, text, { fill: colours.soft, "font-size": 11 })));
  const ramp = linear([0, 40], [box.left, box.left + 120]), low = number(range[0]);
  for (let k = 0; k < 40; k++)
    drawn.append(svg("rect", { x: ramp(k), y: box.bottom + 63, width: 3.5, height: 9, fill: blend(ENERGY, k / 39) }));
  drawn.append(svg("g", { fill: colours.soft, "font-size": 11 },
    write(box.left - 6, box.bottom + 72, low, { "text-anchor": "end" }), write(ramp(41.5), box.bottom + 72, `${number(range[1])}  energy E`)));
  show(host, drawn);
}

// The same as a surface, seen from ``view`` = {turn, tilt}, in radians; far squares first.
function drawSurface(host, see, land, view) {
  const colours = theme(), width = Math.max(200, host.clientWidth), height = Math.min(440, width + 10);
  const range = extent(land.energy.flat()), far = land.axis.at(-1), top = 0.55, base = -0.68;
  const up = v => top * (2 * (v - range[0]) / (range[1] - range[0]) - 1);
  const [ct, st, cl, sl] = [Math.cos(view.turn), Math.sin(view.turn), Math.cos(view.tilt), Math.sin(view.tilt)];
  const scale = Math.min((width - 12) / 2 / Math.SQRT2, (height - 64) / (2 * Math.SQRT2 * sl + (top - base) * cl));
  const middle = height / 2 + scale * (top + base) / 2 * cl;  // however it is turned, nothing is cut off
  const place = (a, b, z) => {
    const u = a * ct - b * st, w = a * st + b * ct;
    return [width / 2 + scale * u, middle - scale * (z * cl + w * sl), w * cl - z * sl];
  };
  const project = (px, py, v) => place(px / far, py / far, up(v));
  const drawn = picture(width, height, "The same landscape as a surface that can be turned; its height is the energy");
  drawn.append(...frame(place, base, view.turn, titlesOf(land)));
  drawn.append(write(2, 20, "height and colour: energy E", { fill: colours.soft, "font-size": 11 }));
  const squares = [];
  for (let j = 0; j + 1 < land.axis.length; j++)
    for (let i = 0; i + 1 < land.axis.length; i++) {
      const corners = [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]].map(([p, q]) =>
        project(land.axis[p], land.axis[q], land.energy[q][p]));
      squares.push([corners.reduce((sum, c) => sum + c[2], 0), corners, land.energy[j][i]]);
    }
  squares.sort((p, q) => q[0] - p[0]);
  for (const [, corners, v] of squares) {
    const fill = blend(ENERGY, (v - range[0]) / (range[1] - range[0]));
    drawn.append(svg("path", { d: `M${corners.map(c => c.slice(0, 2).map(n => n.toFixed(1)).join(" ")).join("L")}Z`, fill, stroke: fill, "stroke-width": 0.6 }));
  }
  const path = land.path.map(([px, py], i) => project(px, py, land.pathEnergy[i]));
  drawn.append(stroke(curve(path), colours.paper, 4), stroke(curve(path), colours.accent, 2));
  for (const m of land.minima) {
    const [a, b] = project(...m.at, m.energy);
    drawn.append(write(a, b + 6, "★ " + visible(see.label(m.said[0])), { "font-size": 15, fill: "#ffe9a8", stroke: "#222", "stroke-width": 3, "paint-order": "stroke" }));
  }
  const t = timeOf(see, see.A), [a, b] = path[Math.min(Math.round(t), path.length - 1)];
  drawn.append(svg("circle", { cx: a, cy: b, r: 6, fill: colours.accent, stroke: colours.paper, "stroke-width": 2 }));
  show(host, drawn);
}

// The ground beneath a surface, with the titles of its two axes along the edges that are near.
function frame(place, base, turn, titles) {
  const colours = theme(), corners = [[-1, -1], [1, -1], [1, 1], [-1, 1]].map(([a, b]) => place(a, b, base));
  const drawn = [stroke(`M${corners.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}Z`, colours.soft, 1, { opacity: 0.6 })];
  const near = [Math.sin(turn) > 0 ? -1 : 1, Math.cos(turn) > 0 ? -1 : 1];  // the nearer value of either coordinate
  titles.forEach((title, axis) => {
    const at = along => place(...(axis === 0 ? [along, near[1]] : [near[0], along]), base);
    const [[x, y], [p, q]] = [at(-1), at(1)], isRight = p > x, slope = Math.atan2(q - y, p - x) * 180 / Math.PI;
    const turned = isRight ? slope : slope + 180, text = isRight ? `${title} →` : `← ${title}`;
    const middle = [(x + p) / 2, (y + q) / 2], length = Math.hypot(p - x, q - y);
    drawn.push(write(0, 14, text, {
      transform: `translate(${middle.map(v => v.toFixed(1))}) rotate(${turned.toFixed(1)})`, "text-anchor": "middle",
      "font-size": Math.min(11, length / 14).toFixed(1), fill: colours.soft,
    }));
  });
  return drawn;
}

function drawStarts(host, see, land) {
  const isSaid = m => m.said.filter((_, i) => i < 3 && (!i || m.chances[i] >= 0.0005));  // no "0 %"
  const say = m => isSaid(m).flatMap((token, i) =>
    [i ? ", " : "", html("span", { class: "nowrap" }, html("code", {}, html("bdi", {}, visible(see.label(token)))), ` ${percent(m.chances[i]).replace(" ", "\u00a0")}`)]);
  const cells = (tag, values) => values.map(v => html(tag, tag === "th" ? { scope: "col" } : {}, v));
  const minima = land.minima.map((m, i) => html("tr", {}, cells("td", [`★ ${i + 1}`, number(m.energy), String(m.count), say(m)])));
  const ways = land.starts.map(s => html("li", {}, `${s.from}: ${number(s.energy)} → ★ ${s.basin + 1}`));
  show(host, html("div", {},
    html("table", {}, html("thead", {}, html("tr", {}, cells("th", ["minimum", "energy", "starts", "what it says there"]))), html("tbody", {}, minima)),
    html("p", { class: "soft" }, `Where the token stops, at energy ${number(land.pathEnergy.at(-1))}, it says `, say(land.end), "."
      + (land.pass ? ` Between the two minima on the map, the way leads over a pass at ${number(land.pass.energy)}.` : "")),
    html("details", {}, html("summary", {}, "each start"), html("ul", { class: "starts" }, ways))));
}
