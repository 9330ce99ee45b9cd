"use strict";
// The page of one run, or of two that are compared. All data is in script elements that do not
// run: "manifest" is JSON; m<run> curves, v<run> vocabulary, t<run>-<step> trajectories are blobs
// (jaxrl/tools/report/blob.py). What a run wrote reaches the page only as text nodes and attributes
// that are text (`el`), never as HTML.

const byId = (id) => document.getElementById(id);
const manifest = JSON.parse(byId("manifest").textContent);
const runs = manifest.runs;
const VIEWS = ["overview", "curves", "time", "trajectories", "config"];

// What the reader has chosen; it is in the address, so that a view can be linked to.
const state = {
  view: "overview", step: 0, color: "log_probs", smooth: 0, log: 0, clip: 0, from: "", to: "",
  metric: "", order: "given", groups: "given", text: "", min: "", max: "", stop: "", ended: "",
  theme: "",
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
const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

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

// ------------------------------------------------------------------ blobs

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

// ------------------------------------------------------------------ curves

function pointsOf(run, name) {
  const i = run.index.get(name);
  return i === undefined ? null
    : { steps: run.curves.arrays[`steps${i}`], values: run.curves.arrays[`values${i}`] };
}

function smoothed(values, weight) {
  // Exponential, without the bias to the start (as Adam's moments); what is not finite is skipped.
  const result = new Float64Array(values.length);
  let sum = 0, total = 0;
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i])) {
      sum = weight * sum + (1 - weight) * values[i];
      total = weight * total + (1 - weight);
    }
    result[i] = total && Number.isFinite(values[i]) ? sum / total : NaN;
  }
  return result;
}

function ticks(low, high, most) {
  const span = high - low || 1, rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((x) => power * x >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * span; k++) found.push(k * step);
  return found;
}

function logTicks(low, high) {
  const found = [], a = Math.ceil(Math.log10(low) - 1e-9), b = Math.floor(Math.log10(high) + 1e-9);
  for (let k = a; k <= b; k += Math.max(1, Math.ceil((b - a) / 5))) found.push(10 ** k);
  return found.length >= 2 ? found : ticks(low, high, 4).filter((x) => x > 0);
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
}

function pathOf(steps, values, x, y, bad) {
  // Where a pixel has several points, its lowest and its highest: a spike is never lost.
  let path = "", pen = false, i = 0;
  while (i < steps.length) {
    const pixel = Math.round(x(steps[i]));
    let low = -1, high = -1, holes = false;
    for (; i < steps.length && Math.round(x(steps[i])) === pixel; i++) {
      const height = y(values[i]);
      if (!Number.isFinite(height)) { holes = true; continue; }
      if (low < 0 || values[i] < values[low]) low = i;
      if (high < 0 || values[i] > values[high]) high = i;
    }
    if (low < 0) { pen = false; bad.push(pixel); continue; }
    if (holes) bad.push(pixel);
    for (const k of low === high ? [low] : [Math.min(low, high), Math.max(low, high)]) {
      path += `${pen ? "L" : "M"}${x(steps[k]).toFixed(1)} ${y(values[k]).toFixed(1)}`;
      pen = true;
    }
  }
  return path;
}

function rangeOf(lines, log) {
  const all = lines.flatMap((line) => Array.from(line.values))
    .filter((v) => Number.isFinite(v) && (!log || v > 0)).sort((a, b) => a - b);
  if (!all.length) return null;
  const cut = state.clip ? 0.02 : 0;
  const low = all[Math.floor(cut * (all.length - 1))], high = all[Math.ceil((1 - cut) * (all.length - 1))];
  if (low === high) return log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const room = 0.04 * (high - low);
  return log ? [low, high] : [low - room, high + room];
}

function drawCurve(svg, name, wide) {
  const W = wide ? 1200 : 400, H = wide ? 340 : 190, left = 50, right = 8, top = 8, bottom = 20;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  const from = state.from === "" ? -Infinity : Number(state.from);
  const to = state.to === "" ? Infinity : Number(state.to);
  const lines = [];
  runs.forEach((run, number) => {
    const points = pointsOf(run, name);
    if (!points) return;
    const inside = Array.from(points.steps.keys()).filter((i) => points.steps[i] >= from && points.steps[i] <= to);
    const curve = state.smooth > 0 ? smoothed(points.values, state.smooth) : points.values;
    lines.push({
      number, steps: inside.map((i) => points.steps[i]),
      values: inside.map((i) => points.values[i]), curve: inside.map((i) => curve[i]),
    });
  });
  const steps = lines.flatMap((line) => [line.steps[0], line.steps.at(-1)]).filter((s) => s !== undefined);
  const range = rangeOf(lines, state.log);
  if (!range || !steps.length) {
    svg.append(el("text", { x: W / 2, y: H / 2, "text-anchor": "middle" },
      state.log ? "nothing above 0 here" : "no finite value here"));
    return null;
  }
  const first = Math.min(...steps), last = Math.max(...steps, first + 1);
  const x = (step) => left + (W - left - right) * (step - first) / (last - first);
  const f = state.log ? (v) => (v > 0 ? Math.log(v) : NaN) : (v) => v;
  const [low, high] = range.map(f);
  const y = (v) => Math.max(top - 3, Math.min(H - bottom + 3, H - bottom - (H - bottom - top) * (f(v) - low) / (high - low)));
  for (const tick of state.log ? logTicks(...range) : ticks(...range, 5)) {
    svg.append(el("line", { class: "grid", x1: left, x2: W - right, y1: y(tick), y2: y(tick) }),
      el("text", { x: left - 5, y: y(tick) + 3.5, "text-anchor": "end" }, number(tick)));
  }
  for (const tick of ticks(first, last, wide ? 10 : 5).filter(Number.isInteger)) {
    svg.append(el("text", { x: x(tick), y: H - 6, "text-anchor": x(tick) > W - 25 ? "end" : "middle" }, String(tick)));
  }
  marks(svg, x, first, last, top, H - bottom);
  for (const line of lines) {
    const bad = [], dots = line.steps.length <= 40 ? line.steps.keys() : [];
    const path = pathOf(line.steps, line.curve, x, y, bad);
    if (state.smooth > 0) svg.append(el("path", { class: `raw run${line.number}`, d: pathOf(line.steps, line.values, x, y, []) }));
    svg.append(el("path", { class: `curve run${line.number}`, d: path }));
    for (const i of dots) {
      if (Number.isFinite(y(line.curve[i]))) svg.append(el("circle", { class: `dot run${line.number}`, cx: x(line.steps[i]), cy: y(line.curve[i]), r: 2 }));
    }
    if (bad.length) {
      svg.append(el("path", { class: "notfinite", d: bad.map((p) => `M${p - 3} ${top}l6 6m0 -6l-6 6`).join("") },
        el("title", {}, state.log ? "not finite, or not above 0" : "not finite")));
    }
  }
  const chosen = el("line", { class: "chosen", y1: top, y2: H - bottom });
  const cursor = el("line", { class: "cursor", y1: top, y2: H - bottom, visibility: "hidden" });
  svg.append(chosen, cursor);
  return { x, first, last, lines, W, left, right, chosen, cursor };
}

