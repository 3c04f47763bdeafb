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

  // u = Gamma f less its mean: the force as the normalised state feels it.
  pull(force) {
    return this.gamma ? this.centred(force.map((c, i) => this.gamma[i] * c)) : force;
  }
}

// Energies: each look gives E and the force on g ---------------------------------------------------

// A query of all heads, side by side, among what other tokens show: for each head the probabilities,
// the logsumexp of its scores, and the mean of the values.
function attend(query, shown, heads, scale) {
  const size = query.length / heads, mean = zeros(query.length), logs = zeros(heads), p = [];
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
    shown.forEach(({ value }, B) => {
      for (let i = from; i < from + size; i++) mean[i] += p[h][B] * value[i];
    });
  }
  return { p, logs, mean };
}

// -(1/beta) sum_h alpha_h log sum_B exp(beta q . k_B)
class Attention {
  constructor(spec, tensors) {
    Object.assign(this, { heads: spec.heads, beta: spec.beta, mask: spec.mask });
    this.W_Q = tensors[spec.W_Q];
    this.W_K = tensors[spec.W_K];
    this.alpha = spec.alpha ? tensors[spec.alpha].data : zeros(spec.heads).fill(1);
  }

  show(g) {
    const key = times(this.W_K, g);
    return { key, value: key };
  }

  look(g, past, settings) {
    const shown = this.mask === "strict" ? past : [...past, this.show(g)];
    if (!shown.length) return { energy: 0, force: zeros(g.length), p: [] };
    const query = times(this.W_Q, g), beta = this.beta * settings.beta;
    const { p, logs, mean } = attend(query, shown, this.heads, beta);
    const size = query.length / this.heads, weigh = v => v.map((c, i) => this.alpha[i / size | 0] * c);
    const force = timesTransposed(this.W_Q, weigh(mean));
    if (this.mask === "inclusive") {  // the token is a key of its own, and that key moves too
      const own = query.map((c, i) => p[i / size | 0][shown.length - 1] * c);
      addTo(force, timesTransposed(this.W_K, weigh(own)));
    }
    return { energy: -dot(this.alpha, logs) / beta, force, p };
  }
}

// The feed-forward energies: E and dE/dz by kind, z = W g + b.
class FeedForwardEnergy {
  constructor(spec, tensors) {
    this.kind = spec.kind;
    this.scale = spec.scale ? tensors[spec.scale].data[0] : 1;
    for (const name of ["W", "b", "W_1", "W_2", "b_1", "b_2"])
      this[name] = spec[name] ? tensors[spec[name]] : null;
    [this.value, this.slope] = spec.potential ? POTENTIALS[spec.potential] : ACTIVATIONS[spec.activation];
  }

  look(g) {
    const { energy, force } = this[this.kind](g);
    return { energy: this.scale * energy, force: force.map(c => this.scale * c) };
  }

  // -sum F(z)
  memory(g) {
    const z = times(this.W, g, this.b);
    let energy = 0;
    for (const c of z) energy -= this.value(c);
    return { energy, force: timesTransposed(this.W, z.map(this.slope)) };
  }

  // -|sigma(z)|^2
  ff1(g) {
    const z = times(this.W, g, this.b), s = z.map(this.value);
    const force = timesTransposed(this.W, s.map((c, i) => 2 * c * this.slope(z[i])));
    return { energy: -dot(s, s), force };
  }

  // -g . (W_2 sigma(z) + b_2)
  ff2w(g) {
    const z = times(this.W_1, g, this.b_1), s = z.map(this.value), out = times(this.W_2, s, this.b_2);
    const back = timesTransposed(this.W_2, g).map((c, i) => c * this.slope(z[i]));
    return { energy: -dot(g, out), force: addTo(timesTransposed(this.W_1, back), out) };
  }

  // -|sigma(u)|^2, u = W_2 sigma(z) + b_2
  ff2(g) {
    const z = times(this.W_1, g, this.b_1), u = times(this.W_2, z.map(this.value), this.b_2);
    const s = u.map(this.value), on_u = s.map((c, i) => 2 * c * this.slope(u[i]));
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
    return { energy: -dot(g, this.force), force: this.force };
  }
}

// Blocks: what a model applies at every step --------------------------------------------------------

const TERMS = { attention: Attention };

class EnergyBlock {
  constructor(spec, tensors) {
    this.norm = new Norm(spec.norm, tensors);
    this.cone = spec.cone;
    this.names = spec.terms.map(term => term.name);
    this.terms = spec.terms.map(term => new (TERMS[term.kind] || FeedForwardEnergy)(term, tensors));
    this.eta = spec.eta.map(name => tensors[name]);  // one for all terms, or one for each
  }

  // What a token shows to later ones, by term.
  show(x) {
    const g = this.norm.apply(x);
    return this.terms.map(term => (term.show ? term.show(g) : null));
  }

  // eta^(t) f: a diagonal or a matrix, the same for all steps or one for each.
  rated(eta, t, f) {
    const own = eta.part(Math.min(t, eta.shape[0] - 1));
    return own.shape.length === 2 ? times(own, f) : f.map((c, i) => own.data[i] * c);
  }

