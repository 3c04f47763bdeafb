// The pictures of a text: its tokens rolling, heat under the text, curves, what the model would say,
// whom a token attends to. Each function draws into a host; ``see`` holds what to draw: a panel's
// record and label, the followed token A, the time t, the chosen quantity.
"use strict";

const QUANTITIES = {
  energy: ["energy E", "The token's energy, the sum of all terms."],
  force: ["force |∂E/∂g|", "How strongly the energy pulls at the token."],
  size: ["size |x|", "The length of the state. The norm hides it, but the longer it is, the less a step turns it."],
  angle: ["angle to the force (°)", "Between the token's state and the force on it: at 0° it rests in a minimum."],
  movement: ["movement |Δg|", "How far the last step moved what the model reads."],
  push: ["push of the safeguard", "How far the cone pushed a step back so that no energy rises; 0 where it had nothing to do."],
  entropy: ["entropy (nats)", "How unsure the model would be if it stopped here."],
  loss: ["loss (nats)", "How surprised the model would be by the token that does come next."],
  "own energy": ["own energy", "The energy that you added."],
};
const titleOf = name => QUANTITIES[name]?.[0] ?? name;
const aboutOf = name => QUANTITIES[name]?.[1] ?? `The part of the energy that comes from the ${name.replace(" energy", "")} term.`;

// A value between two steps.
function between(states, A, t) {
  const i = Math.floor(t), here = states[i][A], there = states[Math.min(i + 1, states.length - 1)][A];
  return isNumber(here) && isNumber(there) ? here + (t - i) * (there - here) : here ?? null;
}

const chosenOf = see => see.record.curves[see.quantity] ?? Object.values(see.record.curves)[0];
const nameOf = see => (see.record.curves[see.quantity] ? see.quantity : Object.keys(see.record.curves)[0]);
// A token that has just come rolls on its own, the others have arrived.
const timeOf = (see, A) => (see.fresh === null ? see.t : A < see.fresh ? see.record.steps : see.t);

function show(host, drawn) {
  host.replaceChildren(drawn);
}

// Each token stands at its place in the text, at the height of its energy, and falls.
function drawStage(host, see) {
  const { record, label, A } = see, table = chosenOf(see), N = record.tokens.length, colours = theme();
  const longest = Math.max(...record.tokens.map(token => [...visible(label(token))].length)), isWide = longest > 1;
  const width = Math.max(host.clientWidth, 76 + (isWide ? 20 : 11) * N), height = 340;
  const box = { left: 62, right: width - 14, top: 26, bottom: height - 40 };
  const all = extent(table.flat()), pad = 0.06 * (all[1] - all[0]), range = [all[0] - pad, all[1] + pad];
  const x = linear([-0.7, N - 0.3], [box.left, box.right]), y = linear(range, [box.bottom, box.top]);
  const name = nameOf(see), text = `${titleOf(name)} of ${N} tokens after ${Math.round(see.t)} of ${record.steps} steps`;
  const drawn = picture(width, height, text);
  const places = stepTicks(N - 1, Math.min(16, (box.right - box.left) / 60)).map(i => i + 1);
  const axis = { x: place => x(place - 1), y, xTitle: "position in the text", yTitle: titleOf(name) };
  drawn.append(axes(box, places, ticks(range), axis));
  const pitch = (box.right - box.left) / N;  // a long label may reach over its neighbours' places, not further
  const size = Math.max(10, Math.min(22, 1.1 * pitch, isWide ? 3 * pitch / longest : Infinity));
  for (let i = 0; i < N; i++) {
    const states = table.map(row => row[i]), from = states.find(isNumber), t = timeOf(see, i), now = between(table, i, t);
    if (!isNumber(now)) continue;
    const own = i === A, colour = lineColour(ENERGY, (now - all[0]) / (all[1] - all[0]));
    const trail = svg("g", { class: "token", onclick: () => see.follow(i) });
    trail.append(svg("rect", { x: x(i - 0.5), y: box.top, width: x(1) - x(0), height: box.bottom - box.top, fill: "transparent" }));
    trail.append(stroke(`M${x(i)} ${y(from)}V${y(now)}`, own ? colours.accent : colour, own ? 2.5 : 1.2, { opacity: own ? 0.9 : 0.6 }));
    trail.append(svg("circle", { cx: x(i), cy: y(from), r: own ? 2.5 : 1.5, fill: own ? colours.accent : colour, opacity: 0.6 }));
    trail.append(write(x(i), y(now) + size * 0.32, visible(label(record.tokens[i])), {
      "text-anchor": "middle", "font-size": own ? size * 1.25 : size, "font-family": MONO,
      "font-weight": own ? 700 : 500, fill: own ? colours.accent : colours.ink,
      stroke: colours.paper, "stroke-width": 3, "paint-order": "stroke",
    }));
    drawn.append(trail);
  }
  show(host, drawn);
  const away = x(A) - host.scrollLeft;  // keep the followed token in sight
  if (away < 40 || away > host.clientWidth - 40) host.scrollLeft = x(A) - host.clientWidth / 2;
  stay(host, drawn);
}

