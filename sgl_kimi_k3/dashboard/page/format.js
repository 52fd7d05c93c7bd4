"use strict";
// Numbers as people read them. Nothing known is a dash, never a zero.

const NONE = "–";
const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

const count = (n) => (n == null ? NONE : GROUPED.format(n));
const compact = (n) => (n == null ? NONE : COMPACT.format(n));

function percent(share, digits = 1) {
  return share == null ? NONE : `${(share * 100).toFixed(digits)} %`;
}

function seconds(s) {
  if (s == null) return NONE;
  if (s < 0.01) return `${(s * 1000).toFixed(1)} ms`;
  return s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;
}

// Short, for the ticks of an axis.
function secondsTick(s) {
  if (s === 0) return "0";
  return s < 1 ? `${+(s * 1000).toPrecision(3)} ms` : `${+s.toPrecision(3)} s`;
}

function bytes(n) {
  if (n == null) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

function span(s) {
  return s < 3600 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

function ago(at, now) {
  const s = Math.max(0, Math.round(now - at));
  if (s < 60) return `${s} s ago`;
  return s < 3600 ? `${Math.floor(s / 60)} min ago` : `${Math.floor(s / 3600)} h ago`;
}

// An element: h("td", { class: "num" }, "text", child)
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") element.style.cssText = value;
    else if (value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

const byId = (id) => document.getElementById(id);

// Writing an unchanged text would disturb a selection and a screen reader.
function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
