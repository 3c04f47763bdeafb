// The model itself, in plain JavaScript: what nrgpt.dynamics.trajectory shows in Python, one token at a
// time. A token sees earlier tokens only, so each rolls down once, for all steps, and text can be
// added at the end without another look at the beginning.
//
// Weights are float32 or shorter, as they were trained; all arithmetic is float64. Letters are those
// of docs/equations.md: a state x, g = norm(x), energies E, the force f = -dE/dg, the rate eta.
"use strict";

// g = norm(x) ------------------------------------------------------------------------------------

class Norm {
  constructor({ kind, eps, gamma, delta }, tensors) {
    this.kind = kind;
    this.eps = eps;
    this.gamma = gamma ? tensors[gamma].data : null;
    this.delta = delta ? tensors[delta].data : null;
  }

  // What of v the norm looks at.
  centred(v) {
    if (this.kind !== "layernorm") return v;
    const mean = v.reduce((a, b) => a + b, 0) / v.length;
    return v.map(c => c - mean);
  }

  apply(x) {
    if (this.kind === "none") return x;
    const u = this.centred(x), r = Math.sqrt(dot(u, u) / u.length + this.eps);
    return u.map((c, i) => this.gamma[i] * c / r + (this.delta ? this.delta[i] : 0));
  }

  // The part of v that turns x: P v.
  across(x, v) {
    if (this.kind === "none") return v;
    const u = this.centred(x), flat = this.centred(v), share = dot(u, flat) / (dot(u, u) + this.eps * u.length);
    return flat.map((c, i) => c - share * u[i]);
  }

  // u = Gamma f less its mean: the force as the normalised state feels it.
  pull(force) {
    return this.gamma ? this.centred(force.map((c, i) => this.gamma[i] * c)) : force;
  }
}

// Energies: each look gives E and the force on g ---------------------------------------------------

// A query of all heads, side by side, among what other tokens show: for each head the probabilities,
// the logsumexp of its scores, and the means of the keys and of the values.
function attend(query, shown, heads, scale) {
  const size = query.length / heads, logs = zeros(heads), p = [];
  const mean = zeros(query.length), values = zeros(query.length);
  for (let h = 0; h < heads; h++) {
    const from = h * size, scores = zeros(shown.length);
    for (let B = 0; B < shown.length; B++) {
      const key = shown[B].key;
      let score = 0;
      for (let i = from; i < from + size; i++) score += query[i] * key[i];
      scores[B] = scale * score;
    }
    const most = scores.reduce((a, b) => Math.max(a, b), -Infinity);
    const weights = scores.map(s => Math.exp(s - most)), sum = weights.reduce((a, b) => a + b, 0);
    logs[h] = most + Math.log(sum);
    p.push(weights.map(w => w / sum));
    shown.forEach(({ key, value }, B) => {
      for (let i = from; i < from + size; i++) {
        mean[i] += p[h][B] * key[i];
        values[i] += p[h][B] * value[i];
      }
    });
  }
  return { p, logs, mean, values };
}

// -(1/beta) sum_h alpha_h log sum_B exp(beta q . k_B). ``own`` is what a settled token showed and is
// driven by; ``move`` what write weights of its own make of the same look. With full coupling W_Q has
// D rows for each head, there is no W_K, and every head's key is g.
class Attention {
  constructor(spec, tensors) {
    Object.assign(this, { heads: spec.heads, beta: spec.beta, mask: spec.mask });
    for (const name of ["W_Q", "W_K", "W_V", "W_P", "W_drive"]) this[name] = tensors[spec[name]];
    this.alpha = spec.alpha ? tensors[spec.alpha].data : zeros(spec.heads).fill(1);
  }

  show(g) {
    const key = this.W_K ? times(this.W_K, g) : Float64Array.from({ length: this.heads * g.length }, (_, i) => g[i % g.length]);
    return { key, value: this.W_V ? times(this.W_V, g) : key };
  }

