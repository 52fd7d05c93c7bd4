"use strict";
// Asks for the view every few seconds and hands it to the panels.

const state = { window: 300, view: null, lost: false, timer: 0, asked: 0 };
const root = document.documentElement;

const charts = {
  hit: new Chart("hit", {
    title: "Token hit rate", format: (v) => percent(v, 0), ceiling: 1, none: "No prompts in this time",
    series: [
      { label: "Resumed", color: "resumed", fill: true, tip: "Prompt tokens not computed again." },
      { label: "Known", color: "known", dash: true, tip: "Prompt tokens seen before, in memory or not. Between this line and the hit rate lies what more states or more memory could win." },
    ],
  }),
  ttft: new Chart("ttft", {
    title: "Time to first token", format: seconds, axis: secondsTick, none: "No first tokens in this time",
    series: [{ label: "p50", color: "text" }, { label: "p95", color: "known", dash: true }],
  }),
  tokens: new Chart("tokens", {
    title: "Where prompt tokens went, per second", format: compact, stacked: true, none: "No prompts in this time",
    series: Object.entries(PARTS).map(([key, [label, tip]]) => ({ label, tip, color: key })),
  }),
  itl: new Chart("itl", {
    title: "Time between tokens", format: seconds, axis: secondsTick, none: "No streamed reply in this time",
    series: [{ label: "p50", color: "text" }, { label: "p95", color: "known", dash: true }],
  }),
  output: new Chart("output", {
    title: "Output tokens per second", format: compact, none: "No output in this time",
    series: [{ label: "Output", color: "text", fill: true }],
  }),
  load: new Chart("load", {
    title: "Requests", format: count, axis: (v) => (Number.isInteger(v) ? count(v) : ""), none: "Nothing known",
    series: [{ label: "Running", color: "text" }, { label: "Queued", color: "evicted", dash: true }],
  }),
};

function renderCharts({ curves, status }) {
  const { time, bin_s: bin, lines, tokens_per_s: bars } = curves;
  if (!time.length) return;
  const range = [time[0], time.at(-1) + bin];
  const ends = time.map((t) => t + bin);
  const told = status.metrics === false ? "Not told: needs --enable-metrics" : null;
  const draw = (chart, ...names) => chart.update(ends, names.map((name) => lines[name]), range, chart === charts.hit ? null : told);
  draw(charts.hit, "hit_rate", "known_rate");
  draw(charts.ttft, "ttft_s_p50", "ttft_s_p95");
  draw(charts.itl, "itl_s_p50", "itl_s_p95");
  draw(charts.output, "output_tokens_per_s");
  draw(charts.load, "running", "queued");
  charts.tokens.update(time.map((t) => t + bin / 2), Object.keys(PARTS).map((key) => bars[key]), range);
}