// Under each token of the text, a column of its values: the first state on top.
function drawHeat(host, see, isChange) {
  const { record, label, A } = see, { tokens, steps } = record, table = chosenOf(see), colours = theme();
  const texts = tokens.map(token => visible(label(token))), wide = texts.some(text => [...text].length > 1);
  const width = Math.max(220, host.clientWidth), least = wide ? 44 : 17, rows = steps + 1;
  const lines = Math.ceil(tokens.length / Math.max(1, Math.floor((width - 34) / least)));
  const perLine = Math.ceil(tokens.length / lines), tall = Math.max(3, Math.min(11, 150 / rows));
  const cell = Math.max(least, Math.min(1.6 * least, (width - 34) / perLine));
  const lineHeight = 24 + rows * tall + 14, height = lines * lineHeight + 50;
  const values = isChange ? table.slice(1).map((row, t) => row.map((v, i) => (isNumber(v) && isNumber(table[t][i]) ? v - table[t][i] : null))) : table;
  const range = extent(values.flat()), far = Math.max(...range.map(Math.abs)) || 1;
  const bend = v => Math.asinh(30 * v / far) / Math.asinh(30);  // small late changes beside large early ones
  const colour = v => (v === null ? colours.line : isChange ? blend(CHANGE, 0.5 + bend(v) / 2) : blend(ENERGY, (v - range[0]) / (range[1] - range[0])));
  const drawn = picture(width, height, `${titleOf(nameOf(see))} of every token at every step, under the text`);
  tokens.forEach((token, i) => {
    const x = 30 + (i % perLine) * cell, y = Math.floor(i / perLine) * lineHeight, own = i === A;
    const column = svg("g", { class: "token", onclick: () => see.follow(i) });
    column.append(write(x + cell / 2, y + 17, texts[i].slice(0, 6), {
      "text-anchor": "middle", "font-family": MONO, "font-size": wide ? 12 : 15,
      fill: own ? colours.accent : colours.ink, "font-weight": own ? 700 : 400,
    }));
    values.forEach((row, t) => column.append(svg("rect", {
      x: x + 0.5, y: y + 24 + (t + (isChange ? 0.5 : 0)) * tall, width: cell - 1, height: tall, fill: colour(row[i]),
      opacity: t + (isChange ? 0.5 : 0) <= timeOf(see, i) + 0.01 ? 1 : 0.13, "shape-rendering": "crispEdges",
    })));
    if (own) column.append(svg("rect", { x, y: y + 23, width: cell, height: rows * tall + 2, fill: "none", stroke: colours.accent, "stroke-width": 2 }));
    drawn.append(column);
  });
  drawn.append(write(26, 17, "step", { "text-anchor": "end", "font-size": 10, fill: colours.soft }));
  for (let line = 0; line < lines; line++) {
    const y = line * lineHeight + 24;
    drawn.append(write(26, y + 8, "0", { "text-anchor": "end", "font-size": 10, fill: colours.soft }));
    if (rows * tall > 24) drawn.append(write(26, y + rows * tall, String(steps), { "text-anchor": "end", "font-size": 10, fill: colours.soft }));
  }
  const ends = isChange ? [-far, far] : range, stops = Array.from({ length: 40 }, (_, i) => i / 39);
  const legend = svg("g", { transform: `translate(30 ${height - 14})`, fill: colours.soft, "font-size": 11 });
  const span = Math.min(200, width - 190);
  stops.forEach((s, i) => legend.append(svg("rect", {
    x: 58 + i * span / 40, y: -9, width: span / 40 + 0.5, height: 9, fill: blend(isChange ? CHANGE : ENERGY, s),
  })));
  legend.append(write(52, 0, number(ends[0]), { "text-anchor": "end" }), write(64 + span, 0, number(ends[1])),
    write(58, -15, (isChange ? "change of " : "") + titleOf(nameOf(see))));
  drawn.append(legend);
  show(host, drawn);
}