function marks(svg, x, first, last, top, bottom) {
  runs.forEach((run, number) => {
    for (const attempt of run.attempts.slice(1)) {
      if (attempt.from_step < first || attempt.from_step > last) continue;
      svg.append(el("line", { class: "restart", x1: x(attempt.from_step), x2: x(attempt.from_step), y1: top, y2: bottom },
        el("title", {}, `${name(number)}start ${attempt.attempt}, after step ${attempt.from_step}`)));
    }
    for (const alarm of run.alarms) {
      if (alarm.step < first || alarm.step > last) continue;
      const a = x(alarm.step), b = x(Math.min(alarm.beyond, last)), side = a > x(last) - 8 ? -7 : 7;
      svg.append(el("g", {}, el("title", {}, `${name(number)}${alarm.name}, steps ${alarm.step} to ${alarm.beyond}`),
        el("rect", { class: "alarm", x: a, y: top, width: Math.max(b - a, 1), height: bottom - top }),
        el("line", { class: "alarmline", x1: a, x2: a, y1: top, y2: bottom }),
        el("path", { class: "flag", d: `M${a} ${top}l${side} 3.5l${-side} 3.5z` })));
    }
  });
}

const name = (i) => (runs.length > 1 ? `${runs[i].name}: ` : "");
const curves = new Set(); // those on the page: { figure, draw, drawn }

function curve(metric) {
  const svg = el("svg", { role: "img", tabindex: 0, viewBox: "0 0 400 190", "aria-label": metric });
  const at = el("output");
  const larger = el("button", { type: "button", "aria-label": `${metric}: larger or smaller`, onclick: () => {
    figure.classList.toggle("wide");
    draw();
  } }, "⤢");
  const figure = el("figure", {}, el("figcaption", {}, el("b", {}, metric), at, larger), svg);
  let drawn = null;
  const valuesAt = (step) => drawn.lines.filter((line) => line.steps.length).map((line) => {
    const i = nearest(line.steps, step);
    const smooth = state.smooth > 0 ? ` (smoothed ${number(line.curve[i])})` : "";
    return `${name(line.number)}step ${line.steps[i]}: ${number(line.values[i])}${smooth}`;
  });
  const choose = () => {
    if (!drawn) return;
    const inside = state.step >= drawn.first && state.step <= drawn.last;
    drawn.chosen.setAttribute("visibility", inside ? "visible" : "hidden");
    for (const end of ["x1", "x2"]) drawn.chosen.setAttribute(end, drawn.x(state.step));
    at.textContent = drawn.lines.filter((line) => line.steps.length)
      .map((line) => number(line.values[nearest(line.steps, state.step)])).join(" | ");
    svg.setAttribute("aria-label", `${metric}. ${valuesAt(state.step).join("; ")}. Arrow keys choose the step.`);
  };
  const draw = () => { drawn = drawCurve(svg, metric, figure.classList.contains("wide")); choose(); };
  const stepAt = (event) => {
    const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) * drawn.W / box.width;
    const share = (px - drawn.left) / (drawn.W - drawn.left - drawn.right);
    const step = drawn.first + Math.max(0, Math.min(1, share)) * (drawn.last - drawn.first);
    const own = drawn.lines.filter((line) => line.steps.length)
      .map((line) => line.steps[nearest(line.steps, step)]);
    return own.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
  };
  svg.addEventListener("pointermove", (event) => {
    if (!drawn) return;
    const step = stepAt(event);
    drawn.cursor.setAttribute("visibility", "visible");
    for (const end of ["x1", "x2"]) drawn.cursor.setAttribute(end, drawn.x(step));
    showTip(valuesAt(step).join("\n"), event.clientX, event.clientY);
  });
  svg.addEventListener("pointerleave", () => { hideTip(); drawn?.cursor.setAttribute("visibility", "hidden"); });
  svg.addEventListener("click", (event) => { if (drawn) setStep(stepAt(event)); });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { event.preventDefault(); moveStep(move); }
  });
  const self = { figure, choose, redraw: () => { drawn = null; whenSeen(figure, draw); } };
  self.redraw();
  curves.add(self);
  return figure;
}

const redrawCurves = later(() => curves.forEach((one) => one.redraw()), 60);

const GROUPS = ["reward", "eval", "train", "environment", "generate", "policy", "loss", "critic", "async", "trainer", "timing", "compile", "alarm"];

function metricNames() {
  return [...new Set(runs.flatMap((run) => run.curves.names))].sort();
}

function metricGroups() {
  const groups = new Map();
  for (const metric of metricNames().filter((one) => one.includes(state.metric))) {
    const group = metric.split("/")[0];
    groups.set(group, [...(groups.get(group) ?? []), metric]);
  }
  const place = (group) => (GROUPS.includes(group) ? GROUPS.indexOf(group) : GROUPS.indexOf("trainer"));
  return [...groups].sort(([a], [b]) => place(a) - place(b));
}

function curvesView() {
  const list = el("div");
  const option = (key, attributes, label) => el("label", {}, label, el("input", {
    ...attributes, value: state[key], oninput: (event) => {
      const box = event.target;
      box.title = box.value;
      state[key] = { checkbox: Number(box.checked), range: Number(box.value) }[box.type] ?? box.value;
      remember();
      if (key === "metric") fill(); else redrawCurves();
    },
  }));
  const fill = () => {
    const groups = metricGroups();
    curves.clear();
    list.replaceChildren(...groups.map(([group, metrics]) => el("details", { open: !["timing", "alarm"].includes(group) || state.metric !== "" },
      el("summary", {}, `${group} (${metrics.length})`), el("div", { class: "charts" }, metrics.map(curve)))));
    if (!groups.length) list.append(el("p", { class: "faint" }, "No metric has this in its name."));
  };
  fill();
  return [
    el("div", { class: "tools", role: "group", "aria-label": "curves" },
      option("metric", { type: "search", placeholder: "part of a name" }, "metrics"),
      option("smooth", { type: "range", min: 0, max: 0.98, step: 0.02 }, "smoothing"),
      option("log", { type: "checkbox", checked: Boolean(state.log) }, "log scale"),
      option("clip", { type: "checkbox", checked: Boolean(state.clip) }, "without the outermost 2 %"),
      option("from", { type: "number" }, "steps from"), option("to", { type: "number" }, "to"),
      runs.length > 1 ? runKeys() : ""),
    list,
  ];
}

