"use strict";
// What each panel shows of one view (README.md of the dashboard: the keys).

// PARTS, KINDS and SEGMENTS (names.py): key -> [name, explanation]. A part's colour has its name.
const COLORS = {
  states_used: "states", states_cached: "states-soft", gap: "grid", kv_cached: "kv-soft", kv_used: "kv",
  holes: "known", sink: "sink", states_holes: "states", kv_holes: "kv",
};
const term = (label, tip) => h("span", { class: "term", tabindex: "0", "data-tip": tip }, label);
const named = (table, key) => table[key] ?? [key, `“${key}” on /metrics.`];

const TILES = [
  ["hit", "Token hit rate", "Prompt tokens that were not computed again, as a share of all of them, over the time shown."],
  ["ttft", "Time to first token", "Half of the requests in the time shown got their first token faster than this."],
  ["itl", "Time between tokens", "Of streamed replies: half of the steps from one token to the next were faster than this."],
  ["prompt", "Prompt tokens", "Prompt tokens per second, resumed and computed together."],
  ["output", "Output tokens", "Generated tokens per second."],
  ["load", "Requests running", "Requests in the batch now; those queued wait for memory or a place."],
];

function buildTiles() {
  byId("tiles").replaceChildren(...TILES.map(([key, label, tip]) =>
    h("div", { class: key === "hit" ? "tile lead" : "tile", id: `tile-${key}` },
      h("div", { class: "label" }, term(label, tip)),
      h("div", { class: "value" }, NONE), h("div", { class: "sub" }, "\u00a0"))));
}

function setTile(key, value, sub) {
  const [, big, small] = byId(`tile-${key}`).children;
  const found = /^(.*\d) (\D+)$/.exec(value);
  const unit = found ? found[2] : "";
  if (big.dataset.text !== value) {
    big.dataset.text = value;
    big.replaceChildren(found ? found[1] : value, unit ? h("span", { class: "unit" }, unit) : "");
  }
  put(small, sub);
}

function renderTiles(view) {
  const { hit_rate, latency, load, limits } = view;
  const rate = (n) => (n == null ? NONE : `${n < 10 ? n.toFixed(1) : compact(n)} /s`);
  setTile("hit", percent(hit_rate.window), `${percent(hit_rate.total)} since start`);
  setTile("ttft", seconds(latency.ttft_s.p50), `p95 ${seconds(latency.ttft_s.p95)}`);
  setTile("itl", seconds(latency.itl_s.p50), `p95 ${seconds(latency.itl_s.p95)}`);
  setTile("prompt", rate(load.prompt_tokens_per_s), `${count(view.tokens.window.input)} in ${span(view.window_s)}`);
  setTile("output", rate(load.output_tokens_per_s), load.requests_per_s == null ? "\u00a0" : `${load.requests_per_s.toFixed(2)} requests/s`);
  const most = limits.running_requests ? ` · at most ${count(limits.running_requests)}` : "";
  setTile("load", count(load.running), `${count(load.queued)} queued${most}`);
}

// Rows are kept: rebuilding them would close a tooltip and lose the focus.
function row(body, key, build) {
  let found = body.querySelector(`tr[data-key="${key}"]`);
  if (!found) {
    found = build();
    found.dataset.key = key;
    body.append(found);
  }
  return found;
}

function setCells(found, values, total = false) {
  values.forEach((text, i) => {
    const cell = found.cells[i + 1];
    put(cell, text);
    cell.classList.toggle("zero", !total && (text === "0" || text === NONE || text === "0.0 %"));
  });
}

function partRow(label, color, tip) {
  const mark = color ? h("i", { class: "swatch", style: `--c: var(--${color})` }) : null;
  return h("tr", color ? {} : { class: "sum" }, h("th", { scope: "row" }, mark, tip ? term(label, tip) : label),
    ...[1, 2, 3].map(() => h("td", { class: "num" })));
}

function partsOf(tokens) {
  return { resumed: tokens.resumed, ...tokens.lost };
}

