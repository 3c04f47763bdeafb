// Arrays and the functions that the engine needs: products, tensors in base64, activations.
"use strict";

// Arrays -----------------------------------------------------------------------------------------

class Tensor {
  constructor(shape, data) {
    this.shape = shape;
    this.data = data;
  }

  // Row i of a matrix, matrix i of a stack.
  part(i) {
    const size = this.data.length / this.shape[0];
    return new Tensor(this.shape.slice(1), this.data.subarray(i * size, (i + 1) * size));
  }
}

const zeros = size => new Float64Array(size);
const norm = v => Math.sqrt(dot(v, v));

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

function addTo(sum, v, factor = 1) {
  for (let i = 0; i < sum.length; i++) sum[i] += factor * v[i];
  return sum;
}

// W x + bias. Four sums at a time: one would make the processor wait for itself.
function times(W, x, bias = null) {
  const [rows, columns] = W.shape, w = W.data, out = zeros(rows), most = columns - columns % 4;
  for (let i = 0, at = 0; i < rows; i++, at += columns) {
    let a = bias ? bias.data[i] : 0, b = 0, c = 0, d = 0;
    for (let j = 0; j < most; j += 4) {
      a += w[at + j] * x[j];
      b += w[at + j + 1] * x[j + 1];
      c += w[at + j + 2] * x[j + 2];
      d += w[at + j + 3] * x[j + 3];
    }
    for (let j = most; j < columns; j++) a += w[at + j] * x[j];
    out[i] = a + b + c + d;
  }
  return out;
}

// W^T y; rows of which y wants nothing cost nothing.
function timesTransposed(W, y) {
  const [rows, columns] = W.shape, w = W.data, out = zeros(columns);
  for (let i = 0, at = 0; i < rows; i++, at += columns) {
    const factor = y[i];
    if (factor === 0) continue;
    for (let j = 0; j < columns; j++) out[j] += factor * w[at + j];
  }
  return out;
}

// Tensors from the base64 that nrgpt.explore.weights writes: each in the shortest type that is exact.
function readTensors(list, base64) {
  const bytes = Uint8Array.from(atob(base64), c => c.charCodeAt(0)), found = {};
  for (const { name, shape, type, at } of list) {
    const count = shape.reduce((a, b) => a * b, 1), width = { f64: 8, f32: 4, f16: 2, bf16: 2 }[type];
    const part = bytes.slice(at, at + width * count).buffer;
    found[name] = new Tensor(shape, NUMBERS[type](part));
  }
  return found;
}

const NUMBERS = {
  f64: part => new Float64Array(part),
  f32: part => new Float32Array(part),
  bf16: part => new Float32Array(Uint32Array.from(new Uint16Array(part), h => h << 16).buffer),
  f16: part => Float32Array.from(new Uint16Array(part), h => {
    const sign = h >> 15 ? -1 : 1, power = (h >> 10) & 31, rest = (h & 1023) / 1024;
    return sign * (power ? 2 ** (power - 15) * (1 + rest) : 2 ** -14 * rest);
  }),
};

// Functions of one number ------------------------------------------------------------------------

const density = z => Math.exp(-z * z / 2) / Math.sqrt(2 * Math.PI);

// The normal distribution: Taylor's series around the nearest of the entries of a table.
const fromNearest = (z, d) => density(z) * d * (1 - d / 2 * (z - d / 3 * (z * z - 1 - d / 4 * (
  z * (z * z - 3) - d / 5 * (z ** 4 - 6 * z * z + 3)))));
const FINE = 64, NORMAL = zeros(9 * FINE).fill(0.5);
for (let i = 1; i < NORMAL.length; i++)
  NORMAL[i] = NORMAL[i - 1] + fromNearest((i - 0.5) / FINE, 0.5 / FINE)
    - fromNearest((i - 0.5) / FINE, -0.5 / FINE);

function normal(z) {
  const size = Math.abs(z), i = Math.round(size * FINE);
  const above = i < NORMAL.length ? NORMAL[i] + fromNearest(i / FINE, size - i / FINE) : 1;
  return z < 0 ? 1 - above : above;
}

const sigmoid = z => 1 / (1 + Math.exp(-z));
const softplus = z => Math.max(z, 0) + Math.log1p(Math.exp(-Math.abs(z)));
const relu = z => Math.max(z, 0);
const gelu = z => z * normal(z);
const bent = z => Math.tanh(Math.sqrt(2 / Math.PI) * (z + 0.044715 * z ** 3));

// sigma and its derivative.
const ACTIVATIONS = {
  relu: [relu, z => (z > 0 ? 1 : 0)],
  gelu: [gelu, z => normal(z) + z * density(z)],
  gelu_tanh: [z => z * (1 + bent(z)) / 2, z => (1 + bent(z)) / 2
    + z / 2 * (1 - bent(z) ** 2) * Math.sqrt(2 / Math.PI) * (1 + 3 * 0.044715 * z * z)],
};

// F and F' of a dense associative memory.
const POTENTIALS = {
  relu2: [z => relu(z) ** 2 / 2, relu],
  gelu: [z => ((z * z - 1) * normal(z) + z * density(z)) / 2, gelu],
  softplus: [softplus, sigmoid],
  softplus2: [z => softplus(z) ** 2 / 2, z => softplus(z) * sigmoid(z)],
};
