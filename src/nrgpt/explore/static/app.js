// The page: what is chosen, and what follows from it. ``chosen`` is all that a link holds; ``panels``
// have what was computed, one or two side by side.
"use strict";

const data = JSON.parse($("data").textContent);
const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
const DEFAULTS = { steps: null, rate: 1, beta: 1, temperature: 1, cone: null, frozen: false, word: "", weight: 0 };
const chosen = { text: null, A: 0, t: null, quantity: "energy", change: false, models: [0], settings: [{ ...DEFAULTS }] };
let panels = [], active = 0, fresh = null, isPlaying = false, isGenerating = false, turn = { turn: 0.6, tilt: 0.85 };

class Panel {
  constructor(number) {
    this.number = number;
    this.info = data.models[chosen.models[number]];
    this.source = sourceOf(this.info);
    this.record = null;
    this.land = null;
    this.asked = 0;
  }

  get settings() {
    return chosen.settings[this.number];
  }

  // Compute; what was asked for before is dropped. True if this is still the last that was asked.
  async update() {
    const mine = ++this.asked, alive = () => mine === this.asked;
    const { tokens, unknown } = await this.source.read(chosen.text);
    if (!alive()) return false;
    const { context } = this.info, notices = [];
    if (unknown.length) notices.push(`left out, as ${this.info.name} does not know them: ${unknown.slice(0, 12).map(visible).join(" ")}`);
    if (tokens.length > context) notices.push(`only the first ${context} of ${tokens.length} tokens fit into this model`);
    this.notice = notices.join("; ");
    if (!tokens.length) {
      this.record = this.land = null;
      this.notice ||= "type something";
      return true;
    }
    const found = await this.source.roll(tokens.slice(0, context), this.settings, alive, share => tell(`rolling: ${percent(share)}`));
    if (!found || !alive()) return false;
    this.record = found;
    this.land = found.landscape ? { A: found.landscape.token, found: found.landscape } : null;
    return true;
  }

  // What the views are given.
  see() {
    const { record, source, info } = this;
    const A = Math.min(chosen.A, record.tokens.length - 1), t = Math.min(time(), record.steps);
    return {
      record, info, A, t, fresh, trained: info.steps, quantity: chosen.quantity,
      label: token => source.label(token), follow, goTo,
    };
  }
}

const steps = () => Math.max(...panels.map(panel => panel.record?.steps ?? 0));
const time = () => chosen.t ?? steps();
const tell = text => ($("notice").textContent = text);

// One function computes, one draws everything, one draws what changes with time.
let computing = 0;
async function compute() {
  if (chosen.text === null) return;
  remember();
  computing += 1;
  try {
    const done = await Promise.all(panels.map(panel => panel.update()));
    if (!done.every(Boolean)) return;
    tell([...new Set(panels.map(panel => panel.notice).filter(Boolean))].join("; "));
  } catch (error) {
    return tell(error.message);
  } finally {
    computing -= 1;
  }
  draw();
}

function hosts(id, count = panels.length) {
  const host = $(id), isTwo = count > 1;
  host.classList.toggle("two", isTwo);
  if (host.children.length !== count || host.dataset.names !== String(chosen.models)) {
    host.dataset.names = String(chosen.models);
    host.replaceChildren(...Array.from({ length: count }, (_, i) => {
      const name = isTwo ? html("h3", {}, `${"AB"[i]}: ${panels[i].info.name}`) : null;
      const own = id === "says" ? "scroll" : id === "small" ? "smalls" : "view";
      const view = html("div", { class: own, tabindex: 0, role: "group", "aria-label": `${$(id).closest("section").querySelector("h2").textContent}${isTwo ? ", " + "AB"[i] : ""}` });
      return html("div", { class: "panel" }, name, view);
    }));
  }
  return [...host.children].map(panel => panel.lastElementChild);
}

function each(id, action) {
  hosts(id).forEach((host, i) => {
    if (panels[i].record) action(host, panels[i].see(), panels[i]);
    else host.replaceChildren(html("p", { class: "soft" }, "Nothing to see: this model can read nothing of the text."));
  });
}

function draw() {
  if (!panels.some(panel => panel.record)) return;
  const { tokens } = (panels[active] ?? panels[0]).record ?? panels.find(panel => panel.record).record;
  chosen.A = Math.max(0, Math.min(chosen.A, tokens.length - 1));
  Object.assign($("t"), { max: steps() });
  Object.assign($("follow"), { max: tokens.length - 1, value: chosen.A });
  offerQuantities();
  drawMoving();
  each("small", (host, see) => {
    const rest = Object.keys(see.record.curves).filter(name => name !== nameOf(see));
    host.replaceChildren(...rest.map(name => html("button", { type: "button", onclick: () => choose({ quantity: name }) })));
    rest.forEach((name, i) => drawCurves(host.children[i], see, name, { height: 150, isSmall: true }));
  });
  drawLamps();
  drawLand();
}

