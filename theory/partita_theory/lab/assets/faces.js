// The same scores read as a classifier, a contrastive loss and an attention row; and the scale for a wanted width.
function facesView() {
  const table = el("table", { id: "faces-table" });
  const goal = slider({ id: "f-target", label: "target, positive, or query of interest", min: 0, max: 63, step: 1, value: 0, show: (v) => `key ${v}`, on: (v) => { LAB.target = Math.round(v); draw(); } });
  const f = figure({ id: "faces-figure", title: "Which keys feel the loss?", subtitle: "gradient p - y on each score; the target is pulled up, the others pushed down in proportion to p", help: ["dL/dz_j = (p_j - [j = target]) / T for classification and contrast alike.", "Hard negatives are those with a large p; a lower temperature focuses on fewer of them.", "Attention has no target: its gradient depends on the values."] });
  function draw() {
    const n = LAB.z.length, t = Math.min(LAB.target, n - 1), g = gibbs(LAB.z, LAB.T), nll = -Math.log(g.p[t]), rest = gibbs(LAB.z.filter((_, i) => i !== t), LAB.T);
    const grad = g.p.map((p, j) => (p - (j === t ? 1 : 0)) / LAB.T), value = g.p.reduce((a, p, j) => a + p * j, 0);
    table.replaceChildren(el("tr", {}, ["read as", "the scores are", "what is read", "here"].map((h) => el("th", {}, h))), ...[["classification", "logits of classes", "loss = log Z - z_target", `${fmt(nll)} nats, confidence ${fmt(g.top, 3)}`], ["contrast", `similarities of ${n} candidates / T`, "loss, bound log N - loss, effective negatives", `${fmt(nll)}; bound ${fmt(Math.log(n) - nll)} of at most ${fmt(Math.log(n))}; ${fmt(rest.width, 3)} of ${n - 1} negatives`], ["attention", "query times keys, scaled", "mean value (here: mean key position)", `${fmt(value)}; width ${fmt(g.width, 3)}`]].map((r) => el("tr", {}, r.map((c) => el("td", {}, c)))));
    xy(f, { height: 210, x: { label: "key", whole: true, domain: [-0.5, n - 0.5] }, y: { label: "dL/dz" }, series: [...grad.map((v, j) => ({ name: "", kind: "line", mute: true, width: Math.max(2, 180 / n), colour: j === t ? lineColour(2) : lineColour(1), x: [j, j], y: [0, v] })), { name: "gradient", kind: "dots", r: 3, x: grad.map((_, j) => j), y: grad, colours: grad.map((_, j) => (j === t ? lineColour(2) : lineColour(1))) }, { name: "zero", kind: "rule", at: { y: 0 }, label: "", colour: "var(--soft)" }] });
  }
  LAB.watchers.push(draw); redraws.push(draw);
  return { ...lab("faces", "Three readings", "One softmax, three readings", "The scores and the temperature of the first figure, read in three ways.", el("div", { class: "scroll" }, table), el("div", { class: "bench" }, f.node, el("div", { class: "controls" }, goal))), draw };
}
function solverView() {
  const f = figure({ id: "solver-figure", title: "Which scale gives the width you ask for?", subtitle: "error of the entropy after each Newton step, nats", help: ["Solve H(scale) = log(width): scale <- scale + (H - target) / (scale Var(s)), kept inside a bracket.", "H falls with the scale unless all scores are equal, so there is at most one answer.", "A target wider than all keys, or narrower than the ties, has none: the nearest scale is given."] });
  let share = 0.4;
  const out = numbers([["g-width", "wanted width"], ["g-scale", "scale"], ["g-T", "temperature"], ["g-got", "width there"], ["g-steps", "steps"]]), why = el("p", { class: "small soft" });
  const ask = slider({ id: "g-target", label: "wanted width, share of the keys (log)", min: 0, max: 1, step: 0.01, value: share, show: (v) => fmt(v, 2), on: (v) => { share = v; draw(); } });
  const use = el("button", { type: "button", id: "g-use", onclick: () => { const r = solveScale(LAB.z, share * Math.log(LAB.z.length)); if (r.scale > 0) { LAB.T = Math.min(20, Math.max(0.05, 1 / r.scale)); changed("solver"); } } }, "use this temperature above");
  function draw() {
    const target = share * Math.log(LAB.z.length), r = solveScale(LAB.z, target), g = gibbs(LAB.z.map((v) => v * r.scale));
    out.show({ "g-width": fmt(Math.exp(target)), "g-scale": fmt(r.scale), "g-T": r.scale > 0 ? fmt(1 / r.scale) : "infinite", "g-got": fmt(g.width), "g-steps": String(r.path.length) });
    why.textContent = r.why;
    xy(f, { why: r.why || "no step was needed", height: 200, x: { label: "step", whole: true, domain: [0, Math.max(3, r.path.length - 1)] }, y: { label: "error, nats", log: true }, series: [{ name: "error", kind: "line", label: "", colour: lineColour(0), x: r.path.map((_, i) => i), y: r.path.map((p) => Math.max(p[1], 1e-16)) }, { name: "steps", kind: "dots", r: 4, colour: lineColour(0), x: r.path.map((_, i) => i), y: r.path.map((p) => Math.max(p[1], 1e-16)) }] });
  }
  LAB.watchers.push(draw); redraws.push(draw);
  return { ...lab("solver", "Solver", "Solve for a width", "Turn the question round: name the width, get the scale.", el("div", { class: "bench" }, el("div", {}, f.node, why), el("div", { class: "controls" }, ask, use, out))), draw };
}
