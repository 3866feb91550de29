// Experiments that were run: the question, what was expected, what came out, the figure.
// A figure comes as [tag, attributes, text, children], already without everything that a figure does not need.
function build([tag, attributes, text, children]) {
  const node = sv(tag, attributes, text || undefined);
  node.append(...children.map(build));
  return node;
}
// The page has the question as its heading, so the figure's own title goes, and the picture starts below it.
function untitled(svg) {
  const box = (svg.getAttribute("viewBox") || "").split(" ").map(Number), titles = [...svg.children].filter((n) => n.classList.contains("title"));
  if (box.length !== 4 || !box.every(ok) || !titles.length) return svg;
  const cut = Math.min(Math.max(...titles.map((n) => Number(n.getAttribute("y")) || 0)) + 2 - box[1], box[3] - 1);
  titles.forEach((n) => n.remove());
  svg.setAttribute("viewBox", `${box[0]} ${box[1] + cut} ${box[2]} ${box[3] - cut}`);
  svg.setAttribute("height", box[3] - cut);
  return svg;
}
// On a narrow screen the panels stand below each other, each as wide as it can be.
function stacked(svg) {
  const notes = [...svg.children].filter((n) => n.classList.contains("note")).map((n) => n.textContent).join(" ");
  const panels = [...svg.children].filter((n) => n.localName === "g").map((g) => {
    const b = g.getBBox(), one = sv("svg", { class: "partita-figure", role: "img", "aria-label": svg.getAttribute("aria-label"), viewBox: `${b.x - 4} ${b.y - 4} ${b.width + 8} ${b.height + 8}`, width: b.width + 8, height: b.height + 8 });
    one.append(g.cloneNode(true));
    return one;
  });
  return [el("p", { class: "small soft" }, notes), ...panels];
}
const SEVERAL = { "holds": "hold", "holds within": "hold within a range", "does not hold": "do not hold" };
const ANSWER = { "holds": "fine", "holds within": "warning", "does not hold": "error" };
function experimentView(run, s, i) {
  const f = figure({ id: "experiment-" + i, title: s.question || s.name, subtitle: `${s.name}, size ${s.size}${ok(s.cells) ? `, ${s.cells} cells` : ""}${ok(s.rows) ? `, ${s.rows} rows` : ""}${s.ids.length ? " · " + s.ids.join(" ") : ""}` });
  f.body.before(el("div", { class: "outcome" }, mark(ANSWER[s.answer] || "warning"), el("div", {}, el("p", {}, el("strong", {}, `${s.answer}${s.within ? " " + s.within : ""}`), ": ", s.evidence), el("p", { class: "small soft" }, "Expected: ", s.expected))));
  const drawn = s.figure ? build(s.figure) : null;
  if (!drawn) { f.draw = () => f.empty(s.drawn ? "The figure of this experiment could not be read." : `No figure was kept with this experiment: partita study show ${s.name} draws it.`); return f; }
  const whole = untitled(drawn), holder = el("div", { class: "scroll" });
  f.body.append(holder);
  f.svg = whole;
  f.text = (svg) => { const copy = svg.cloneNode(true); copy.setAttribute("xmlns", SVG); copy.prepend(sv("style", {}, run.figureStyle || "")); return new XMLSerializer().serializeToString(copy); };
  f.table = () => [["point", "x", "y"], ...[...whole.querySelectorAll("circle")].map((c) => [c.textContent, c.getAttribute("data-x"), c.getAttribute("data-y")])];
  holder.addEventListener("pointerover", (e) => { const about = e.target.localName === "circle" && e.target.querySelector("title"); if (about) f.say(about.textContent); });
  f.draw = () => { holder.replaceChildren(whole); if (holder.clientWidth < 720 && whole.querySelectorAll(":scope > g").length) holder.replaceChildren(...stacked(whole)); };
  redraws.push(f.draw);
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
