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
  const all = lines.flatMap((line) => [line.values, ...line.interval].flatMap((values) => Array.from(values)))
    .filter((v) => Number.isFinite(v) && (!log || v > 0)).sort((a, b) => a - b);
  if (!all.length) return null;
  const cut = state.clip ? 0.02 : 0;
  const low = all[Math.floor(cut * (all.length - 1))], high = all[Math.ceil((1 - cut) * (all.length - 1))];
  if (low === high) return log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const room = 0.04 * (high - low);
  return log ? [low, high] : [low - room, high + room];
}

function drawCurve(svg, name, wide) {
  const W = wide && innerWidth >= 700 ? 1200 : 400, H = wide ? 340 : 190, left = 50, right = 8, top = 8, bottom = 20;
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
    const ends = INTERVAL.map((end) => pointsOf(run, name + end)?.values);
    lines.push({
      number, steps: inside.map((i) => points.steps[i]),
      values: inside.map((i) => points.values[i]), curve: inside.map((i) => curve[i]),
      // of one length with the values, unless the run wrote them at other steps
      interval: ends.every((end) => end?.length === points.values.length) ? ends.map((end) => inside.map((i) => end[i])) : [[], []],
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
      el("text", { x: left - 5, y: y(tick) + 3.5, "text-anchor": "end" }, number(tick) + unitOf(name)));
  }
  for (const tick of ticks(first, last, W === 400 ? 5 : 10).filter(Number.isInteger)) {
    svg.append(el("text", { x: x(tick), y: H - 6, "text-anchor": x(tick) > W - 25 ? "end" : "middle" }, String(tick)));
  }
  marks(svg, x, first, last, top, H - bottom);
  if (runs.length > 1) lines.forEach((line) => alarmsAlong(svg, line, x, y));
  for (const line of lines) {
    const bad = [], dots = line.steps.length <= 40 ? line.steps.keys() : [];
    const path = pathOf(line.steps, line.curve, x, y, bad);
    const [low, high] = line.interval, stroke = `stroke: ${toneOf(line.number)}`;
    if (low.length) {
      const there = line.steps.map((step, i) => `${x(step).toFixed(1)} ${y(low[i]).toFixed(1)}`);
      const back = line.steps.map((step, i) => `${x(step).toFixed(1)} ${y(high[i]).toFixed(1)}`).reverse();
      svg.append(el("path", { class: "interval", style: `fill: ${toneOf(line.number)}`, d: `M${[...there, ...back].join("L")}z` }));
    }
    if (state.smooth > 0) svg.append(el("path", { class: "raw", style: stroke, d: pathOf(line.steps, line.values, x, y, []) }));
    svg.append(el("path", { class: "curve", style: stroke, "stroke-dasharray": dashOf(line.number), d: path }));
    for (const i of dots) {
      if (Number.isFinite(y(line.curve[i]))) svg.append(el("circle", { style: `fill: ${toneOf(line.number)}`, cx: x(line.steps[i]), cy: y(line.curve[i]), r: 2 }));
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
      svg.append(el("line", { class: "restart", style: runs.length > 1 ? `stroke: ${toneOf(number)}` : null, x1: x(attempt.from_step), x2: x(attempt.from_step), y1: top, y2: bottom },
        el("title", {}, `${name(number)}start ${attempt.attempt}, after step ${attempt.from_step}`)));
    }
    for (const alarm of runs.length > 1 ? [] : run.alarms) {
      if (alarm.step < first || alarm.step > last) continue;
      const a = x(alarm.step), b = x(Math.min(alarm.beyond, last)), side = a > x(last) - 8 ? -7 : 7;
      svg.append(el("g", {}, el("title", {}, saidOf(alarm, number)),
        el("rect", { class: "alarm", x: a, y: top, width: Math.max(b - a, 1), height: bottom - top }),
        el("line", { class: "alarmline", x1: a, x2: a, y1: top, y2: bottom }),
        el("path", { class: "flag", d: `M${a} ${top}l${side} 3.5l${-side} 3.5z` })));
    }
  });
}

