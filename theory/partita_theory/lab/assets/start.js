// The page, in reading order.
function start() {
  readHash();
  const app = document.getElementById("app");
  const z = (state.z || "").split(",").map(Number);
  if (state.z && z.length >= 2 && z.length <= 64 && z.every(ok)) LAB.z = z;
  if (ok(Number(state.T)) && Number(state.T) >= 0.05 && Number(state.T) <= 20) LAB.T = Number(state.T);
  const top = el("section", { id: "top" }, el("div", { class: "top" }, el("span", {}, "partita"), themeButton()), el("h1", {}, "One softmax, looked at from every side"), el("p", { class: "lead" }, "A classifier, a contrastive loss and an attention layer are one distribution, p = exp(z / T) / Z. Turn a knob and see what each of them would say. Everything is computed here, in your browser."));
  const sections = [knobs(), simplexView(), streamView(), attendView(), facesView(), pullView(), solverView(), noiseView(), pasteView()];
  app.replaceChildren(top, ...sections.map((s) => s.node));
  document.body.append(buildIndex(sections));
  changed("start");
  for (const s of sections) if (s.draw) s.draw();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; for (const draw of redraws) draw(); } });
  document.body.dataset.ready = "yes";
}
start();