const runKeys = () => el("span", { class: "legend" }, runs.map((run, i) => [
  el("span", { class: "swatch", style: `background: var(--${"ab"[i]})` }), run.name + (i ? " (dashed)" : "")]));

// ------------------------------------------------------------------ time

const PALETTE = ["#3b76d6", "#e08a1e", "#2e9e6b", "#c2455a", "#8b63c9", "#15a3b8", "#a98118", "#d670b5", "#6d8f2f", "#7d8694", "#5a54b8", "#b5643a", "#3f8f8a", "#9c9c9c", "#c98f8f", "#8fb3c9", "#77624f", "#4f6f77", "#a3a35c"];
const hue = (phase) => PALETTE[(phaseOrder ??= allPhases()).indexOf(phase) % PALETTE.length];
let phaseOrder = null;

function allPhases() { // the longest first, over the runs: they get the colours that differ most
  const total = new Map();
  for (const { curves: { phases, columns, arrays } } of runs) {
    phases.forEach((phase, p) => {
      const own = arrays.seconds.subarray(p * columns.length, (p + 1) * columns.length);
      total.set(phase, (total.get(phase) ?? 0) + own.reduce((a, b) => a + b, 0) / columns.length);
    });
  }
  return [...total.keys()].sort((a, b) => total.get(b) - total.get(a));
}


function timeView() {
  const choices = [];
  onStep = () => choices.forEach((choose) => choose());
  return runs.map((run, i) => {
    const { phases, columns, arrays } = run.curves;
    if (!columns.length) return el("section", {}, el("h2", {}, run.name), el("p", {}, "No times are recorded."));
    const n = columns.length, at = (p, c) => arrays.seconds[p * n + c];
    const total = phases.map((_, p) => columns.reduce((sum, c, k) => sum + at(p, k), 0));
    const all = total.reduce((a, b) => a + b, 0);
    const order = phases.map((_, p) => p).sort((a, b) => total[b] - total[a]);
    return el("section", {},
      el("h2", {}, `${name(i)}seconds of each step`),
      timeChart(run, order, at, choices),
      el("div", { class: "scroll" }, el("table", {},
        el("thead", {}, el("tr", {}, ["phase", "share", "seconds a step"].map((t, k) => el("th", { scope: "col", class: k ? "number" : null }, t)))),
        el("tbody", {}, order.map((p) => el("tr", {},
          el("td", {}, el("span", { class: "swatch", style: `background: ${hue(phases[p])}` }), phases[p]),
          el("td", { class: "number" }, percent(total[p] / all)),
          el("td", { class: "number" }, number(total[p] / n))))))));
  });
}

function timeChart(run, order, at, choices) {
  const { phases, columns } = run.curves, n = columns.length;
  const W = 1200, H = 320, left = 50, top = 8, bottom = 20;
  const sums = columns.map((_, c) => order.reduce((sum, p) => sum + at(p, c), 0));
  const sorted = [...sums].sort((a, b) => a - b);
  // The first step compiles and a few save: they would press all others to the floor.
  const high = Math.max(Math.min(sorted.at(-1), 2.5 * sorted[Math.floor(0.9 * (n - 1))]), 1e-9);
  const x = (c) => left + (W - left - 8) * c / n, y = (v) => H - bottom - (H - bottom - top) * Math.min(v / high, 1.02);
  const svg = el("svg", { role: "img", viewBox: `0 0 ${W} ${H}`, "aria-label": "seconds of each phase over the steps, stacked; the table below has the sums" });
  for (const tick of ticks(0, high, 4)) {
    svg.append(el("line", { class: "grid", x1: left, x2: W - 8, y1: y(tick), y2: y(tick) }), el("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end" }, `${number(tick)} s`));
  }
  const floor = new Float64Array(n);
  for (const p of order) {
    let path = "";
    for (let c = 0; c < n; c++) {
      const base = floor[c], value = at(p, c);
      floor[c] += value;
      if (value > 0) path += `M${x(c).toFixed(2)} ${y(base).toFixed(1)}V${y(base + value).toFixed(1)}H${x(c + 1).toFixed(2)}V${y(base).toFixed(1)}z`;
    }
    svg.append(el("path", { d: path, fill: hue(phases[p]) }));
  }
  for (const k of ticks(0, n - 1, 10).filter(Number.isInteger)) {
    svg.append(el("text", { x: x(k + 0.5), y: H - 6, "text-anchor": "middle" }, String(columns[k])));
  }
  const cut = sums.filter((sum) => sum > high * 1.001).length;
  const columnAt = (event) => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) * W / box.width - left) / (W - left - 8);
    return Math.max(0, Math.min(n - 1, Math.floor(share * n)));
  };
  const said = (c) => [`step ${columns[c]}: ${seconds(sums[c])}`,
    ...order.filter((p) => at(p, c) > 0.0005 * sums[c]).map((p) => `${phases[p]} ${seconds(at(p, c))}`)];
  svg.addEventListener("pointermove", (event) => showTip(said(columnAt(event)).join("\n"), event.clientX, event.clientY));
  const mark = el("line", { class: "chosen", y1: top, y2: H - bottom }), chosen = el("p", { role: "status" });
  const choose = () => {
    const c = nearest(columns, state.step);
    for (const end of ["x1", "x2"]) mark.setAttribute(end, x(c + 0.5));
    chosen.textContent = said(c).join(", ");
  };
  svg.append(mark);
  choices.push(choose);
  choose();
  svg.addEventListener("pointerleave", hideTip);
  svg.addEventListener("click", (event) => setStep(columns[columnAt(event)]));
  return el("figure", {}, svg, chosen, el("p", { class: "faint" }, cut ? `${count(cut, "step")} above ${seconds(high)} cut off. ` : "",
    "A step's line covers the time from the line before it. Click to choose a step."));
}