  // A pull at the key, as g feels it.
  throughKey(pull, D) {
    if (this.W_K) return timesTransposed(this.W_K, pull);
    return pull.reduce((sum, c, i) => { sum[i % D] += c; return sum; }, zeros(D));
  }

  look(g, past, settings, own) {
    const shown = this.mask === "strict" ? past : [...past, own ?? this.show(g)];
    const none = zeros(g.length);
    if (!shown.length) return { energy: 0, force: none, move: none, p: [] };
    const query = driven(times(this.W_Q, g), own), beta = this.beta * settings.beta;
    const { p, logs, mean, values } = attend(query, shown, this.heads, beta);
    const size = query.length / this.heads;
    const weigh = v => v.map((c, i) => this.alpha[i / size | 0] * c);
    const force = timesTransposed(this.W_Q, weigh(mean));
    if (this.mask === "inclusive" && !own) {  // the token is a key of its own, and that key moves too
      const pull = query.map((c, i) => p[i / size | 0][shown.length - 1] * c);
      addTo(force, this.throughKey(weigh(pull), g.length));
    }
    const move = this.W_P ? times(this.W_P, values) : force;
    return { energy: -dot(this.alpha, logs) / beta, force, move, p };
  }
}

const driven = (z, own) => (own?.drive ? addTo(z, own.drive) : z);

// The feed-forward energies: E and the force by kind, z = W g + b.
class FeedForwardEnergy {
  constructor(spec, tensors) {
    this.kind = spec.kind;
    this.scale = spec.scale ? tensors[spec.scale].data[0] : 1;
    for (const name of ["W", "b", "W_1", "W_2", "b_1", "b_2", "W_drive"]) this[name] = tensors[spec[name]];
    this.units = spec.units ? tensors[spec.units].data : null;
    [this.sigma, this.slope] = ACTIVATIONS[spec.activation];
    this.potential = POTENTIALS[spec.potential];
  }

  look(g, past, settings, own) {
    const z = driven(times(this.W ?? this.W_1, g, this.b ?? this.b_1), own);
    const found = this[this.kind](z, g), force = found.force.map(c => this.scale * c);
    return { energy: this.scale * found.energy, force, move: found.move ?? force };
  }

  // -sum_j w_j F(z_j); with write weights of its own the token moves by W_2 sigma(z)
  memory(z) {
    const [F, slope] = this.potential, w = this.units ?? z.map(() => 1);
    const force = timesTransposed(this.W, z.map((c, j) => w[j] * slope(c)));
    const move = this.W_2 ? times(this.W_2, z.map(this.sigma)) : null;
    return { energy: -dot(w, z.map(F)), force, move };
  }

  // -|sigma(z)|^2
  ff1(z) {
    const s = z.map(this.sigma), on_z = s.map((c, i) => 2 * c * this.slope(z[i]));
    return { energy: -dot(s, s), force: timesTransposed(this.W, on_z) };
  }

  // -g . (W_2 sigma(z) + b_2)
  ff2w(z, g) {
    const s = z.map(this.sigma), out = times(this.W_2, s, this.b_2);
    const back = timesTransposed(this.W_2, g).map((c, i) => c * this.slope(z[i]));
    return { energy: -dot(g, out), force: addTo(timesTransposed(this.W_1, back), out) };
  }

  // -|sigma(u)|^2, u = W_2 sigma(z) + b_2
  ff2(z) {
    const u = times(this.W_2, z.map(this.sigma), this.b_2), s = u.map(this.sigma);
    const on_u = s.map((c, i) => 2 * c * this.slope(u[i]));
    const on_z = timesTransposed(this.W_2, on_u).map((c, i) => c * this.slope(z[i]));
    return { energy: -dot(s, s), force: timesTransposed(this.W_1, on_z) };
  }
}