function reasonsIn(view) {
  const told = Object.keys(view.tokens.total.lost);
  return [...Object.keys(PARTS).filter((key) => key === "resumed" || told.includes(key)), ...told.filter((key) => !(key in PARTS))];
}

function renderReasons(view) {
  const { window: now, total } = view.tokens;
  const body = byId("reasons").tBodies[0];
  const [here, ever] = [partsOf(now), partsOf(total)];
  put(byId("reasons-window"), `In ${span(view.window_s)}`);
  row(body, "input", () => partRow("All prompt tokens", null));
  for (const key of reasonsIn(view)) {
    const [label, tip] = named(PARTS, key);
    const share = now.input ? here[key] / now.input : null;
    setCells(row(body, key, () => partRow(label, key, tip)), [count(here[key] ?? 0), percent(share), count(ever[key] ?? 0)]);
  }
  setCells(row(body, "input"), [count(now.input), now.input ? "100 %" : NONE, count(total.input)], true);
  const bar = byId("share");
  bar.replaceChildren(...stack(here));
  bar.setAttribute("aria-label", `Resumed ${percent(view.hit_rate.window)} of the prompt tokens in ${span(view.window_s)}.`);
}

function stack(parts) {
  const keys = [...Object.keys(PARTS), ...Object.keys(parts).filter((key) => !(key in PARTS))];
  return keys.filter((key) => parts[key] > 0).map((key) => h("i", { style: `flex: ${parts[key]}; --c: var(--${key}, var(--known))` }));
}

function renderCheckpoints(view) {
  const { held, taken, evicted, refused } = view.checkpoints;
  const hits = view.tokens.total.hits;
  const body = byId("checkpoints").tBodies[0];
  const kinds = [...Object.keys(KINDS), ...Object.keys(taken).filter((kind) => !(kind in KINDS))];
  for (const kind of kinds) {
    const [label, tip] = named(KINDS, kind);
    const build = () => h("tr", {}, h("th", { scope: "row" }, term(label, tip)), ...[1, 2, 3, 4, 5].map(() => h("td", { class: "num" })));
    const numbers = [held ? held[kind] ?? 0 : null, ...[taken, evicted, refused, hits].map((table) => table[kind] ?? 0)];
    setCells(row(body, kind, build), numbers.map(count));
  }
}

function renderArena(view) {
  const { ranks, bytes: parts } = view.arena;
  const pictures = ranks.length ? ranks : parts ? [coarse(parts)] : [];
  const total = pictures.reduce((sum, one) => sum + one.total_bytes, 0);
  put(byId("arena-total"), total ? bytes(total) + (pictures.length > 1 ? ` in ${pictures.length} ranks` : "") : "");
  const box = byId("arena");
  if (!pictures.length) {
    box.replaceChildren(h("p", { class: "muted" }, "The server tells nothing about its memory."));
    return;
  }
  pictures.forEach((one, i) => {
    const node = box.querySelectorAll(".rank")[i] ?? box.appendChild(h("div", { class: "rank" }));
    if (node.dataset.text !== JSON.stringify(one)) {
      node.dataset.text = JSON.stringify(one);
      drawRank(node, one, pictures.length > 1);
    }
  });
  box.querySelectorAll(":scope > :not(.rank)").forEach((note) => note.remove());
  [...box.querySelectorAll(".rank")].slice(pictures.length).forEach((node) => node.remove());
}

// Without /server_info only the sums are known.
function coarse(parts) {
  const order = [["sink", "sink"], ["states_used", "states"], ["states_holes", "state_holes"], ["gap", "gap"], ["kv_holes", "kv_holes"], ["kv_used", "kv"]];
  const segments = order.map(([part, key]) => ({ part, bytes: parts[key] ?? 0 }));
  return { total_bytes: segments.reduce((sum, one) => sum + one.bytes, 0), segments };
}