// ------------------------------------------------------------------ overview, config

const FIRST_CURVES = ["reward/avg_raw_reward", "eval/all/avg_score", "train/loss", "eval/loss", "policy/policy_entropy", "generate/avg_num_tokens", "policy/policy_kl", "loss/avg_kl", "policy/approx_kl", "policy/grad_norm", "policy/rollout_train_logprobs_abs_diff_mean", "timing/wall"];

function lastOf(run, metric, average = 1) {
  const points = pointsOf(run, metric);
  if (!points) return null;
  const values = Array.from(points.values.slice(-average));
  return values.reduce((a, b) => a + b, 0) / values.length;
}

const FACTS = [
  ["folder", (run) => run.folder],
  ["steps", (run) => `${run.last_step}${run.total_steps ? ` of ${run.total_steps}` : ""}${run.total_steps > run.last_step ? "; not finished: it goes on, or was stopped" : ""}`],
  ["last line written", (run) => when(run.written)],
  ["reward, mean of the last 10 steps", (run) => number(lastOf(run, "reward/avg_raw_reward", 10))],
  ["last evaluation", (run) => number(lastOf(run, "eval/all/avg_score") ?? lastOf(run, "eval/loss"))],
  ["time of the steps", (run) => seconds(run.curves.columns.length ? (pointsOf(run, "timing/wall")?.values ?? []).reduce((a, b) => a + b, 0) : null)],
  ["starts of the process", (run) => (run.has_ledger ? run.attempts.length : "–")],
  ["where trajectories ended", (run) => Object.entries(run.ends).map(([reason, n]) => `${reason} ${n}`).join(", ") || "–"],
  ["trajectories in this page", (run) => {
    const { kept, of, steps_left_out: steps } = run.trajectories;
    const left = kept < of || steps ? `; left out to keep the page small${steps ? `, ${count(steps, "step")} wholly` : ""}` : "";
    return `${kept} of ${of}, of ${count(Object.keys(run.steps).length, "step")}${left}`;
  }],
];

function overview() {
  const present = new Set(metricNames());
  return [
    el("div", { class: "scroll" }, el("table", {}, el("caption", { class: "hidden" }, "the run"),
      runs.length > 1 ? el("thead", {}, el("tr", {}, el("td"), runs.map((run, i) => el("th", { scope: "col" }, el("span", { class: "swatch", style: `background: var(--${"ab"[i]})` }), run.name)))) : "",
      el("tbody", {}, FACTS.map(([title, value]) => el("tr", {}, el("th", { scope: "row" }, title), runs.map((run) => el("td", {}, String(value(run))))))))),
    runs.map((run, i) => (run.notes.length ? [el("h2", {}, `${name(i)}what this page cannot show`), el("ul", { class: "notes" }, run.notes.map((note) => el("li", {}, note)))] : [])),
    el("h2", {}, "curves"),
    el("div", { class: "charts" }, FIRST_CURVES.filter((metric) => present.has(metric)).map(curve)),
    el("h2", {}, "alarms"),
    runs.flatMap((run, i) => run.alarms.map((alarm) => [i, alarm])).length ? el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["step", "alarm", "value", "what to try"].map((t) => el("th", { scope: "col" }, t)))),
      el("tbody", {}, runs.flatMap((run, i) => run.alarms.map((alarm) => el("tr", {},
        el("td", {}, el("button", { type: "button", onclick: () => setStep(alarm.step) }, `${name(i)}${alarm.step}${alarm.beyond > alarm.step ? ` to ${alarm.beyond}` : ""}`)),
        el("td", { class: "bad" }, alarm.name),
        el("td", {}, `${number(alarm.value)}, ${alarm.below ? "below" : "above"} ${number(alarm.threshold)}: ${alarm.says}`),
        el("td", {}, alarm.advice))))))) : el("p", { class: "faint" }, "None went off."),
    runs.map((run, i) => (run.has_ledger ? attemptsTable(run, i) : [])),
  ];
}

function attemptsTable(run, i) {
  return [el("h2", {}, `${name(i)}starts and machines`), el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ["start", "at", "after step", "steps finished", "taken back later", "devices", "mesh", "jax", "from"].map((t) => el("th", { scope: "col" }, t)))),
    el("tbody", {}, run.attempts.map((attempt) => {
      const machine = attempt.machine;
      const mesh = Object.entries(machine.mesh ?? {}).map(([axis, size]) => `${axis} ${size}`).join(", ");
      return el("tr", {}, [attempt.attempt, when(attempt.started), attempt.from_step, attempt.steps, attempt.taken_back,
        `${machine.devices ?? "?"} x ${machine.device ?? "?"} (${machine.platform ?? "?"})${machine.processes ? `, ${machine.processes} processes` : ""}`, mesh || "one device", machine.jax ?? "?",
        attempt.origin || (attempt.from_step ? "own checkpoint" : "the start")].map((value) => el("td", {}, String(value))));
    }))))];
}

function configView() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.fields)))];
  const usual = new Map(runs.flatMap((run) => run.changed.map(([field, , value]) => [field, value])));
  const rows = (fields) => fields.map((field) => {
    const values = runs.map((run) => run.fields[field] ?? "–");
    return el("tr", { class: new Set(values).size > 1 ? "differs" : null },
      el("th", { scope: "row" }, el("code", {}, field)), values.map((value) => el("td", {}, el("code", {}, value))),
      el("td", { class: "faint" }, usual.has(field) ? el("code", {}, usual.get(field)) : "as here"));
  });
  const table = (fields) => el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "field"), runs.map((run) => el("th", { scope: "col" }, runs.length > 1 ? run.name : "value")), el("th", { scope: "col" }, "default"))),
    el("tbody", {}, rows(fields))));
  const changed = names.filter((field) => usual.has(field));
  const differ = names.filter((field) => new Set(runs.map((run) => run.fields[field] ?? "–")).size > 1);
  return [
    el("div", { class: runs.length > 1 ? "pair" : null }, runs.map((run, i) => el("div", {}, el("h2", {}, `${name(i)}objective`),
      run.card ? el("pre", {}, run.card) : el("p", { class: "faint" }, "Not known; the overview says why.")))),
    runs.length > 1 ? [el("h2", {}, `what differs between the runs (${differ.length})`), differ.length ? table(differ) : el("p", { class: "faint" }, "Nothing.")] : [],
    el("h2", {}, `what differs from the defaults (${changed.length})`),
    changed.length ? table(changed) : el("p", { class: "faint" }, names.length ? "Nothing." : "The config is not known."),
    el("details", {}, el("summary", {}, `all fields (${names.length})`), table(names)),
  ];
}