// An energy of one's own: -weight g . v / |v|, a constant pull along v (Toward in nrgpt).
class Attract {
  constructor(direction, weight) {
    this.force = direction.map(c => weight * c / norm(direction));
  }

  look(g) {
    return { energy: -dot(g, this.force), force: this.force, move: this.force };
  }
}

// Blocks: what a model applies at every step --------------------------------------------------------

const TERMS = { attention: Attention };
const ROUNDING = 8 * Number.EPSILON;

class EnergyBlock {
  constructor(spec, tensors) {
    this.norm = new Norm(spec.norm, tensors);
    Object.assign(this, { cone: spec.cone, curvature: spec.curvature, margin: spec.margin });
    this.names = spec.terms.map(term => term.name);
    this.terms = spec.terms.map(term => new (TERMS[term.kind] || FeedForwardEnergy)(term, tensors));
    this.eta = spec.eta.map(name => tensors[name]);  // one for all terms, or one for each
    this.W_M = tensors[spec.W_M];  // eta = diag M(x) P, beside what ``eta`` holds
    this.b_M = tensors[spec.b_M];
  }

  // What a token shows to later ones, by term.
  show(x) {
    const g = this.norm.apply(x);
    return this.terms.map(term => (term.show ? term.show(g) : null));
  }

  // The same of a past that is settled, made once where the steps start, and what drives the token.
  settle(x) {
    const g = this.norm.apply(x), shown = this.show(x);
    const drive = term => (term.W_drive ? times(term.W_drive, g) : null);
    return this.terms.map((term, slot) => ({ ...shown[slot], drive: drive(term) }));
  }

  // eta^(t) f: a diagonal or a matrix, the same for all steps or one for each.
  rated(eta, t, f) {
    const own = eta.part(Math.min(t, eta.shape[0] - 1));
    return own.shape.length === 2 ? times(own, f) : f.map((c, i) => own.data[i] * c);
  }

  // A term that joined for one call is moved by the mean of the others' rates.
  etaOf(slot) {
    if (slot < this.eta.length) return this.eta[slot];
    const mean = zeros(this.eta[0].data.length);
    for (const eta of this.eta) addTo(mean, eta.data, 1 / this.eta.length);
    return new Tensor(this.eta[0].shape, mean);
  }

  // Energies and forces at g. ``past`` has what earlier tokens show, by token and term; ``own`` what
  // the token itself does, if it is settled.
  field(g, past, settings, own) {
    const terms = settings.attract ? [...this.terms, settings.attract] : this.terms;
    const looks = terms.map((term, slot) =>
      term.look(g, term.show ? past.map(shown => shown[slot]) : null, settings, own?.[slot]));
    const energies = looks.map(look => look.energy), moves = looks.map(look => look.move);
    const force = looks.reduce((sum, look) => addTo(sum, look.force), zeros(g.length));
    const p = looks.find(look => look.p)?.p ?? [];
    return { energies, energy: energies.reduce((a, b) => a + b, 0), moves, force, p };
  }

  // The same in state x, and the state after step t.
  look(x, t, past, settings, own) {
    const g = this.norm.apply(x), found = this.field(g, past, settings, own), update = zeros(x.length);
    if (this.eta.length > 1)
      found.moves.forEach((move, slot) => addTo(update, this.rated(this.etaOf(slot), t, move)));
    else
      addTo(update, this.rated(this.eta[0], t, found.moves.reduce((sum, f) => addTo(sum, f), zeros(x.length))));
    if (this.W_M) {
      const M = times(this.W_M, g, this.b_M).map(softplus);
      this.norm.across(x, update).forEach((c, i) => (update[i] = M[i] * c));
    }
    const wanted = x.map((c, i) => c + settings.rate * update[i]), hasCone = settings.cone ?? this.cone;
    const next = hasCone ? this.kept(x, wanted, found.force) : wanted;
    const push = hasCone ? norm(next.map((c, i) => c - wanted[i])) : 0;
    return { g, ...found, angle: this.angle(x, found.force), next, push };
  }

