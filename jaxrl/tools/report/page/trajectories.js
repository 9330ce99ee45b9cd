// ------------------------------------------------------------------ trajectories: data

const stepsRead = new Map(); // "run-step" -> promise of { of, groups }

async function readStep(r, step) {
  const text = await part(`t${r}-${step}`);
  if (text === null) return { of: 0, groups: [] };
  const { of, groups } = JSON.parse(text), blobs = await Promise.all(groups.map(unpack));
  await growVocabulary(r, blobs.reduce((most, { arrays }) => arrays.tokens.reduce((a, b) => Math.max(a, b), most), -1));
  return { of, groups: blobs.map((blob) => group(r, step, blob)) };
}

function growVocabulary(r, most) { // until token number `most` is known; one after the other
  const run = runs[r];
  return run.growing = (run.growing ?? Promise.resolve()).catch(() => {}).then(async () => {
    const start = run.vocabulary.entries.length;
    if (most < start) return;
    const more = await unpack(await part(`v${r}-${start}`));
    run.vocabulary.entries.push(...more.entries);
    run.vocabulary.ids.push(...more.ids);
    run.vocabulary.known = more.known;
    for (const number of more.special) run.specials.add(number);
  });
}

function groupsOf(r, step) {
  const key = `${r}-${step}`;
  if (!stepsRead.has(key)) {
    const read = runs[r].recorded.includes(step) ? readStep(r, step) : Promise.resolve({ of: 0, groups: [] });
    read.catch(() => stepsRead.delete(key)); // a server that did not answer may be asked again
    stepsRead.set(key, read);
    if (stepsRead.size > 12) stepsRead.delete(stepsRead.keys().next().value); // the oldest: memory is finite
  }
  return stepsRead.get(key);
}

function placesOf(r) { // promise of: prompt -> the steps that have it
  const run = runs[r];
  if (!run.places) {
    const read = run.places = part(`p${r}`).then((text) => {
      const places = new Map();
      for (const [step, uids] of Object.entries(JSON.parse(text ?? "{}"))) {
        for (const uid of uids) {
          if (!places.has(uid)) places.set(uid, []);
          places.get(uid).push(Number(step));
        }
      }
      return places;
    });
    read.catch(() => { if (run.places === read) run.places = null; }); // it may be asked again
  }
  return run.places;
}

function group(r, step, blob) {
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
    const last = sample.rows.at(-1), length = sample.rows.reduce((sum, row) => sum + row.turns.reduce((n, [a, b]) => n + b - a, 0), 0);
    const advantages = sample.rows.flatMap(({ arrays }) => Array.from(arrays.advantages ?? []).filter((x, i) => arrays.mask[i] && Number.isFinite(x)));
    Object.assign(sample, { reward: last.reward, stop: last.stop, ended: last.ended, length, advantage: advantages.length ? mean(advantages) : null });
  }
  return { uid: blob.uid, env: blob.env, row: blob.row, samples, run: r, step };
}

const textOf = (r, sample) => sample.text ??= sample.rows.map((row) => pieces(r, row.tokens).join("")).join("\n");
const promptOf = (r, rows) => pieces(r, rows[0].prompt).join("");

function matches(r, group, sample) { // as find.py does for a live page
  const at = sample.reward ?? NaN;
  if (state.min !== "" && !(at >= Number(state.min))) return false;
  if (state.max !== "" && !(at <= Number(state.max))) return false;
  if (state.stop && sample.stop !== state.stop) return false;
  if (state.ended && sample.ended !== state.ended) return false;
  if (state.env && group.env !== state.env) return false;
  if (!state.text) return true;
  const wanted = state.text.toLowerCase();
  return textOf(r, sample).toLowerCase().includes(wanted) || group.uid.toLowerCase() === wanted
    || promptOf(r, sample.rows).toLowerCase().includes(wanted);
}