function renderStatus(view) {
  const { status, server } = view ?? { status: {}, server: {} };
  const well = !state.lost && status.state === "ok";
  const words = { ok: "Live", waiting: "Connecting", denied: "No access" };
  put(byId("live"), state.lost ? "Disconnected" : words[status.state] ?? "Disconnected");
  byId("dot").dataset.state = well ? "ok" : status.state === "waiting" && !state.lost ? "waiting" : "bad";
  const name = server.model?.split("/").pop();
  put(byId("server"), [server.url?.replace(/^https?:\/\//, ""), name, server.version && `SGLang ${server.version}`].filter(Boolean).join(" · "));
  byId("main").classList.toggle("stale", !well && !!view?.time);
  document.title = well && view.hit_rate.window != null ? `${percent(view.hit_rate.window)} · Kimi K3 cache` : "Kimi K3 cache";
  showBanners(view);
}

function showBanners(view) {
  const told = [];
  const { status } = view ?? { status: {} };
  if (state.lost) told.push(["bad", `The dashboard does not answer at ${location.host}: was it stopped? Retrying …`]);
  else if (status.state && !["ok", "waiting"].includes(status.state)) {
    const last = status.heard_at ? ` Last heard at ${clock(status.heard_at)}.` : "";
    told.push(["bad", `${status.message} Retrying every ${status.retry_s} s …${last}`]);
  } else if (status.message) told.push(["warn", status.message]);
  if (!state.lost && status.state === "ok") {
    if (status.metrics === false) told.push(["warn", "The server was started without --enable-metrics: it does not tell latency, throughput and queue."]);
    if (status.cache === "on" && view.tokens.total.input === 0) told.push(["info", "No request yet. The figures fill as soon as one is served."]);
    told.push(...view.notices.map(({ level, text }) => [level, text]));
  }
  const box = byId("banners");
  const key = JSON.stringify(told);
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  box.replaceChildren(...told.map(([level, text]) => h("div", { class: `banner ${level}` }, text)));
}

function render() {
  const { view } = state;
  renderStatus(view);
  const started = view?.time != null;
  byId("empty").hidden = started || !view;
  byId("main").hidden = !started;
  byId("windows").hidden = !started;
  if (view) put(byId("empty-url"), view.server.url);
  if (!started || state.lost) return;
  byId("main").classList.toggle("no-cache", ["off", "other"].includes(view.status.cache));
  renderTiles(view);
  renderCharts(view);
  renderReasons(view);
  renderArena(view);
  renderCheckpoints(view);
  renderRequests(view);
  root.dataset.time = view.time ?? "";
}

async function refresh() {
  clearTimeout(state.timer);
  const asked = (state.asked += 1);
  try {
    const answer = await fetch(`api/view?window=${state.window}`, { signal: AbortSignal.timeout(15000) });
    if (!answer.ok) throw new Error(answer.statusText);
    const view = await answer.json();
    if (asked !== state.asked) return; // another window has been chosen since
    Object.assign(state, { view, lost: false });
  } catch {
    if (asked !== state.asked) return;
    state.lost = true;
  }
  render();
  if (!document.hidden) state.timer = setTimeout(refresh, 1000 * (state.view?.status.retry_s ?? 2));
}

// -- controls ----------------------------------------------------------------------------------

function stored(name, value) {
  try {
    if (value === undefined) return localStorage.getItem(name);
    localStorage.setItem(name, value);
  } catch { /* storage may be forbidden: nothing is remembered then */ }
  return null;
}

const DARK = matchMedia("(prefers-color-scheme: dark)");

function setTheme(theme) {
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  redraw();
  if (state.view) renderCharts(state.view);
}

byId("theme").addEventListener("click", () => {
  const dark = (root.dataset.theme ?? (DARK.matches ? "dark" : "light")) === "dark";
  const theme = dark ? "light" : "dark";
  stored("theme", theme);
  setTheme(theme);
});
DARK.addEventListener("change", () => setTheme(root.dataset.theme));

byId("windows").addEventListener("change", (event) => {
  state.window = Number(event.target.value);
  stored("window", event.target.value);
  refresh();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });

// -- tooltips: by mouse, by keyboard and by touch ------------------------------------------------

const tip = byId("tip");
let described = null;

function showTip(element) {
  described = element;
  put(tip, element.dataset.tip);
  tip.hidden = false;
  element.setAttribute("aria-describedby", "tip");
  placeTip();
}

function placeTip() {
  const at = described.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const below = at.bottom + 8 + height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  tip.style.top = `${below ? at.bottom + 8 : at.top - height - 8}px`;
}

function hideTip() {
  described = null;
  tip.hidden = true;
}

// Focus scrolls its element into view, and the event comes after the focus: the tip goes along.
function followTip() {
  if (!described) return;
  const at = described.getBoundingClientRect();
  if (at.bottom < 0 || at.top > innerHeight) hideTip();
  else placeTip();
}

for (const [show, hide] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
  document.addEventListener(show, (event) => {
    const element = event.target.closest?.("[data-tip]");
    if (element) showTip(element);
  });
  document.addEventListener(hide, hideTip);
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.addEventListener("scroll", followTip, true);

// -- start -------------------------------------------------------------------------------------

const remembered = document.querySelector(`#windows input[value="${stored("window") ?? 300}"]`);
if (remembered) {
  remembered.checked = true;
  state.window = Number(remembered.value);
}
buildTiles();
const theme = stored("theme");
if (theme === "light" || theme === "dark") setTheme(theme);
refresh();
