// Where what is shown comes from: the engine in this page, a server on this machine, or a recording.
// Each source gives records: {tokens, steps, curves: {name: [step][token]}, said, chances}, the
// same as nrgpt.dynamics.page writes.
"use strict";

const NAMES = { force: "force", size: "size", angle: "angle", move: "movement", push: "push", entropy: "entropy" };

class Source {
  constructor(info) {
    this.info = info;
  }

  label(token) {
    return this.info.symbols?.[token] ?? this.info.texts?.[token] ?? `#${token}`;
  }

  // Tokens of a text, and what of it the model does not know.
  encode(text) {
    const { symbols, expressions } = this.info, tokens = [], unknown = new Set();
    if (!this.numbers) {
      this.numbers = new Map(symbols.map((symbol, i) => [symbol, i]));
      this.longest = symbols.reduce((most, symbol) => Math.max(most, symbol.length), 0);
    }
    if (expressions) {
      for (const word of text.match(/<end>|[A-Za-z_]+|\d+|[()=]|[^\s,]/g) ?? []) {
        const found = this.numbers.get(/^\d+$/.test(word) ? " " + word : word);
        if (found === undefined) unknown.add(word);
        else tokens.push(found);
      }
      return { tokens, unknown: [...unknown] };
    }
    for (let at = 0; at < text.length;) {
      let length = Math.min(this.longest, text.length - at);
      while (length > 0 && !this.numbers.has(text.slice(at, at + length))) length--;
      if (length > 0) tokens.push(this.numbers.get(text.slice(at, at + length)));
      else unknown.add(String.fromCodePoint(text.codePointAt(at)));
      at += length || String.fromCodePoint(text.codePointAt(at)).length;
    }
    return { tokens, unknown: [...unknown] };
  }

  async read(text) {
    return this.encode(text);
  }

  // A text with one more token.
  append(text, token) {
    const label = this.label(token);
    if (!this.info.expressions) return text + label;
    const isTight = /\($/.test(text.trimEnd()) || /^[()]/.test(label.trim());
    const isNumber = /^ \d/.test(label) && /[\d)]$/.test(text.trimEnd());
    return text.trimEnd() + (isTight ? "" : isNumber ? "," : " ") + label.trim();
  }
}

// Work in small pieces, so that the page stays awake; null if it is no longer wanted.
async function inPieces(work, alive, progress) {
  for (let until = performance.now() + 12; ;) {
    const { done, value } = work.next();
    if (done) return value;
    if (performance.now() < until) continue;
    progress?.(value);
    await new Promise(resume => setTimeout(resume));
    if (!alive()) return null;
    until = performance.now() + 12;
  }
}

class Local extends Source {
  get model() {
    this.info.model ??= new Model(this.info.engine);
    return this.info.model;
  }

  // The engine's settings: an energy of one's own pulls towards the tokens of a word.
  settings(chosen) {
    const { word, weight, temperature, ...rest } = chosen, { tokens } = word ? this.encode(word) : { tokens: [] };
    if (!tokens.length || !weight || !this.model.hasEnergy) return { ...rest, temperature };
    const pull = zeros(this.model.tokens.shape[1]);
    for (const token of tokens) addTo(pull, this.model.direction(token), 1 / tokens.length);
    return { ...rest, temperature, attract: new Attract(pull, weight * this.unit) };
  }

  // The mean force on the first example's states: what a weight of 1 is as strong as.
  get unit() {
    if (!this.info.unit) {
      const roll = new Roll(this.model).read(this.encode(this.info.examples[0]).tokens).finish();
      const forces = roll.rolled.flatMap(one => one.looks.map(look => look.force));
      this.info.unit = forces.reduce((a, b) => a + b, 0) / forces.length;
    }
    return this.info.unit;
  }

  // Roll a text; the beginning that it shares with the last one has rolled already.
  async roll(tokens, chosen, alive, progress) {
    const key = JSON.stringify(chosen);
    if (this.key !== key) [this.key, this.rolling] = [key, new Roll(this.model, this.settings(chosen))];
    const roll = this.rolling.read(tokens);
    const work = (function* () { while (roll.advance()) yield; })();
    const done = await inPieces(work, alive, () => progress?.(roll.rolled.length / tokens.length));
    return done === null ? null : { ...record(roll), roll };
  }

  async landscape({ roll }, A, alive, progress) {
    let seed = 1;  // the same starts every time
    const random = () => (seed = seed * 48271 % 2147483647) / 2147483647;
    return inPieces(survey(roll, A, { random }), alive, value => value && progress?.(value.progress));
  }

  async attention({ roll }, A, t) {
    return roll.attention(A, t);
  }

  async next({ roll }, temperature) {
    return roll.next(temperature, Math.random);
  }
}

function record(roll) {
  const { model, tokens, rolled, steps } = roll, states = Array.from({ length: steps + 1 }, (_, t) => t);
  const table = read => states.map(t => rolled.map(one => read(one.looks[t])));
  const curves = {};
  if (model.hasEnergy) {
    curves.energy = table(look => look.energy);
    model.terms.forEach((name, i) => (curves[`${name} energy`] = table(look => look.energies[i])));
    if (roll.settings.attract) curves["own energy"] = table(look => look.energies[model.terms.length]);
  }
  for (const [name, title] of Object.entries(NAMES)) {
    const values = table(look => look[name]);
    if (values.flat().some(v => isNumber(v) && (name !== "push" || v > 0))) curves[title] = values;
  }
  return { tokens, steps, curves, said: table(look => look.said), chances: table(look => look.chances) };
}

// Computed by `nrgpt explore` on this machine, for models too large for a page.
class Remote extends Source {
  async ask(what, body) {
    const answer = await fetch(what, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-NRGPT-Key": this.info.key },
      body: JSON.stringify({ model: this.info.name, ...body }),
    }).catch(() => { throw new Error("nrgpt explore does not answer: is it still running?"); });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error ?? answer.statusText);
    this.info.texts = { ...this.info.texts, ...found.texts };
    return found;
  }

  async read(text) {
    return this.ask("read", { text });
  }

  async roll(tokens, settings, alive) {
    const found = await this.ask("roll", { tokens, settings });
    return alive() ? { ...found, settings } : null;
  }

  // Of all steps at once, so that the slider of steps asks for nothing.
  async attention(record, A, t) {
    if (record.attended?.A !== A) {
      const { tokens, settings } = record;
      record.attended = { A, found: this.ask("attention", { tokens, settings, token: A }) };
    }
    return (await record.attended.found).heads[t] ?? [];
  }

  async landscape({ tokens, settings }, token, alive) {
    const found = await this.ask("landscape", { tokens, settings, token });
    return alive() ? found : null;
  }

  async next({ tokens, settings }) {
    return (await this.ask("next", { tokens, settings })).token;
  }
}

// What was seen once, by nrgpt.trajectory or nrgpt landscape.
class Recorded extends Source {
  encode() {
    return { tokens: this.info.recorded.tokens, unknown: [] };
  }

  async roll() {
    return this.info.recorded;
  }

  async landscape(_, A) {
    const { landscape } = this.info.recorded;
    return landscape?.token === A ? landscape : null;
  }
}

const sourceOf = info =>
  new (info.engine ? Local : info.recorded ? Recorded : Remote)(info);
