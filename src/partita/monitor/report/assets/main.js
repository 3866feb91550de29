// Puts the page together, in the order in which it is read.
function findingItem(run, f) {
  const here = f.heads.length && run.jump;
  const jump = here ? el("a", { href: "#atlas", onclick: (e) => { e.preventDefault(); select(f.heads[0][0], f.heads[0][1]); document.getElementById("atlas").scrollIntoView(); } }, clip(f.where, 160)) : el("span", {}, clip(f.where, 160));
  const limit = `${f.severity}, confidence ${f.confidence}${f.threshold ? ", " + f.threshold : ""}`;
  return el("li", { "data-code": f.code, title: limit }, mark(f.severity), el("div", {}, el("div", {}, jump, ": ", clip(f.evidence, 400), " ", el("span", { class: "code" }, f.code)),
    el("div", { class: "meaning" }, clip(f.meaning, 400), f.action ? " " : "", f.action ? el("span", { class: "try" }, "Try: " + clip(f.action, 300)) : null)), sparkline(f.series));
}
function findingList(run, found, id) {
  const shown = found.slice(0, 5), rest = found.slice(5, 205);
  return [el("ul", { class: "findings", id }, shown.map((f) => findingItem(run, f))), rest.length ? el("details", { class: "small" }, el("summary", {}, `${rest.length} more`), el("ul", { class: "findings" }, rest.map((f) => findingItem(run, f)))) : null];
}
function verdict(run, other) {
  const o = run.overhead || {}, worst = (codes) => { const s = run.findings.filter((f) => codes.includes(f.code)).map((f) => f.severity); return s.includes("error") ? "error" : s.includes("warning") ? "warning" : "fine"; };
  const groups = [["attention", ["HEAD_COLLAPSED", "HEAD_UNIFORM", "ENTROPY_DROP", "DUPLICATE_HEADS", "LENGTH_DILUTION"]], ["scores", ["LOGIT_GROWTH", "NONFINITE"]], ["sinks", ["SINK_HEAD"]], ["contrast", ["NOT_NORMALISED", "EFFECTIVE_NEGATIVES_LOW", "MI_SATURATED", "SCALE_AT_CAP"]], ["coverage", ["COVERAGE"]]];
  // what was not there to be judged gets no mark: a green one would be a claim
  const judged = { attention: run.index.length && run.steps.length, scores: run.index.length && run.steps.length, sinks: run.index.length && run.steps.length, contrast: Object.values(run.losses).some((l) => l.type === "contrastive"), coverage: run.index.length && run.steps.length };
  const calm = () => el("div", { class: "calm", id: "findings" }, mark(run.steps.length ? "fine" : "warning"), el("span", {}, run.steps.length ? "No findings: every head selects, no score runs away, nothing was missed." : Object.keys(run.losses).length ? "No attention was recorded; the losses are below." : "Nothing was recorded: the model was not called while it was watched."));
  const list = run.findings.length ? findingList(run, run.findings, "findings") : calm();
  return el("section", { id: "verdict" }, el("div", { class: "top" }, el("span", {}, clip(run.title, 90)), el("span", {}, (run.links || []).flatMap(([name, href]) => (/^[\w./-]+$/.test(href) ? [el("a", { href }, name), " · "] : [])), themeButton())),
    el("h1", { id: "sentence" }, run.sentence), el("div", { class: "status" }, groups.filter(([name]) => judged[name]).map(([name, codes]) => el("span", {}, mark(worst(codes)), name)), el("span", {}, ok(o.fraction) ? `overhead ${fmt(o.fraction * 100, 2)} %` : ""), el("span", {}, clip((run.coverage && run.coverage.short) || "", 90))), list,
    other ? el("p", { class: "small soft" }, `Compared with: ${clip(other.title, 90)}, below.`) : null);
}
function compareView(run, other) {
  const metrics = Object.keys(METRICS).filter((m) => run.values[m] && other.values[m]), late = (r, m) => meanOf(r.index.map(([l, h]) => r.at(m, l, h, r.steps.length - 1)));
  // two runs of one title are distinguished by their order
  const same = run.title === other.title, names = [clip(run.title, 60) + (same ? " (first)" : ""), clip(other.title, 60) + (same ? " (second)" : "")];
  const table = el("div", { class: "scroll" }, el("table", { id: "compare" }, el("tr", {}, [`mean over heads, last ${run.unit === other.unit ? run.unit : "step or input"}`, ...names, "difference"].map((t, i) => el("th", { class: i ? "num" : "" }, t))), metrics.map((m) => { const a = late(run, m), b = late(other, m); return el("tr", {}, el("td", {}, METRICS[m].label), el("td", { class: "num" }, fmt(a)), el("td", { class: "num" }, fmt(b)), el("td", { class: "num" }, fmt(b - a))); })));
  return [el("p", {}, el("b", {}, names[1]), `: ${other.sentence}`), other.findings.length ? findingList(other, other.findings, "other-findings") : null, table].flat().filter(Boolean);
}
// Every word of the page that is not plain English, once.
function wordsView(run) {
  const t = run.thresholds, words = [["row", "one query and its weights over the keys it may see; n is how many it may see (visible keys)"], ["H", "the entropy of a row's weights, in nats: 0 is one key, log n is all keys alike"], ["H / log n", "the share of the entropy a row could have, so that rows of different length compare"], ["width", "exp(H): how many keys a row really uses"], ["score", "the number in the softmax's exponent, after scale, cap and bias"], ["log Z", "log of the sum of exp(score) over a row: drifts when scores grow as a whole"], ["sink", `a key that gets more than ${fmt(t.sink * 100)} % of a head's mass; often key 0, the first`], ["healthy", "no warning or error is about this head"]];
  return el("dl", { class: "words", id: "words" }, words.map(([w, d]) => el("div", {}, el("dt", {}, w), el("dd", {}, d))));
}
async function start() {
  readHash();
  const app = document.getElementById("app"), data = JSON.parse(document.getElementById("record").textContent);
  if (!window.DecompressionStream) { app.textContent = "This page needs a browser of 2023 or later (DecompressionStream)."; return; }
  const run = await openRun(data.run), other = data.other ? await openRun(data.other) : null;
  run.jump = true; // its heads are in the atlas of this page
  SEEN.step = Math.max(0, run.steps.length - 1);
  const wanted = /^L(\d+)H(\d+)$/.exec(state.head || data.run.focus || ""), layer = wanted ? Number(wanted[1]) : 0, head = wanted ? Number(wanted[2]) : 0;
  if (run.sites[layer] && head < run.sites[layer].heads) { SEEN.layer = layer; SEEN.head = head; }
  if (state.metric && METRICS[state.metric] && run.values[state.metric]) SEEN.metric = state.metric;
  if (state.step !== undefined && run.steps.includes(Number(state.step))) SEEN.step = run.steps.indexOf(Number(state.step));
  const sections = [], draws = [], experiments = experimentViews(run);
  const add = (id, short, title, nodes, draw) => { const node = el("section", { id }, title ? el("h2", {}, title) : null, nodes); sections.push({ id, short, node }); if (draw) draws.push(draw); return node; };
  const top = verdict(run, other);
  sections.push({ id: "verdict", short: "Verdict", node: top });
  app.replaceChildren(top);
  if (other) app.append(add("comparison", "Comparison", "Two runs", compareView(run, other)));
  if (run.index.length) {
    const atlas = atlasView(run, other), one = headViews(run), depth = depthViews(run), sinks = sinkView(run), logits = logitView(run), advisor = advisorView(run), robust = robustView(run), rounded = roundingView(run), texts = textsView(run), raw = tableView(run);
    app.append(add("atlas", "Head atlas", null, [atlas.node, wordsView(run)], atlas.draw), add("head", "Selected head", null, one.nodes, one.draw), add("depth", run.frozen ? "Depth and inputs" : "Depth and time", run.frozen ? "Depth and inputs" : "Depth and time", depth.nodes, depth.draw), add("sink-section", "Sinks and scores", "Sinks and scores", el("div", { class: "grid2" }, sinks.node, logits.node), () => { sinks.draw(); logits.draw(); }));
    const study = studyViews(run), loss = lossViews(run), cost = costView(run);
    app.append(add("study", "Scale policies", "Scale policies", study.nodes, study.draw), add("advice-section", "Temperature", "Temperature advisor", advisor.node, advisor.draw), add("loss", "Output side", "Output side", loss.nodes, loss.draw), add("robustness", "Robustness", "Robustness", [robust.node, el("div", { class: texts ? "grid2" : "" }, rounded.node, texts && texts.node)], () => { robust.draw(); rounded.draw(); if (texts) texts.draw(); }), add("cost", "Cost", "Cost", cost.node), add("studies", "Studies", "Studies", experiments.nodes, experiments.draw), add("method", "Method", "Method and provenance", [...methodView(run), ...raw.nodes].filter(Boolean), raw.draw));
  } else {
    const loss = lossViews(run), cost = costView(run);
    app.append(add("atlas", "Head atlas", null, el("p", { class: "soft" }, "No attention was recorded, so there is no atlas. " + clip((run.coverage && run.coverage.text) || "", 600))), add("loss", "Output side", "Output side", loss.nodes, loss.draw), add("cost", "Cost", "Cost", cost.node), add("studies", "Studies", "Studies", experiments.nodes, experiments.draw), add("method", "Method", "Method and provenance", methodView(run).filter(Boolean)));
  }
  document.body.append(buildIndex(sections));
  // what is on screen is drawn now, the rest in the next idle moments: 1,000 heads must not delay the first screen
  draws.shift()?.();
  for (const draw of draws) await new Promise((done) => setTimeout(() => { draw(); done(); }, 0));
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; for (const draw of redraws) draw(); } });
  document.body.dataset.ready = "yes";
}
start().catch((error) => { const app = document.getElementById("app"); app.append(el("p", {}, "The record in this page could not be read: " + error.message)); console.error(error); });