function drawMoving() {
  const shown = panels.find(panel => panel.record);
  if (!shown) return;
  const see = shown.see(), at = time();
  $("t").value = at;
  $("t-out").textContent = `${Math.round(at)} of ${steps()}`;
  $("follow-out").textContent = `${see.A + 1}: ${visible(see.label(see.record.tokens[see.A]))}`;
  $("curves-about").textContent = aboutCurves();
  $("stage-about").textContent = ABOUT_STAGE[howMany(panel => panel.record && /energy/.test(nameOf(panel.see())))];
  $("attention-about").textContent = ABOUT_ATTENTION[howMany(panel => panel.info.terms.length)];
  each("stage", drawStage);
  each("heat", (host, see) => drawHeat(host, see, chosen.change));
  each("curves", (host, see) => drawCurves(host, see, nameOf(see), { height: 260 }));
  each("says", drawSays);
  drawAttentions();
  drawLand();
}

// What the large curves are, once if both show the same.
function aboutCurves() {
  const told = panels.map(panel => panel.record && aboutOf(nameOf(panel.see())));
  const different = new Set(told.filter(Boolean));
  return different.size < 2 ? [...different][0] : told.map((text, i) => `${"AB"[i]}: ${text}`).join(" ");
}

// All, some or none of the models that are shown.
const howMany = has => (panels.every(has) ? "all" : panels.some(has) ? "some" : "none");
const ABOUT_STAGE = {
  all: "Each token starts at its dot and rolls down an energy of its own, step by step.",
  some: "Each token starts at its dot. Where there is an energy, it rolls down one of its own, step by step; the other model has none, and something else is shown.",
  none: "Each token starts at its dot and stands, after every step, at the height of what is shown.",
};
const ABOUT_ATTENTION = {
  all: "The energy of attention pulls the token towards the keys of tokens that it sees; the shares say how hard each of them pulls at the present step.",
  some: "In a model with an energy the shares say how hard each token that it sees pulls at the followed one; in the other, how much of each is mixed into it.",
  none: "The shares say how much of each token that it sees is mixed into the followed one at the present step.",
};

let attended = "";
function drawAttentions() {
  const wanted = panels.map(panel => panel.record && [panel.asked, panel.see().A, Math.round(panel.see().t), theme().ink, innerWidth]).join();
  if (wanted === attended) return;
  attended = wanted;
  each("attention", async (host, see, panel) => {
    try {
      const heads = await panel.source.attention?.(see.record, see.A, Math.round(see.t));
      if (wanted === attended) drawAttention(host, see, heads ?? []);
    } catch (error) {
      tell(error.message);
    }
  });
}

function offerQuantities() {
  const names = [...new Set(panels.flatMap(panel => Object.keys(panel.record?.curves ?? {})))];
  if (names.join() !== [...$("quantity").options].map(option => option.value).join())
    $("quantity").replaceChildren(...names.map(name => html("option", { value: name }, titleOf(name))));
  $("quantity").value = names.includes(chosen.quantity) ? chosen.quantity : names[0];
}

// The certificate as a lamp: what is proved, and what happened in this text.
function drawLamps() {
  $("lamps").replaceChildren(...panels.filter(panel => panel.record && panel.info.certificates).map((panel, i) => {
    const { certificates } = panel.info, { cone } = panel.settings, { energy } = panel.record.curves;
    const found = certificates[cone === null ? "as_is" : cone ? "cone" : "no_cone"] ?? certificates.as_is;
    let told = "";
    if (energy) {
      const all = energy.slice(1).flatMap((row, t) => row.map((v, A) => [v - energy[t][A], Math.abs(v)]));
      const rises = all.filter(([rise, size]) => rise > 1e-6 * Math.max(1, size)).length;
      told = ` In this text ${rises ? number(rises) : "none"} of ${number(all.length)} steps raise${rises === 1 || !rises ? "s" : ""} an energy.`;
      const isMoving = !panel.settings.frozen && found.level === "EVERY_STEP", hasSwitch = panel.info.engine && !panel.info.settled;
      if (rises && isMoving) told += ` (Here earlier tokens move too. ${hasSwitch ? "Let them stand still, below, to see what is proved" : "While they stand still, none rises"}.)`;
    }
    const why = html("details", {}, html("summary", {}, "why"), html("ul", {}, found.findings.map(f => html("li", {}, `${f.part}: ${f.why}`))));
    return html("div", { class: `lamp ${found.level}` }, html("i", { "aria-hidden": "true" }), html("div", {}, (panels.length > 1 ? `${"AB"[i]}: ` : "") + found.title[0].toUpperCase() + found.title.slice(1) + "." + told, why));
  }));
}

