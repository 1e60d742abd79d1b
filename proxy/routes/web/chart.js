// A line chart as SVG: up to three series over one axis, each a list of [x, y]; a missing y leaves a gap.
const WIDTH = 360, HEIGHT = 150, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;
const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes, content) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (content !== undefined) made.textContent = content;
  return made;
}

const short = (value) => Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 0.001) ? value.toExponential(1) : String(Number(value.toPrecision(3)));

export function chart(label, series) {
  const points = series.flatMap(([, line]) => line).filter(([, y]) => Number.isFinite(y));
  const svg = element("svg", {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img"});
  const last = series.map(([name, line]) => [name, line.filter(([, y]) => Number.isFinite(y)).at(-1)]).filter(([, point]) => point);
  svg.append(element("title", {}, `${label}: ${last.map(([name, [x, y]]) => `${name} ${short(y)} at ${x}`).join(", ") || "no values yet"}`));
  if (!points.length) {
    svg.append(element("text", {x: LEFT, y: HEIGHT / 2}, "no values yet"));
    return svg;
  }
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
  const [minX, maxX] = [Math.min(...xs), Math.max(...xs)];
  let [minY, maxY] = [Math.min(...ys), Math.max(...ys)];
  if (minY === maxY) [minY, maxY] = [minY - 0.5, maxY + 0.5];
  const across = (x) => LEFT + (maxX === minX ? 0.5 : (x - minX) / (maxX - minX)) * (WIDTH - LEFT - RIGHT);
  const down = (y) => HEIGHT - BOTTOM - (y - minY) / (maxY - minY) * (HEIGHT - TOP - BOTTOM);
  for (const y of [minY, (minY + maxY) / 2, maxY]) {
    svg.append(element("line", {class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: down(y), y2: down(y)}));
    svg.append(element("text", {x: LEFT - 6, y: down(y) + 4, "text-anchor": "end"}, short(y)));
  }
  svg.append(element("text", {x: LEFT, y: HEIGHT - 4}, short(minX)));
  svg.append(element("text", {x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end"}, short(maxX)));
  series.forEach(([, line], index) => {
    let pen = "M";
    const way = line.map(([x, y]) => {
      if (!Number.isFinite(y)) { pen = "M"; return ""; }
      const step = `${pen}${across(x).toFixed(1)} ${down(y).toFixed(1)}`;
      pen = "L";
      return step;
    }).join("");
    svg.append(element("path", {class: `s${index}`, d: line.length === 1 ? `${way}h1` : way}));
  });
  return svg;
}