async function* search(r) { // { hits, searched } of some steps at a time
  if (live) {
    const { text, min, max, stop, ended, env } = state, words = new URLSearchParams({ run: r, text, min, max, stop, ended, env });
    for (let from = 0; from !== null;) {
      words.set("from", from);
      const found = await (await ask(`find?${words}`)).json();
      yield found;
      from = found.next;
    }
    return;
  }
  for (const step of runs[r].recorded) {
    const { groups } = await readStep(r, step); // not kept: all of them would fill the memory
    yield { searched: 1, hits: groups.flatMap((one) => one.samples.filter((sample) => matches(r, one, sample)).map((sample) => {
      const text = textOf(r, sample), start = Math.max(0, text.toLowerCase().indexOf(state.text.toLowerCase()) - 30);
      return { step, uid: one.uid, sample: sample.number, reward: sample.reward, text: text.slice(start, start + 90) };
    })) };
  }
}

// ------------------------------------------------------------------ trajectories: a prompt

const cardId = (r, step, uid, number) => `${r}#${step}#${number}#${uid}`;

function sampleCard(group, sample, scale) {
  const { run: r, step, uid } = group, terms = Object.entries(sample.rows.at(-1).terms), several = sample.rows.length > 1;
  return el("article", { class: `sample${sample.reward > 0 ? " good" : ""}`, "data-sample": cardId(r, step, uid, sample.number) },
    el("div", { class: "about" }, el("b", {}, `sample ${sample.number + 1}`), el("b", {}, `reward ${number(sample.reward)}`),
      sample.advantage === null ? "" : el("b", { title: "mean over the tokens that the policy sampled" }, `advantage ${number(sample.advantage)}`),
      el("span", {}, sample.stop), el("span", {}, count(sample.length, "token")), el("span", {}, `version ${sample.rows[0].version}`),
      sample.ended && sample.ended !== "trained" ? el("span", { class: "bad" }, sample.ended) : "",
      terms.length > 1 ? el("span", {}, terms.map(([term, value]) => `${term} ${number(value)}`).join(", ")) : ""),
    sample.rows.map((row, k) => [
      several ? el("details", {}, el("summary", {}, `turn ${k + 1}: its prompt`), promptBox(r, row)) : "",
      response(r, row, scale)]));
}

function samplesOf(group, scale) {
  const chosen = group.samples.filter((sample) => matches(group.run, group, sample));
  if (state.order !== "given") chosen.sort((a, b) => (state.order === "high" ? 1 : -1) * ((b.reward ?? -Infinity) - (a.reward ?? -Infinity)));
  return el("div", { class: "samples" }, chosen.map((sample) => sampleCard(group, sample, scale)));
}

function statistics(values) {
  const middle = mean(values);
  return { mean: middle, spread: Math.sqrt(mean(values.map((x) => (x - middle) ** 2))) };
}

const rewardsOf = (group) => group.samples.map((sample) => sample.reward ?? NaN);

function truthOf(group) { // what the data says of the prompt beside its text
  const entries = Object.entries(group.row), read = (text) => { try { return JSON.parse(text); } catch { return text; } };
  const truth = read(group.row.reward_spec ?? "null")?.ground_truth ?? read(group.row.ground_truth ?? "null");
  return [
    truth == null ? "" : el("p", { class: "truth" }, "ground truth: ", el("code", {}, visible(typeof truth === "string" ? truth : JSON.stringify(truth)))),
    entries.length ? el("details", {}, el("summary", {}, "its row of the data"), el("div", { class: "scroll" }, el("table", {},
      el("tbody", {}, entries.map(([column, text]) => el("tr", {}, el("th", { scope: "row" }, column), el("td", {}, el("code", {}, visible(text))))))))) : "",
  ];
}

function otherSteps(r, uid) {
  const list = el("span", { class: "bar" });
  const fill = async () => {
    const found = ((await placesOf(r)).get(uid) ?? []).filter((step) => step !== state.step);
    list.replaceChildren(...found.slice(-40).map((step) => el("button", { type: "button", onclick: () => choose({ prompt: uid, against: String(step) }) }, `step ${step}`)));
    if (!found.length) list.append(el("span", { class: "faint" }, "no other step in this page has it"));
  };
  return el("details", { ontoggle: (event) => { if (event.target.open) fill(); } }, el("summary", {}, "compare with another step"), list);
}

function cell(found, column, several, scale) {
  const { mean: middle, spread } = statistics(rewardsOf(found));
  return el("div", {}, el("p", { class: "faint" }, several ? el("b", {}, `${column.title}: `) : "",
    `${count(found.samples.length, "sample")}, mean reward ${number(middle)}, deviation ${number(spread)}`), samplesOf(found, scale));
}