// Choices ----------------------------------------------------------------------------------------

function choose(changes, isComputed = false) {
  Object.assign(chosen, changes);
  if (isComputed) return compute();
  remember();
  draw();
}
const follow = A => choose({ A });
const goTo = t => { stop(); chosen.t = t >= steps() ? null : Math.max(0, t); remember(); drawMoving(); };

// Frames of an animation: ``action`` gets seconds since the start and says whether to go on.
function animate(action) {
  const begin = performance.now();
  return new Promise(end => {
    const frame = now => (action(Math.max(0, now - begin) / 1000) ? requestAnimationFrame(frame) : end());
    requestAnimationFrame(frame);
  });
}

function stop() {
  isPlaying = isGenerating = false;
  fresh = null;
  $("play").textContent = "Play";
  $("generate").textContent = "Continue the text";
}

async function play() {
  if (isPlaying) return stop();
  stop();
  isPlaying = true;
  $("play").textContent = "Pause";
  const all = steps(), from = time() >= all ? 0 : time(), seconds = Math.min(6, Math.max(2.5, 0.22 * all));
  await animate(now => {
    if (!isPlaying) return false;
    const at = from + all * now / seconds;
    chosen.t = at >= all ? null : isCalm ? Math.floor(at) : at;
    drawMoving();
    return chosen.t !== null;
  });
  if (isPlaying) stop();
  remember();
}

// Token after token; each rolls down before the next one comes.
async function generate() {
  if (isGenerating || !panels[active].record) return stop();
  stop();
  isGenerating = true;
  $("generate").textContent = "Stop";
  const panel = panels[active], { source, info } = panel;
  while (isGenerating && panel.record.tokens.length < info.context) {
    const token = await source.next(panel.record, panel.settings.temperature).catch(error => tell(error.message));
    if (!isGenerating || token === undefined || token === info.end) break;
    const before = panel.record.tokens.length;
    setText(source.append(chosen.text, token));
    await compute();
    if (panel.record.tokens.length <= before) break;
    Object.assign(chosen, { A: panel.record.tokens.length - 1, t: 0 });
    fresh = chosen.A;
    draw();
    await animate(now => {
      chosen.t = Math.min(steps(), steps() * now / (isCalm ? 0.05 : 0.5));
      drawMoving();
      return isGenerating && chosen.t < steps();
    });
    chosen.t = null;
    fresh = null;
  }
  stop();
  draw();
}

function setText(text) {
  chosen.text = text;
  if ($("text").value !== text) $("text").value = text;
}

async function survey_() {
  const panel = panels[active], mine = panel.asked;
  if (!panel.record) return;
  const { A } = panel.see();
  $("land-progress").textContent = "surveying …";
  const progress = share => ($("land-progress").textContent = `surveying: ${percent(share)}`);
  try {
    const found = await panel.source.landscape(panel.record, A, () => mine === panel.asked && chosen.A === A, progress);
    $("land-progress").textContent = found ? "" : "There is no landscape of this token here.";
    if (found && mine === panel.asked) panel.land = { A, found };
  } catch (error) {
    $("land-progress").textContent = error.message;
  }
  drawLand();
}

function drawLand() {
  const panel = panels[active], hasEnergy = Boolean(panel?.record?.curves.energy);
  $("survey").disabled = !hasEnergy;
  if (panel?.record && $("land-none").hidden === !hasEnergy) $("land-none").hidden = hasEnergy;
  const land = panel?.land?.A === chosen.A ? panel.land.found : null;
  $("section").parentElement.hidden = !land?.sections.minima;
  if (!land) {
    ["map", "surface", "starts"].forEach(id => $(id).replaceChildren());
    return;
  }
  const see = panel.see(), section = sectionOf(land, $("section").value);
  drawMap($("map"), see, section);
  drawSurface($("surface"), see, section, turn);
  if ($("starts").dataset.of !== `${panel.asked} ${chosen.A}` || !$("starts").children.length) drawStarts($("starts"), see, land);
  $("starts").dataset.of = `${panel.asked} ${chosen.A}`;
}