// All tokens' values over the steps.
function drawCurves(host, see, name, { height = 210, isSmall = false } = {}) {
  const { record, A } = see, table = record.curves[name], colours = theme(), width = host.clientWidth;
  const box = { left: 56, right: width - 10, top: 28, bottom: height - 38 };
  const range = extent(table.flat()), N = record.tokens.length;
  const x = linear([0, record.steps], [box.left, box.right]), y = linear(range, [box.bottom, box.top]);
  const drawn = picture(width, height, `${titleOf(name)} of ${N} tokens over ${record.steps} steps`);
  const trained = see.trained <= record.steps ? see.trained : null;
  const axis = { x, y, xTitle: "step", yTitle: titleOf(name), trained };
  drawn.append(axes(box, stepTicks(record.steps, isSmall ? 6 : 12), ticks(range), axis));
  const points = i => table.map((row, t) => [x(t), isNumber(row[i]) ? y(row[i]) : null]);
  for (let i = 0; i < N; i++)
    drawn.append(stroke(curve(points(i)), lineColour(POSITION, i / Math.max(1, N - 1)), 1, { opacity: 0.65, class: "token", onclick: () => see.follow(i) }));
  drawn.append(stroke(curve(points(A)), colours.accent, 2.5));
  const now = between(table, A, see.t);
  drawn.append(stroke(`M${x(see.t)} ${box.top}V${box.bottom}`, colours.accent, 1, { opacity: 0.5 }));
  if (isNumber(now)) drawn.append(svg("circle", { cx: x(see.t), cy: y(now), r: 4.5, fill: colours.accent }));
  show(host, drawn);
}

// What the model would say of the followed token if it stopped after each step: ``most`` tokens.
function saysOf(see, most) {
  const { record, label, A } = see, entropy = record.curves.entropy;
  const target = record.targets?.[A] ?? record.tokens[A + 1] ?? null;
  return record.said.map((state, t) => ({
    step: t,
    best: percent(record.chances[t][A][0]),
    unsure: entropy && isNumber(entropy[t][A]) ? number(+entropy[t][A].toFixed(2)) : "–",
    words: state[A].slice(0, most).map((token, k) => ({ text: visible(label(token)), p: record.chances[t][A][k], isNext: token === target })),
  }));
}

const saysColumns = count => ["step", ...["1st", "2nd", "3rd", "4th", "5th"].slice(0, count), "p of 1st", "entropy"];

function drawSays(host, see) {
  const at = Math.round(timeOf(see, see.A)), widest = see.info.symbols?.some(symbol => symbol.trim().length > 1) ?? true;
  const fitting = Math.floor((host.clientWidth - 140) / (widest ? 52 : 36));  // the rest would be cut off
  const told = saysOf(see, Math.max(2, Math.min(5, fitting)));
  const rows = told.map(({ step, words, best, unsure }) => {
    const cells = words.map(({ text, p, isNext }) => {
      const bar = html("span", { class: "bar", style: `width:${(100 * p).toFixed(1)}%` });
      const title = `${text}: ${percent(p)}${isNext ? ", which does come next" : ""}`;
      return html("td", { class: isNext ? "right" : "", title }, html("bdi", {}, text), html("span", { class: "track" }, bar));
    });
    return html("tr", { class: step === at ? "now" : "", onclick: () => see.goTo(step) },
      html("th", { scope: "row" }, String(step)), cells, html("td", { class: "number" }, best), html("td", { class: "number" }, unsure));
  });
  const columns = saysColumns(told[0].words.length).map(name => html("th", { scope: "col" }, name));
  const table = html("table", { class: "says" }, html("thead", {}, html("tr", {}, columns)), html("tbody", {}, rows));
  const before = host.scrollTop;
  show(host, table);
  host.scrollTop = before;
  const now = table.querySelector(".now");  // in sight, without moving the page
  if (now.offsetTop < host.scrollTop + 24) host.scrollTop = now.offsetTop - 24;
  else if (now.offsetTop + now.offsetHeight > host.scrollTop + host.clientHeight)
    host.scrollTop = now.offsetTop + now.offsetHeight - host.clientHeight;
}

