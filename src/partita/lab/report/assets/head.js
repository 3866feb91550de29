// The selected head: is it too uniform, too peaked, or healthy, and since when.
function readingOf(run, layer, head, limits) {
  const n = run.steps.length, from = n - Math.max(1, Math.floor(n / 4));
  const late = (m) => quantile(run.line(m, layer, head).slice(from), 0.5);
  const h = late("normalized_entropy"), p50 = ok(late("normalized_entropy_p50")) ? late("normalized_entropy_p50") : h, top = late("max_score"), sink = Math.max(late("sink_first") || 0, late("sink_top") || 0);
  if ((run.flags[`${layer},${head}`] || []).includes("NONFINITE")) return ["error", `Broken: some of its rows had NaN or infinite scores.${ok(h) ? ` The others use ${fmt(h, 3)} of the possible entropy.` : ""} Look at the inputs of this layer at the first bad step.`];
  if (!ok(h)) return ["warning", "No row with two or more visible keys was recorded for this head, so nothing can be said about it."];
  if (p50 < limits.collapsed) return ["warning", `Too peaked: half of the rows use ${fmt(p50, 2)} of the entropy they could have. Little gradient reaches the scores; a smaller scale or normalised queries and keys would open it.`];
  if (h > limits.uniform) return ["warning", `Too uniform: ${fmt(h, 4)} of the possible entropy. The head averages all keys; a larger or length-aware scale would let it choose.`];
  const extra = sink > limits.sink ? ` ${Math.round(sink * 100)} % of its mass is parked on one key (a sink), which is common and not a fault by itself.` : "";
  if (top > limits.logit_warning) return ["warning", `Selective, but its largest score is ${fmt(top, 3)}: beyond ${limits.logit_warning} half precision loses digits.${extra}`];
  return ["fine", `Healthy: it uses ${fmt(h, 3)} of the possible entropy, about ${fmt(late("effective_width"), 3)} keys per row.${extra}`];
}
function headViews(run) {
  const words = el("p", { class: "reading", id: "reading" }), heading = el("h2", { id: "head-title" });
  const time = figure({ id: "head-time", title: "How did this head get here?", subtitle: "", help: ["H / log(visible), so that rows of different length compare.", "Line: mean over rows; band: 5 to 95 % of the rows; grey: the other heads of the layer.", "Worrying: a sudden fall, often ahead of a spike of the loss; a line stuck at 1 or at 0."] });
  const width = figure({ id: "head-width", title: "Does attention widen with length?", subtitle: "", help: ["width = exp(H), against the number of keys a row may see.", "Dashed: every key alike (width = n). A flat line keeps its focus at any length.", "Worrying: a line parallel to the dashed one: what was picked out at short length fades at long length."] });
  const keys = figure({ id: "head-keys", title: "Which keys get the mass?", subtitle: "", help: ["Mean over rows of p(j|i), for the five strongest key positions.", "Measured on evenly spaced rows.", "A single key above 0.3 is a sink: common, rarely a fault."] });
  const map = figure({ id: "head-map", title: "What does it look at?", subtitle: "", help: ["p(j|i), pooled to at most 128 x 128 while streaming; rows are queries, columns keys.", "Colour is relative to the uniform weight of the row, so lengths compare.", "Pick heads with watch(model, maps=[(layer, head)])."] });
  const code = el("pre", { id: "snippet" });
  function draw() {
    const { layer, head } = SEEN, site = run.sites[layer];
    heading.textContent = `Layer ${layer}, head ${head}`;
    heading.title = site ? site.name : "";
    const [severity, text] = readingOf(run, layer, head, run.thresholds);
    words.replaceChildren(mark(severity), el("span", {}, text));
    const siblings = Array.from({ length: Math.min(site.heads, 24) }, (_, h) => h).filter((h) => h !== head);
    time.sub.textContent = `H / log(visible) over steps, ${fmt(quantile(run.rowsPerStep[layer] || [], 0.5), 4)} rows a step`;
    xy(time, { x: { label: "step", whole: true }, y: { label: "H / log(visible)", domain: [0, 1.02] }, series: [
      ...siblings.map((h) => ({ name: place(layer, h), kind: "line", context: true, x: run.steps, y: run.line("normalized_entropy", layer, h) })),
      { name: "band", kind: "band", x: run.steps, lo: run.line("normalized_entropy_p05", layer, head), hi: run.line("normalized_entropy_p95", layer, head), colour: lineColour(0) },
      { name: place(layer, head), kind: "line", label: "head " + head, colour: lineColour(0), x: run.steps, y: run.line("normalized_entropy", layer, head), lo: run.line("normalized_entropy_p05", layer, head), hi: run.line("normalized_entropy_p95", layer, head) },
      { name: "uniform", kind: "rule", at: { y: 1 }, label: "", colour: "var(--soft)" }] });
    const bands = run.bands[`${layer},${head}`];
    width.sub.textContent = "keys, by the number of visible keys; end of the run" + (bands ? `, ${fmt(bands.rows.reduce((a, b) => a + b, 0), 4)} rows` : "");
    if (!bands) width.empty("No band of visible keys was recorded for this head.");
    else {
      const train = run.provenance && run.provenance.training_length;
      xy(width, { x: { label: "visible keys", log: true }, y: { label: "effective width", log: true }, series: [
        { name: "every key alike", kind: "line", dash: true, label: "uniform", colour: "var(--soft)", x: bands.visible, y: bands.visible, mute: true },
        { name: "start of the run", kind: "line", label: bands.first ? "start" : "", colour: lineColour(4), x: bands.first ? bands.first.visible : [], y: bands.first ? bands.first.width : [] },
        { name: place(layer, head), kind: "line", label: "now", colour: lineColour(0), x: bands.visible, y: bands.width },
        ...(ok(train) ? [{ name: "training length", kind: "rule", at: { x: train }, label: "training length", colour: "var(--soft)" }] : [])] });
    }
    const strongest = (run.keys[layer] || [])[head];
    keys.sub.textContent = "mean mass by key position, last sampled step";
    if (!strongest || !strongest.length) keys.empty("No sampled rows for this layer.");
    else xy(keys, { height: 190, x: { label: "rank of the key", whole: true, domain: [0.5, strongest.length + 0.5] }, y: { label: "mass", domain: [0, Math.max(0.3, ...strongest.map((k) => k[1])) * 1.15] }, describe: (p) => `key ${strongest[p.i][0]}: ${fmt(p.y)} of the mass`,
      series: [...strongest.map((k, i) => ({ name: "", kind: "line", mute: true, width: 14, colour: lineColour(0), x: [i + 1, i + 1], y: [0, k[1]] })), { name: "keys", kind: "dots", r: 4, colour: lineColour(0), x: strongest.map((_, i) => i + 1), y: strongest.map((k) => k[1]) }, { name: "sink", kind: "rule", at: { y: run.thresholds.sink }, label: "sink threshold", end: true, colour: "var(--soft)" }] });
    if (strongest && keys.svg) strongest.forEach((k, i) => keys.svg.append(sv("text", { class: "tick halo", x: keys.X(i + 1), y: keys.Y(k[1]) - 9, "text-anchor": "middle" }, `key ${k[0]}`)));
    const pooled = run.maps[`${layer},${head}`];
    map.sub.textContent = pooled ? `${pooled.rows} x ${pooled.columns} cells over ${pooled.n_query} queries and ${pooled.n_key} keys, step ${pooled.step}` : "";
    if (!pooled) map.empty(`No map was kept for this head (maps cost memory, so they are asked for). Watch it with the line below.`);
    else {
      const data = pooled.values || (pooled.values = bytes(pooled.data)), peak = pooled.peak;
      heat(map, { rows: pooled.rows, columns: pooled.columns, height: Math.min(300, map.body.clientWidth * 0.8), value: (r, c) => (data[r * pooled.columns + c] / 255) ** 2 * peak, colour: (v) => cividis(Math.sqrt(v / (peak || 1))), rowLabel: "query", columnLabel: "key",
        rowName: (r) => Math.floor((r * pooled.n_query) / pooled.rows), columnName: (c) => Math.floor((c * pooled.n_key) / pooled.columns), describe: (r, c, v) => `queries from ${Math.floor((r * pooled.n_query) / pooled.rows)}, keys from ${Math.floor((c * pooled.n_key) / pooled.columns)}: mass ${fmt(v)}` });
    }
    code.textContent = `partita.watch(model, layers=[${layer}], maps=[(${layer}, ${head})])   # ${tail(site.name, 70)}`;
  }
  followers.push(draw); redraws.push(draw);
  return { nodes: [heading, words, el("div", { class: "grid2" }, time.node, width.node, keys.node, map.node), code], draw };
}