function groupSection(cells, columns, scale) {
  const section = el("section", { class: `group${state.prompt ? " alone" : ""}` });
  section.style.minHeight = "140px";
  return whenSeen(section, () => {
    section.style.minHeight = "";
    const first = cells.find(Boolean), { uid } = first, without = columns.flatMap(({ title }, c) => (cells[c] ? [] : [title]));
    const inTurns = first.samples.some((sample) => sample.rows.length > 1);
    section.append(
      el("div", { class: "head" }, el("h3", {}, `prompt ${uid}`), el("span", { class: "faint" }, first.env),
        el("button", { type: "button", onclick: () => choose({ prompt: state.prompt ? "" : uid }) }, state.prompt ? "all prompts" : "only this prompt")),
      inTurns ? "" : promptBox(first.run, first.samples[0].rows[0]),
      el("div", { class: "facts" }, truthOf(first), otherSteps(first.run, uid)),
      el("div", { class: "columns" }, columns.map((column, c) => (cells[c] ? cell(cells[c], column, columns.length > 1, scale) : null))),
      without.length ? el("p", { class: "faint" }, `Not among the prompts in this page of ${without.join(", ")}.`) : "");
    if (focused) for (const card of section.querySelectorAll("[data-sample]")) card.classList.toggle("found", card.dataset.sample === focused);
  });
}

// ------------------------------------------------------------------ trajectories: a step, or two

function summary(columns) { // what the steps, or the runs, are beside each other
  const full = columns.filter((column) => column.groups.length);
  if (!full.length) return [];
  const all = full.map(({ groups }) => groups.flatMap((one) => one.samples));
  const rows = [
    ["prompts", (c) => `${full[c].groups.length}${full[c].groups.length < full[c].of ? ` of ${full[c].of}; the others were left out to keep the page small` : ""}`],
    ["samples", (c) => all[c].length],
    ["reward", (c) => { const { mean: middle, spread } = statistics(all[c].map((one) => one.reward ?? NaN)); return `${number(middle)}, deviation ${number(spread)}`; }],
    ["tokens of a sample", (c) => `${number(mean(all[c].map((one) => one.length)))} on average, ${all[c].reduce((most, one) => Math.max(most, one.length), 0)} at most`],
    ["stopped by", (c) => [...new Set(all[c].map((one) => one.stop))].sort().map((stop) => `${stop} ${percent(all[c].filter((one) => one.stop === stop).length / all[c].length)}`).join(", ")],
  ];
  return [el("details", { open: full.length > 1 }, el("summary", {}, full.length > 1 ? "the distributions" : "the step"),
    el("div", { class: "scroll" }, el("table", { class: "runs" }, el("caption", { class: "hidden" }, "rewards and lengths"),
      full.length > 1 ? el("thead", {}, el("tr", {}, el("td"), full.map((column, c) => el("th", { scope: "col" }, swatch(toneOf(c)), column.title)))) : "",
      el("tbody", {}, rows.map(([title, value]) => el("tr", {}, el("th", { scope: "row" }, title), full.map((_, c) => el("td", {}, String(value(c))))))))),
    el("div", { class: "charts" }, histogram("reward", all.map((one) => one.map((sample) => sample.reward))),
      histogram("tokens", all.map((one) => one.map((sample) => sample.length)))))];
}

