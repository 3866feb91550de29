// Unit vectors on a circle: InfoNCE pulls the positive towards the query and pushes the negatives away, each by its p.
function pullView() {
  const f = figure({ id: "pull-figure", title: "Who is pulled, who is pushed?", subtitle: "vectors on a circle; arrows are the step -dL/dk along it; drag a vector", help: ["L = -log p_0, p = softmax(cos(q, k_j) / T), key 0 the positive. dL/dk_j = (p_j - [j = 0]) q / T, its part along the circle.", "The positive is pulled by (1 - p_0) / T, the negatives are pushed by p_j / T: together as much as the positive is pulled.", "A low T pushes the nearest negative alone; a high one pushes all alike. An arrow fades where a vector points at the query or away from it."] });
  const START = { q: 90, k: [25, 60, 130, 170, 205, 250, 290, 330] };
  let q = START.q, k = START.k.slice(), T = 0.2, held = null;
  const out = numbers([["p-loss", "loss, nats"], ["p-pull", "pull, (1 - p+)/T"], ["p-push", "push, all negatives"], ["p-hardest", "hardest negative's share"], ["p-effective", "effective negatives"]]);
  const rad = (a) => (a * Math.PI) / 180;
  // the force -dL/dk_j along the circle, in the direction of growing angle; the query's is minus their sum
  function forces() {
    const g = gibbs(k.map((a) => Math.cos(rad(q - a))), T), weight = g.p.map((p, j) => (p - (j === 0 ? 1 : 0)) / T);
    const along = k.map((a, j) => -weight[j] * Math.sin(rad(q - a)));
    return { p: g.p, weight, along, query: -along.reduce((a, b) => a + b, 0) };
  }
  function draw() {
    const W = Math.max(250, Math.min(420, f.body.clientWidth || 400)), c = W / 2, R = c - 34, F = forces(), largest = Math.max(1e-9, Math.abs(F.query), ...F.along.map(Math.abs));
    const at = (a, r = R) => [c + r * Math.cos(rad(a)), c - r * Math.sin(rad(a))];
    const svg = sv("svg", { class: "drag", viewBox: `0 0 ${W} ${W}`, role: "group", "aria-label": "vectors on a circle" });
    svg.append(sv("circle", { cx: c, cy: c, r: R, fill: "none", stroke: "var(--ink)", "stroke-opacity": 0.25 }));
    const vector = (id, a, name, colour, force, move) => {
      const [x, y] = at(a), step = (32 * force) / largest, from = at(a, R + 14), to = [from[0] - step * Math.sin(rad(a)), from[1] - step * Math.cos(rad(a))], text = at(a, 0.6 * R), off = 10 + 24 * Math.abs(Math.sin(rad(a)));
      svg.append(sv("line", { x1: c, y1: c, x2: x, y2: y, stroke: colour, "stroke-width": id === "p-q" ? 2.5 : 1.5, "stroke-opacity": 0.8 }));
      if (Math.abs(step) > 0.5) {
        const length = Math.abs(step), u = [(to[0] - from[0]) / length, (to[1] - from[1]) / length], tip = Math.min(6, length);
        svg.append(sv("path", { class: "force", d: `M${from.join(" ")}L${to.join(" ")}M${to[0] - tip * (u[0] + 0.6 * u[1])} ${to[1] - tip * (u[1] - 0.6 * u[0])}L${to.join(" ")}L${to[0] - tip * (u[0] - 0.6 * u[1])} ${to[1] - tip * (u[1] + 0.6 * u[0])}`, fill: "none", stroke: colour, "stroke-width": 2 }));
      }
      if (name) svg.append(sv("text", { x: text[0] - off * Math.sin(rad(a)), y: text[1] + 4 - 16 * Math.cos(rad(a)), "text-anchor": "middle", class: "tick" }, name));
      const dot = sv("circle", { class: "handle", id, cx: x, cy: y, r: 7, fill: colour, stroke: "var(--paper)", "stroke-width": 2, tabindex: 0, role: "slider", "aria-label": name || id, "aria-valuenow": fmt(a, 4), "aria-valuetext": `${fmt(a, 3)} degrees, force ${fmt(force, 3)}` });
      dot.addEventListener("pointerdown", (e) => { held = move; e.preventDefault(); });
      dot.addEventListener("keydown", (e) => { const by = { ArrowLeft: 3, ArrowUp: 3, ArrowRight: -3, ArrowDown: -3 }[e.key]; if (by) { move((a + by + 360) % 360); e.preventDefault(); draw(); document.getElementById(id).focus(); } });
      svg.append(dot);
    };
    k.forEach((a, j) => vector(`p-k${j}`, a, j === 0 ? "positive" : "", j === 0 ? lineColour(2) : lineColour(1), F.along[j], (v) => { k[j] = v; }));
    vector("p-q", q, "query", lineColour(0), F.query, (v) => { q = v; });
    svg.style.maxWidth = W + "px"; f.svg = svg; f.body.replaceChildren(svg);
    f.move = (e) => { if (!held) return; const box = svg.getBoundingClientRect(); held(((Math.atan2(box.top + box.height / 2 - e.clientY, e.clientX - box.left - box.width / 2) * 180) / Math.PI + 360) % 360); draw(); };
    f.table = () => [["vector", "angle, degrees", "probability", "force along the circle"], ["query", q, "", F.query], ...k.map((a, j) => [j === 0 ? "positive" : `negative ${j}`, a, F.p[j], F.along[j]])];
    const rest = F.p.slice(1), total = rest.reduce((a, b) => a + b, 0), H = rest.reduce((a, p) => a - (p > 0 ? (p / total) * Math.log(p / total) : 0), 0);
    out.show({ "p-loss": fmt(-Math.log(F.p[0])), "p-pull": fmt(-F.weight[0]), "p-push": fmt(F.weight.slice(1).reduce((a, b) => a + b, 0)), "p-hardest": fmt(Math.max(...rest) / total, 3), "p-effective": fmt(Math.exp(H), 3) });
  }
  const temperature = slider({ id: "p-T", label: "temperature T", min: 0.02, max: 5, value: T, log: true, on: (v) => { T = v; draw(); } });
  const step = el("button", { type: "button", id: "p-step", onclick: () => { const F = forces(), largest = Math.max(1e-9, Math.abs(F.query), ...F.along.map(Math.abs)), by = 6 / Math.max(1, largest); q += by * F.query; k = k.map((a, j) => a + by * F.along[j]); draw(); } }, "one step");
  const reset = el("button", { type: "button", id: "p-reset", onclick: () => { q = START.q; k = START.k.slice(); draw(); } }, "start again");
  addEventListener("pointermove", (e) => f.move && f.move(e));
  addEventListener("pointerup", () => { held = null; });
  f.body.addEventListener("touchmove", (e) => { if (held) e.preventDefault(); }, { passive: false });
  redraws.push(draw);
  return { ...lab("pull", "Pull and push", "Pulled together, pushed apart", "A contrastive loss moves vectors on a sphere: here, on a circle. The positive comes nearer, the negatives go, the near ones first.", el("div", { class: "bench" }, f.node, el("div", { class: "controls" }, temperature, el("div", { class: "presets" }, step, reset), out))), draw };
}
