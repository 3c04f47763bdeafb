// The landscape of one token, its past held still: minima, the pass between two of them, a map.
// As nrgpt.dynamics.landscape and .paths do it in Python: points u of the sphere |u|^2 = D (for
// LayerNorm without their mean), or of all of space where there is no norm.
"use strict";

class Landscape {
  constructor(roll, A) {
    this.roll = roll;
    this.model = roll.model;
    this.block = roll.model.blockAt(0);
    this.position = A;
    this.one = roll.rolled[A];
    this.past = roll.past(A, roll.steps);
    const width = this.one.x[0].length;
    this.radius = this.block.norm.kind === "none" ? null : Math.sqrt(width);
  }

  // Energy at u, and its gradient along the surface.
  look(u) {
    const { norm: scale } = this.block, g = scale.apply(u);
    const { energy, force } = this.block.field(g, this.past, this.roll.settings, this.one.settled);
    const r = this.radius === null ? 1 : Math.sqrt(1 + scale.eps);  // of a point on the sphere
    return { energy, gradient: this.tangent(u, scale.pull(force).map(c => -c / r)) };
  }

  // The part of the energy that is one's own.
  own(u) {
    const { attract } = this.roll.settings;
    return attract ? attract.look(this.block.norm.apply(u)).energy : 0;
  }

  // The nearest point of the surface.
  retract(u) {
    if (this.radius === null) return u;
    const v = this.block.norm.centred(u), size = norm(v);
    return v.map(c => this.radius * c / size);
  }

  tangent(u, v) {
    if (this.radius === null) return v;
    const flat = this.block.norm.centred(v), along = dot(u, flat) / this.radius ** 2;
    return flat.map((c, i) => c - along * u[i]);
  }

  // Straight ahead from u, as far as v is long; and the v that leads to another point.
  walk(u, v) {
    if (this.radius === null) return u.map((c, i) => c + v[i]);
    const angle = norm(v) / this.radius, stretch = angle > 0 ? Math.sin(angle) / angle : 1;
    return u.map((c, i) => Math.cos(angle) * c + stretch * v[i]);
  }

  heading(u, other) {
    if (this.radius === null) return other.map((c, i) => c - u[i]);
    const along = dot(u, other) / this.radius ** 2;
    const across = other.map((c, i) => c - along * u[i]), size = norm(across);
    const angle = Math.atan2(size, this.radius * along);
    return across.map(c => (size > 0 ? this.radius * angle * c / size : 0));
  }

  path() {
    return this.one.x.map(x => this.retract(x));
  }

  random(random) {
    const normalNumber = () =>
      Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
    return this.retract(this.one.x[0].map(normalNumber));
  }

  // Down from a point until the slope is gone. Steps are as long as the last change of the gradient
  // suggests (Barzilai and Borwein), shorter where the energy would not fall, and never so long that
  // they leap into the next basin.
  *minimise(start, iterations = 3000, tolerance = 1e-5, reach = 0.05) {
    let u = this.retract(start), here = this.look(u), size = 0.1;
    const longest = reach * Math.sqrt(u.length);
    for (let i = 0; i < iterations && norm(here.gradient) > tolerance; i++) {
      size = Math.min(size, longest / norm(here.gradient));
      const tried = this.retract(u.map((c, j) => c - size * here.gradient[j])), there = this.look(tried);
      if (there.energy > here.energy) {
        if (size < 1e-12) break;
        size *= 0.3;
        continue;
      }
      const moved = tried.map((c, j) => c - u[j]);
      const bent = there.gradient.map((c, j) => c - here.gradient[j]), pull = dot(moved, bent);
      size = pull > 0 ? Math.min(10, dot(moved, moved) / pull) : 1.5 * size;
      [u, here] = [tried, there];
      yield;
    }
    return { u, energy: here.energy, slope: norm(here.gradient) };
  }

  // The path of least energy between two points, by the string method: beads descend, and are spread
  // out evenly again. Its highest bead stands near the pass.
  *between(a, b, beads = 17, iterations = 120, rate = 0.05) {
    const bend = this.tangent(a, a.map((c, i) => Math.sin(i + 1)));  // opposite points: any way round
    const mixed = s => a.map((c, i) => (1 - s) * c + s * b[i] + 0.1 * s * (1 - s) * bend[i]);
    let string = Array.from({ length: beads }, (_, k) => this.retract(mixed(k / (beads - 1))));
    for (let i = 0; i < iterations; i++) {
      string = string.map((u, k) => {
        if (k === 0 || k === beads - 1) return u;
        const { gradient } = this.look(u);
        return this.retract(u.map((c, j) => c - rate * gradient[j]));
      });
      string = this.spread(string);
      yield;
    }
    const energies = string.map(u => this.look(u).energy), top = energies.indexOf(Math.max(...energies));
    return { string, energies, pass: { u: string[top], energy: energies[top] }, isPass: top > 0 && top < beads - 1 };
  }