function histogram(title, columns) {
  // A bar for each value where there are few, else for each of some stretches of one width.
  const finite = columns.map((values) => values.filter((x) => Number.isFinite(x))), all = finite.flat();
  const W = 400, H = 130, left = 40, bottom = 18, top = 6, values = [...new Set(all)].sort((a, b) => a - b);
  if (!values.length) return "";
  const low = values[0], few = values.length <= 10, bins = few ? values.length : 16, width = (values.at(-1) - low) / bins;
  const binOf = (x) => (few ? values.indexOf(x) : Math.min(bins - 1, Math.floor((x - low) / width)));
  const shares = finite.map((own) => {
    const found = new Float64Array(bins);
    for (const x of own) found[binOf(x)] += 1 / own.length;
    return found;
  });
  const high = Math.max(...shares.flatMap((own) => Array.from(own))), room = (W - left - 8) / bins, bar = 0.9 * room / columns.length;
  const y = (share) => H - bottom - (H - bottom - top) * share / high;
  const svg = el("svg", { role: "img", viewBox: `0 0 ${W} ${H}`, "aria-label": `how many samples have which ${title}` });
  for (const tick of ticks(0, high, 3)) svg.append(el("line", { class: "grid", x1: left, x2: W - 8, y1: y(tick), y2: y(tick) }), el("text", { x: left - 5, y: y(tick) + 3.5, "text-anchor": "end" }, `${number(100 * tick)} %`));
  shares.forEach((own, c) => own.forEach((share, k) => {
    if (share) svg.append(el("rect", { style: `fill: ${toneOf(c)}`, x: left + k * room + 0.05 * room + c * bar, y: y(share), width: bar, height: H - bottom - y(share) },
      el("title", {}, `${few ? number(values[k]) : `${number(low + k * width)} to ${number(low + (k + 1) * width)}`}: ${percent(share)}`)));
  }));
  for (let k = 0; k < bins; k += few ? Math.ceil(bins / 6) : 4) svg.append(el("text", { x: left + (few ? (k + 0.5) * room : k * room), y: H - 4, "text-anchor": few || k ? "middle" : "start" }, number(few ? values[k] : low + k * width)));
  return el("figure", {}, el("figcaption", {}, el("b", {}, title)), svg);
}

let focused = null; // the sample that was searched for
let shownAt = 0; // which drawing is the newest: reading takes its time

async function columnsOf() {
  const against = state.against === "" || Number(state.against) === state.step ? [] : [Number(state.against)];
  const places = [state.step, ...against].flatMap((step) => runs.map((_, r) => [r, step]));
  return Promise.all(places.map(async ([r, step]) => ({ ...await groupsOf(r, step), r, step, title: `${name(r)}step ${step}` })));
}

async function drawTrajectories(box) {
  const turn = ++shownAt, columns = await columnsOf();
  if (turn !== shownAt) return;
  const prompts = new Map(); // uid -> its group in each column
  columns.forEach(({ groups }, c) => {
    for (const one of groups) prompts.set(one.uid, Object.assign(prompts.get(one.uid) ?? new Array(columns.length).fill(null), { [c]: one }));
  });
  const shown = columns.flatMap(({ groups }) => groups), scale = scaleOf(shown, state.color);
  box.legend.replaceChildren(legend(shown, scale));
  let wanted = [...prompts.values()].filter((cells) => cells.some((one) => one && (!state.prompt || one.uid === state.prompt) && one.samples.some((sample) => matches(one.run, one, sample))));
  if (state.groups !== "given") {
    const key = state.groups === "spread" ? "spread" : "mean", sign = state.groups === "low" ? -1 : 1;
    const of = (cells) => statistics(rewardsOf(cells.find(Boolean)))[key];
    wanted.sort((a, b) => sign * (of(b) - of(a)));
  }
  const inAll = (cells) => cells.every(Boolean), both = wanted.filter(inAll);
  if (columns.length > 1) wanted = [...both, ...wanted.filter((cells) => !inAll(cells))];
  box.about.replaceChildren(...missing(columns), ...summary(columns));
  if (columns.length > 1 && shown.length) box.about.append(el("p", { class: "faint" }, `${both.length ? count(both.length, "prompt is", "prompts are") : "No prompt is"} in all columns${both.length && both.length < wanted.length ? `; the other ${wanted.length - both.length} follow` : ""}.`));
  if (runs.some((run) => !run.vocabulary.known)) box.about.prepend(el("p", { class: "bad" }, "Tokens are shown by their ids: the tokenizer was not found; name its folder with --tokenizer."));
  box.list.replaceChildren(...wanted.map((cells) => groupSection(cells, columns, scale)));
  if (shown.length && !wanted.length) box.list.append(el("p", { class: "faint" }, "No trajectory of this step matches; “find in all steps” looks at the others."));
  if (focused) {
    const uid = focused.split("#").slice(3).join("#");
    box.list.querySelectorAll(".group")[wanted.findIndex((cells) => cells.find(Boolean).uid === uid)]?.scrollIntoView({ block: "start" });
  }
}

