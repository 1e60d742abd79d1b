// Line charts by uPlot, which is loaded before the modules: series are [name, [[x, y], …]]; a missing y leaves a gap.
// A series with a third item, its intervals [[x, low, high], …], is points of measurements, which no line joins.
import {make, number, time} from "./page.js";

const COLOURS = 6, HEIGHT = 190, MINUTE = 60, DAY = 86_400;
// Seconds between two positions in time that have a label.
const STEPS = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720].map((minutes) => minutes * MINUTE), ...[1, 2, 5, 10, 30, 90, 365].map((days) => days * DAY)];
// Up to so many positions, each value is a visible point.
const DOTTED = 40;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => value === null || value === undefined ? "–" : Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(1) : number(Number(value.toPrecision(4)));

// Charts of one view with the same `x` show the same position under the pointer.
export function chart(title, series, {x = "version", isTime = false, integer = !isTime, none = "No value yet."} = {}) {
  const shown = series.filter(([, line]) => line.some(([, y]) => Number.isFinite(y))).slice(0, COLOURS);
  if (!shown.length) return make("p", {className: "quiet"}, none);
  const xs = [...new Set(shown.flatMap(([, line]) => line.map(([at]) => at)))].sort((first, second) => first - second);
  const columns = shown.map(([, line]) => { const at = new Map(line); return xs.map((each) => Number.isFinite(at.get(each)) ? at.get(each) : null); });
  const box = make("div", {className: "chart", dataset: {points: String(xs.length)}});
  const last = shown.map(([name, line]) => [name, line.filter(([, y]) => Number.isFinite(y)).at(-1)]);
  const where = (at) => isTime ? time(1000 * at) : `${x} ${number(at)}`;
  const described = `${title}: ${last.map(([name, [at, y]]) => `${name} ${short(y)} at ${where(at)}`).join(", ")}`;
  let plot = null;
  const draw = () => {
    plot?.destroy();
    plot = new uPlot(options(box.clientWidth, shown, {x, isTime, integer, isSparse: xs.length <= DOTTED}), [xs, ...columns], box);
    showLast(plot);
    const canvas = box.querySelector(".u-wrap");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", described);
  };
  new ResizeObserver(() => {
    if (!box.clientWidth) return;
    if (plot === null) draw(); else plot.setSize({width: box.clientWidth, height: HEIGHT});
  }).observe(box);
  box.redraw = () => { if (plot !== null) draw(); };
  return box;
}

const range = (_, low, high) => low === null || (low === 0 && high === 0) ? [0, 1] : low === high ? uPlot.rangeNum(Math.min(0, low), Math.max(0, high), 0.1, true) : uPlot.rangeNum(low, high, 0.1, true);

// For a single value uPlot proposes a range that ends years later; the value is shown in the middle instead.
const xRange = (margin) => ({data: [xs]}, low, high) => xs.length === 1 ? [xs[0] - margin, xs[0] + margin] : [low, high];

// A position in time as short as the ticks allow: seconds within two minutes, days beyond one.
function clock(_, ticks) {
  const span = ticks.at(-1) - ticks[0];
  const parts = span > DAY ? {month: "short", day: "numeric"} : {hour: "numeric", minute: "2-digit", ...(span < 2 * MINUTE ? {second: "2-digit"} : {})};
  return ticks.map((tick) => new Date(1000 * tick).toLocaleString([], parts));
}

// Tests read the width of the horizontal axis, because a canvas has no text.
const showSpan = ({root, scales: {x}}) => { root.parentElement.dataset.span = String(x.max - x.min); };

// Without a pointer, the legend has the last values.
function showLast(plot) {
  if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({idxs: plot.data.map((column) => column.findLastIndex((value) => value !== null))}, false);
}

// Draw the intervals of measurements as vertical lines.
const drawIntervals = (shown) => (plot) => {
  const {ctx} = plot, ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  ctx.clip();
  ctx.lineWidth = 1.5 * ratio;
  for (const [at, [, , intervals]] of shown.entries()) {
    ctx.strokeStyle = style(`--series${at}`);
    for (const [x, low, high] of intervals ?? []) {
      const across = plot.valToPos(x, "x", true);
      ctx.beginPath();
      ctx.moveTo(across, plot.valToPos(low, "y", true));
      ctx.lineTo(across, plot.valToPos(high, "y", true));
      ctx.stroke();
    }
  }
  ctx.restore();
};

function options(width, shown, {x, isTime, integer, isSparse}) {
  const quiet = style("--quiet"), line = style("--grid");
  const axis = {stroke: quiet, grid: {stroke: line, width: 1}, ticks: {stroke: line, width: 1, size: 4}, font: "11px system-ui, sans-serif"};
  const values = (_, ticks) => ticks.map(short);
  return {
    width, height: HEIGHT, scales: {x: {time: isTime, range: xRange(isTime ? MINUTE : 1)}, y: {range}}, cursor: {sync: {key: x}, y: false}, legend: {live: true}, hooks: {setCursor: [showLast], draw: [showSpan, drawIntervals(shown)]},
    padding: [8, 12, 0, 0],
    axes: [{...axis, size: 28, space: isTime ? 84 : 50, ...(isTime ? {incrs: STEPS} : {}), values: isTime ? clock : (_, ticks) => ticks.map((tick) => integer && !Number.isInteger(tick) ? "" : number(tick))},
      {...axis, size: 48, values}],
    series: [{label: isTime ? "time" : x, value: (_, value) => value === null ? "–" : isTime ? time(1000 * value) : number(value)},
      ...shown.map(([label, , intervals], at) => ({label, stroke: style(`--series${at}`), width: 1.75, spanGaps: true, ...(intervals ? {paths: () => null} : {}),
        points: {size: intervals ? 7 : 5, show: isSparse || Boolean(intervals)}, value: (_, value) => short(value)}))],
  };
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const box of document.querySelectorAll(".chart")) box.redraw?.();
});
