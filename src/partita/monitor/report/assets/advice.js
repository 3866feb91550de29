// What to change: scale for a target width, scale policies by length, how solid the numbers are, what watching cost.
function interpolate(xs, ys, x) { // piecewise linear in the order given
  for (let i = 1; i < xs.length; i++) { const a = xs[i - 1], b = xs[i]; if ((x - a) * (x - b) <= 0 && a !== b) return ys[i - 1] + ((x - a) / (b - a)) * (ys[i] - ys[i - 1]); }
  return NaN;
}
function advisorView(run) {
  const slider = el("input", { type: "range", id: "target-width", min: 0, max: 100, value: 50, "aria-label": "target width" }), shown = el("span", { class: "num", id: "target-value" }), advice = el("p", { id: "advice" });
  const f = figure({ id: "advisor", title: "What scale gives the width you want?", subtitle: "mean width against a factor on the scale it has now, for the selected head", controls: el("div", { class: "scrub" }, el("label", { for: "target-width" }, "target width"), slider, shown),
    help: ["H(c * scale) was evaluated on evenly spaced rows for c from 1/4 to 4; the bias, if any, is not scaled. Dashed: the slope that theory gives at the present scale, dH / d log c = -Var(score), from the recorded variance.", "Line: mean over rows; band: 10 to 90 % of the rows. The recommended factor is where the line meets the target; its range comes from the band.", "Heuristic: the other layers adapt when the model is trained again, and the width is not a goal by itself."] });
  f.draw = () => {
    const curve = run.curves[SEEN.layer], h = SEEN.head;
    if (!curve || !curve.mean[h]) { f.empty("No temperature curve was sampled for this layer."); advice.textContent = ""; shown.textContent = ""; return; }
    const mean = curve.mean[h].map((v) => Math.exp(v)), lo = curve.p10[h].map((v) => Math.exp(v)), hi = curve.p90[h].map((v) => Math.exp(v)), range = extent(mean);
    if (!range) { f.empty("The sampled rows of this head had no finite entropy."); return; }
    const target = Math.exp(Math.log(Math.max(range[0], 1)) + (slider.value / 100) * (Math.log(range[1]) - Math.log(Math.max(range[0], 1))));
    shown.textContent = fmt(target, 3) + " keys";
    const logs = curve.factors.map(Math.log), best = Math.exp(interpolate(mean, logs, target)), ends = [Math.exp(interpolate(lo, logs, target)), Math.exp(interpolate(hi, logs, target))].filter(ok).sort((a, b) => a - b);
    const now = run.steps.indexOf(curve.step), variance = now >= 0 ? run.at("score_variance", SEEN.layer, h, now) : NaN, near = [0.5, 0.7071, 1, 1.4142, 2], middle = interpolate(curve.factors, curve.mean[h], 1);
    const tangent = near.map((c) => Math.exp(middle - variance * Math.log(c))).map((w) => (ok(w) && w >= range[0] / 2 && w <= range[1] * 2 ? w : NaN));
    xy(f, { height: 250, x: { label: "factor on the scale", log: true }, y: { label: "effective width", log: true }, series: [
      { name: "rows", kind: "band", x: curve.factors, lo, hi, colour: lineColour(0) }, { name: "width", kind: "line", label: "width", colour: lineColour(0), x: curve.factors, y: mean },
      { name: "theory: slope -Var(score)", kind: "line", dash: true, label: tangent.some(ok) ? "slope -Var" : "", colour: "var(--soft)", x: near, y: tangent },
      { name: "now", kind: "rule", at: { x: 1 }, label: "now", colour: "var(--soft)" }, { name: "target", kind: "rule", at: { y: target }, label: "target", colour: "var(--accent)" }] });
    advice.textContent = ok(best) ? `Multiply the scale of ${place(SEEN.layer, h)} by ${fmt(best, 3)}${ends.length === 2 ? ` (80 % of the rows: ${fmt(ends[0], 3)} to ${fmt(ends[1], 3)})` : " (for part of the rows the target lies outside the measured range)"}: ${!ok(curve.scale) ? "its scale differs from row to row (a policy, or scores that were seen after scaling), so each is multiplied" : curve.scale === 1 ? "the call itself has scale 1, so whatever was folded into its queries is multiplied" : `the scale of the call, ${fmt(curve.scale, 3)}, becomes ${fmt(curve.scale * best, 3)}`}. Prediction from ${curve.rows} rows at ${stepAt(run, curve.step)}, not a measured outcome.` : "The target lies outside the measured range of factors.";
  };
  slider.addEventListener("input", f.draw);
  followers.push(f.draw); redraws.push(f.draw);
  f.node.append(advice);
  return f;
}
function studyViews(run) {
  const loss = figure({ id: "study-loss", title: "Which scale policy survives longer input?", subtitle: "", help: ["Each policy was trained at one length and evaluated at several; dots are seeds.", "Dashed vertical: the training length. Lower is better.", "Differences smaller than the spread of the dots are noise."] });
  const width = figure({ id: "study-width", title: "Does the width stay put?", subtitle: "mean effective width over all heads", help: ["width = exp(H), averaged over heads and rows.", "Dashed: width grows in proportion to the length (log-log slope 1).", "Flatter is what a length-aware policy promises."] });
  const draw = () => {
    const rows = run.studies.filter((r) => r.study === "scale-policy" && ok(r.length));
    if (!rows.length) { const why = "No scale-policy study is part of this record. `partita study` and `partita demo` add one."; loss.empty(why); width.empty(why); return; }
    const policies = [...new Set(rows.map((r) => r.policy))].slice(0, 5), train = (rows.find((r) => ok(r.training_length)) || {}).training_length;
    const lines = (key) => policies.flatMap((p, i) => {
      const mine = rows.filter((r) => r.policy === p && ok(r[key])), lengths = [...new Set(mine.map((r) => r.length))].sort((a, b) => a - b);
      return [{ name: p, kind: "line", label: p, colour: lineColour(i), x: lengths, y: lengths.map((n) => meanOf(mine.filter((r) => r.length === n).map((r) => r[key]))) }, { name: p + ", seeds", kind: "dots", r: 3, colour: lineColour(i), x: mine.map((r) => r.length), y: mine.map((r) => r[key]) }];
    });
    const mark = ok(train) ? [{ name: "training length", kind: "rule", at: { x: train }, label: "trained here", colour: "var(--soft)" }] : [];
    const seeds = new Set(rows.map((r) => r.seed)).size;
    const unit = clip((rows.find((r) => r.unit) || {}).unit || "token", 20);
    loss.sub.textContent = `nats per ${unit} on held-out text, ${rows.length} evaluations, ${seeds} seed${seeds === 1 ? ": no statement about spread" : "s"}`;
    xy(loss, { x: { label: "length", log: true }, y: { label: "nats per " + unit }, series: [...lines("loss"), ...mark] });
    xy(width, { x: { label: "length", log: true }, y: { label: "width", log: true }, series: [...lines("width"), ...mark] });
  };
  redraws.push(draw);
  return { nodes: [el("div", { class: "grid2" }, loss.node, width.node)], draw };
}
function robustView(run) {
  const f = figure({ id: "robust", title: "Would another average tell another story?", subtitle: "the metric of the atlas over all heads: mean, median, and mean without the outer fifths", help: ["Three estimators of the same centre.", "Where they part, a few heads carry the mean: look at the atlas there.", "Quantiles over rows come from a histogram of 256 bins (error below 0.004)."] });
  const facts = el("ul", { class: "small" });
  f.draw = () => {
    const per = run.steps.map((_, t) => run.index.map(([l, h]) => run.at(SEEN.metric, l, h, t)).filter(ok).sort((a, b) => a - b));
    const trimmed = (v) => { const k = Math.floor(v.length / 5); return meanOf(v.slice(k, v.length - k)); };
    xy(f, { height: 220, x: { label: run.unit, whole: true }, y: { label: METRICS[SEEN.metric].short }, series: [{ name: "mean", kind: "line", label: "mean", colour: lineColour(0), x: run.steps, y: per.map(meanOf) }, { name: "median", kind: "line", label: "median", colour: lineColour(1), x: run.steps, y: per.map((v) => quantile(v, 0.5)) }, { name: "trimmed mean", kind: "line", label: "trimmed", colour: lineColour(2), x: run.steps, y: per.map(trimmed) }] });
    const missing = run.index.filter(([l, h]) => !run.line("normalized_entropy", l, h).some(ok)).length, holes = run.index.reduce((n, [l, h]) => n + run.line("normalized_entropy", l, h).filter((v) => !ok(v)).length, 0);
    facts.replaceChildren(el("li", {}, `${fmt(run.totals.rows)} rows stand behind the means; ${fmt(run.totals.single)} rows that see a single key were left out (their entropy is 0 by force), ${fmt(run.totals.nonfinite)} were not finite.`),
      el("li", {}, holes ? `${holes} of ${run.index.length * run.steps.length} cells have no value${missing ? `, ${missing} heads none at all` : ""}; they are drawn as crossed squares, never as zero.` : "No cell is missing."),
      run.options.rows ? el("li", {}, `At most ${run.options.rows} rows per call were observed: means are unbiased, the largest score is a lower bound.`) : el("li", {}, "Every row was observed: the largest score is the largest."),
      el("li", {}, `Resolution of the numbers in this page: ${run.resolution}. The record itself is exact.`));
  };
  followers.push(f.draw); redraws.push(f.draw);
  f.node.append(facts);
  return f;
}
// |softmax(s + e) - softmax(s)|_1 <= 2 tanh(|e|_inf / 2): what rounding to a number format can do to the weights
const FORMATS = [["bfloat16", 8], ["float16", 11], ["float32", 24]];
const rounding = (score, bits) => (Math.abs(score) > 0 ? 2 ** (Math.floor(Math.log2(Math.abs(score))) - bits) : 0); // half a unit in the last place
const moved = (radius) => 2 * Math.tanh(radius / 2);
function roundingView(run) {
  const f = figure({ id: "rounding", title: "How far can rounding move the weights?", subtitle: "certified bound on the change of a row's weights (l1, of at most 2), worst head of each " + run.unit, help: ["|softmax(s + e) - softmax(s)|_1 <= 2 tanh(|e|_inf / 2), sharp; e is half a unit in the last place of the largest score, were the scores stored in that format.", "An upper bound from the largest positive score alone: the true change is smaller. Scores far below zero carry no weight.", "Worrying: above 0.1 in the format the model runs in; normalise query and key, cap the scores, or keep the scores in float32."] });
  f.draw = () => {
    const top = run.steps.map((_, t) => (extent(run.index.map(([l, h]) => run.at("max_score", l, h, t))) || [NaN, NaN])[1]);
    xy(f, { height: 220, why: "No largest score was recorded.", x: { label: run.unit, whole: true }, y: { label: "change of the weights", log: true }, series: FORMATS.map(([name, bits], i) => ({ name, kind: "line", label: name, colour: lineColour(i), x: run.steps, y: top.map((s) => (ok(s) ? moved(rounding(s, bits)) || NaN : NaN)) })) });
  };
  redraws.push(f.draw);
  return f;
}
function textsView(run) {
  const named = run.steps.map((_, t) => t).filter((t) => ((run.provenance || {}).step_names || {})[run.steps[t]]);
  if (named.length < 2) return null;
  const f = figure({ id: "texts", table: true, title: "Would another text tell another story?", subtitle: "" }), body = el("tbody");
  const rows = () => named.map((t) => { const v = run.index.map(([l, h]) => run.at(SEEN.metric, l, h, t)); return [run.provenance.step_names[run.steps[t]], run.steps[t], meanOf(v), quantile(v, 0.05), quantile(v, 0.95)]; });
  f.draw = () => {
    f.sub.textContent = `${METRICS[SEEN.metric].label} over all heads, by what was read; the bar runs from the 5 % to the 95 % quantile of the heads`;
    const all = rows(), span = METRICS[SEEN.metric].domain || extent(all.flatMap((r) => r.slice(2))) || [0, 1], X = (v) => 2 + (156 * (v - span[0])) / (span[1] - span[0] || 1);
    body.replaceChildren(...all.map(([name, step, mean, lo, hi]) => {
      const bar = sv("svg", { width: 160, height: 14, viewBox: "0 0 160 14", "aria-hidden": "true" });
      if (ok(mean)) bar.append(sv("line", { x1: X(lo), x2: X(hi), y1: 7, y2: 7, stroke: lineColour(0), "stroke-width": 5, "stroke-opacity": 0.3 }), sv("circle", { cx: X(mean), cy: 7, r: 4, fill: lineColour(0) }));
      return el("tr", {}, el("td", {}, clip(name, 60)), el("td", { class: "num" }, step), el("td", { class: "num" }, fmt(mean, 3)), el("td", {}, bar));
    }));
  };
  f.body.append(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "read"), el("th", { class: "num" }, run.unit), el("th", { class: "num" }, "mean"), el("th", {}, "over the heads"))), body)));
  f.table = () => [["read", run.unit, "mean", "p05", "p95"], ...rows()];
  f.read.remove();
  followers.push(f.draw); redraws.push(f.draw);
  return f;
}
function costView(run) {
  const o = run.overhead || {}, size = (b) => (b >= 2 ** 30 ? fmt(b / 2 ** 30, 3) + " GiB" : b >= 2 ** 20 ? fmt(b / 2 ** 20, 3) + " MiB" : fmt(b / 1024, 3) + " KiB");
  const rows = [["time inside watch", ok(o.watch_s) ? fmt(o.watch_s, 3) + " s" : "not measured"], ["time of the run", ok(o.elapsed_s) ? fmt(o.elapsed_s, 3) + " s" : "not measured"], ["overhead", ok(o.fraction) ? fmt(o.fraction * 100, 3) + " % of the time outside watch" : "not measured"], [`${run.unit}s observed`, `${o.observed_steps ?? "?"} of ${o.steps ?? "?"}`], ["time for each of them", ok(o.watch_s) && o.observed_steps ? fmt((1000 * o.watch_s) / o.observed_steps, 3) + " ms" : "not measured"],
    ["kept in memory", ok(o.record_bytes) ? size(o.record_bytes) : "not measured"], ["attention maps would have needed", ok(o.map_bytes) ? size(o.map_bytes) + ` at the largest ${run.unit} (float32)` : "not measured"],
    [`statistics for each ${run.unit} kept`, ok(o.record_bytes) && o.observed_steps ? size(o.record_bytes / o.observed_steps) + `, whatever the length (${run.index.length} heads)` : "not measured"]];
  const f = figure({ id: "cost-figure", table: true, title: "What did watching cost?", subtitle: "measured in this run" });
  f.draw = () => {};
  f.table = () => rows;
  f.body.append(el("div", { class: "scroll" }, el("table", {}, rows.map(([k, v]) => el("tr", {}, el("th", { scope: "row" }, k), el("td", { class: "num" }, v))))));
  f.read.remove();
  return f;
}