// ------------------------------------------------------------------ trajectories: data

const steps = new Map(); // "run-step" -> promise of its groups

function groupsOf(r, step) {
  const key = `${r}-${step}`;
  if (!steps.has(key)) {
    const element = byId(`t${key}`);
    steps.set(key, element ? Promise.all(element.textContent.split(" ").map(unpack)).then((blobs) => blobs.map((blob) => group(r, blob))) : Promise.resolve([]));
    if (steps.size > 12) steps.delete(steps.keys().next().value); // the oldest: memory is finite
  }
  return steps.get(key);
}

function group(r, blob) {
  // Rows with the parts of the arrays that are theirs; samples are trajectories, of one or more rows.
  const { tokens, ...perToken } = blob.arrays;
  let token = 0, at = 0, prompt = null;
  const samples = [];
  for (const row of blob.rows) {
    if (row.prompt >= 0) { prompt = tokens.subarray(token, token + row.prompt); token += row.prompt; }
    const own = { ...row, prompt, tokens: tokens.subarray(token, token + row.response), arrays: {} };
    token += row.response;
    for (const [channel, array] of Object.entries(perToken)) own.arrays[channel] = array.subarray(at, at + row.response);
    at += row.response;
    (samples[row.trajectory] ??= { rows: [], number: row.trajectory }).rows.push(own);
  }
  for (const sample of samples) {
    const last = sample.rows.at(-1);
    Object.assign(sample, { reward: last.reward, stop: last.stop, ended: last.ended });
  }
  return { uid: blob.uid, samples, run: r };
}

function pieces(r, numbers) {
  // What each token adds to the text: a character stands with the token that completes it.
  const { entries } = runs[r].vocabulary, decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const result = [];
  let open = false;
  for (const number of numbers) {
    const entry = entries[number];
    if (typeof entry !== "string") {
      const text = decoder.decode(Uint8Array.from(entry), { stream: true });
      open = true;
      result.push(text);
    } else {
      result.push((open ? decoder.decode() : "") + entry); // an unfinished character becomes \ufffd
      open = false;
    }
  }
  if (open && result.length) result[result.length - 1] += decoder.decode();
  return result;
}

const textOf = (r, sample) => sample.text ??= sample.rows.map((row) => pieces(r, row.tokens).join("")).join("\n");
const promptOf = (r, rows) => pieces(r, rows[0].prompt).join("");

function promptBox(r, row) {
  const texts = pieces(r, row.prompt), special = (number) => runs[r].specials.has(number);
  return el("div", { class: "tokens prompt", tabindex: 0, role: "group", "aria-label": "prompt" },
    texts.map((text, i) => (special(row.prompt[i]) ? el("span", { class: "special" }, visible(text)) : visible(text))));
}

function matches(r, group, sample) {
  const at = sample.reward ?? NaN;
  if (state.min !== "" && !(at >= Number(state.min))) return false;
  if (state.max !== "" && !(at <= Number(state.max))) return false;
  if (state.stop && sample.stop !== state.stop) return false;
  if (state.ended && sample.ended !== state.ended) return false;
  if (!state.text) return true;
  const wanted = state.text.toLowerCase();
  return textOf(r, sample).toLowerCase().includes(wanted) || group.uid.toLowerCase() === wanted
    || promptOf(r, sample.rows).toLowerCase().includes(wanted);
}

// ------------------------------------------------------------------ trajectories: colours

const MASK = ["given (environment, prompt)", "sampled, not trained", "sampled"];
const COLORS = {
  log_probs: { title: "log-prob of the sampler", lack: "the rollouts carry no log-probs" },
  log_ratios: { title: "ratio trainer / sampler", lack: "this step's training batch was not dumped (trainer.dump_data_batch=true), or it needed no log-probs of the trainer: one update on what was just sampled" },
  advantages: { title: "advantage", lack: "this step's training batch was not dumped (trainer.dump_data_batch=true)" },
  rewards: { title: "reward per token", lack: "rewards are one number for the whole response" },
  values: { title: "value (critic)", lack: "no critic, or this step's training batch was not dumped (trainer.dump_data_batch=true)" },
  mask: { title: "mask", lack: "" },
  plain: { title: "no colour", lack: "" },
};

function scaleOf(shown, channel) {
  // The same for all tokens in view: 98 of 100 are inside.
  const sizes = [];
  for (const group of shown) for (const sample of group.samples) for (const row of sample.rows) {
    for (const value of row.arrays[channel] ?? []) if (Number.isFinite(value) && value !== 0) sizes.push(Math.abs(value));
  }
  if (!sizes.length) return 0;
  sizes.sort((a, b) => a - b);
  const size = sizes[Math.floor(0.98 * (sizes.length - 1))];
  return channel === "log_ratios" ? Math.max(size, 0.01) : size; // the noise of rounding has no colour
}

function background(row, i, scale) {
  const sampled = row.arrays.mask[i] === 1, channel = state.color;
  if (channel === "mask") {
    if (!sampled) return "rgba(var(--grey), 0.28)";
    return row.arrays.trained && !row.arrays.trained[i] ? "rgba(var(--warm), 0.4)" : "rgba(var(--cool), 0.25)";
  }
  const value = row.arrays[channel]?.[i];
  if (value === undefined || Number.isNaN(value) || !(sampled || channel === "rewards")) return "";
  if (channel === "log_probs") return `rgba(var(--warm), ${(0.6 * Math.min(1, -value / 5)).toFixed(2)})`;
  const size = 0.55 * Math.min(1, Math.abs(value) / (scale || 1));
  return size > 0.01 ? `rgba(var(--${value > 0 ? "cool" : "warm"}), ${size.toFixed(2)})` : "";
}