  // Energies and forces at g. ``past`` has what earlier tokens show, by token and term.
  field(g, past, settings) {
    const terms = settings.attract ? [...this.terms, settings.attract] : this.terms;
    const looks = terms.map((term, slot) =>
      term.look(g, term.show ? past.map(shown => shown[slot]) : null, settings));
    const energies = looks.map(look => look.energy), forces = looks.map(look => look.force);
    const force = forces.reduce((sum, f) => addTo(sum, f), zeros(g.length));
    const p = looks.find(look => look.p)?.p ?? [];
    return { energies, energy: energies.reduce((a, b) => a + b, 0), forces, force, p };
  }

  // The same in state x, and the state after step t.
  look(x, t, past, settings) {
    const g = this.norm.apply(x), found = this.field(g, past, settings), { force, forces } = found;
    const update = this.eta.length === 1
      ? this.rated(this.eta[0], t, force)
      : forces.reduce((sum, f, slot) => addTo(sum, this.rated(this.etaOf(slot), t, f)), zeros(x.length));
    const wanted = x.map((c, i) => c + settings.rate * update[i]);
    const kept = (settings.cone ?? this.cone) ? this.kept(x, wanted, force) : { next: wanted, push: 0 };
    return { g, ...found, angle: this.angle(x, force), ...kept };
  }

  // A term that joined for one call is moved by the mean of the others' rates.
  etaOf(slot) {
    if (slot < this.eta.length) return this.eta[slot];
    const mean = zeros(this.eta[0].data.length);
    for (const eta of this.eta) addTo(mean, eta.data, 1 / this.eta.length);
    return new Tensor(this.eta[0].shape, mean);
  }

  // Degrees between the normalised state and the force that it feels: 0 where it rests.
  angle(x, force) {
    const u = this.norm.pull(force), v = this.norm.centred(x), sizes = norm(u) * norm(v);
    return sizes > 0 ? Math.acos(Math.max(-1, Math.min(1, dot(u, v) / sizes))) * 180 / Math.PI : 90;
  }

  // The cone: y, pushed along the force as far as it takes that no concave energy rises from x to y
  // (nrgpt.model.safeguard).
  kept(x, y, force) {
    const u = this.norm.pull(force), size = norm(u), isFlat = !this.norm.gamma;
    if (size === 0) return { next: y, push: 0 };
    const e = u.map(c => c / size), before = this.norm.centred(x), after = this.norm.centred(y);
    const along = [before, after].map(v => dot(v, e));
    const floor = this.norm.eps * x.length + Number.MIN_VALUE;
    const across = [before, after].map((v, i) =>
      Math.sqrt(v.reduce((sum, c, j) => sum + (c - along[i] * e[j]) ** 2, 0) + floor));
    // A state that points along the force already, but for rounding, has no cone left: it stays.
    if (!isFlat && across[0] <= 64 * Number.EPSILON * norm(before) && along[0] > 0)
      return { next: x, push: 0 };
    const push = Math.max(0, (isFlat ? 1 : across[1] / across[0]) * along[0] - along[1]);
    return { next: y.map((c, i) => c + push * e[i]), push };
  }
}

// A transformer's block, without an energy: sequential as in GPT, parallel as in GPT-J.
class TransformerBlock {
  constructor(spec, tensors) {
    const of = name => (spec[name] ? tensors[spec[name]] : null);
    for (const name of ["W_Q", "W_K", "W_V", "W_P", "W_1", "W_2", "b_Q", "b_K", "b_V", "b_P", "b_1", "b_2"])
      this[name] = of(name);
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
    const { p, mean } = attend(query, shown, this.heads, this.beta * settings.beta);
    const moved = addTo(Float64Array.from(x), times(this.W_P, mean, this.b_P), settings.rate);
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
    const tensors = readTensors(spec.tensors, spec.data), of = name => (name ? tensors[name] : null);
    this.tokens = of(spec.tokens);
    this.positions = of(spec.positions);
    this.head = of(spec.head);
    this.headBias = of(spec.head_bias);
    this.finalNorm = new Norm(spec.final_norm, tensors);
    this.blocks = spec.blocks.map(block => new BLOCKS[block.kind](block, tensors));
    this.hasEnergy = spec.blocks[0].kind === "energy";
    this.terms = this.blocks[0].names;
    this.steps = spec.steps;
    this.context = spec.context;
  }

  embed(token, position) {
    return addTo(Float64Array.from(this.tokens.part(token).data), this.positions.part(position).data);
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
    this.others = this.settings.frozen ? new Roll(model, { ...this.settings, frozen: false }) : null;
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
    const { model, steps } = this, x = model.embed(this.tokens[A], A);
    const one = { x: [x], shown: [], looks: [] };
    for (let t = 0; t <= steps; t++) {
      const block = model.blockAt(t), look = block.look(one.x[t], t, this.past(A, t), this.settings);
      one.shown.push(block.show(one.x[t]));
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

  // What the tokens before A show it at step t.
  past(A, t) {
    return this.others
      ? this.others.rolled.slice(0, A).map(one => one.shown[this.steps])
      : this.rolled.slice(0, A).map(one => one.shown[t]);
  }

  // Whom token A attends to at step t: probabilities by head, over the tokens it sees.
  attention(A, t) {
    return this.model.blockAt(t).look(this.rolled[A].x[t], t, this.past(A, t), this.settings).p;
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
