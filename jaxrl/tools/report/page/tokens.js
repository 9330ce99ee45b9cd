// ------------------------------------------------------------------ tokens: what they say

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

function promptBox(r, row) {
  const texts = pieces(r, row.prompt), special = (number) => runs[r].specials.has(number);
  return el("div", { class: "tokens prompt", tabindex: 0, role: "group", "aria-label": "prompt" },
    texts.map((text, i) => (special(row.prompt[i]) ? el("span", { class: "special" }, visible(text)) : visible(text))));
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
  const box = (style, text) => [swatch(style), text];
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

