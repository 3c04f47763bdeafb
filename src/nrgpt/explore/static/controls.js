// Sliders, buttons and keys, the link that holds the state, light and dark; and the start of it all.
"use strict";

const SLIDERS = [
  { name: "steps", title: "Steps", most: info => (info.most_steps ?? 4 * info.steps), about: "More than in training: the tokens roll on." },
  { name: "rate", title: "Step size", range: [0.1, 5], about: "A factor on every step." },
  { name: "beta", title: "Sharpness β of attention", range: [0.1, 10], about: "Low: it looks at all tokens alike. High: at one." },
  { name: "temperature", title: "Temperature of what it says", range: [0.1, 3], about: "Also of “Continue the text”." },
];

// Whole numbers on a plain scale, factors on a logarithmic one of 100 places.
function slider({ name, title, most, range, about }, panel) {
  const { info, settings } = panel, isFactor = Boolean(range);
  const normal = isFactor ? 1 : info.steps, value = settings[name] ?? normal;
  const toValue = place => (isFactor ? +(range[0] * (range[1] / range[0]) ** (place / 100)).toPrecision(3) : place);
  const toPlace = v => (isFactor ? Math.round(100 * Math.log(v / range[0]) / Math.log(range[1] / range[0])) : v);
  const out = html("output", {}, number(value)), mark = `marks-${name}`;
  const input = html("input", {
    type: "range", min: isFactor ? 0 : 1, max: isFactor ? 100 : most(info), step: 1, name, list: mark,
    "aria-label": title,
    oninput: () => {
      const place = Number(input.value), v = place === toPlace(normal) ? normal : toValue(place);
      out.textContent = number(v);
      change(panel, { [name]: name === "steps" && v === normal ? null : v });
    },
  });
  input.value = toPlace(value);
  const marks = html("datalist", { id: mark }, html("option", { value: toPlace(normal) }));
  return explained(html("label", {}, `${title} `, out, marks, input), input, about);
}

function checkbox(name, title, isOn, set, about) {
  const input = html("input", { type: "checkbox", name, onchange: () => set(input.checked) });
  input.checked = isOn;
  return explained(html("label", { class: "check" }, input, title), input, about);
}

// A sentence beneath, which a screen reader reads with the control.
function explained(label, input, about) {
  const id = `about-${input.name}`;
  input.setAttribute("aria-describedby", id);
  return html("div", {}, label, html("small", { id }, about));
}

function drawSettings() {
  const panel = panels[active], { info, settings } = panel, hasEnergy = info.terms.length > 0;
  const rows = SLIDERS.filter(() => !info.recorded).map(spec => slider(spec, panel));
  if (hasEnergy && !info.recorded) {
    rows.push(checkbox("cone", "safeguard: keep every step in the cone", settings.cone ?? info.cone,
      on => change(panel, { cone: on === info.cone ? null : on }), "The least push that keeps a concave energy from rising."));
    if (!info.settled)
      rows.push(checkbox("frozen", "earlier tokens stand still", settings.frozen, on => change(panel, { frozen: on }),
        "Each token rolls among the last states of the others: what the certificate speaks of."));
    const word = html("input", { type: "text", name: "word", placeholder: "a word", oninput: () => change(panel, { word: word.value }) });
    word.value = settings.word;
    const out = html("output", {}, number(settings.weight));
    const weight = html("input", { type: "range", min: -1, max: 1, step: 0.02, name: "weight", oninput: () => {
      out.textContent = number(Number(weight.value));
      change(panel, { weight: Number(weight.value) });
    } });
    weight.value = settings.weight;
    rows.push(explained(html("label", {}, "An energy of your own: pull towards ", word), word, "It draws every token towards saying this."));
    rows.push(explained(html("label", {}, "Weight of your energy ", out, weight), weight, "In units of the mean force on a token; below 0 it pushes away."));
  }
  if (!info.recorded)
    rows.push(html("button", { type: "button", onclick: () => { chosen.settings[active] = { ...DEFAULTS }; drawSettings(); compute(); } }, "As trained"));
  $("settings").replaceChildren(...rows);
  for (const host of document.querySelectorAll(".which"))
    host.replaceChildren(...(panels.length < 2 ? [] : panels.map((_, i) => html("button", {
      type: "button", "aria-pressed": String(i === active), onclick: () => { activate(i); host.children[i].focus(); },
    }, "AB"[i]))));
}

// Which of two models the sliders and the landscape are about.
function activate(number) {
  active = number;
  drawModels();
  drawSettings();
  drawLand();
}