  // Degrees between the normalised state and the force that it feels: 0 where it rests.
  angle(x, force) {
    const u = this.norm.pull(force), v = this.norm.centred(x), sizes = norm(u) * norm(v);
    return sizes > 0 ? Math.acos(Math.max(-1, Math.min(1, dot(u, v) / sizes))) * 180 / Math.PI : 90;
  }

  // The cone: y, pushed as far as it takes that the energy does not rise from x to y. Line by line
  // nrgpt.model.safeguard, where it is explained.
  kept(x, y, force) {
    if (!this.norm.gamma) return this.keptFlat(x, y, force, ROUNDING);
    const before = this.norm.centred(x), after = this.norm.centred(y), u = this.norm.pull(force);
    const floor = this.norm.eps * x.length;
    const parts = (v, e) => {  // along e, and across it
      const along = dot(v, e);
      return [along, Math.sqrt(v.reduce((sum, c, i) => sum + (c - along * e[i]) ** 2, 0) + floor)];
    };
    const withMargin = cosine => 1 - (1 - this.margin) * (1 - cosine);
    if (this.curvature !== null) return this.keptCurved(x, y, before, after, u, floor, parts, withMargin);
    const size = norm(u), e = u.map(c => c / size);
    if (size === 0) return y;
    const [along, across] = parts(before, e), [A, B] = parts(after, e);
    if (across <= 8 * ROUNDING * norm(before) && along > 0) return x;
    let slope = along / across;  // the cotangent of the angle
    if (this.margin) {
      const cosine = Math.min(1 - ROUNDING, withMargin(slope / Math.sqrt(1 + slope * slope)));
      slope = cosine / Math.sqrt(1 - cosine * cosine);
    }
    const push = Math.max(0, B * (slope + ROUNDING * (1 + Math.abs(slope))) - A);
    return y.map((c, i) => c + push * e[i]);
  }

  keptCurved(x, y, before, after, u, floor, parts, withMargin) {
    const D = x.length, longer = Math.sqrt(dot(before, before) + floor);
    const pull = this.curvature * Math.sqrt(D) / longer, axis_ = u.map((c, i) => c + pull * before[i]);
    const W = norm(axis_), e = axis_.map(c => c / W), m = pull * floor;
    const [along] = parts(before, e), [A, B] = parts(after, e);
    const axis = Math.sqrt(W * W + Math.max(0, pull * m));
    const k = (withMargin((W * along + m) / (longer * axis)) + ROUNDING) * axis;
    const limit = k * B / Math.hypot(W * B, m);
    if (limit >= 1) return x;
    const sine = Math.max(-1, Math.min(1 - Number.EPSILON, limit)), other = Math.sqrt(1 - sine * sine);
    const tangent = (opposite, adjacent, beyond) => (adjacent > 0 ? opposite / adjacent : beyond);
    const least = tangent(sine * W * B - other * m, other * W * B + sine * m, -Infinity);
    const most = tangent(sine * W * B + other * m, sine * m - other * W * B, Infinity);
    const push = Math.min(Math.max(A, B * least), B * most) - A;
    return y.map((c, i) => c + push * e[i]);
  }

  keptFlat(x, y, force, rounding) {
    const size = norm(force), L = this.curvature;
    if (L === null) {
      const push = x.reduce((sum, c, i) => sum + force[i] / size * (c - y[i]), 0);
      const least = push + rounding * (norm(x) + norm(y));
      return size > 0 ? y.map((c, i) => c + Math.max(0, least) * force[i] / size) : y;
    }
    const centre = force.map(c => c / L), away = y.map((c, i) => c - x[i] - centre[i]);
    const radius = norm(centre), share = (1 - rounding) * radius / norm(away);
    return norm(away) > radius ? x.map((c, i) => c + centre[i] + share * away[i]) : y;
  }
}

