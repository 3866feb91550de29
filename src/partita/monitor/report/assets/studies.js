// Experiments that were run: the question, what was expected, what came out, the figure.
// A figure is shown as an image: a browser runs no script in one and loads nothing for it.
const address = (svg) => "data:image/svg+xml;base64," + btoa(Array.from(new TextEncoder().encode(svg), (b) => String.fromCharCode(b)).join(""));
const SEVERAL = { "holds": "hold", "holds within": "hold within a range", "does not hold": "do not hold" };
const ANSWER = { "holds": "fine", "holds within": "warning", "does not hold": "error" };
function experimentView(run, s, i) {
  const f = figure({ id: "experiment-" + i, title: s.question || s.name, subtitle: `${s.name}, size ${s.size}${ok(s.cells) ? `, ${s.cells} cells` : ""}${ok(s.rows) ? `, ${s.rows} rows` : ""}${s.ids.length ? " · " + s.ids.join(" ") : ""}` });
  f.body.before(el("div", { class: "outcome" }, mark(ANSWER[s.answer] || "warning"), el("div", {}, el("p", {}, el("strong", {}, `${s.answer}${s.within ? " " + s.within : ""}`), ": ", s.evidence), el("p", { class: "small soft" }, "Expected: ", s.expected))));
  if (!s.figure) { f.draw = () => f.empty(s.drawn ? "The figure of this experiment could not be read." : `No figure was kept with this experiment: partita study show ${s.name} draws it.`); return f; }
  f.body.append(el("div", { class: "scroll" }, el("img", { src: address(s.figure), alt: s.question || s.name })));
  f.svg = s.figure;
  f.text = (svg) => svg;
  f.table = () => s.points;
  f.draw = () => {};
  return f;
}
function experimentViews(run) {
  const all = run.experiments || [];
  if (!all.length) return { nodes: [el("p", { class: "empty" }, "No experiment is part of this record. `partita demo` runs a few, and `partita report RUN --studies out/studies` adds those that `partita study run` finished.")], draw: () => {} };
  const counts = Object.keys(ANSWER).map((a) => [a, all.filter((s) => s.answer === a).length]).filter(([, n]) => n);
  const intro = el("p", { class: "small soft" }, `${all.length} experiment${all.length === 1 ? "" : "s"}: ${counts.map(([a, n]) => `${n} ${n === 1 ? a : SEVERAL[a]}`).join(", ")}. The expected answer was written down before the run; the verdict is computed from the rows. A filled circle says that the expected answer does not hold, a half one that it holds within a range.`);
  const views = all.map((s, i) => experimentView(run, s, i));
  return { nodes: [intro, el("div", { class: "experiments" }, views.map((f) => f.node))], draw: () => views.forEach((f) => f.draw()) };
}