function drawRank(node, one, several) {
  const size = Object.fromEntries(one.segments.map(({ part, bytes: n }) => [part, n]));
  const merged = { ...size, holes: (size.states_holes ?? 0) + (size.kv_holes ?? 0) };
  const bar = one.segments.filter(({ bytes: n, part }) => n > 0 || part === "gap").map(({ part, bytes: n }) => {
    const share = n / one.total_bytes;
    const kind = part.endsWith("holes") ? "hole" : part;
    return h("i", { class: kind, style: `width: ${share * 100}%; --c: var(--${COLORS[part]})` }, part === "gap" && share > 0.12 ? `${bytes(n)} free` : "");
  });
  const cells = Object.entries(SEGMENTS).filter(([key]) => key in merged).map(([key, [label, tip]]) =>
    h("div", { "data-part": key, "data-bytes": merged[key] },
      h("div", { class: "k" }, h("i", { class: "swatch", style: `--c: var(--${COLORS[key]})${key === "gap" ? "; outline: 1px solid var(--border)" : ""}` }), term(label, tip)),
      h("div", { class: "v" }, bytes(merged[key]), h("small", {}, percent(merged[key] / one.total_bytes)))));
  const memory = h("div", { class: "memory", role: "img", "aria-label": cells.map((cell) => cell.textContent).join(", ") }, ...bar);
  const rank = several ? `dp ${one.rank.dp} ` : "";
  node.replaceChildren(
    h("div", { class: "ends" }, h("span", {}, `${rank}KDA states →`), h("span", {}, "← MLA KV")),
    memory, ...marks(one), h("div", { class: "cells" }, ...cells), ...room(one));
}

function marks(one) {
  if (!one.states) return [];
  const low = (size(one, "sink") + one.states.peak_bytes) / one.total_bytes;
  const high = 1 - one.kv_tokens.peak_bytes / one.total_bytes;
  return [h("div", { class: "peaks", "aria-hidden": "true" },
    h("i", { style: `left: ${Math.min(1, low) * 100}%; --c: var(--states)`, title: "most that states ever took" }),
    h("i", { style: `left: ${Math.max(0, high) * 100}%; --c: var(--kv)`, title: "most that KV ever took" }))];
}

const size = (one, part) => one.segments.find((segment) => segment.part === part)?.bytes ?? 0;

function room(one) {
  if (!one.states) return [];
  const { states, kv_tokens: kv } = one;
  return [h("p", { class: "room" },
    "Without evicting anything there is room for ", h("b", {}, `${count(states.more)} more states`), " or ", h("b", {}, `${count(kv.more)} more tokens`),
    `. A state takes ${bytes(states.unit_bytes)}, as much as ${count(states.unit_bytes / kv.unit_bytes)} tokens of KV. ▴ marks the most either side ever took.`)];
}

function renderRequests(view) {
  const rows = view.requests;
  const note = byId("requests-note");
  byId("requests-box").hidden = !rows?.length;
  if (rows == null) {
    note.replaceChildren("Start the server with ", h("code", {}, "KIMI_K3_EXPLAIN=1"), " to see for each request what was resumed, what was computed, and why.");
  } else put(note, rows.length ? "" : "No request yet.");
  const key = rows?.length ? `${rows[0].rid} ${rows[0].time} ${rows.length}` : "";
  const table = byId("requests");
  if (table.dataset.key === key) return;
  table.dataset.key = key;
  table.tBodies[0].replaceChildren(...(rows ?? []).map((one) =>
    h("tr", {},
      h("td", {}, clock(one.time)), h("td", {}, h("code", { title: one.rid }, one.rid.slice(0, 8))),
      h("td", { class: "num", "data-label": "prompt" }, count(one.prompt_tokens)),
      h("td", { class: "num", "data-label": "resumed" }, percent(one.resumed / one.prompt_tokens, 0)),
      h("td", { class: "wide" }, h("div", { class: "parts" }, ...stack({ resumed: one.resumed, ...one.lost }))),
      h("td", { class: "text" }, one.text))));
}
