// The selected head: the verdict of the findings, with this head's own numbers.
const SAID = {
  NONFINITE: () => "some of its rows had NaN or infinite scores",
  HEAD_COLLAPSED: (v) => `half of its rows have H / log n below ${fmt(Math.max(v.normalized_entropy_p50, 1 / 256), 2)}`,
  HEAD_UNIFORM: () => "it averages all keys and selects nothing",
  LOGIT_GROWTH: (v, run) => `its largest score is beyond ${run.thresholds.logit_warning}, where half precision loses digits`,
  ENTROPY_DROP: () => "its entropy fell suddenly",
  DUPLICATE_HEADS: () => "it attends like another head of its layer",
};
function readingOf(run, layer, head) {
  const key = `${layer},${head}`, list = run.numbers[key], said = run.verdicts[key];
  const names = ["normalized_entropy", "normalized_entropy_p50", "effective_width", "max_score", "sink_first", "sink_top"], v = Object.fromEntries(names.map((n, i) => [n, list ? list[i] : NaN]));
  const sink = Math.max(ok(v.sink_first) ? v.sink_first : 0, ok(v.sink_top) ? v.sink_top : 0);
  const numbers = ok(v.normalized_entropy) ? ` Mean H / log n ${fmt(v.normalized_entropy)}, mean width ${fmt(v.effective_width, 3)} keys, largest score ${fmt(v.max_score, 3)}, strongest key ${fmt(sink, 2)} of the mass (${run.window}).` : "";
  if (said) return [said.severity, `Needs a look: ${said.codes.map((c) => (SAID[c] || (() => c))(v, run)).join("; ")}.${numbers}`];
  if (!numbers) return ["warning", "No row with two or more visible keys was recorded for this head, so nothing can be said about it."];
  return ["fine", `Healthy: no finding is about this head.${numbers}${sink > run.thresholds.sink ? " It parks much of its mass on one key (a sink), which is common and no fault by itself." : ""}`];
}
function headViews(run) {
  const words = el("p", { class: "reading", id: "reading" }), heading = el("h2", { id: "head-title" });
  const time = figure({ id: "head-time", title: run.frozen ? "Does this head depend on the input?" : "How did this head get here?", subtitle: "", help: ["H / log n with n the keys a row may see, so that rows of different length compare.", "Line: mean over rows; band: 5 to 95 % of the rows; grey: the other heads of the layer.", run.frozen ? "Worrying: a line stuck at 1 or at 0." : "Worrying: a sudden fall, often ahead of a spike of the loss; a line stuck at 1 or at 0."] });
  const width = figure({ id: "head-width", title: "Does attention widen with length?", subtitle: "", help: ["width = exp(H), against the number of keys a row may see.", "Dashed: every key alike (width = n). A flat line keeps its focus at any length.", "Worrying: a line parallel to the dashed one: what was picked out at short length fades at long length."] });
  const keys = figure({ id: "head-keys", title: "Which keys get the mass?", subtitle: "", help: ["Mean over rows of p(j|i), for the five strongest key positions.", "Measured on evenly spaced rows.", `A single key above ${run.thresholds.sink} is a sink: common, rarely a fault.`] });
  const received = figure({ id: "head-received", title: "Which positions draw the mass?", subtitle: "", help: ["Share of all rows' mass that each bin of key positions received: sum over rows of p(j|i), over the number of rows.", "Dashed: what it would be if every row saw its keys alike; under a causal mask early keys receive more by themselves.", "A peak far above the dashed line is a sink. One that moves during training is a head that changes its mind."] });
  const map = figure({ id: "head-map", title: "What does it look at?", subtitle: "", help: ["p(j|i), pooled to at most 128 x 128 while streaming; rows are queries, columns keys.", "Colour is relative to the uniform weight of the row, so lengths compare.", "Pick heads with watch(model, maps=[(layer, head)])."] });
  const code = el("pre", { id: "snippet" });
  function draw() {
    const { layer, head } = SEEN, site = run.sites[layer];
    heading.textContent = `Layer ${layer}, head ${head}`;
    heading.title = site ? site.name : "";
    const [severity, text] = readingOf(run, layer, head);
    words.replaceChildren(mark(severity), el("span", {}, text));
    const siblings = Array.from({ length: Math.min(site.heads, 24) }, (_, h) => h).filter((h) => h !== head);
    time.sub.textContent = `mean H / log n over the ${run.unit}s, ${fmt(quantile(run.rowsPerStep[layer] || [], 0.5), 4)} rows each`;
    xy(time, { x: { label: run.unit, whole: true }, y: { label: "mean H / log n", domain: [0, 1.02] }, series: [
      ...siblings.map((h) => ({ name: place(layer, h), kind: "line", context: true, x: run.steps, y: run.line("normalized_entropy", layer, h) })),
      { name: "band", kind: "band", x: run.steps, lo: run.line("normalized_entropy_p05", layer, head), hi: run.line("normalized_entropy_p95", layer, head), colour: lineColour(0) },
      { name: place(layer, head), kind: "line", label: "head " + head, colour: lineColour(0), x: run.steps, y: run.line("normalized_entropy", layer, head), lo: run.line("normalized_entropy_p05", layer, head), hi: run.line("normalized_entropy_p95", layer, head) },
      { name: "uniform", kind: "rule", at: { y: 1 }, label: "", colour: "var(--soft)" }] });
    const bands = run.bands[`${layer},${head}`];
    width.sub.textContent = `keys, mean over rows, by the number of visible keys; ${run.frozen ? "all inputs" : "end of the run"}` + (bands ? `, ${fmt(bands.rows.reduce((a, b) => a + b, 0), 4)} rows` : "");
    if (!bands) width.empty("No band of visible keys was recorded for this head.");
    else {
      const train = run.provenance && run.provenance.training_length;
      xy(width, { x: { label: "visible keys", log: true }, y: { label: "effective width", log: true }, series: [
        { name: "every key alike", kind: "line", dash: true, label: "uniform", colour: "var(--soft)", x: bands.visible, y: bands.visible, mute: true },
        { name: "start of the run", kind: "line", label: bands.first && !run.frozen ? "start" : "", colour: lineColour(4), x: bands.first && !run.frozen ? bands.first.visible : [], y: bands.first && !run.frozen ? bands.first.width : [] },
        { name: place(layer, head), kind: "line", label: "now", colour: lineColour(0), x: bands.visible, y: bands.width },
        ...(ok(train) ? [{ name: "training length", kind: "rule", at: { x: train }, label: "training length", colour: "var(--soft)" }] : [])] });
    }
    const strongest = (run.keys[layer] || [])[head];
    keys.sub.textContent = `mean mass by key position, last sampled ${run.unit}`;
    if (!strongest || !strongest.length) keys.empty("No sampled rows for this layer.");
    else xy(keys, { height: 190, x: { label: "rank of the key", whole: true, domain: [0.5, strongest.length + 0.5] }, y: { label: "mass", domain: [0, Math.max(0.3, ...strongest.map((k) => k[1])) * 1.15] }, describe: (p) => `key ${strongest[p.i][0]}: ${fmt(p.y)} of the mass`,
      series: [...strongest.map((k, i) => ({ name: "", kind: "line", mute: true, width: 14, colour: lineColour(0), x: [i + 1, i + 1], y: [0, k[1]] })), { name: "keys", kind: "dots", r: 4, colour: lineColour(0), x: strongest.map((_, i) => i + 1), y: strongest.map((k) => k[1]) }, { name: "sink", kind: "rule", at: { y: run.thresholds.sink }, label: "sink threshold", end: true, colour: "var(--soft)" }] });
    if (strongest && keys.svg) strongest.forEach((k, i) => keys.svg.append(sv("text", { class: "tick halo", x: keys.X(i + 1), y: keys.Y(k[1]) - 9, "text-anchor": "middle" }, `key ${k[0]}`)));
    const profiles = (run.received[layer] || []).filter((p) => p.bins[head]), last = profiles[profiles.length - 1], began = profiles.length > 1 && !run.frozen ? profiles[0] : null;
    received.sub.textContent = last ? `share of the mass of ${fmt(last.rows[head], 4)} rows, ${last.n_key} keys${last.n_key > last.alike.length ? ` in bins of ${Math.ceil(last.n_key / last.alike.length)}` : ""}, ${stepAt(run, last.step)}` : "";
    if (!last) received.empty(run.options.received ? "Nothing finite was received from this head's rows." : "Not recorded: it takes two more passes now and then, so it is asked for. partita.watch(model, received=True)");
    else {
      const from = (p) => { const wide = Math.ceil(p.n_key / p.alike.length); return p.alike.map((_, i) => i * wide); };
      xy(received, { height: 190, x: { label: "key position", whole: true }, y: { label: "share of the mass", include: [0] }, describe: (p) => `${p.s.name}, keys from ${fmt(p.x)}: ${fmt(p.y)} of the mass`, series: [
        { name: "every key alike", kind: "line", dash: true, label: "alike", colour: "var(--soft)", x: from(last), y: last.alike },
        { name: began ? `start, ${stepAt(run, began.step)}` : "", kind: "line", label: began ? "start" : "", colour: lineColour(4), x: began ? from(began) : [], y: began ? began.bins[head] : [] },
        { name: place(layer, head), kind: "line", label: "now", colour: lineColour(0), x: from(last), y: last.bins[head] }] });
      received.body.append(el("p", { class: "small soft" }, "most: " + last.top[head].map(([k, v]) => `key ${k} ${fmt(100 * v, 2)} %`).join(", ")));
    }
    const kept = run.maps[`${layer},${head}`], pooled = kept && !kept.damaged ? kept : null;
    map.sub.textContent = pooled ? `${pooled.rows} x ${pooled.columns} cells over ${pooled.n_query} queries and ${pooled.n_key} keys, ${stepAt(run, pooled.step)}` : "";
    if (kept && kept.damaged) map.empty("The map of this head is damaged in the record; everything else was read.");
    else if (!pooled) map.empty(`No map was kept for this head (maps cost memory, so they are asked for). Watch it with the line below.`);
    else {
      const data = pooled.values || (pooled.values = bytes(pooled.data)), peak = pooled.peak;
      heat(map, { rows: pooled.rows, columns: pooled.columns, height: Math.min(300, map.body.clientWidth * 0.8), value: (r, c) => (data[r * pooled.columns + c] / 255) ** 2 * peak, colour: (v) => cividis(Math.sqrt(v / (peak || 1))), rowLabel: "query", columnLabel: "key",
        rowName: (r) => Math.floor((r * pooled.n_query) / pooled.rows), columnName: (c) => Math.floor((c * pooled.n_key) / pooled.columns), describe: (r, c, v) => `queries from ${Math.floor((r * pooled.n_query) / pooled.rows)}, keys from ${Math.floor((c * pooled.n_key) / pooled.columns)}: mass ${fmt(v)}` });
    }
    code.textContent = `partita.watch(model, layers=[${layer}], maps=[(${layer}, ${head})])   # ${tail(site.name, 70)}`;
  }
  followers.push(draw); redraws.push(draw);
  return { nodes: [heading, words, el("div", { class: "grid2" }, time.node, width.node, keys.node, received.node, map.node), code], draw };
}
