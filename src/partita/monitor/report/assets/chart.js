// Figures: a question as title, unit and rows as subtitle, exact numbers under the pointer, a click pins them, arrow keys walk.
function figure(options) {
  const f = { options, table: () => [], svg: null };
  f.read = el("output", { "aria-live": "polite" });
  f.body = el("div", { class: "body" });
  f.pins = el("div", { class: "pins mono" });
  f.help = el("div", { class: "help", hidden: true }, (options.help || []).map((line) => el("p", {}, line)));
  f.title = el("h3", {}, options.title);
  f.sub = el("p", { class: "sub" }, options.subtitle || "");
  const name = (options.id || "figure").replace(/[^a-z0-9-]/gi, "-");
  f.tools = el("span", { class: "tools" },
    !options.table && el("button", { class: "bare", type: "button", title: "save this figure as SVG", onclick: () => f.svg && download(name + ".svg", "image/svg+xml", (f.text || exportSVG)(f.svg)) }, "SVG"),
    el("button", { class: "bare", type: "button", title: "save the numbers as CSV", onclick: () => download(name + ".csv", "text/csv", f.table().map((r) => r.map(csvCell).join(",")).join("\n") + "\n") }, "CSV"),
    options.help && el("button", { class: "bare", type: "button", "aria-label": "how to read this figure", "aria-expanded": "false", onclick: (e) => { f.help.hidden = !f.help.hidden; e.currentTarget.setAttribute("aria-expanded", String(!f.help.hidden)); } }, "?"));
  f.node = el("figure", { id: options.id }, el("header", {}, el("div", {}, f.title, f.sub), f.tools), f.help, options.controls, f.body, f.read, f.pins);
  f.say = (text) => { f.read.textContent = text; };
  f.empty = (why) => { f.svg = null; f.table = () => []; f.body.replaceChildren(el("p", { class: "empty" }, why)); f.say(""); };
  f.pin = (text) => {
    if ([...f.pins.children].some((p) => p.dataset.text === text)) return;
    if (f.pins.children.length >= 6) f.pins.firstChild.remove();
    const line = el("div", { "data-text": text }, text, " ", el("button", { class: "bare", type: "button", "aria-label": "unpin", onclick: () => line.remove() }, "×"));
    f.pins.append(line);
  };
  return f;
}
function exportSVG(svg) {
  const copy = svg.cloneNode(true);
  const box = svg.viewBox.baseVal;
  copy.setAttribute("xmlns", SVG); copy.setAttribute("width", box.width); copy.setAttribute("height", box.height);
  copy.prepend(sv("rect", { x: box.x, y: box.y, width: box.width, height: box.height, fill: "var(--paper)" }));
  copy.prepend(sv("style", {}, "text{font:12px sans-serif;fill:var(--ink)} .tick,.axis{font-size:11px;fill:var(--soft)} .halo{paint-order:stroke;stroke:var(--paper);stroke-width:4px}"));
  copy.querySelectorAll(".cursor").forEach((n) => n.remove());
  return new XMLSerializer().serializeToString(copy).replace(/var\((--[a-z]+)\)/g, (_, name) => token(name) || "#888");
}
function niceTicks(lo, hi, count) {
  const span = hi - lo || 1, raw = span / Math.max(1, count), base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * base).find((s) => s >= 0.75 * raw) || raw;
  const ticks = [];
  for (let v = Math.ceil(lo / step - 1e-9) * step; v <= hi + step * 1e-6; v += step) ticks.push(Math.abs(v) < step * 1e-6 ? 0 : Number(v.toPrecision(12)));
  return ticks;
}
function logTicks(lo, hi, count) {
  const a = Math.floor(Math.log2(lo) + 1e-9), b = Math.ceil(Math.log2(hi) - 1e-9), stride = Math.max(1, Math.ceil((b - a) / Math.max(1, count)));
  const ticks = [];
  for (let k = Math.ceil(a / stride) * stride; k <= b; k += stride) if (2 ** k >= lo * 0.999 && 2 ** k <= hi * 1.001) ticks.push(2 ** k);
  return ticks;
}
function axisScale(domain, range, log) {
  const f = log ? Math.log : (v) => v, lo = f(domain[0]), span = f(domain[1]) - lo || 1;
  const scale = (v) => range[0] + ((f(v) - lo) / span) * (range[1] - range[0]);
  scale.invert = (p) => { const t = lo + ((p - range[0]) / (range[1] - range[0])) * span; return log ? Math.exp(t) : t; };
  return scale;
}
function widen([lo, hi], log) { if (lo === hi) return log ? [lo / 2, hi * 2] : [lo - (Math.abs(lo) * 0.1 || 1), hi + (Math.abs(hi) * 0.1 || 1)]; return [lo, hi]; }
// spec: {x:{label,log,domain}, y:{...}, series:[{name,kind:line|band|dots|rule,x,y,lo,hi,colour,dash,label,context,r,text}], height}
function xy(f, spec) {
  const W = Math.max(260, f.body.clientWidth || 480), H = spec.height || 240, narrow = W < 380;
  const beside = spec.series.filter((s) => s.label && s.kind !== "dots" && s.kind !== "rule");
  const longest = Math.max(0, ...beside.map((s) => Math.min(22, s.label.length)));
  const M = { l: 50, r: beside.length && !narrow ? 18 + longest * 6.4 : 14, t: 10, b: 38 };
  const finite = (axis, keys) => spec.series.filter((s) => !s.aside).flatMap((s) => keys.flatMap((k) => s[k] || [])).filter((v) => ok(v) && (!axis.log || v > 0));
  const xr = spec.x.domain || extent(finite(spec.x, ["x"])), yr = spec.y.domain || extent([...finite(spec.y, ["y", "lo", "hi"]), ...(spec.y.include || [])]);
  f.table = () => [["series", spec.x.label, spec.y.label, "low", "high"], ...spec.series.flatMap((s) => (s.x || []).map((x, i) => [s.name, x, s.y ? s.y[i] : "", s.lo ? s.lo[i] : "", s.hi ? s.hi[i] : ""]))];
  if (!xr || !yr) return f.empty(spec.why || "Nothing to draw: no finite number was recorded.");
  const xd = widen(xr, spec.x.log), yd = spec.y.domain ? yr : widen(yr, spec.y.log);
  if (!spec.y.domain && !spec.y.log) { const pad = (yd[1] - yd[0]) * 0.05; yd[0] = yd[0] >= 0 && yd[0] < pad * 4 ? 0 : yd[0] - pad; yd[1] += pad; }
  const X = axisScale(xd, [M.l, W - M.r], spec.x.log), Y = axisScale(yd, [H - M.b, M.t], spec.y.log);
  const svg = sv("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "aria-label": `${f.options.title}. Arrow keys walk through the numbers.` });
  const inside = (v, d) => v >= d[0] - 1e-12 && v <= d[1] + 1e-12;
  for (const t of (spec.y.log ? logTicks : niceTicks)(yd[0], yd[1], (H - 48) / 40)) {
    svg.append(sv("line", { x1: M.l, x2: W - M.r, y1: Y(t), y2: Y(t), stroke: "var(--hair)" }), sv("text", { class: "tick", x: M.l - 6, y: Y(t) + 4, "text-anchor": "end" }, tickText(t)));
  }
  const perX = (W - M.l - M.r) / 64;
  for (const t of (spec.x.log ? logTicks : niceTicks)(xd[0], xd[1], perX)) if (!spec.x.whole || Number.isInteger(t)) svg.append(sv("text", { class: "tick", x: X(t), y: H - M.b + 16, "text-anchor": "middle" }, tickText(t)));
  svg.append(sv("line", { x1: M.l, x2: W - M.r, y1: H - M.b, y2: H - M.b, stroke: "var(--soft)", "stroke-opacity": 0.6 }));
  svg.append(sv("text", { class: "axis", x: W - M.r, y: H - 6, "text-anchor": "end" }, spec.x.label + (spec.x.log ? ", log scale" : "")), sv("text", { class: "axis", x: 4, y: H - 6 }, clip("up: " + spec.y.label + (spec.y.log ? ", log scale" : ""), Math.max(16, Math.floor(W / 11)))));
  const labels = [], targets = [];
  spec.series.forEach((s) => {
    const colour = s.colour || "var(--ink)";
    if (s.kind === "rule") {
      const vertical = ok(s.at.x), v = vertical ? s.at.x : s.at.y;
      if (!inside(v, vertical ? xd : yd)) return;
      svg.append(sv("line", vertical ? { x1: X(v), x2: X(v), y1: M.t, y2: H - M.b, stroke: colour, "stroke-dasharray": "4 4" } : { x1: M.l, x2: W - M.r, y1: Y(v), y2: Y(v), stroke: colour, "stroke-dasharray": "4 4" }));
      const flip = vertical && X(v) + 8 + 6.4 * (s.label || "").length > W - M.r;
      svg.append(sv("text", vertical ? { class: "axis halo", x: X(v) + (flip ? -4 : 4), y: narrow ? H - M.b - 6 : M.t + 9, "text-anchor": flip ? "end" : "start" } : { class: "axis halo", x: s.end ? W - M.r - 4 : M.l + 6, y: Y(v) - 4, "text-anchor": s.end ? "end" : "start" }, s.label || ""));
      return;
    }
    if (s.kind === "band") {
      const good = s.x.map((_, i) => i).filter((i) => ok(s.lo[i]) && ok(s.hi[i]) && (!spec.y.log || s.lo[i] > 0));
      const at = (i, v) => `${X(s.x[i]).toFixed(1)} ${Y(Math.min(Math.max(v, yd[0]), yd[1])).toFixed(1)}`;
      if (good.length) svg.append(sv("path", { d: "M" + good.map((i) => at(i, s.hi[i])).join("L") + "L" + good.slice().reverse().map((i) => at(i, s.lo[i])).join("L") + "Z", fill: colour, "fill-opacity": 0.14 }));
      return;
    }
    const points = s.x.map((x, i) => ({ s, i, x, y: s.y[i], px: X(x), py: Y(s.y[i]) })).filter((p) => ok(p.x) && ok(p.y) && ok(p.px) && ok(p.py) && (s.aside ? inside(p.y, yd) : true));
    if (s.kind === "dots") points.forEach((p) => svg.append(sv("circle", { cx: p.px, cy: p.py, r: s.r || 3.5, fill: Array.isArray(s.colours) ? s.colours[p.i] : colour, "fill-opacity": s.context ? 0.35 : 0.85, stroke: s.edge, "stroke-width": s.edge && 1.2 })));
    else {
      let d = "", lastIndex = -2;
      for (const p of points) { d += (p.i === lastIndex + 1 ? "L" : "M") + p.px.toFixed(1) + " " + p.py.toFixed(1); lastIndex = p.i; }
      svg.append(sv("path", { d, fill: "none", stroke: colour, "stroke-width": s.context ? 1 : s.width || 1.8, "stroke-opacity": s.context ? 0.28 : 1, "stroke-dasharray": s.dash ? "5 4" : null, "stroke-linejoin": "round" }));
      if (points.length === 1) svg.append(sv("circle", { cx: points[0].px, cy: points[0].py, r: 3.5, fill: colour }));
      if (s.label && points.length) labels.push({ text: clip(s.label, 22), colour, x: points[points.length - 1].px, y: points[points.length - 1].py });
    }
    if (!s.mute) targets.push(...points);
  });
  labels.sort((a, b) => a.y - b.y).forEach((l, i) => { l.y = Math.max(l.y, i ? labels[i - 1].y + 14 : 12); });
  const over = labels.length ? labels[labels.length - 1].y - (H - M.b) : 0;
  labels.forEach((l) => { if (over > 0) l.y -= over; const early = l.x < W - M.r - 40; /* a line that ends inside has its name where it ends */ svg.append(sv("text", early ? { class: "halo", x: l.x + 6, y: l.y + 4, fill: l.colour } : narrow ? { class: "halo", x: W - M.r - 2, y: l.y - 6, "text-anchor": "end", style: null, fill: l.colour } : { class: "halo", x: W - M.r + 6, y: l.y + 4, fill: l.colour }, l.text)); svg.lastChild.style.fill = l.colour; });
  const cursor = sv("g", { class: "cursor" });
  svg.append(cursor);
  const describe = spec.describe || ((p) => `${p.s.name}: ${spec.x.label} ${fmt(p.x)}, ${spec.y.label} ${fmt(p.y)}${p.s.lo ? `, 5 to 95 %: ${fmt(p.s.lo[p.i])} to ${fmt(p.s.hi[p.i])}` : ""}`);
  let current = null;
  const show = (p) => { current = p; cursor.replaceChildren(sv("circle", { cx: p.px, cy: p.py, r: 5.5, fill: "none", stroke: "var(--accent)", "stroke-width": 2 })); f.say(describe(p)); };
  svg.addEventListener("pointermove", (e) => {
    const box = svg.getBoundingClientRect(), px = ((e.clientX - box.left) / box.width) * W, py = ((e.clientY - box.top) / box.height) * H;
    let best = null, least = 40 * 40;
    for (const p of targets) { const d = (p.px - px) ** 2 + ((p.py - py) * (p.s.kind === "dots" ? 1 : 0.5)) ** 2; if (d < least) { least = d; best = p; } }
    if (best) show(best);
  });
  svg.addEventListener("pointerleave", () => { cursor.replaceChildren(); });
  svg.addEventListener("click", () => { if (current) { f.pin(describe(current)); if (spec.onPick) spec.onPick(current); } });
  svg.addEventListener("keydown", (e) => {
    if (!targets.length) return;
    const i = current ? targets.findIndex((p) => p.s.name === current.s.name && p.i === current.i) : -1;
    if (e.key === "ArrowRight" || e.key === "ArrowLeft") { show(targets[Math.min(Math.max(i + (e.key === "ArrowRight" ? 1 : -1), 0), targets.length - 1)]); e.preventDefault(); }
    if (e.key === "ArrowUp" || e.key === "ArrowDown") {
      const names = [...new Set(targets.map((p) => p.s.name))], at = Math.max(0, names.indexOf(current ? current.s.name : names[0]));
      const next = names[Math.min(Math.max(at + (e.key === "ArrowDown" ? 1 : -1), 0), names.length - 1)];
      const line = targets.filter((p) => p.s.name === next); show(line.find((p) => current && p.x >= current.x) || line[0]); e.preventDefault();
    }
    if (e.key === "Enter" && current) { f.pin(describe(current)); if (spec.onPick) spec.onPick(current); }
  });
  f.svg = svg; f.X = X; f.Y = Y; f.frame = { W, H, M };
  f.body.replaceChildren(svg);
}
// spec: {rows, columns, value(r, c), colour(v), rowLabel, columnLabel, describe(r, c, v), cursor}
function heat(f, spec) {
  const W = Math.max(260, f.body.clientWidth || 480), M = { l: 34, r: 10, t: 4, b: 34 }, w = W - M.l - M.r;
  const cell = Math.min(16, Math.max(4, 220 / spec.rows)), h = spec.height || Math.max(16, spec.rows * cell), H = h + M.t + M.b;
  const canvas = document.createElement("canvas");
  canvas.width = spec.columns; canvas.height = spec.rows;
  const g = canvas.getContext("2d");
  for (let r = 0; r < spec.rows; r++) for (let c = 0; c < spec.columns; c++) { const v = spec.value(r, c); g.fillStyle = ok(v) ? spec.colour(v) : "rgba(128,128,128,0.25)"; g.fillRect(c, r, 1, 1); }
  const svg = sv("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: 0, "aria-label": `${f.options.title}. Arrow keys walk through the cells.` });
  const image = sv("image", { x: M.l, y: M.t, width: w, height: h, preserveAspectRatio: "none", href: canvas.toDataURL() });
  image.style.imageRendering = "pixelated";
  svg.append(image);
  const everyRow = Math.max(1, Math.ceil(14 / (h / spec.rows)));
  for (let r = 0; r < spec.rows; r += everyRow) svg.append(sv("text", { class: "tick", x: M.l - 5, y: M.t + ((r + 0.5) * h) / spec.rows + 4, "text-anchor": "end" }, spec.rowName ? spec.rowName(r) : r));
  const n = Math.max(1, Math.min(spec.columns - 1, Math.floor(w / 70)));
  for (let k = 0; k <= n; k++) { const c = Math.round((k * (spec.columns - 1)) / n); svg.append(sv("text", { class: "tick", x: M.l + ((c + 0.5) * w) / spec.columns, y: M.t + h + 14, "text-anchor": k === 0 && spec.columns > 1 ? "start" : k === n && spec.columns > 1 ? "end" : "middle" }, spec.columnName ? spec.columnName(c) : c)); if (spec.columns === 1) break; }
  svg.append(sv("text", { class: "axis", x: W - M.r, y: H - 3, "text-anchor": "end" }, spec.columnLabel), sv("text", { class: "axis", x: 2, y: H - 3 }, "down: " + spec.rowLabel));
  const cursor = sv("rect", { class: "cursor", fill: "none", stroke: "var(--accent)", "stroke-width": 2, visibility: "hidden", width: Math.max(3, w / spec.columns), height: Math.max(3, h / spec.rows) });
  svg.append(cursor);
  let at = [0, 0];
  const show = (r, c) => { at = [r, c]; cursor.setAttribute("x", M.l + (c * w) / spec.columns); cursor.setAttribute("y", M.t + (r * h) / spec.rows); cursor.setAttribute("visibility", "visible"); f.say(spec.describe(r, c, spec.value(r, c))); if (spec.onMove) spec.onMove(r, c); };
  svg.addEventListener("pointermove", (e) => { const box = svg.getBoundingClientRect(); const c = Math.floor((((e.clientX - box.left) / box.width) * W - M.l) / (w / spec.columns)), r = Math.floor((((e.clientY - box.top) / box.height) * H - M.t) / (h / spec.rows)); if (r >= 0 && c >= 0 && r < spec.rows && c < spec.columns) show(r, c); });
  svg.addEventListener("click", () => { f.pin(spec.describe(at[0], at[1], spec.value(at[0], at[1]))); if (spec.onPick) spec.onPick(at[0], at[1]); });
  svg.addEventListener("keydown", (e) => { const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[e.key]; if (move) { show(Math.min(Math.max(at[0] + move[0], 0), spec.rows - 1), Math.min(Math.max(at[1] + move[1], 0), spec.columns - 1)); e.preventDefault(); } if (e.key === "Enter") f.pin(spec.describe(at[0], at[1], spec.value(at[0], at[1]))); });
  f.table = () => [[spec.rowLabel, spec.columnLabel, "value"], ...Array.from({ length: spec.rows }, (_, r) => Array.from({ length: spec.columns }, (_, c) => [spec.rowName ? spec.rowName(r) : r, spec.columnName ? spec.columnName(c) : c, spec.value(r, c)])).flat()];
  f.svg = svg; f.showCell = show;
  f.body.replaceChildren(svg);
}
function colourScale(lo, hi, colour, signed) {
  const W = 190, s = sv("svg", { viewBox: `0 0 ${W} 26`, width: W, height: 26, role: "img", "aria-label": `colour scale from ${fmt(lo, 3)} to ${fmt(hi, 3)}` });
  for (let i = 0; i < 60; i++) s.append(sv("rect", { x: 1 + (i * (W - 2)) / 60, y: 1, width: (W - 2) / 60 + 0.6, height: 10, fill: colour(lo + ((i + 0.5) / 60) * (hi - lo)) }));
  s.append(sv("text", { class: "tick", x: 1, y: 23 }, fmt(lo, 3)), sv("text", { class: "tick", x: W - 1, y: 23, "text-anchor": "end" }, fmt(hi, 3)));
  if (signed) s.append(sv("text", { class: "tick", x: W / 2, y: 23, "text-anchor": "middle" }, "0"));
  return s;
}