// A transformer's block, without an energy: sequential as in GPT, parallel as in GPT-J.
class TransformerBlock {
  constructor(spec, tensors) {
    for (const name of ["Q", "K", "V", "P", "1", "2"])
      for (const kind of ["W_", "b_"]) this[kind + name] = tensors[spec[kind + name]];
    Object.assign(this, { heads: spec.heads, beta: spec.beta, isParallel: spec.kind === "parallel" });
    this.names = [];
    this.norm_1 = new Norm(spec.norm_1, tensors);
    this.norm_2 = new Norm(spec.norm_2, tensors);
    this.sigma = ACTIVATIONS[spec.activation][0];
  }

  show(x) {
    const g = this.norm_1.apply(x);
    return [{ key: times(this.W_K, g, this.b_K), value: times(this.W_V, g, this.b_V) }];
  }

  look(x, t, past, settings) {
    const g = this.norm_1.apply(x), shown = [...past, this.show(x)].map(slots => slots[0]);
    const query = times(this.W_Q, g, this.b_Q);
    const { p, values } = attend(query, shown, this.heads, this.beta * settings.beta);
    const moved = addTo(Float64Array.from(x), times(this.W_P, values, this.b_P), settings.rate);
    const hidden = times(this.W_1, this.norm_2.apply(this.isParallel ? x : moved), this.b_1);
    const next = addTo(moved, times(this.W_2, hidden.map(this.sigma), this.b_2), settings.rate);
    return { g, energies: [], energy: null, force: null, p, angle: null, next, push: 0 };
  }
}

// The model ----------------------------------------------------------------------------------------

const BLOCKS = { energy: EnergyBlock, sequential: TransformerBlock, parallel: TransformerBlock };
const AS_TRAINED = { steps: null, rate: 1, beta: 1, cone: null, frozen: false, attract: null };

class Model {
  constructor(spec) {
    const tensors = readTensors(spec.tensors, spec.data);
    const build = block => new BLOCKS[block.kind](block, tensors);
    this.tokens = tensors.tokens;
    this.positions = tensors.positions;
    this.head = tensors[spec.head];
    this.headBias = tensors[spec.head_bias];
    this.finalNorm = new Norm(spec.final_norm, tensors);
    this.blocks = spec.blocks.map(build);
    const layers = [...spec.prelude.map(build), ...Array(spec.prelude_shared).fill(this.blocks[0])];
    this.prelude = Array(spec.prelude_loops).fill(layers).flat();
    this.isOnSphere = spec.on_sphere;
    this.isSettled = spec.settled;
    this.hasEnergy = spec.blocks[0].kind === "energy";
    this.terms = this.blocks[0].names;
    this.steps = spec.steps;
    this.context = spec.context;
  }

  // Token and position embeddings, the prelude's layers, and the sphere: where the steps start, and
  // what the layers show. ``earlier`` has what they showed of the tokens before. Layers that are the
  // block itself obey the settings, but not the cone.
  begin(token, position, earlier, settings) {
    let x = addTo(Float64Array.from(this.tokens.part(token).data), this.positions.part(position).data);
    const shown = this.prelude.map((layer, i) => {
      const before = x;
      const own = layer === this.blocks[0] ? { ...settings, cone: false } : AS_TRAINED;
      x = layer.look(x, 0, earlier.map(layers => layers[i]), own).next;
      return layer.show(before);
    });
    const r = this.isOnSphere ? Math.sqrt(Math.max(dot(x, x) / x.length, 1e-12)) : 1;
    return { x: x.map(c => c / r), shown };
  }

  blockAt(t) {
    return this.blocks[t % this.blocks.length];
  }

  logits(x) {
    return times(this.head, this.finalNorm.apply(x), this.headBias);
  }

