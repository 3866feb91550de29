// Home view: layers by heads. Everything below follows the selected head.
const SEEN = { layer: 0, head: 0, step: 0, metric: "normalized_entropy", diff: false };
const followers = [];
function select(layer, head, focus) {
  SEEN.layer = layer; SEEN.head = head; state.head = `L${layer}H${head}`;
  for (const f of followers) f();
  writeHash();
  if (focus) { const cell = document.getElementById(`cell-${layer}-${head}`); if (cell) cell.focus({ preventScroll: true }); }
}
function atlasView(run, other) {
  const codes = (l, h) => (run.verdicts[`${l},${h}`] || { codes: [] }).codes;
  const metric = el("select", { id: "metric", "aria-label": "metric" }, Object.keys(METRICS).filter((m) => run.values[m]).map((m) => el("option", { value: m }, METRICS[m].label)));
  const scrub = el("input", { id: "step", type: "range", min: 0, max: Math.max(0, run.steps.length - 1), value: SEEN.step, "aria-label": "step" });
  const when = el("span", { id: "step-value", class: "num" });
  const diff = other && el("button", { id: "difference", type: "button", "aria-pressed": String(SEEN.diff), onclick: () => { SEEN.diff = !SEEN.diff; diff.setAttribute("aria-pressed", String(SEEN.diff)); draw(); } }, clip(`difference to ${other.title}`, 60));
  const holder = el("div", { class: "scroll" }), legend = el("span", { id: "legend" }), note = el("span", { class: "small soft" }), picked = el("div", { class: "picked", id: "picked", "aria-live": "polite" });
  const layers = run.sites.length, most = Math.max(1, ...run.sites.map((s) => s.heads));
  const read = (layer, head) => {
    const a = run.at(SEEN.metric, layer, head, SEEN.step);
    return SEEN.diff && other ? other.at(SEEN.metric, layer, head, Math.min(SEEN.step, other.steps.length - 1)) - a : a;
  };
  let cells = new Map();
  function describe(layer, head) {
    const v = read(layer, head), marks = codes(layer, head);
    return `${place(layer, head)} at ${stepName(run, SEEN.step)}: ${METRICS[SEEN.metric].label} ${SEEN.diff ? "differs by " : ""}${fmt(v)}${marks.length ? " · " + marks.join(", ") : ""} · ${run.sites[layer].cross ? "cross-attention " : ""}${tail(run.sites[layer].name, 60)}`;
  }
  function colourer() {
    if (SEEN.diff && other) {
      const all = run.index.map(([l, h]) => read(l, h)), top = Math.max(1e-9, ...all.filter(ok).map(Math.abs));
      return { lo: -top, hi: top, colour: (v) => diverging(v / top), signed: true };
    }
    const [lo, hi] = domainOf(run, SEEN.metric);
    return { lo, hi, colour: (v) => cividis((v - lo) / (hi - lo || 1)), signed: false };
  }
  function draw() {
    metric.value = SEEN.metric; scrub.value = SEEN.step; when.textContent = stepName(run, SEEN.step);
    const scale = colourer();
    legend.replaceChildren(colourScale(scale.lo, scale.hi, scale.colour, scale.signed));
    note.textContent = METRICS[SEEN.metric].note + ". A corner mark: the head needs a look." + (run.sites.some((s) => s.cross) ? " ×: cross-attention." : "");
    const room = holder.clientWidth || 900, left = 56, right = 64;
    const cell = Math.max(14, Math.min(30, Math.floor((room - left - right) / most))), W = left + most * cell + right, top = 16, H = top + layers * cell + 18;
    const svg = sv("svg", { class: "cells", viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "grid", "aria-label": "head atlas" });
    const everyHead = Math.max(1, Math.ceil(22 / cell));
    for (let h = 0; h < most; h += everyHead) svg.append(sv("text", { class: "tick", x: left + (h + 0.5) * cell, y: 11, "text-anchor": "middle" }, h));
    svg.append(sv("text", { class: "axis", x: left + most * cell + 8, y: 11 }, "mean"), sv("text", { class: "axis", x: left, y: H - 4 }, "across: head"), sv("text", { class: "axis", x: 2, y: 11 }, "layer"));
    cells = new Map();
    for (let l = 0; l < layers; l++) {
      const y = top + l * cell, heads = run.sites[l].heads;
      svg.append(sv("text", { class: "tick", x: left - 8, y: y + cell / 2 + 4, "text-anchor": "end" }, run.sites[l].cross ? `× ${l}` : l));
      for (let h = 0; h < heads; h++) {
        const v = read(l, h), x = left + h * cell;
        const rect = sv("rect", { class: "cell", id: `cell-${l}-${h}`, x: x + 1, y: y + 1, width: cell - 2, height: cell - 2, rx: 2, fill: ok(v) ? scale.colour(v) : "none", stroke: ok(v) ? "none" : "var(--hair)", tabindex: l === SEEN.layer && h === SEEN.head ? 0 : -1, role: "gridcell", "aria-label": describe(l, h), "data-value": ok(v) ? v : "" });
        rect.addEventListener("pointerenter", () => { picked.textContent = describe(l, h); });
        rect.addEventListener("click", () => select(l, h, true));
        rect.addEventListener("focus", () => { picked.textContent = describe(l, h); });
        svg.append(rect); cells.set(`${l},${h}`, rect);
        if (!ok(v)) svg.append(sv("path", { d: `M${x + 4} ${y + cell - 4}L${x + cell - 4} ${y + 4}`, stroke: "var(--soft)", "stroke-opacity": 0.4, "pointer-events": "none" }));
        if (codes(l, h).length) svg.append(sv("path", { d: `M${x + cell - 1} ${y + 1}h-7l7 7z`, fill: "var(--paper)", stroke: "var(--error)", "stroke-width": 1.4, "pointer-events": "none" }));
      }
      const mean = meanOf(Array.from({ length: heads }, (_, h) => read(l, h)));
      svg.append(sv("text", { class: "tick", x: left + most * cell + 8, y: y + cell / 2 + 4 }, ok(mean) ? fmt(mean, 3) : ""));
    }
    const ring = sv("rect", { x: left + SEEN.head * cell, y: top + SEEN.layer * cell, width: cell, height: cell, rx: 3, fill: "none", stroke: "var(--accent)", "stroke-width": 2.5, "pointer-events": "none" });
    svg.append(ring);
    svg.addEventListener("pointerleave", () => { picked.textContent = describe(SEEN.layer, SEEN.head); });
    svg.addEventListener("keydown", (e) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[e.key];
      if (!move) return;
      const l = Math.min(Math.max(SEEN.layer + move[0], 0), layers - 1);
      select(l, Math.min(Math.max(SEEN.head + move[1], 0), run.sites[l].heads - 1), true); e.preventDefault();
    });
    holder.replaceChildren(svg); fig.svg = svg;
    picked.textContent = describe(SEEN.layer, SEEN.head);
  }
  metric.addEventListener("change", () => { SEEN.metric = metric.value; state.metric = SEEN.metric; draw(); for (const f of followers) if (f !== draw) f(); writeHash(); });
  scrub.addEventListener("input", () => { SEEN.step = Number(scrub.value); state.step = run.steps[SEEN.step]; draw(); for (const f of stepFollowers) f(); writeHash(); });
  const fig = figure({ id: "atlas-figure", title: "Which heads need a look?", subtitle: `${run.index.length} head${run.index.length === 1 ? "" : "s"} in ${layers} layer${layers === 1 ? "" : "s"}, ${run.steps.length} recorded ${run.unit}${run.steps.length === 1 ? "" : "s"}`,
    help: ["Each square is one head; arrow keys move, the figures below follow. The number at the right is the mean of the layer.", `Worrying: dark squares under H / log n (one key), the brightest ones (no selection), largest scores above ${run.thresholds.logit_warning}.`] });
  fig.table = () => [["layer", "head", "name", "cross", "step", SEEN.metric], ...run.index.map(([l, h]) => [l, h, run.sites[l].name, run.sites[l].cross ? 1 : 0, run.steps[SEEN.step], read(l, h)])];
  fig.body.append(el("div", { class: "atlas" }, el("div", { class: "row" }, el("label", {}, "colour", metric), legend, el("div", { class: "scrub" }, el("label", { for: "step" }, run.frozen ? "input" : "time"), scrub, when), diff), holder, picked, note));
  fig.read.remove();
  followers.push(draw); redraws.push(draw);
  fig.draw = draw;
  return fig;
}
const stepFollowers = [];