// A slider may move faster than a text can roll: only its last place counts.
let isDue = false;
function change(panel, changes) {
  Object.assign(panel.settings, changes);
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; compute(); });
}

function drawModels() {
  const panel = panels[0], { info } = panel;
  $("model").replaceChildren(...data.models.map(({ name }, i) => html("option", { value: i }, name)));
  $("model").value = chosen.models[active] ?? 0;
  $("model-of").textContent = panels.length > 1 ? `Model ${"AB"[active]}` : "Model";
  $("examples").replaceChildren(...(info.examples ?? []).map(text => html("button", {
    type: "button", onclick: () => { stop(); setText(text); compute(); },
  }, text.trim() || "(new line)")));
  $("what").replaceChildren(...panels.map(({ info }, i) => html("p", {}, (panels.length > 1 ? `${"AB"[i]}: ` : "") + aboutModel(info))));
  $("text").readOnly = Boolean(info.recorded);
  const isRecorded = Boolean(info.recorded);  // the model is not in the page
  for (const id of ["generate", "compare", "examples", "text", "text-label", "survey"]) $(id).hidden = isRecorded;
  for (const id of ["settings", "attention"]) $(id).closest("section").hidden = isRecorded;
  $("survey").closest("section").hidden = isRecorded && !info.recorded.landscape;
  $("says").closest("section").classList.toggle("wide", isRecorded);
  $("compare").setAttribute("aria-pressed", String(panels.length > 1));
  const places = panels.map(({ info }) => (info.engine ? "in this page, by a small engine in JavaScript" : info.recorded ? "beforehand, by Python" : "by Python on this machine"));
  $("where").textContent = [...new Set(places)].join(", and ");
  $("kept").hidden = isRecorded;
  document.title = `${[...new Set(panels.map(({ info }) => info.name))].join(" and ")} – nrgpt explorer`;
}

function aboutModel({ what, parameters, steps }) {
  const size = parameters ? `${parameters.toLocaleString("en-US")} parameters, ` : "A recording of a model ";
  return `${what ? `${what}. ` : ""}${size}trained with ${steps} step${steps === 1 ? "" : "s"}.`.replace(/^t/, "T");
}

// Panels for the chosen models; the text changes only if a model cannot read the old one.
async function arrange(text = chosen.text) {
  stop();
  panels = chosen.models.map((_, i) => new Panel(i));
  active = Math.min(active, panels.length - 1);
  setText(text ?? panels[0].info.examples[0]);
  drawModels();
  drawSettings();
  await compute();
}

// The link ---------------------------------------------------------------------------------------

function remember() {
  const changed = chosen.settings.slice(0, chosen.models.length).map(own =>
    Object.fromEntries(Object.entries(own).filter(([name, value]) => value !== DEFAULTS[name])));
  const state = new URLSearchParams({ model: chosen.models.map(i => data.models[i].name).join("|"), text: chosen.text });
  if (chosen.A !== null) state.set("token", chosen.A);
  if (chosen.t !== null) state.set("step", +chosen.t.toFixed(2));
  if (chosen.quantity !== "energy") state.set("show", chosen.quantity);
  if (chosen.change) state.set("change", 1);
  if (changed.some(own => Object.keys(own).length)) state.set("settings", JSON.stringify(changed));
  try {
    history.replaceState(null, "", "#" + state);
  } catch { /* too many changes in a second, or a page without an address: the link waits */ }
}

// What a link asks for; whatever makes no sense in it is left out.
function recall() {
  const state = new URLSearchParams(location.hash.slice(1)), names = data.models.map(m => m.name);
  const models = (state.get("model") ?? "").split("|").map(name => names.indexOf(name)).filter(i => i >= 0).slice(0, 2);
  chosen.models = models.length ? models : [0];
  const count = name => (/^\d+(\.\d+)?$/.test(state.get(name) ?? "") ? Number(state.get(name)) : null);
  const { recorded } = data.models[chosen.models[0]];
  chosen.A = Math.floor(count("token") ?? recorded?.landscape?.token ?? 10);
  chosen.t = count("step");
  chosen.quantity = state.get("show") ?? "energy";
  chosen.change = $("change").checked = state.get("change") === "1";
  let settings = [];
  try { settings = JSON.parse(state.get("settings") ?? "[]"); } catch { /* not one of ours */ }
  const KINDS = { steps: "number", rate: "number", beta: "number", temperature: "number", cone: "boolean", frozen: "boolean", word: "string", weight: "number" };
  const least = { steps: 1, rate: 0.01, beta: 0.01, temperature: 0.01, weight: -10 }, most = { steps: 1000, rate: 100, beta: 100, temperature: 100, weight: 10 };
  chosen.settings = [0, 1].map(i => ({ ...DEFAULTS, ...Object.fromEntries(Object.entries(settings?.[i] ?? {}).filter(([name, v]) =>
    Object.hasOwn(KINDS, name) && typeof v === KINDS[name] && (typeof v !== "number" || (v >= least[name] && v <= most[name])))) }));
  for (const own of chosen.settings) if (own.steps !== null) own.steps = Math.floor(own.steps);
  return state.get("text");
}