function legend(shown, scale) {
  const channel = state.color;
  const box = (style, text) => [el("span", { class: "swatch", style: `background: ${style}` }), text];
  if (channel === "plain") return el("span", { class: "legend" });
  if (channel === "mask") {
    return el("span", { class: "legend" }, box("rgba(var(--grey), 0.28)", MASK[0]), box("rgba(var(--warm), 0.4)", MASK[1]), box("rgba(var(--cool), 0.25)", `${MASK[2]}${hasAny(shown, "trained") ? " and trained" : ""}`));
  }
  if (!hasAny(shown, channel)) return el("span", { class: "legend bad" }, `nothing to colour: ${COLORS[channel].lack}`);
  if (channel === "log_probs") {
    return el("span", { class: "legend" }, "p = 1", el("span", { class: "ramp", style: "background: linear-gradient(90deg, transparent, rgba(var(--warm), 0.6))" }), "p ≤ 0.0067 (log p ≤ −5)");
  }
  if (!scale) return el("span", { class: "legend" }, "all are 0");
  const ends = channel === "log_ratios" ? [Math.exp(-scale), Math.exp(scale)] : [-scale, scale];
  return el("span", { class: "legend" }, number(ends[0]), el("span", { class: "ramp", style: "background: linear-gradient(90deg, rgba(var(--warm), 0.55), transparent, rgba(var(--cool), 0.55))" }), `${number(ends[1])} (98 of 100 tokens are between)`);
}

const hasAny = (shown, channel) => shown.some((group) => group.samples.some((sample) => sample.rows.some((row) => row.arrays[channel])));

// ------------------------------------------------------------------ trajectories: what is shown

const SHOWN = 1500; // tokens of a response, before it is asked for more

function visible(text) {
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t")
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (char) => (char === "\u007f" ? "␡" : String.fromCodePoint(0x2400 + char.codePointAt(0))))
    .replace(/[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (char) => `‹U+${char.codePointAt(0).toString(16).toUpperCase()}›`);
}

function aboutToken(r, row, i, text) {
  const { arrays } = row, lines = [`${JSON.stringify(text)}  id ${runs[r].vocabulary.ids[row.tokens[i]]}, place ${i + 1} of ${row.tokens.length}`];
  if (!arrays.mask[i]) return [...lines, "given, not sampled"].join("\n");
  if (arrays.log_probs) lines.push(`log p ${number(arrays.log_probs[i])}, p ${number(Math.exp(arrays.log_probs[i]))}`);
  if (arrays.log_ratios && !Number.isNaN(arrays.log_ratios[i])) lines.push(`ratio trainer / sampler ${number(Math.exp(arrays.log_ratios[i]))}`);
  for (const [channel, word] of [["advantages", "advantage"], ["values", "value"], ["rewards", "reward"]]) {
    if (arrays[channel] && !Number.isNaN(arrays[channel][i])) lines.push(`${word} ${number(arrays[channel][i])}`);
  }
  if (arrays.trained && !arrays.trained[i]) lines.push("not trained");
  if (arrays.versions) lines.push(`drawn by version ${row.version + arrays.versions[i]}`);
  return lines.join("\n");
}

function tokensOf(r, row, scale, from, to) {
  const special = runs[r].specials, texts = row.texts ??= pieces(r, row.tokens);
  const starts = new Map(row.turns.length > 1 ? row.turns.map(([first, , reward], k) => [first, [k + 1, reward]]) : []);
  const nodes = [];
  for (let i = from; i < to; i++) {
    if (starts.has(i)) {
      const [turn, reward] = starts.get(i);
      nodes.push(el("span", { class: "turn" }, `turn ${turn}${reward == null ? "" : `, reward ${number(reward)}`}`));
    }
    const kind = special.has(row.tokens[i]) ? "special" : texts[i] === "" ? "part" : row.arrays.mask[i] ? null : "given";
    const style = background(row, i, scale);
    nodes.push(el("span", { class: kind, "data-i": i, style: style ? `background: ${style}` : null }, visible(texts[i]) || "·"));
  }
  return nodes;
}

function response(r, row, scale) {
  const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "tokens of the response; arrow keys read them one by one" });
  box.append(...tokensOf(r, row, scale, 0, Math.min(SHOWN, row.tokens.length)));
  if (row.tokens.length > SHOWN) {
    const more = el("button", { type: "button", onclick: () => more.replaceWith(...tokensOf(r, row, scale, SHOWN, row.tokens.length)) }, `${row.tokens.length - SHOWN} more tokens`);
    box.append(more);
  }
  const say = (span, x, y) => showTip(aboutToken(r, row, Number(span.dataset.i), row.texts[Number(span.dataset.i)]), x, y);
  box.addEventListener("pointerover", (event) => { if (event.target.dataset.i) say(event.target, event.clientX, event.clientY); });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const spans = [...box.querySelectorAll("[data-i]")], now = spans.findIndex((span) => span.classList.contains("here"));
    const next = spans[Math.max(0, Math.min(spans.length - 1, now + move))];
    if (!next) return;
    spans[now]?.classList.remove("here");
    next.classList.add("here");
    next.scrollIntoView({ block: "nearest" });
    const place = next.getBoundingClientRect();
    say(next, place.left, place.bottom - 12);
  });
  box.addEventListener("blur", () => { box.querySelector(".here")?.classList.remove("here"); hideTip(); });
  return box;
}

const cardId = (group, sample) => `${group.run}#${sample.number}#${group.uid}`;

function sampleCard(r, group, sample, scale) {
  const tokens = sample.rows.reduce((sum, row) => sum + row.turns.reduce((n, [a, b]) => n + b - a, 0), 0);
  const last = sample.rows.at(-1), terms = Object.entries(last.terms);
  const several = sample.rows.length > 1;
  return el("article", { class: `sample${sample.reward > 0 ? " good" : ""}`, "data-sample": cardId(group, sample) },
    el("div", { class: "about" }, el("b", {}, `sample ${sample.number + 1}`), el("b", {}, `reward ${number(sample.reward)}`),
      el("span", {}, sample.stop), el("span", {}, count(tokens, "token")), el("span", {}, `version ${sample.rows[0].version}`),
      sample.ended && sample.ended !== "trained" ? el("span", { class: "bad" }, sample.ended) : "",
      terms.length > 1 ? el("span", {}, terms.map(([term, value]) => `${term} ${number(value)}`).join(", ")) : ""),
    sample.rows.map((row, k) => [
      several ? el("details", {}, el("summary", {}, `turn ${k + 1}: its prompt`), promptBox(r, row)) : "",
      response(r, row, scale)]));
}

function samplesOf(r, group, scale) {
  const chosen = group.samples.filter((sample) => matches(r, group, sample));
  if (state.order !== "given") chosen.sort((a, b) => (state.order === "high" ? 1 : -1) * ((b.reward ?? -Infinity) - (a.reward ?? -Infinity)));
  return chosen.map((sample) => sampleCard(r, group, sample, scale));
}