  // What the model would say in state x: the likeliest tokens, their probabilities, the entropy.
  say(x, temperature = 1, count = 5) {
    const p = softmax(this.logits(x), temperature);
    const said = [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, count);
    const entropy = -p.reduce((sum, c) => sum + (c > 0 ? c * Math.log(c) : 0), 0);
    return { said, chances: said.map(n => p[n]), entropy };
  }

  // What pulls towards saying a token.
  direction(token) {
    return this.finalNorm.pull(Float64Array.from(this.head.part(token).data));
  }
}

function softmax(logits, temperature) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = logits.map(l => Math.exp((l - most) / temperature));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map(w => w / sum);
}

// One text, rolling ----------------------------------------------------------------------------------

// ``rolled`` has for each token its states x (0 to steps), what it shows in each, and a look at each.
class Roll {
  constructor(model, settings = {}) {
    this.model = model;
    this.settings = { ...AS_TRAINED, ...settings };
    this.steps = this.settings.steps ?? model.steps;
    this.tokens = [];
    this.rolled = [];
    // With a frozen past a token moves among the last states of the others, which move as always.
    this.others = this.settings.frozen && !model.isSettled ? new Roll(model, { ...this.settings, frozen: false }) : null;
  }

  // Another text: what it begins with like the present one stays.
  read(tokens) {
    this.others?.read(tokens);
    let same = 0;
    while (same < this.rolled.length && tokens[same] === this.tokens[same]) same++;
    this.rolled.length = same;
    this.tokens = tokens.slice(0, this.model.context);
    return this;
  }

  // Let the next token roll; false if all have.
  advance() {
    const A = this.rolled.length;
    if (A >= this.tokens.length) return false;
    this.others?.advance();
    const { model, steps } = this, layers = this.rolled.map(one => one.layers);
    const { x, shown } = model.begin(this.tokens[A], A, layers, this.settings);
    const one = { x: [x], layers: shown, shown: [], looks: [], settled: null };
    if (model.isSettled) one.settled = model.blocks[0].settle(x);
    for (let t = 0; t <= steps; t++) {
      const look = this.look(one, A, t);
      if (!one.settled) one.shown.push(model.blockAt(t).show(one.x[t]));
      const g = model.hasEnergy ? look.g : model.finalNorm.apply(one.x[t]);  // what moves, as Python has it
      one.looks.push({
        g,
        energies: look.energies,
        energy: look.energy,
        force: look.force && norm(look.force),
        size: norm(one.x[t]),
        move: t ? norm(addTo(Float64Array.from(g), one.looks[t - 1].g, -1)) : null,
        angle: look.angle,
        push: t < steps ? look.push : null,
        ...model.say(one.x[t], this.settings.temperature),
      });
      if (t < steps) one.x.push(look.next);
    }
    this.rolled.push(one);
    return true;
  }

  finish() {
    while (this.advance());
    return this;
  }

  look(one, A, t) {
    return this.model.blockAt(t).look(one.x[t], t, this.past(A, t), this.settings, one.settled);
  }

  // What the tokens before A show it at step t.
  past(A, t) {
    const [from, at] = this.others ? [this.others, this.steps] : [this, t];
    return from.rolled.slice(0, A).map(one => one.settled ?? one.shown[at]);
  }

  // Whom token A attends to at step t: probabilities by head, over the tokens it sees. After the last
  // of several blocks there is none that would look.
  attention(A, t) {
    return this.model.blocks[t] || this.model.blocks.length === 1 ? this.look(this.rolled[A], A, t).p : [];
  }

  // Draw the next token from what the last one says; ``random`` gives numbers in [0, 1).
  next(temperature, random) {
    const { x } = this.rolled.at(-1), logits = this.model.logits(x.at(-1));
    if (temperature === 0) return logits.indexOf(logits.reduce((a, b) => Math.max(a, b)));
    const p = softmax(logits, temperature);
    let left = random();
    return Math.max(0, p.findIndex(c => (left -= c) < 0));
  }
}
