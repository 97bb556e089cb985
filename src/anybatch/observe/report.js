const byId = (id) => document.getElementById(id), data = JSON.parse(byId("data").textContent);
const { flow, events } = data, FULL = [data.x[0], Math.max(data.last, data.x[0] + 1)], charts = [];
const TOP = 8, FOOT = 26, END = 20, PAD = 5, SIGNS = { vanishing: "↓", exploding: "↑", unused: "∅", "not finite": "!" };
let view = FULL, cursor = null, layer = 0, figure = 0, frame = 0, smoothing = 0;
const redraw = () => { cancelAnimationFrame(frame); frame = requestAnimationFrame(() => charts.forEach(draw)); };
function make(parent, name, attributes, textContent = "") {
  const node = Object.assign(document.createElementNS(parent.namespaceURI, name), { textContent });
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  return parent.appendChild(node);
}
function format(v, unit) {
  if (v === null || v === undefined) return "none";
  const size = Math.abs(v), power = Math.min(Math.floor(Math.log2(Math.max(size, 1) * 1.0005) / 10), 4);
  if (unit === "bytes") return `${+(v / 1024 ** power).toPrecision(4)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  if (size && (size < 1e-3 || size >= 1e7)) return v.toExponential(2).replace(/\.?0*e\+?/, "e");
  return (+v.toPrecision(size >= 1e4 ? 7 : 4)).toLocaleString("en", { maximumFractionDigits: 20 });
}
function ticks(low, high, most, log) {
  if (log && high - low < 2) return ticks(10 ** low, 10 ** high, most).map(Math.log10).filter(isFinite);
  const raw = (high - low) / most, base = 10 ** Math.floor(Math.log10(raw)), found = [];
  const step = log ? Math.ceil(raw) : base * ([1, 2, 5].find((one) => one * base >= raw * 0.999) || 10);
  for (let i = Math.ceil(low / step); i * step <= high && found.length < 20; i++) found.push(i * step);
  return found;
}
const move = (to) => { cursor = to && Math.min(Math.max(Math.round(to), FULL[0]), data.last); charts.forEach(point); };
const at = (xs, x) => Math.max(xs.findLastIndex((one) => one <= x), 0);
const even = (part, code) => part.least + (code - 2) / 65533 * (part.most - part.least);  // of 16 bits
const value = (part, code) => (code < 2 ? [null, 0][code] : part.log ? 10 ** even(part, code) : even(part, code));
const series = (part) => ({ name: part.name, x: flow.x, ...Object.fromEntries(["low", "high", "y"].map((key) =>
  [key, flow.x.map((_, i) => value(part, (part[key] || part.high)[i * flow.layers.length + layer]))])) });
function draw(chart) {  // all charts share the zoom and the pointer's place
  const { svg, heat } = chart, width = svg.parentNode.clientWidth || 320;
  const left = heat ? Math.min(210, width * 0.38) : 64, inner = width - left - END;
  const height = heat ? flow.layers.length * flow.row : 176;
  const x = (one) => PAD + (one - view[0]) / (view[1] - view[0]) * (inner - 2 * PAD);
  svg.setAttribute("viewBox", `0 0 ${width} ${height + TOP + FOOT}`);
  svg.replaceChildren();
  const inside = make(svg, "svg", { x: left, y: TOP, width: inner, height });
  Object.assign(chart, { left, inner, height, x, inside });
  for (const one of ticks(...view, Math.max(3, inner / 55)).filter(Number.isInteger)) {
    make(svg, "text", { x: left + x(one), y: TOP + height + 18, class: "middle" }, one.toLocaleString("en"));
    if (!heat) make(inside, "path", { class: "grid", d: `M${x(one)} 0v${height}` });
  }
  (heat ? drawHeat : drawCurves)(chart);
  for (const [i, kind] of heat ? [] : events.entries())
    for (const one of kind.x) make(inside, "path", { class: `event e${i}`, d: `M${x(one)} ${height}l-4 -9h8z` });
  for (const name of ["brush", "line"]) chart[name] = make(inside, "path", { class: name });
  point(chart);
}
function smooth(ys) {  // an exponential mean over so many points, without a bias at its start
  let sum = 0, weight = 0;
  const keep = 1 - 1 / smoothing;
  return ys.map((v) => ((v ?? null) === null ? null : (sum = sum * keep + v) / (weight = weight * keep + 1)));
}
function drawCurves({ svg, spec, height, left, inner, x, inside }) {
  const good = (v) => (v ?? null) !== null && (!spec.log || v > 0), to = spec.log ? Math.log10 : (v) => v;
  const near = (xs, i) => (xs[i + 1] ?? xs[i]) >= view[0] && (xs[i - 1] ?? xs[i]) <= view[1];
  const seen = spec.series.flatMap((one) => [...one.low, ...one.high, ...one.y]
    .filter((v, i) => good(v) && near(one.x, i % one.x.length)).map(to));
  let [low, high] = seen.length ? [Math.min(...seen), Math.max(...seen)] : [0, 1];
  const room = (high - low) * 0.06 || (spec.log ? 0.5 : Math.abs(high) * 0.1) || 1;
  [low, high] = [spec.log || low < 0 ? low - room : Math.max(0, low - room), high + room];
  const y = (v) => height * (1 - (to(v) - low) / (high - low));
  const unit = spec.unit === "bytes" ? 1024 ** Math.floor(Math.log2(Math.max(high, 1)) / 10) : 1;
  for (const one of ticks(low / unit, high / unit, 6, spec.log).map((v) => (spec.log ? 10 ** v : v * unit))) {
    make(inside, "path", { class: "grid", d: `M0 ${y(one)}h${inner}` });
    make(svg, "text", { x: left - 6, y: TOP + y(one) + 4, class: "end" }, format(one, spec.unit));
  }
  for (const [number, one] of spec.series.entries()) {
    const xs = one.x, wide = (x(FULL[1]) - x(FULL[0])) / xs.length + 0.5, paths = { band: "", raw: "", curve: "", dot: "" };
    const smoothed = smoothing && xs.length > 40 ? smooth(one.y) : one.y;
    for (const [i, v] of one.y.entries()) if (good(v)) {
      const to = i && good(one.y[i - 1]) ? "L" : "M";
      if (good(smoothed[i])) paths.curve += `${to}${x(xs[i])} ${y(smoothed[i])}h0`;
      if (smoothed !== one.y) paths.raw += `${to}${x(xs[i])} ${y(v)}h0`;
      if (xs.length <= 40) paths.dot += `M${x(xs[i])} ${y(v)}h0`;
      paths.band += `M${x(xs[i])} ${y(good(one.low[i]) ? one.low[i] : v)}V${y(one.high[i])}`;
    }
    for (const [kind, d] of Object.entries(paths))
      make(inside, "path", { class: `${kind} s${number}`, d, "stroke-width": kind === "band" ? wide : kind === "raw" ? 1 : 2 });
  }
}
const full = (j) => `${flow.layers[j]} ${flow.classes[j]}`.trim();
function drawHeat({ svg, left, inner, x, inside }) {
  const part = flow.figures[figure], { row, layers, marks } = flow, rows = layers.length, cells = {}, room = left / 5.9 - 3;
  for (const [k, code] of part.high.entries()) {
    const i = Math.floor(k / rows), from = x(flow.x[i]), to = x(flow.x[i + 1] ?? data.last + 1);
    const kind = code < 2 ? ["none", "zero"][code] : `c${Math.floor((code - 2) / 65533 * 15.99)}`;
    cells[kind] = (cells[kind] || "") + `M${from} ${k % rows * row}h${Math.max(to - from, 1)}v${row}H${from}z`;
  }
  for (const kind in cells) make(inside, "path", { class: `cell ${kind}`, d: cells[kind] });
  for (const [j, name] of layers.entries()) if (j % Math.ceil(13 / row) === 0) make(svg, "text",
    { class: `end ${j === layer ? "chosen" : marks[j] && "marked"}`, x: left - 6, y: TOP + (j + 0.5) * row + 4 },
    `${name.length > room ? `…${name.slice(1 - room)}` : full(j).length > room ? name : full(j)} ${SIGNS[marks[j]] || ""}`);
  make(inside, "rect", { class: "row", x: 1, y: layer * row, width: inner - 2, height: row });
  for (const [id, code] of [["least", 2], ["most", 65535]]) byId(id).textContent = format(value(part, code));
}
function point({ spec, line, readout, x, height }) {
  const here = cursor ?? data.last, shown = spec.series.map((one) => one.x[at(one.x, here)]), near = (one) => cursor && Math.abs(x(one) - x(here)) < 5;
  line.setAttribute("d", cursor === null ? "" : `M${x(here)} 0v${height}`);
  readout.textContent = `update ${format(Math.max(...shown))} `;
  for (const [number, one] of spec.series.entries()) {
    const [y, low, high] = [one.y, one.low, one.high].map((ys) => format(ys[at(one.x, here)], spec.unit));
    make(readout, "span", { class: `key s${number}` }, `${one.name} ${y}${low === high ? "" : ` (${low} to ${high})`}`);
  }
  for (const kind of events) if (kind.x.some(near)) make(readout, "b", {}, kind.name);
}
function zoom(low, high) {
  const all = FULL[1] - FULL[0], wide = Math.min(Math.max(high - low, 4), all);
  const from = Math.min(Math.max(low, FULL[0]), FULL[1] - wide);
  [view, byId("reset").hidden] = [[from, from + wide], wide === all];
  redraw();
}
function choose(to) {
  byId("layer-choice").value = layer = Math.min(Math.max(to, 0), flow.layers.length - 1);
  for (const one of document.querySelectorAll("button[data-layer]")) one.ariaPressed = one.dataset.layer == layer;
  const name = full(layer) + (flow.marks[layer] && ` (${flow.marks[layer]})`), part = flow.figures[figure];
  for (const { spec, heat, root } of charts.filter((one) => one.spec.layer)) {
    if (!heat) root.querySelector("h3").textContent = `${spec.title}: ${name}`;
    spec.series = heat ? [{ ...series(part), name: `${name}: ${part.name}` }]
      : flow.figures.filter((one) => one.log === spec.log).map(series);
  }
  redraw();
}
function start(root) {
  const svg = root.querySelector("svg"), spec = data.charts[root.id], readout = root.querySelector("output");
  const chart = { root, svg, spec, heat: spec.heat, readout }, box = () => svg.getBoundingClientRect();
  const where = (event) => event.clientX - box().left - chart.left;
  const update = (place) => view[0] + (place - PAD) / (chart.inner - 2 * PAD) * (view[1] - view[0]);
  const brush = (a, b) => chart.brush.setAttribute("d", `M${a} 0H${b}v${chart.height}H${a}z`);
  for (const one of spec.series) Object.assign(one, { x: data.x, low: one.y, high: one.y, ...one });
  let from;  // where a drag began
  svg.onpointerdown = (event) => { from = where(event); svg.setPointerCapture(event.pointerId); };
  svg.onpointermove = (event) => { brush(from ?? where(event), where(event)); move(update(where(event))); };
  svg.onpointerup = (event) => {
    const [low, high] = [from, where(event)].sort((a, b) => a - b);
    if (high - low >= 8) zoom(update(low), update(high));
    else if (chart.heat) choose(Math.floor((event.clientY - box().top - TOP) / flow.row));
    from = brush(0, 0);
  };
  svg.onpointercancel = () => { from = brush(0, 0); };
  svg.onpointerleave = () => from ?? move(null);
  svg.ondblclick = () => zoom(...FULL);
  svg.onkeydown = (event) => {
    const here = cursor ?? data.last, wide = view[1] - view[0], far = Math.max(1, wide / 100);
    const act = { ArrowLeft: () => move(here - far), ArrowRight: () => move(here + far), "+": () =>
      zoom(here - wide / 4, here + wide / 4), "-": () => zoom(here - wide, here + wide), Escape: () => zoom(...FULL),
      ...(chart.heat && { ArrowUp: () => choose(layer - 1), ArrowDown: () => choose(layer + 1) }) }[event.key];
    if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); }
  };
  charts.push(chart);
}
for (const part of flow?.figures || []) for (const key of ["low", "high"]) if (part[key])
  part[key] = new Uint16Array(Uint8Array.from(atob(part[key]), (one) => one.charCodeAt(0)).buffer);
document.querySelectorAll("figure[id]").forEach(start);
window.onresize = redraw;
document.onchange = () => {
  smoothing = +byId("smoothing")?.value || 0;
  if (!flow) return redraw();
  figure = +byId("figure").value;
  choose(+byId("layer-choice").value);
};
document.onclick = ({ target: on }) => (on.id === "reset" ? zoom(...FULL) : on.dataset.layer && choose(+on.dataset.layer));
flow ? choose(Math.max(flow.marks.findIndex((one) => one && one !== "unused"), 0)) : redraw();
