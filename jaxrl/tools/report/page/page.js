"use strict";
// The page of one run, or of several beside each other. Its data are parts with names
// (jaxrl/tools/report/parts.py): script elements that do not run, or, where there is no manifest
// among them, what the server of a live page answers. What a run wrote reaches the page only as text
// nodes and attributes that are text (`el`), never as HTML.

const byId = (id) => document.getElementById(id);
const live = byId("manifest") === null;
const runs = []; // what `about` of parts.py says of each, and what is made of it in `readRuns`
const VIEWS = ["overview", "curves", "time", "trajectories", "config"];

// What the reader has chosen; it is in the address, so that a view can be linked to.
const state = {
  view: "overview", step: 0, against: "", prompt: "", color: "log_probs", smooth: 0, log: 0, clip: 0,
  from: "", to: "", metric: "", order: "given", groups: "given", text: "", min: "", max: "", stop: "",
  ended: "", env: "", follow: 0, theme: "",
};
const initial = { ...state };

// ------------------------------------------------------------------ small things

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "rect", "text", "circle", "title", "g"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null && child !== ""));
  return node;
}

function number(x) {
  if (x == null) return "–";
  if (!Number.isFinite(x)) return String(x);
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-3) return x.toExponential(2);
  return String(Number(x.toPrecision(4)));
}

function seconds(x) {
  if (x == null || !Number.isFinite(x)) return "–";
  if (x < 120) return `${number(x)} s`;
  if (x < 7200) return `${number(x / 60)} min`;
  return `${number(x / 3600)} h`;
}

const percent = (x) => `${(100 * x).toFixed(1)} %`;
const when = (x) => (x == null ? "–" : new Date(1000 * x).toLocaleString());
const count = (n, noun, several = `${noun}s`) => `${n} ${n === 1 ? noun : several}`;
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

function later(action, wait = 150) {
  let timer;
  return () => { clearTimeout(timer); timer = setTimeout(action, wait); };
}

const tip = byId("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(4, y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18)}px`;
}
const hideTip = () => { tip.hidden = true; };

// Things that are drawn only once they can be seen: a run has a hundred curves.
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) { watcher.unobserve(entry.target); entry.target.draw(); }
  }
}, { rootMargin: "300px" });
function whenSeen(node, draw) { node.draw = draw; watcher.observe(node); return node; }

// ------------------------------------------------------------------ parts and blobs

async function ask(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address}: ${await answer.text()}`);
  return answer;
}

async function part(name) {
  return byId(name)?.textContent ?? (live ? (await ask(`part/${name}`)).text() : null);
}

const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };
let halves = null; // the 65,536 numbers of half precision

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = new Uint8Array(await new Response(stream).arrayBuffer());
  let start = 4 + new DataView(data.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(data.subarray(4, start)));
  const arrays = {};
  for (const [name, [kind, size]] of Object.entries(header.arrays)) {
    const width = Number(kind[1]), bytes = new Uint8Array(size * width);
    for (let plane = 0; plane < width; plane++) { // stored plane by plane, see blob.py
      const offset = start + plane * size;
      for (let i = 0; i < size; i++) bytes[i * width + plane] = data[offset + i];
    }
    start += size * width;
    if (kind === "f2") {
      halves ??= Float32Array.from({ length: 65536 }, (_, bits) => half(bits));
      arrays[name] = Float32Array.from(new Uint16Array(bytes.buffer), (bits) => halves[bits]);
    } else arrays[name] = new KINDS[kind](bytes.buffer);
  }
  return { ...header, arrays };
}