const saidOf = (alarm, i) => `${name(i)}${alarm.name}, steps ${alarm.step} to ${alarm.beyond}`;

function alarmsAlong(svg, line, x, y) { // of several runs: a band would lie over the curves of all
  for (const alarm of runs[line.number].alarms) {
    const own = line.steps.flatMap((step, i) => (step >= alarm.step && step <= alarm.beyond ? [i] : []));
    const path = pathOf(own.map((i) => line.steps[i]), own.map((i) => line.curve[i]), x, y, []);
    if (path) svg.append(el("path", { class: "alarmed", d: `${path}h0.01` }, el("title", {}, saidOf(alarm, line.number))));
  }
}

const INTERVAL = ["_ci_low", "_ci_high"]; // of a metric: drawn with it, not by themselves
const isEnd = (metric) => INTERVAL.some((end) => metric.endsWith(end));
const unitOf = (metric) => (metric.startsWith("timing/") ? " s" : "");
const toneOf = (i) => `var(--run${i % 7})`;
const dashOf = (i) => ["none", "6 2", "2 2", "9 2 2 2"][i % 4];
const name = (i) => (runs.length > 1 ? `${runs[i].name}: ` : "");
const namesOf = (all) => (runs.length < 2 ? "" : `${all.length === runs.length ? "all runs" : all.map((i) => runs[i].name).join(", ")}: `);
// A number of a run, in the run's colour where there are several.
const valueOf = (i, text) => (runs.length < 2 ? text
  : el("span", { style: `color: ${toneOf(i)}`, title: runs[i].name }, el("span", { class: "hidden" }, name(i)), text));
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
    const ends = line.interval[0].length ? ` (${line.interval.map((end) => number(end[i])).join(" to ")})` : "";
    return `${name(line.number)}step ${line.steps[i]}: ${number(line.values[i])}${unitOf(metric)}${ends}${smooth}`;
  });
  const choose = () => {
    if (!drawn) return;
    const inside = state.step >= drawn.first && state.step <= drawn.last;
    drawn.chosen.setAttribute("visibility", inside ? "visible" : "hidden");
    for (const end of ["x1", "x2"]) drawn.chosen.setAttribute(end, drawn.x(state.step));
    at.replaceChildren(...drawn.lines.filter((line) => line.steps.length)
      .map((line) => valueOf(line.number, number(line.values[nearest(line.steps, state.step)]) + unitOf(metric))));
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
  svg.addEventListener("click", (event) => { if (drawn) chooseStep(stepAt(event)); });
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
  return [...new Set(runs.flatMap((run) => run.curves.names))].filter((metric) => !isEnd(metric))
    .sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
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
  let known = String(metricNames());
  fill();
  onData = () => {
    if (known === String(metricNames())) redrawCurves(); else fill();
    known = String(metricNames());
  };
  return [
    el("h2", { class: "hidden" }, "curves"),
    el("div", { class: "tools", role: "group", "aria-label": "curves" },
      option("metric", { type: "search", placeholder: "part of a name" }, "metrics"),
      option("smooth", { type: "range", min: 0, max: 0.98, step: 0.02 }, "smoothing"),
      option("log", { type: "checkbox", checked: Boolean(state.log) }, "log scale"),
      option("clip", { type: "checkbox", checked: Boolean(state.clip) }, "without the outermost 2 %"),
      option("from", { type: "number" }, "steps from"), option("to", { type: "number" }, "to")),
    list,
  ];
}

const swatch = (color) => el("span", { class: "swatch", style: `background: ${color}` });
const runKey = (i) => el("span", { class: "key" }, el("svg", { viewBox: "0 0 24 6", class: "stroke", "aria-hidden": "true" },
  el("line", { class: "curve", style: `stroke: ${toneOf(i)}`, "stroke-dasharray": dashOf(i), x1: 0, x2: 24, y1: 3, y2: 3 })), runs[i].name);
const runKeys = () => el("span", { class: "legend", role: "group", "aria-label": "runs" }, runs.map((_, i) => runKey(i)));

