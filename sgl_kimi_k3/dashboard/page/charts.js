"use strict";
// Time series on uPlot: lines and stacked bars that share one cursor and one look.

const CHARTS = [];
const CURSOR = uPlot.sync("time");

// Canvas knows no custom properties, and they hold light-dark(): ask a real element.
function resolved(name) {
  const probe = h("i", { style: `color: var(--${name})` });
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

/* One chart.
   series: [{ key, label, color, dash, fill }]; format, axis: a value as text, in full and as a tick; stacked: bars;
   ceiling: fixed upper end of the scale. update(x, columns, [from, to], none) takes null for unknown; `none` is
   said where there is nothing to draw. */
class Chart {
  constructor(id, { title, series, format, axis = format, stacked = false, ceiling = null, none }) {
    Object.assign(this, { title, series, format, axis, stacked, ceiling, none });
    this.box = byId(`${id}-chart`);
    this.legend = byId(`${id}-legend`);
    this.box.setAttribute("role", "img");
    this.note = h("div", { class: "none" });
    this.data = [[], ...series.map(() => [])];
    this.range = [0, 1];
    this.draw();
    new ResizeObserver(() => this.resize()).observe(this.box);
    CHARTS.push(this);
  }

  draw() {
    this.plot?.destroy();
    const muted = resolved("muted");
    const grid = { stroke: resolved("grid"), width: 1 };
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: muted, font, grid, ticks: { show: false } };
    const order = this.stacked ? [...this.series].reverse() : this.series;
    this.peek = h("div", { class: "peek", hidden: "" });
    this.plot = new uPlot(
      {
        width: this.box.clientWidth || 300,
        height: this.box.clientHeight,
        padding: [8, 16, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: CURSOR.key, setSeries: false }, points: { size: 6 }, drag: { x: false, y: false }, y: false },
        scales: { x: { range: () => this.range }, y: { range: (_, __, top) => this.yRange(top) } },
        axes: [
          { ...axis, space: 52, size: 22, gap: 4, grid: { show: false }, values: (_, times) => this.ticks(times) },
          { ...axis, size: 46, space: 34, values: (_, ticks) => ticks.map((t) => this.axis(t)) },
        ],
        series: [{}, ...order.map((one) => this.style(one))],
        hooks: { setCursor: [() => this.peekAt()] },
      },
      this.plotted(),
      this.box,
    );
    this.plot.over.append(this.peek);
    this.box.append(this.note);
  }

  style({ color, dash, fill }) {
    const stroke = resolved(color);
    if (this.stacked) {
      return { fill: stroke, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.82, 40], radius: 0 }) };
    }
    const points = { show: (u, i) => u.data[i].filter((v) => v != null).length < 3, size: 5, fill: stroke };
    const area = fill ? stroke.replace(/rgba?\(([^,]+),([^,]+),([^,)]+).*/, "rgba($1,$2,$3,0.12)") : undefined;
    return { stroke, width: dash ? 1.5 : 2, dash: dash ? [5, 4] : undefined, fill: area, spanGaps: false, points };
  }

  yRange(top) {
    if (this.ceiling != null) return [0, this.ceiling];
    return [0, top > 0 ? top * 1.1 : 1];
  }

  ticks(times) {
    const minutes = times.every((t) => t % 60 === 0);
    return times.map((t) => clock(t).slice(0, minutes ? 5 : 8));
  }

  // Stacked bars are drawn from the tallest sum down to the first part.
  plotted() {
    const [x, ...columns] = this.data;
    if (!this.stacked) return this.data;
    const sums = x.map(() => 0);
    const stack = columns.map((column) => column.map((v, i) => (v == null ? null : (sums[i] += v))));
    return [x, ...stack.reverse()];
  }

  update(x, columns, range, none = null) {
    this.data = [x, ...columns.map((column) => column ?? x.map(() => null))];
    this.range = range;
    const empty = this.data.slice(1).every((column) => !column.some((v) => v != null && (!this.stacked || v > 0)));
    put(this.note, empty ? none ?? this.none : "");
    this.plot.setData(this.plotted());
    this.tell();
  }

  // Legend with the newest values; the same for those who do not see the picture.
  tell() {
    const values = this.series.map((_, i) => this.data[i + 1].findLast((v) => v != null));
    if (this.legend.childElementCount !== this.series.length) {
      this.legend.replaceChildren(...this.series.map(({ label, color, dash, tip }) => {
        const mark = `swatch${this.stacked ? "" : dash ? " dash" : " line"}`;
        const name = tip ? h("span", { class: "term", tabindex: "0", "data-tip": tip }, label) : label;
        return h("span", {}, h("i", { class: mark, style: `--c: var(--${color})` }), name, this.stacked ? null : h("b"));
      }));
    }
    if (!this.stacked) {
      [...this.legend.children].forEach((item, i) => put(item.lastChild, this.format(values[i])));
    }
    const told = this.series.map(({ label }, i) => `${label} ${this.format(values[i])}`);
    this.box.setAttribute("aria-label", `${this.title}. Newest: ${told.join(", ")}.`);
  }

  peekAt() {
    const { idx, left } = this.plot.cursor;
    const known = idx != null && left >= 0 && this.data.slice(1).some((column) => column[idx] != null);
    this.peek.hidden = !known;
    if (!known) return;
    const rows = this.series.map(({ label, color }, i) => [label, color, this.data[i + 1][idx]]);
    const shown = this.stacked ? rows.filter(([, , v]) => v > 0).reverse() : rows;
    this.peek.replaceChildren(
      h("div", { class: "at" }, clock(this.data[0][idx])),
      ...shown.map(([label, color, v]) => h("div", {}, h("i", { class: "swatch", style: `--c: var(--${color})` }), label, h("b", {}, this.format(v)))),
    );
    const right = left > this.plot.over.clientWidth / 2;
    this.peek.style.left = right ? "" : `${left + 12}px`;
    this.peek.style.right = right ? `${this.plot.over.clientWidth - left + 12}px` : "";
    this.peek.style.top = "6px";
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.box;
    if (width && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
  }
}

function redraw() {
  CHARTS.forEach((chart) => chart.draw());
}