  spread(string) {
    const lengths = string.slice(1).map((u, k) => norm(u.map((c, j) => c - string[k][j])));
    const total = lengths.reduce((a, b) => a + b, 0);
    let k = 0, before = 0;
    return string.map((u, i) => {
      if (i === 0 || i === string.length - 1) return u;
      const wanted = total * i / (string.length - 1);
      while (before + lengths[k] < wanted) before += lengths[k++];
      const share = (wanted - before) / lengths[k];
      return this.retract(string[k].map((c, j) => (1 - share) * c + share * string[k + 1][j]));
    });
  }

  // The plane at ``centre`` along two directions, which are made orthonormal.
  plane(centre, first, second) {
    const e = this.tangent(centre, first), size = norm(e), one = e.map(c => c / size);
    const rest = this.tangent(centre, second), along = dot(rest, one);
    const across = rest.map((c, i) => c - along * one[i]), length = norm(across);
    return { centre, directions: [one, across.map(c => c / length)] };
  }

  place({ centre, directions }, u) {
    const way = this.heading(centre, u);
    return directions.map(e => dot(e, way));
  }

  point({ centre, directions: [e, f] }, [x, y]) {
    return this.walk(centre, e.map((c, i) => x * c + y * f[i]));
  }
}

// The plane through the token's end, the minimum below it, and a third point, as a map: energies on a
// grid, and the places of what lies in it. Yields the share that is done.
function* section(land, path, below, third, count, random) {
  const end = path.at(-1);
  let plane = land.plane(end, land.heading(end, below), land.heading(end, third));
  if (!plane.directions.flat().every(e => Number.isFinite(e[0])))  // two of the three are one
    plane = land.plane(end, land.heading(end, path[0]), land.random(random));
  const place = u => land.place(plane, u), places = [...path, below, third].map(place);
  const reach = 1.2 * places.flat().reduce((a, b) => Math.max(a, Math.abs(b)), 1e-3);
  const extent = Math.min(reach, land.radius === null ? Infinity : 0.98 * Math.PI * land.radius);
  const axis = Array.from({ length: count }, (_, i) => extent * (2 * i / (count - 1) - 1));
  const energy = [], own = [];
  for (const y of axis) {
    const points = axis.map(x => land.point(plane, [x, y]));
    energy.push(points.map(u => land.look(u).energy));
    own.push(points.map(u => land.own(u)));
    yield energy.length / count;
  }
  return { axis, energy, own: land.roll.settings.attract ? own : null, path: path.map(place), place };
}

// Everything that the page shows of a token's landscape. Yields now and then, so that a page stays
// awake; ``random`` gives numbers in [0, 1).
function* survey(roll, A, { starts = 8, count = 45, random = Math.random } = {}) {
  const land = new Landscape(roll, A), path = land.path(), end = path.at(-1);
  const minima = [], found = [];
  const say = u => roll.model.say(u, roll.settings.temperature, 3);
  const origins = [end, path[0], ...Array.from({ length: starts }, () => land.random(random))];
  for (const [i, origin] of origins.entries()) {
    const { u, energy, slope } = yield* land.minimise(origin);
    const near = m => norm(m.u.map((c, j) => c - u[j])) < 0.02 * norm(u);
    let basin = minima.findIndex(near);
    if (basin < 0) basin = minima.push({ u, energy, slope, count: 0, ...say(u) }) - 1;
    minima[basin].count += 1;
    found.push({ from: ["its end", "its start"][i] ?? `start ${i - 1}`, energy: land.look(origin).energy, basin: minima[basin] });
    yield { progress: 0.5 * (i + 1) / origins.length };
  }
  const { basin: below } = found[0];
  const other = minima.filter(m => m !== below).sort((a, b) => b.count - a.count)[0] ?? null;
  const pass = other ? yield* land.between(below.u, other.u) : null, isPass = Boolean(pass?.isPass);
  minima.sort((a, b) => a.energy - b.energy);
  const thirds = { path: path[0], ...(other && { minima: other.u }) }, sections = {}, names = Object.keys(thirds);
  for (const name of names) {
    const map = section(land, path, below.u, thirds[name], count, random);
    let drawn = map.next();
    for (; !drawn.done; drawn = map.next())
      yield { progress: 0.6 + 0.4 * (names.indexOf(name) + drawn.value) / names.length };
    const { place, ...rest } = drawn.value, shown = name === "minima" ? [below, other] : [below];
    const places = shown.map(m => ({ which: minima.indexOf(m), at: place(m.u) }));
    sections[name] = { ...rest, minima: places, pass: name === "minima" && isPass ? place(pass.pass.u) : null };
  }
  return {
    sections,
    pathEnergy: path.map(u => land.look(u).energy),
    minima: minima.map(({ u, ...rest }) => rest),
    starts: found.map(s => ({ ...s, basin: minima.indexOf(s.basin) })),
    pass: isPass ? { energy: pass.pass.energy } : null,
    end: say(end),
  };
}
