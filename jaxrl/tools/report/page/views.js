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
  const choices = [], box = el("div");
  const fill = () => {
    choices.length = 0;
    phaseOrder = null;
    box.replaceChildren(...timesOf(choices));
  };
  onStep = () => choices.forEach((choose) => choose());
  onData = fill;
  fill();
  return [box];
}

function timesOf(choices) {
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
        el("thead", {}, el("tr", {}, ["phase", "share", "time of a step", "of the roofline"].map((t, k) => el("th", { scope: "col", class: k ? "number" : null }, t)))),
        el("tbody", {}, order.map((p) => el("tr", {},
          el("td", {}, swatch(hue(phases[p])), phases[p]),
          el("td", { class: "number" }, percent(total[p] / all)),
          el("td", { class: "number" }, seconds(total[p] / n)),
          el("td", { class: "number" }, roofline(run, phases[p]))))))),
      run.curves.names.some((metric) => metric.startsWith("roofline/")) ? el("p", { class: "faint" }, "Of the roofline: the least seconds in which these devices can do the work of a phase, over those it took; the median of the steps.") : "");
  });
}

function roofline(run, phase) {
  const metric = `roofline/${phase}`;
  if (!run.index.has(metric)) return "";
  const sorted = [...pointsOf(run, metric).values].sort((a, b) => a - b);
  return percent(sorted[Math.floor((sorted.length - 1) / 2)]);
}

function timeChart(run, order, at, choices) {
  const { phases, columns } = run.curves, n = columns.length;
  const W = innerWidth < 700 ? 400 : 1200, H = W === 400 ? 220 : 320, left = 50, top = 8, bottom = 20;
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
  for (const k of ticks(0, n - 1, W / 120).filter(Number.isInteger)) {
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
  svg.addEventListener("click", (event) => chooseStep(columns[columnAt(event)]));
  return el("figure", {}, svg, chosen, el("p", { class: "faint" }, cut ? `${count(cut, "step")} above ${seconds(high)} cut off. ` : "",
    "A step's line covers the time from the line before it. Click to choose a step."));
}

// ------------------------------------------------------------------ overview, config

const FIRST_CURVES = ["reward/avg_raw_reward", "eval/all/avg_score", "train/loss", "eval/loss", "policy/policy_entropy", "generate/avg_num_tokens", "policy/policy_kl", "loss/avg_kl", "policy/approx_kl", "policy/grad_norm", "policy/rollout_train_logprobs_abs_diff_mean", "timing/wall"];

const lastOf = (run, metric) => pointsOf(run, metric)?.values.at(-1) ?? null;

const FACTS = [
  ["folder", (run) => run.folder],
  ["steps", (run) => `${run.last_step}${run.total_steps ? ` of ${run.total_steps}` : ""}${run.total_steps > run.last_step ? "; not finished: it goes on, or was stopped" : ""}`],
  ["last line written", (run) => when(run.written)],
  ["reward, mean of the last 10 steps", (run) => number(run.recent_reward)],
  ["last evaluation", (run) => number(lastOf(run, "eval/all/avg_score") ?? lastOf(run, "eval/loss"))],
  ["time of the steps", (run) => seconds(run.seconds)],
  ["starts of the process", (run) => (run.has_ledger ? run.attempts.length : "–")],
  ["where trajectories ended", (run) => Object.entries(run.ends).map(([reason, n]) => `${reason} ${n}`).join(", ") || "–"],
  ["recorded steps", (run) => {
    if (!run.left_out) return String(run.recorded.length);
    const { kept, of, steps } = run.left_out;
    const missing = kept < of || steps ? `; left out to keep the page small, a live page (--live) has all${steps ? `: ${count(steps, "step")} wholly` : ""}` : "";
    return `${run.recorded.length}, with ${kept} of ${count(of, "trajectory", "trajectories")}${missing}`;
  }],
];

function overview() {
  const facts = el("div"), charts = el("div", { class: "charts" }), rest = el("div");
  let shown = "";
  const fill = () => {
    facts.replaceChildren(...factsOf().flat(Infinity));
    rest.replaceChildren(...alarmsAndStarts().flat(Infinity));
    const present = new Set(metricNames()), wanted = FIRST_CURVES.filter((metric) => present.has(metric));
    if (String(wanted) === shown) { redrawCurves(); return; }
    shown = String(wanted);
    curves.clear();
    charts.replaceChildren(...wanted.map(curve));
  };
  onData = fill;
  fill();
  return [facts, el("h2", {}, "curves"), charts, rest];
}

function runsOf(texts) { // of each run: text -> the runs that have it
  const found = new Map();
  texts.forEach((own, i) => own.forEach((text) => found.set(text, [...(found.get(text) ?? []), i])));
  return found;
}

function factsOf() {
  const notes = runsOf(runs.map((run) => run.notes));
  return [
    el("h2", { class: "hidden" }, "the run"),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "facts" }, el("table", { class: "runs" }, el("caption", { class: "hidden" }, "facts"),
      runs.length > 1 ? el("thead", {}, el("tr", {}, el("td"), runs.map((_, i) => el("th", { scope: "col" }, runKey(i))))) : "",
      el("tbody", {}, FACTS.map(([title, value]) => el("tr", {}, el("th", { scope: "row" }, title), runs.map((run) => el("td", {}, String(value(run))))))))),
    notes.size ? [el("h2", {}, "what this page cannot show"), el("ul", { class: "notes" }, [...notes].map(([note, all]) => el("li", {}, `${namesOf(all)}${note}`)))] : [],
  ];
}