function statistics(group) {
  const rewards = group.samples.map((sample) => sample.reward ?? NaN), n = rewards.length;
  const mean = rewards.reduce((a, b) => a + b, 0) / n;
  return { mean, spread: Math.sqrt(rewards.reduce((sum, x) => sum + (x - mean) ** 2, 0) / n) };
}

function groupHead(group, where) {
  const { mean, spread } = statistics(group);
  return el("div", { class: "head" }, el("h3", {}, `prompt ${group.uid}`), el("span", { class: "faint" }, `${where}${count(group.samples.length, "sample")}, mean reward ${number(mean)}, deviation ${number(spread)}`));
}

async function twin(group, step) {
  // The prompt of a group in the second run: at the same step, else the nearest that has it.
  const found = (runs[1].places.get(group.uid) ?? []);
  if (!found.length) return null;
  const at = found[nearest(found, step)];
  return { step: at, group: (await groupsOf(1, at)).find((one) => one.uid === group.uid) };
}

function groupSection(group, other, step, scale) {
  const section = el("section", { class: "group" });
  section.style.minHeight = "140px";
  return whenSeen(section, () => {
    section.style.minHeight = "";
    const several = group.samples.some((sample) => sample.rows.length > 1);
    const prompt = several ? "" : promptBox(group.run, group.samples[0].rows[0]);
    if (runs.length < 2) {
      section.append(groupHead(group, ""), prompt, el("div", { class: "samples" }, samplesOf(group.run, group, scale)));
    } else {
      const side = (one, where) => el("div", {}, one ? [groupHead(one, where), el("div", { class: "samples" }, samplesOf(one.run, one, scale))] : el("p", { class: "faint" }, where));
      section.append(prompt, el("div", { class: "pair" },
        group.run === 0 ? side(group, `${runs[0].name}, step ${step}: `) : side(null, `${runs[0].name} has not this prompt at step ${step} in this page.`),
        group.run === 1 ? side(group, `${runs[1].name}, step ${step}: `)
          : other ? side(other.group, `${runs[1].name}, step ${other.step}: `) : side(null, `${runs[1].name} has not this prompt in this page.`)));
    }
    if (focused) for (const card of section.querySelectorAll("[data-sample]")) card.classList.toggle("found", card.dataset.sample === focused);
  });
}

let focused = null; // the sample that was searched for
let shownAt = 0; // which drawing is the newest: unpacking takes its time

async function drawTrajectories(list, legendBox) {
  const turn = ++shownAt, step = state.step;
  const groups = await groupsOf(0, step);
  const seconds = runs.length > 1 ? await groupsOf(1, step) : [];
  const uids = new Set(groups.map((one) => one.uid));
  let wanted = [...groups, ...seconds.filter((one) => !uids.has(one.uid))];
  const others = new Map();
  if (runs.length > 1) for (const one of groups) others.set(one, await twin(one, step));
  if (turn !== shownAt) return;
  const scale = scaleOf(wanted, state.color);
  legendBox.replaceChildren(legend(wanted, scale));
  const all = wanted.length;
  const some = (one) => one && one.samples.some((sample) => matches(one.run, one, sample));
  wanted = wanted.filter((one) => some(one) || some(others.get(one)?.group));
  if (state.groups !== "given") {
    const key = state.groups === "spread" ? "spread" : "mean", sign = state.groups === "low" ? -1 : 1;
    wanted.sort((a, b) => sign * (statistics(b)[key] - statistics(a)[key]));
  }
  list.replaceChildren(...missing(step), ...wanted.map((one) => groupSection(one, others.get(one), step, scale)));
  if (all && !wanted.length) list.append(el("p", { class: "faint" }, "No trajectory of this step matches; “find in all steps” looks at the others."));
  if (focused) {
    const index = wanted.findIndex((one) => focused.split("#").slice(2).join("#") === one.uid);
    list.querySelectorAll(".group")[index]?.scrollIntoView({ block: "start" });
  }
}

function missing(step) {
  const said = [];
  runs.forEach((run, i) => {
    const about = run.steps[step];
    if (about && about[0].length < about[1]) said.push(el("p", { class: "faint" }, `${name(i)}${about[0].length} of ${about[1]} prompts of this step are here; the others were left out to keep the page small.`));
    if (about) return;
    const near = run.recorded.length ? run.recorded[nearest(run.recorded, step)] : null;
    said.push(el("p", {}, `${name(i)}no trajectories of step ${step} are in this page. `, near == null ? (run.notes.length ? "The overview says why." : "") : el("button", { type: "button", onclick: () => setStep(near) }, `go to step ${near}`)));
  });
  return said;
}

async function findEverywhere(box, button) {
  const most = 300, list = el("ol", { id: "found" }), said = el("p", { role: "status" });
  let total = 0, stopped = false;
  const places = runs.flatMap((run, r) => run.recorded.map((step) => [r, step]));
  const stop = () => { stopped = true; button.hidden = false; box.replaceChildren(); };
  button.hidden = true;
  box.replaceChildren(said, el("button", { type: "button", onclick: stop }, "close"), list);
  const entry = (r, step, one, sample) => {
    const text = textOf(r, sample), hit = state.text ? text.toLowerCase().indexOf(state.text.toLowerCase()) : 0;
    const start = Math.max(0, hit - 30), part = visible(text.slice(start, start + 90)).replace(/\n/g, " ");
    const go = () => { focused = cardId(one, sample); setStep(step); };
    return el("li", {}, el("button", { type: "button", onclick: go }, `${name(r)}step ${step}, prompt ${one.uid}, sample ${sample.number + 1}, reward ${number(sample.reward)}: ${part}`));
  };
  for (const [k, [r, step]] of places.entries()) {
    const blobs = await Promise.all(byId(`t${r}-${step}`).textContent.split(" ").map(unpack));
    if (stopped) return; // not kept in `steps`: all of them would fill the memory
    for (const one of blobs.map((blob) => group(r, blob))) {
      for (const sample of one.samples) {
        if (matches(r, one, sample) && ++total <= most) list.append(entry(r, step, one, sample));
      }
    }
    said.textContent = `${total} found in ${k + 1} of ${count(places.length, "step")}${total > most ? `, the first ${most} are listed` : ""} `;
  }
  button.hidden = false;
}