function missing(columns) {
  return columns.filter(({ groups }) => !groups.length).map(({ r, step }) => {
    const { recorded, notes } = runs[r], near = recorded.length ? recorded[nearest(recorded, step)] : null;
    const go = () => (step === state.step ? chooseStep(near) : choose({ against: String(near) }));
    return el("p", {}, `${name(r)}no trajectories of step ${step} are in this page. `, near === null ? (notes.length ? "The overview says why." : "") : el("button", { type: "button", onclick: go }, `go to step ${near}`));
  });
}

async function findEverywhere(box, button) {
  const most = 300, list = el("ol", { id: "found" }), said = el("p", { role: "status" }, "Searching …");
  const all = runs.reduce((sum, run) => sum + run.recorded.length, 0);
  let total = 0, searched = 0, stopped = false;
  const stop = () => { stopped = true; button.hidden = false; box.replaceChildren(); };
  button.hidden = true;
  box.replaceChildren(said, el("button", { type: "button", onclick: stop }, "close"), list);
  const entry = (r, hit) => {
    const go = () => { focused = cardId(r, hit.step, hit.uid, hit.sample); chooseStep(hit.step); };
    return el("li", {}, el("button", { type: "button", onclick: go }, `${name(r)}step ${hit.step}, prompt ${hit.uid}, sample ${hit.sample + 1}, reward ${number(hit.reward)}: ${visible(hit.text).replace(/\n/g, " ")}`));
  };
  for (const r of runs.keys()) {
    for await (const some of search(r)) {
      if (stopped) return;
      list.append(...some.hits.slice(0, Math.max(0, most - total)).map((hit) => entry(r, hit)));
      total += some.hits.length;
      searched += some.searched;
      said.textContent = `${total} found in ${searched} of ${count(all, "step")}${total > most ? `, the first ${most} are listed` : ""} `;
      if (total > most) break;
    }
  }
  button.hidden = false;
}

let choose = () => {}; // changes what is chosen in this view, by its keys

function trajectoriesView() {
  const box = { list: el("div"), about: el("div"), legend: el("span") }, foundBox = el("div");
  const fail = (error) => box.about.replaceChildren(el("p", { class: "bad" }, error.message));
  const draw = later(() => drawTrajectories(box).catch(fail), 60);
  choose = (given) => {
    Object.assign(state, given);
    for (const [key, value] of Object.entries(given)) if (byId(`choice-${key}`)) byId(`choice-${key}`).value = value;
    remember();
    draw();
  };
  const change = (key) => (event) => { focused = null; choose({ [key]: event.target.value }); };
  const select = (key, label, options) => el("label", {}, label, el("select", { id: `choice-${key}`, onchange: change(key) }, Object.entries(options).map(([value, title]) => el("option", { value, selected: state[key] === value }, title))));
  const input = (key, label, attributes) => el("label", {}, label, el("input", { id: `choice-${key}`, value: state[key], oninput: change(key), ...attributes }));
  const seen = (values) => ({ "": "any", ...Object.fromEntries([...new Set(values)].sort().map((value) => [value, value])) });
  const find = el("button", { type: "button", onclick: () => findEverywhere(foundBox, find).catch(fail) }, "find in all steps");
  const ends = runs.flatMap((run) => Object.keys(run.ends)).filter((reason) => reason !== "dynamic_sampling");
  onStep = draw;
  box.about.append(el("p", { class: "faint" }, "Reading …"));
  draw();
  return [
    el("h2", { class: "hidden" }, "trajectories"),
    el("div", { class: "tools", role: "group", "aria-label": "trajectories" },
      select("color", "colour", Object.fromEntries(Object.entries(COLORS).map(([value, { title }]) => [value, title]))), box.legend,
      select("order", "samples", { given: "as drawn", high: "best first", low: "worst first" }),
      select("groups", "prompts", { given: "as drawn", high: "best first", low: "worst first", spread: "most different rewards first" }),
      input("against", "beside step", { type: "number", min: 0, placeholder: "none" })),
    el("div", { class: "tools", role: "search" },
      input("text", "text", { type: "search", placeholder: "in prompt or response" }),
      input("min", "reward from", { type: "number", step: "any" }), input("max", "to", { type: "number", step: "any" }),
      select("stop", "stopped by", seen(runs.flatMap((run) => run.stops))), select("ended", "ended as", seen(ends)),
      input("env", "environment", { type: "search", placeholder: "any", size: 12 }), find),
    foundBox, box.about, box.list,
  ];
}