function alarmsAndStarts() {
  return [
    el("h2", {}, "alarms"),
    runs.flatMap((run, i) => run.alarms.map((alarm) => [i, alarm])).length ? el("div", { class: "scroll" }, el("table", { class: "runs" },
      el("thead", {}, el("tr", {}, ["step", "alarm", "value", "what to try"].map((t) => el("th", { scope: "col" }, t)))),
      el("tbody", {}, runs.flatMap((run, i) => run.alarms.map((alarm) => el("tr", {},
        el("td", {}, el("button", { type: "button", onclick: () => chooseStep(alarm.step) }, `${name(i)}${alarm.step}${alarm.beyond > alarm.step ? ` to ${alarm.beyond}` : ""}`)),
        el("td", { class: "bad" }, alarm.name),
        el("td", {}, `${number(alarm.value)}, ${alarm.below ? "below" : "above"} ${number(alarm.threshold)}: ${alarm.says}`),
        el("td", {}, alarm.advice))))))) : el("p", { class: "faint" }, "None went off."),
    runs.some((run) => run.has_ledger) ? attemptsTable() : [],
  ];
}

function attemptsTable() {
  return [el("h2", {}, "starts and machines"), el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ["start", "at", "after step", "steps finished", "taken back later", "devices", "mesh", "jax", "from"].map((t) => el("th", { scope: "col" }, t)))),
    el("tbody", {}, runs.flatMap((run, i) => run.attempts.map((attempt) => {
      const machine = attempt.machine;
      const mesh = Object.entries(machine.mesh ?? {}).map(([axis, size]) => `${axis} ${size}`).join(", ");
      return el("tr", {}, [`${name(i)}${attempt.attempt}`, when(attempt.started), attempt.from_step, attempt.steps, attempt.taken_back,
        `${machine.devices ?? "?"} x ${machine.device ?? "?"} (${machine.platform ?? "?"})${machine.processes ? `, ${machine.processes} processes` : ""}`, mesh || "one device", machine.jax ?? "?",
        attempt.origin || (attempt.from_step ? "own checkpoint" : "the start")].map((value) => el("td", {}, String(value))));
    })))))];
}

function configView() {
  const box = el("div", {}, el("p", { class: "faint" }, "Reading …"));
  Promise.all(runs.map((_, i) => part(`c${i}`).then(JSON.parse)))
    .then((read) => box.replaceChildren(...settingsOf(read).flat(Infinity)))
    .catch((error) => box.replaceChildren(el("p", { class: "bad" }, error.message)));
  return [box];
}

function settingsOf(read) { // { card, changed } of each run
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.fields)))];
  const usual = new Map(read.flatMap(({ changed }) => changed.map(([field, , value]) => [field, value])));
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
    el("div", { class: "columns" }, [...runsOf(read.map(({ card }) => [card]))].map(([card, all]) => el("div", {}, el("h2", {}, `${namesOf(all)}objective`),
      card ? el("pre", {}, card) : el("p", { class: "faint" }, "Not known: there is no config.yaml, it is of another version, or the run was supervised.")))),
    runs.length > 1 ? [el("h2", {}, `what differs between the runs (${differ.length})`), differ.length ? table(differ) : el("p", { class: "faint" }, "Nothing.")] : [],
    el("h2", {}, `what differs from the defaults (${changed.length})`),
    changed.length ? table(changed) : el("p", { class: "faint" }, names.length ? "Nothing." : "The config is not known."),
    el("details", {}, el("summary", {}, `all fields (${names.length})`), table(names)),
  ];
}