function trajectoriesView() {
  const list = el("div"), legendBox = el("span"), foundBox = el("div");
  const draw = later(() => drawTrajectories(list, legendBox), 60);
  const change = (key) => (event) => { state[key] = event.target.value; focused = null; remember(); draw(); };
  const select = (key, label, options) => el("label", {}, label, el("select", { onchange: change(key) }, Object.entries(options).map(([value, title]) => el("option", { value, selected: state[key] === value }, title))));
  const input = (key, label, attributes) => el("label", {}, label, el("input", { value: state[key], oninput: change(key), ...attributes }));
  const seen = (values) => ({ "": "any", ...Object.fromEntries([...new Set(values)].sort().map((value) => [value, value])) });
  const find = el("button", { type: "button", onclick: () => findEverywhere(foundBox, find) }, "find in all steps");
  const ends = runs.flatMap((run) => Object.keys(run.ends)).filter((reason) => reason !== "dynamic_sampling");
  onStep = draw;
  drawTrajectories(list, legendBox);
  return [
    runs.some((run) => run.recorded.length && !run.known_tokens) ? el("p", { class: "bad" }, "Tokens are shown by their ids: the tokenizer was not found (the overview says more).") : "",
    el("div", { class: "tools", role: "group", "aria-label": "trajectories" },
      select("color", "colour", Object.fromEntries(Object.entries(COLORS).map(([value, { title }]) => [value, title]))), legendBox,
      select("order", "samples", { given: "as drawn", high: "best first", low: "worst first" }),
      select("groups", "prompts", { given: "as drawn", high: "best first", low: "worst first", spread: "most different rewards first" })),
    el("div", { class: "tools", role: "search" },
      input("text", "text", { type: "search", placeholder: "in prompt or response" }),
      input("min", "reward from", { type: "number", step: "any" }), input("max", "to", { type: "number", step: "any" }),
      select("stop", "stopped by", seen(runs.flatMap((run) => run.stops))), select("ended", "ended as", seen(ends)), find),
    foundBox, list,
  ];
}

// ------------------------------------------------------------------ the page

let onStep = () => {};

function remember() {
  const changed = Object.entries(state).filter(([key, value]) => String(value) !== String(initial[key]));
  history.replaceState(null, "", `#${new URLSearchParams(changed)}`);
}

function recall() {
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    if (key in state) state[key] = typeof initial[key] === "number" ? Number(value) || 0 : value;
  }
  if (!VIEWS.includes(state.view)) state.view = initial.view;
  if (!(state.color in COLORS)) state.color = initial.color;
}

let allSteps = [];

function setStep(step) {
  state.step = allSteps.length ? allSteps[nearest(allSteps, Number(step) || 0)] : 0;
  remember();
  showStep();
  curves.forEach((one) => one.choose());
  onStep();
}

function moveStep(by) {
  setStep(allSteps[Math.max(0, Math.min(allSteps.length - 1, nearest(allSteps, state.step) + by))]);
}

function showStep() {
  byId("slider").value = byId("step").value = state.step;
  byId("at").textContent = runs.map((run, i) => {
    const points = pointsOf(run, "reward/avg_raw_reward");
    const k = points && nearest(points.steps, state.step), known = points && points.steps[k] === state.step;
    const kept = run.steps[state.step]?.[0].length;
    return `${name(i)}${known ? `reward ${number(points.values[k])}, ` : ""}${kept ? count(kept, "prompt") : "no trajectories"}`;
  }).join(" | ");
}

function show() {
  onStep = () => {};
  curves.clear();
  hideTip();
  for (const tab of byId("tabs").children) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === state.view));
    tab.tabIndex = tab.dataset.view === state.view ? 0 : -1;
  }
  const views = { overview, curves: curvesView, time: timeView, trajectories: trajectoriesView, config: configView };
  byId("main").replaceChildren(el("div", { role: "tabpanel", "aria-labelledby": `tab-${state.view}` }, views[state.view]().flat(Infinity)));
}

function setUp() {
  byId("names").textContent = runs.map((run) => run.name).join(" | ");
  byId("tabs").append(...VIEWS.map((view) => el("button", {
    type: "button", role: "tab", id: `tab-${view}`, "data-view": view,
    onclick: () => { state.view = view; remember(); show(); scrollTo(0, 0); },
    onkeydown: (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) byId(`tab-${VIEWS[(VIEWS.indexOf(view) + move + VIEWS.length) % VIEWS.length]}`).focus();
    },
  }, view)));
  const slider = byId("slider"), field = byId("step");
  slider.min = field.min = allSteps[0] ?? 0;
  slider.max = field.max = allSteps.at(-1) ?? 0;
  slider.addEventListener("input", () => setStep(slider.value));
  field.addEventListener("change", () => setStep(field.value));
  byId("before").addEventListener("click", () => moveStep(-1));
  byId("after").addEventListener("click", () => moveStep(1));
  byId("theme").addEventListener("click", () => {
    const dark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    state.theme = document.documentElement.dataset.theme = dark ? "light" : "dark";
    remember();
  });
  addEventListener("hashchange", () => { recall(); setStep(state.step); show(); });
}

async function start() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser has no DecompressionStream; take one of 2023 or later");
  for (const [i, run] of runs.entries()) {
    run.curves = await unpack(byId(`m${i}`).textContent);
    run.vocabulary = await unpack(byId(`v${i}`).textContent);
    run.index = new Map(run.curves.names.map((metric, k) => [metric, k]));
    run.specials = new Set(run.special);
    run.recorded = Object.keys(run.steps).map(Number).sort((a, b) => a - b);
    run.places = new Map();
    for (const step of run.recorded) {
      for (const uid of run.steps[step][0]) {
        if (!run.places.has(uid)) run.places.set(uid, []);
        run.places.get(uid).push(step);
      }
    }
  }
  const own = new Set();
  for (const run of runs) {
    for (const step of run.recorded) own.add(step);
    for (const metric of run.curves.names) for (const step of pointsOf(run, metric).steps) own.add(step);
  }
  allSteps = [...own].sort((a, b) => a - b);
  const common = runs[0].recorded.filter((step) => runs.every((run) => run.steps[step]));
  state.step = initial.step = common.at(-1) ?? runs.flatMap((run) => run.recorded).at(-1) ?? allSteps.at(-1) ?? 0;
  recall();
  if (state.theme) document.documentElement.dataset.theme = state.theme;
  setUp();
  setStep(state.step);
  show();
}

start().catch((error) => {
  byId("main").replaceChildren(el("p", { class: "bad" }, `This page cannot be shown (${error.name}: ${error.message}).`));
  throw error;
});
