// Whole-run views: depth by time, sinks, logits, losses.
function depthViews(run) {
  const one = (id, title, metric, worry) => {
    const f = figure({ id, title, subtitle: `${METRICS[metric].label}, ${metric === "max_score" ? "of the worst head" : "mean over the heads"} of a layer`, help: [METRICS[metric].note + ".", `Layers from top to bottom, ${run.unit}s from left to right${run.frozen ? "" : "; the loss above shares the axis"}.`, worry] });
    f.draw = () => {
      const means = run.sites.map((s, l) => run.steps.map((_, t) => { const v = Array.from({ length: s.heads }, (_, h) => run.at(metric, l, h, t)); return metric === "max_score" ? (extent(v) || [NaN, NaN])[1] : meanOf(v); }));
      const range = METRICS[metric].domain || extent(means.flat());
      if (!range || !run.steps.length) return f.empty("Nothing was recorded.");
      const [lo, hi] = range;
      const other = () => [entropy, score].find((g) => g !== f);
      heat(f, { rows: run.sites.length, columns: run.steps.length, value: (r, c) => means[r][c], colour: (v) => cividis((v - lo) / (hi - lo || 1)), rowLabel: "layer", columnLabel: run.unit, columnName: (c) => run.steps[c], describe: (r, c, v) => `layer ${r}, ${stepName(run, c)}: ${fmt(v)}`,
        onMove: (r, c) => { if (!f.busy) { const g = other(); if (g.showCell) { g.busy = true; g.showCell(r, c); g.busy = false; } } }, onPick: (r, c) => { SEEN.step = c; select(r, Math.min(SEEN.head, run.sites[r].heads - 1)); } });
      f.body.append(el("div", { class: "row small soft" }, colourScale(lo, hi, (v) => cividis((v - lo) / (hi - lo || 1)))));
    };
    redraws.push(f.draw);
    return f;
  };
  const entropy = one("depth-entropy", run.frozen ? "Which layers select, on which input?" : "Which layers lose their entropy, and when?", "normalized_entropy", run.frozen ? "Worrying: a layer that is dark or brightest on every input." : "Worrying: a dark stripe that spreads from one layer."), score = one("depth-score", run.frozen ? "Where are the scores large?" : "Where do the scores grow?", "max_score", run.frozen ? "Worrying: a bright layer beyond the level of the scores' figure." : "Worrying: a bright stripe that keeps brightening.");
  const loss = figure({ id: "depth-loss", title: run.frozen ? "What was the loss on each input?" : "Did the loss follow?", subtitle: `loss over the same ${run.unit}s` });
  loss.draw = () => {
    const all = Object.entries(run.losses).filter(([, l]) => l.columns.loss && l.columns.loss.some(ok)).slice(0, 5);
    if (!all.length) return loss.empty("No loss was observed. F.cross_entropy and partita's losses are seen inside `with partita.watch(model)`.");
    if (all.every(([, l]) => l.columns.loss.filter(ok).length < 3)) return loss.empty(all.map(([name, l]) => few(run, clip(name, 40), l.steps, l.columns.loss)).join(" "));
    xy(loss, { height: 170, x: { label: run.unit, whole: true, domain: run.steps.length > 1 ? [run.steps[0], run.steps[run.steps.length - 1]] : undefined }, y: { label: "nats" }, series: all.map(([name, l], i) => ({ name: clip(name, 40), kind: "line", label: all.length > 1 ? tail(name, 16) : "loss", colour: lineColour(i), x: l.steps, y: l.columns.loss })) });
  };
  redraws.push(loss.draw);
  return { nodes: [loss.node, el("div", { class: "grid2" }, entropy.node, score.node)], draw: () => { loss.draw(); entropy.draw(); score.draw(); } };
}
function sinkView(run) {
  const f = figure({ id: "sinks", title: "Which heads park their attention?", subtitle: `one dot per head, at the ${run.unit} of the scrubber`, help: ["Across: mass on the strongest single key. Up: mean H / log n.", "Right and low: a sink. Left and low: sharp on changing keys. Left and high: broad. A click selects the head.", "Worrying: most dots at the right; sinks then cost accuracy under quantisation and cache cutting."] });
  f.draw = () => {
    const t = SEEN.step, x = run.index.map(([l, h]) => Math.max(run.at("sink_first", l, h, t), ok(run.at("sink_top", l, h, t)) ? run.at("sink_top", l, h, t) : 0)), y = run.index.map(([l, h]) => run.at("normalized_entropy", l, h, t));
    const mine = run.index.findIndex(([l, h]) => l === SEEN.layer && h === SEEN.head);
    const trail = run.steps.map((_, s) => [Math.max(run.at("sink_first", SEEN.layer, SEEN.head, s), run.at("sink_top", SEEN.layer, SEEN.head, s)), run.at("normalized_entropy", SEEN.layer, SEEN.head, s)]);
    xy(f, { height: 300, x: { label: "mass on the strongest key", domain: [0, 1] }, y: { label: "mean H / log n", domain: [0, 1.02] }, describe: (p) => (p.s.name === "heads" ? `${place(...run.index[p.i])}: strongest key ${fmt(p.x)}, entropy ${fmt(p.y)}` : `${p.s.name}: ${fmt(p.x)}, ${fmt(p.y)}`), onPick: (p) => { if (p.s.name === "heads") select(...run.index[p.i]); },
      series: [{ name: "sink threshold", kind: "rule", at: { x: run.thresholds.sink }, label: "sink", colour: "var(--soft)" }, { name: "path of the selected head", kind: "line", context: true, mute: true, x: trail.map((p) => p[0]), y: trail.map((p) => p[1]), colour: "var(--accent)" },
        { name: "heads", kind: "dots", r: 4, x, y, edge: "var(--soft)", colours: run.index.map(([l]) => cividis(run.sites.length > 1 ? l / (run.sites.length - 1) : 0.5)) }, ...(mine >= 0 ? [{ name: place(SEEN.layer, SEEN.head), kind: "dots", r: 7, x: [x[mine]], y: [y[mine]], colour: "var(--accent)" }] : [])] });
    f.body.append(el("div", { class: "row small soft" }, "colour: layer ", colourScale(0, Math.max(1, run.sites.length - 1), (v) => cividis(run.sites.length > 1 ? v / (run.sites.length - 1) : 0.5))));
  };
  followers.push(f.draw); stepFollowers.push(f.draw); redraws.push(f.draw);
  return f;
}
function logitView(run) {
  const f = figure({ id: "logits", title: "How much headroom do the scores have?", subtitle: "largest score over all rows", help: ["max_j score_ij over rows, per head; line: the worst head, band: 5 to 95 % of the heads.", "bfloat16 resolves 0.25 at 50 and 0.5 at 100; float16 overflows at 65504.", `Worrying: anything above ${run.thresholds.logit_warning}${run.frozen ? "" : ", or a climb that does not end below it"}.`] });
  f.draw = () => {
    const per = run.steps.map((_, t) => run.index.map(([l, h]) => run.at("max_score", l, h, t)));
    const top = per.map((v) => (extent(v) || [NaN, NaN])[1]), ceiling = Math.max(...top.filter(ok), 1);
    xy(f, { height: 260, x: { label: run.unit, whole: true }, y: { label: "largest score", include: ceiling > run.thresholds.logit_warning / 2 ? [run.thresholds.logit_warning] : [] }, series: [
      { name: "heads", kind: "band", x: run.steps, lo: per.map((v) => quantile(v, 0.05)), hi: per.map((v) => quantile(v, 0.95)), colour: lineColour(0) },
      { name: "median head", kind: "line", label: "median head", colour: lineColour(0), x: run.steps, y: per.map((v) => quantile(v, 0.5)) },
      { name: "worst head", kind: "line", label: "worst head", colour: lineColour(1), x: run.steps, y: top },
      { name: "limit", kind: "rule", at: { y: run.thresholds.logit_warning }, label: `warning ${run.thresholds.logit_warning}`, colour: "var(--warning)" }, { name: "limit", kind: "rule", at: { y: run.thresholds.logit_error }, label: `error ${run.thresholds.logit_error}`, colour: "var(--error)" }] });
  };
  redraws.push(f.draw);
  return f;
}
function lossViews(run) {
  const all = Object.entries(run.losses), nodes = [], draws = [];
  const add = (f, draw, points) => { if (points && points.filter(ok).length < 3) draw = () => f.empty(few(run, "It", points, points)); f.draw = draw; redraws.push(draw); draws.push(draw); nodes.push(f.node); };
  if (!all.length) { const f = figure({ id: "loss-none", title: "What does the output side say?", subtitle: "" }); add(f, () => f.empty("No loss was observed in this run. Call the loss inside `with partita.watch(model)`: F.cross_entropy, nn.CrossEntropyLoss and partita's losses are seen.")); }
  for (const [name, loss] of all.slice(0, 4)) {
    const c = loss.columns, contrast = loss.type === "contrastive", title = clip(name, 60), facts = [], late = (v) => quantile(run.frozen ? v || [] : (v || []).slice(-Math.max(1, Math.floor((v || []).length / 4))), 0.5);
    if (loss.type === "value") {
      const p = figure({ id: "value-" + nodes.length, title: "How does the loss go?", subtitle: `${title}: as it was returned`, help: ["The number that the call returned, or the mean of its rows.", "It has no distribution over classes or candidates of which more could be said."] });
      add(p, () => xy(p, { x: { label: run.unit, whole: true }, y: { label: "loss", include: [0] }, series: [{ name: "loss", kind: "line", label: "loss", colour: lineColour(0), x: loss.steps, y: c.loss || [] }] }), c.loss || []);
      continue;
    }
    if (loss.type === "penalty") {
      const p = figure({ id: "penalty-" + nodes.length, title: "How much does the entropy penalty weigh?", subtitle: `${title}: what the layers add to the loss`, help: ["penalty = -weight mean(H / log n), summed over the layers.", "Falling: entropy moves the way the sign of the weight asks for.", "Worrying: as large as the loss itself, or at its end -weight from the start: attention chooses nothing."] });
      add(p, () => xy(p, { x: { label: run.unit, whole: true }, y: { label: "penalty", include: [0] }, series: [{ name: "penalty", kind: "line", label: "penalty", colour: lineColour(0), x: loss.steps, y: c.loss || [] }] }), c.loss || []);
      continue;
    }
    if (contrast) {
      const n = figure({ id: "negatives-" + nodes.length, title: "How many negatives do the work?", subtitle: `${title}: exp(H) over the negatives alone`, help: ["effective negatives = exp(H(p without the positive)).", "Near the number of negatives: all matter alike. Near 1: one hard (or false) negative decides.", "Worrying: below 5 % of the negatives."] });
      add(n, () => xy(n, { x: { label: run.unit, whole: true }, y: { label: "negatives", log: true }, series: [{ name: "effective negatives", kind: "line", label: "effective", colour: lineColour(0), x: loss.steps, y: c.effective_negatives || [] }, { name: "negatives in the batch", kind: "line", dash: true, label: "in the batch", colour: "var(--soft)", x: loss.steps, y: (c.candidates || []).map((v) => v - 1) }] }), c.effective_negatives || []);
      const b = figure({ id: "bound-" + nodes.length, title: "Can the bound still grow?", subtitle: `${title}: mutual information in nats`, help: ["I >= log N - loss, and the bound cannot pass log N.", "Dashed: the ceiling log N.", "Worrying: within 5 % of the ceiling, the loss no longer measures progress."] });
      add(b, () => xy(b, { x: { label: run.unit, whole: true }, y: { label: "nats", include: [0] }, series: [{ name: "bound", kind: "line", label: "bound", colour: lineColour(0), x: loss.steps, y: c.bound || [] }, { name: "ceiling log N", kind: "line", dash: true, label: "log N", colour: "var(--soft)", x: loss.steps, y: c.cap || [] }] }), c.bound || []);
      if ((c.alignment || []).some(ok)) {
        const a = figure({ id: "sphere-" + nodes.length, title: "Do pairs meet while the rest spreads?", subtitle: `${title}: alignment of pairs and uniformity of anchors, on the sphere`, help: ["alignment = E |x - y|^2 over positive pairs; uniformity = log E exp(-2 |x_i - x_j|^2) over other anchors; both on normalised vectors.", "Both small is good: pairs close, the rest far apart. Uniformity lies between -8 and 0 and is near -4 for directions that fill the space.", "Worrying: uniformity near 0, all vectors point the same way (collapse); alignment that stays as large as that of strangers."] });
        add(a, () => xy(a, { x: { label: run.unit, whole: true }, y: { label: "", include: [0] }, series: [{ name: "alignment", kind: "line", label: "alignment", colour: lineColour(0), x: loss.steps, y: c.alignment }, { name: "uniformity", kind: "line", label: "uniformity", colour: lineColour(1), x: loss.steps, y: c.uniformity || [] }] }), c.alignment);
        facts.push(["alignment", late(c.alignment)], ["uniformity", late(c.uniformity)]);
      }
      facts.push(["positive ranked first", late(c.accuracy)], ["norm of the anchors", late(c.norm_query)], ["norm of the keys", late(c.norm_key)], ["candidates", late(c.candidates)], ["bound over its ceiling", late(c.bound) / late(c.cap)], ["candidates for half a nat of room above the bound", Math.ceil(Math.exp(late(c.bound) + 0.5))]);
      if ((c.scale || []).some(ok)) { const s = figure({ id: "scale-" + nodes.length, title: "Is the learned scale at its cap?", subtitle: `${title}: scale = 1 / temperature` }); add(s, () => xy(s, { x: { label: run.unit, whole: true }, y: { label: "scale" }, series: [{ name: "scale", kind: "line", label: "scale", colour: lineColour(0), x: loss.steps, y: c.scale }, { name: "cap", kind: "rule", at: { y: run.thresholds.scale_cap }, label: "cap", colour: "var(--warning)" }] }), c.scale); }
      const kept = facts.filter(([, v]) => ok(v)), t = figure({ id: "contrast-" + nodes.length, table: true, title: "Is the contrast healthy?", subtitle: `${title}: ${run.window}` });
      t.body.append(el("div", { class: "scroll" }, el("table", {}, kept.map(([k, v]) => el("tr", {}, el("th", { scope: "row" }, k), el("td", { class: "num" }, fmt(v, 4)))))));
      t.table = () => kept; t.read.remove();
      add(t, () => {});
    } else {
      const e = figure({ id: "output-" + nodes.length, title: "How sure is the output?", subtitle: `${title}: nats, ${fmt((c.rows || []).reduce((a, v) => a + (v || 0), 0), 4)} rows in all`, help: ["loss = log Z - score of the target; H = entropy of the predicted distribution.", "A calibrated model has loss = H on average. Dashed: log(classes), a guess.", "Worrying: loss well above H (too sure), or far below (too timid)."] });
      add(e, () => xy(e, { x: { label: run.unit, whole: true }, y: { label: "nats", include: [0] }, series: [{ name: "loss", kind: "line", label: "loss", colour: lineColour(0), x: loss.steps, y: c.loss || [] }, { name: "entropy", kind: "line", label: "entropy", colour: lineColour(1), x: loss.steps, y: c.entropy || [] }, { name: "log(classes)", kind: "line", dash: true, label: "log classes", colour: "var(--soft)", x: loss.steps, y: (c.classes || []).map(Math.log) }] }), c.loss || []);
      const r = figure({ id: "reliability-" + nodes.length, title: "Is it right as often as it is sure?", subtitle: `${title}: ${run.frozen ? "all inputs" : "last quarter of the run"}, calibration error ${fmt(loss.calibration_error, 3)}`, help: ["Rows grouped by confidence (largest probability), against the share that is right.", "Dashed: perfect calibration. Below it: too sure.", "Worrying: a gap above 0.1 where many rows lie."] });
      add(r, () => { const bins = (loss.bins || []).filter((v) => v[0] > 0); xy(r, { why: "No calibration was recorded (soft targets, or no row).", x: { label: "confidence", domain: [0, 1] }, y: { label: "share right", domain: [0, 1] }, describe: (p) => `confidence ${fmt(p.x, 3)}: right ${fmt(p.y, 3)}, ${bins[p.i] ? bins[p.i][0] : 0} rows`, series: bins.length ? [{ name: "perfect", kind: "line", dash: true, mute: true, colour: "var(--soft)", x: [0, 1], y: [0, 1] }, { name: "measured", kind: "line", colour: lineColour(0), x: bins.map((v) => v[1]), y: bins.map((v) => v[2]) }, { name: "bins", kind: "dots", r: 4, colour: lineColour(0), x: bins.map((v) => v[1]), y: bins.map((v) => v[2]) }] : [] }); });
    }
  }
  return { nodes: [el("div", { class: "grid2" }, nodes)], draw: () => draws.forEach((d) => d()) };
}