// The same as a picture, to be saved.
function pictureOfSays(see) {
  const told = saysOf(see, 5), columns = saysColumns(told[0].words.length), colours = theme(), tall = 30;
  const at = columns.map((_, k) => 10 + (k ? 44 + (k - 1) * 84 : 0)), width = at.at(-1) + 70;
  const drawn = picture(width, 30 + told.length * tall, `What the model would say of token ${see.A + 1} after each step`);
  columns.forEach((name, k) => drawn.append(write(at[k], 18, name, { fill: colours.soft, "font-size": 11 })));
  told.forEach(({ step, words, best, unsure }, t) => {
    const y = 44 + t * tall, cells = [String(step), ...words.map(() => null), best, unsure];
    cells.forEach((text, k) => text === null || drawn.append(write(at[k], y, text, { fill: colours.ink })));
    words.forEach(({ text, p, isNext }, k) => drawn.append(
      write(at[k + 1], y, text, { "font-family": MONO, fill: isNext ? colours.accent : colours.ink, "font-weight": isNext ? 700 : 400 }),
      svg("rect", { x: at[k + 1], y: y + 5, width: 70, height: 4, fill: colours.line }),
      svg("rect", { x: at[k + 1], y: y + 5, width: 70 * p, height: 4, fill: colours.accent })));
  });
  return drawn;
}

// Whom the followed token attends to, head by head.
function drawAttention(host, see, heads) {
  const { record, label } = see, colours = theme(), seen = heads[0]?.length ?? 0;
  if (!seen) return show(host, html("p", { class: "soft" }, "This token sees no other: it is the first."));
  const side = svg("g", { class: "side" });
  const texts = record.tokens.slice(0, seen).map(token => visible(label(token)).slice(0, 6));
  const longest = Math.max(...texts.map(text => [...text].length)), least = longest > 1 ? 36 : 12;
  const width = Math.max(host.clientWidth, 62 + least * seen), cell = Math.min(longest > 1 ? 52 : 26, (width - 60) / seen), tall = 18;
  const height = 24 + heads.length * tall + 24, drawn = picture(width, height, `Attention of token ${see.A + 1} to the ${seen} tokens that it sees, by head`);
  side.append(svg("rect", { y: 18, width: 56, height: height - 18, fill: colours.paper, opacity: 0.85 }));
  heads.forEach((p, h) => {
    side.append(write(52, 20 + h * tall + 12, `head ${h + 1}`, { "text-anchor": "end", "font-size": 11, fill: colours.soft }));
    [...p].forEach((v, B) => {
      const box = svg("rect", { x: 58 + B * cell, y: 20 + h * tall, width: cell - 1, height: tall - 1, fill: colours.accent, opacity: 0.06 + 0.94 * v });
      box.append(svg("title", {}, `${texts[B]}: ${percent(v)}`));
      drawn.append(box);
    });
  });
  const size = Math.min(13, cell, Math.max(8, 1.6 * cell / longest));
  texts.forEach((text, B) => drawn.append(write(58 + (B + 0.5) * cell, 24 + heads.length * tall + 14, text, {
    "text-anchor": "middle", "font-family": MONO, "font-size": size, fill: colours.ink,
  })));
  side.append(write(58, 13, "the stronger the colour, the more attention", { "font-size": 11, fill: colours.soft }));
  drawn.append(side);
  show(host, drawn);
  stay(host, drawn);
}
