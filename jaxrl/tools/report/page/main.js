// ------------------------------------------------------------------ the page

let onStep = () => {}; // what the view does when another step is chosen
let onData = () => {}; // and when a live run has gone on
let allSteps = [];

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

function setStep(step) {
  state.step = allSteps.length ? allSteps[nearest(allSteps, Number(step) || 0)] : 0;
  remember();
  showStep();
  curves.forEach((one) => one.choose());
  onStep();
}

function chooseStep(step) { // by hand: the page stays there
  state.follow = 0;
  setStep(step);
}

function followSteps() { // not while trajectories are read
  if (state.follow && state.view !== "trajectories") setStep(allSteps.at(-1)); else showStep();
}

const stepBy = (by) => allSteps[Math.max(0, Math.min(allSteps.length - 1, nearest(allSteps, state.step) + by))];
const moveStep = (by) => chooseStep(stepBy(by));

function showStep() {
  const slider = byId("slider"), field = byId("step");
  slider.min = field.min = allSteps[0] ?? 0;
  slider.max = field.max = allSteps.at(-1) ?? 0;
  slider.value = field.value = state.step;
  const rewards = runs.map((run) => {
    const points = pointsOf(run, "reward/avg_raw_reward"), k = points ? points.steps.indexOf(state.step) : -1;
    return k < 0 ? null : points.values[k];
  });
  const known = [...runs.keys()].filter((i) => rewards[i] !== null), recorded = runs.filter((run) => run.recorded.includes(state.step)).length;
  byId("at").replaceChildren(
    known.length ? "reward" : "", ...known.flatMap((i) => [" ", valueOf(i, number(rewards[i]))]),
    recorded === runs.length ? "" : `${known.length ? ", " : ""}${recorded ? `trajectories of ${recorded} of ${runs.length} runs` : "no trajectories"}`);
  byId("follow").checked = Boolean(state.follow);
  byId("follow").disabled = state.view === "trajectories";
}

function show() {
  onStep = onData = choose = () => {};
  curves.clear();
  hideTip();
  for (const tab of byId("tabs").children) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === state.view));
    tab.tabIndex = tab.dataset.view === state.view ? 0 : -1;
  }
  const views = { overview, curves: curvesView, time: timeView, trajectories: trajectoriesView, config: configView };
  byId("main").replaceChildren(el("div", { role: "tabpanel", "aria-labelledby": `tab-${state.view}` }, views[state.view]().flat(Infinity)));
}

function showNames() {
  byId("names").replaceChildren(runs.length > 1 ? runKeys() : runs[0].name);
}

function setUp() {
  showNames();
  byId("tabs").append(...VIEWS.map((view) => el("button", {
    type: "button", role: "tab", id: `tab-${view}`, "data-view": view,
    onclick: () => { state.view = view; remember(); followSteps(); show(); scrollTo(0, 0); },
    onkeydown: (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) byId(`tab-${VIEWS[(VIEWS.indexOf(view) + move + VIEWS.length) % VIEWS.length]}`).focus();
    },
  }, view)));
  byId("slider").addEventListener("input", (event) => chooseStep(event.target.value));
  byId("step").addEventListener("change", (event) => chooseStep(event.target.value));
  byId("before").addEventListener("click", () => moveStep(-1));
  byId("after").addEventListener("click", () => moveStep(1));
  byId("theme").addEventListener("click", () => {
    const dark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    state.theme = document.documentElement.dataset.theme = dark ? "light" : "dark";
    remember();
  });
  addEventListener("hashchange", () => { recall(); setStep(state.step); show(); });
}

async function readRuns() {
  const about = JSON.parse(await part("manifest")).runs;
  const read = await Promise.all(about.map((_, i) => part(`m${i}`).then(unpack)));
  about.forEach((run, i) => {
    // What starts again takes steps back and does them anew: what was read of them is old.
    if (runs[i] && run.attempts.length !== runs[i].attempts.length) stepsRead.clear();
    runs[i] = {
      vocabulary: { entries: [], ids: [], known: true }, specials: new Set(), ...runs[i], ...run, places: null,
      curves: read[i], index: new Map(read[i].names.map((metric, k) => [metric, k])),
    };
  });
  const own = new Set();
  for (const run of runs) {
    for (const step of run.recorded) own.add(step);
    for (const metric of run.curves.names) for (const step of pointsOf(run, metric).steps) own.add(step);
  }
  allSteps = [...own].sort((a, b) => a - b);
}

// ------------------------------------------------------------------ while runs go on

const EVERY = 1500; // milliseconds between two questions for news

async function heed(version) {
  const now = await part("version");
  if (now === version) return now;
  if (now.split("-")[0] !== version.split("-")[0]) location.reload(); // another server: its tokens have other numbers
  const before = runs.length;
  await readRuns();
  followSteps();
  if (runs.length > before) showNames();
  if (runs.length > before && state.view !== "trajectories") show(); else onData();
  return now;
}

function watch(version) {
  const said = byId("news"), follow = byId("follow");
  const ask = async () => {
    try {
      if (!document.hidden) version = await heed(version);
      said.textContent = `live: step ${allSteps.at(-1) ?? 0}`;
      said.className = "";
    } catch {
      said.textContent = "the server does not answer; what is here stays";
      said.className = "bad";
    }
    setTimeout(ask, EVERY);
  };
  byId("live").hidden = false;
  follow.addEventListener("change", () => { state.follow = Number(follow.checked); setStep(follow.checked ? allSteps.at(-1) : state.step); });
  ask();
}

async function start() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser has no DecompressionStream; take one of 2023 or later");
  const version = live ? await part("version") : "";
  await readRuns();
  const common = runs[0].recorded.filter((step) => runs.every((run) => run.recorded.includes(step)));
  state.step = initial.step = common.at(-1) ?? runs.flatMap((run) => run.recorded).at(-1) ?? allSteps.at(-1) ?? 0;
  state.follow = Number(live && !location.hash.includes("step="));
  recall();
  if (state.theme) document.documentElement.dataset.theme = state.theme;
  setUp();
  setStep(state.step);
  followSteps();
  show();
  if (live) watch(version);
}

start().catch((error) => {
  byId("main").replaceChildren(el("p", { class: "bad" }, `This page cannot be shown (${error.name}: ${error.message}).`));
  throw error;
});