// Events -----------------------------------------------------------------------------------------

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  $("theme").textContent = isDark ? "Light" : "Dark";
  draw();
}

const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function listen() {
  $("text").addEventListener("input", () => { stop(); chosen.t = null; setText($("text").value); chosen.A = Math.max(0, $("text").selectionEnd - 1); compute(); });
  $("t").addEventListener("input", () => goTo(Number($("t").value)));
  $("follow").addEventListener("input", () => follow(Number($("follow").value)));
  $("quantity").addEventListener("change", () => choose({ quantity: $("quantity").value }));
  $("change").addEventListener("change", () => choose({ change: $("change").checked }));
  $("play").addEventListener("click", play);
  $("generate").addEventListener("click", generate);
  $("survey").addEventListener("click", survey_);
  $("section").addEventListener("change", drawLand);
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  $("model").addEventListener("change", () => { chosen.models[active] = Number($("model").value); chosen.t = null; arrange(active ? chosen.text : readable()); });
  $("compare").addEventListener("click", () => {
    const other = data.models.findIndex((m, i) => i !== chosen.models[0] && String(m.symbols) === String(data.models[chosen.models[0]].symbols));
    chosen.models = panels.length > 1 ? [chosen.models[0]] : [chosen.models[0], other < 0 ? chosen.models[0] : other];
    active = chosen.models.length - 1;
    arrange();
  });
  $("link").addEventListener("click", async () => {
    remember();
    try { await navigator.clipboard.writeText(location.href); tell("The link is copied: it holds the text and everything that is chosen."); }
    catch { tell("This page's address is the link: it holds the text and everything that is chosen."); }
  });
  for (const id of ["stage", "heat", "curves"])
    $(id).addEventListener("keydown", event => {
      if (!KEYS[event.key]) return;
      event.preventDefault();
      const [along, down] = KEYS[event.key];
      if (along) follow(Math.max(0, chosen.A + along));
      else goTo(Math.round(time()) + down);
    });
  for (const host of document.querySelectorAll(".save"))
    for (const kind of ["svg", "png"])
      host.append(html("button", { type: "button", "aria-label": `Save as ${kind.toUpperCase()}: ${host.dataset.of}`, onclick: () => {
        const drawn = host.dataset.of.split(" ").flatMap(id => (id === "says"
          ? panels.filter(panel => panel.record).map(panel => pictureOfSays(panel.see())) : [...$(id).querySelectorAll("svg")]));
        drawn.forEach((one, i) => save(one, `nrgpt-${host.dataset.of.split(" ")[0]}${i ? `-${i + 1}` : ""}`, kind));
      } }, kind.toUpperCase()));
  const surface = $("surface");
  surface.addEventListener("pointermove", event => event.buttons && turned(event.movementX / 120, event.movementY / 120));
  surface.addEventListener("keydown", event => {
    if (!KEYS[event.key]) return;
    event.preventDefault();
    turned(0.15 * KEYS[event.key][0], 0.15 * KEYS[event.key][1]);
  });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
  addEventListener("hashchange", () => { const text = recall(); arrange(text ?? undefined); });
}

// The present text if the chosen model knows all of it, otherwise one of its own.
function readable() {
  const info = data.models[chosen.models[0]], source = sourceOf(info);
  if (!info.symbols) return chosen.text;
  const { tokens, unknown } = source.encode(chosen.text);
  return unknown.length || !tokens.length ? info.examples[0] : chosen.text;
}

function turned(along, down) {
  turn = { turn: turn.turn + along, tilt: Math.max(0.1, Math.min(1.5, turn.tilt + down)) };
  drawLand();
}

const darkness = matchMedia("(prefers-color-scheme: dark)");  // of the system, or of a page around this one
darkness.addEventListener("change", () => setTheme(darkness.matches));
setTheme(darkness.matches);
listen();
arrange(recall() ?? undefined).then(() => {
  if (!isCalm && chosen.t === null && !location.hash.includes("settings=")) play();
});
