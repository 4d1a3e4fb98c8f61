/* Shows the plotly figures in #data with one range of steps. */
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const WINDOW = 0.05;  // of the smoothing average, as a fraction of the points
  const CONFIG = { displayModeBar: false, doubleClick: false, responsive: true };
  const state = { smooth: false, log: false, range: null, hidden: new Set() };  // hidden: runs
  const plots = [...document.querySelectorAll(".plot")];
  let page, span;

  /* Colors are names of CSS variables, with an opacity. */
  function load() {
    const probe = document.body.appendChild(document.createElement("i"));
    page = JSON.parse($("data").textContent, (key, value) => {
      if (typeof value !== "string" || !key.endsWith("color")) return value;
      const [name, opacity = 1] = value.split("/");
      probe.style.color = `var(--${name})`;
      return `rgba(${getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3)}, ${opacity})`;
    });
    probe.remove();
    page.layout.font.family = getComputedStyle(document.body).fontFamily;
    let [first, last] = [Infinity, -Infinity];
    for (const { data } of page.figures.filter(({ isOfDepth }) => !isOfDepth)) {
      for (const { x } of data) [first, last] = [Math.min(first, x[0] ?? first), Math.max(last, x.at(-1) ?? last)];
    }
    const pad = Math.max((last - first) * 0.015, 0.5);
    span = [first - pad, last + pad];
  }

  /* Exponential moving average with normalized weights, so that it is not biased towards the first value. */
  function smooth(values) {
    const keep = 1 - 1 / Math.max(2, values.length * WINDOW);
    let sum = 0, weight = 0;
    return values.map((value) => {
      [sum, weight] = [keep * sum + value, keep * weight + 1];
      return sum / weight;
    });
  }

  function tracesOf(figure) {
    return figure.data.filter((trace) => !state.hidden.has(trace.meta?.run)).flatMap((trace) => {
      if (!state.smooth || trace.fill || figure.isOfDepth) return [trace];
      const calm = { y: smooth(trace.y), mode: "lines", showlegend: false, hoverinfo: "skip", hovertemplate: null };
      return [{ ...trace, opacity: 0.28 }, { ...trace, ...calm }];
    });
  }

  /* The range of the values in sight, so that a zoomed chart uses its full height. */
  function valueRange(figure, traces, isLog) {
    const [from, to] = state.range ?? span;
    // The first step opens the data and compiles, which may take as long as a hundred others.
    const skipsFirst = figure.layout.yaxis.title.text === "s" && !state.range;
    let low = Infinity, high = -Infinity;
    for (const { x, y } of traces) {
      x.forEach((step, i) => {
        const isSkipped = skipsFirst && step === x[0] && x.length > 2;
        if (isSkipped || step < from || step > to) return;
        [low, high] = [Math.min(low, y[i]), Math.max(high, y[i])];
      });
    }
    if (low > high) return [0, 1];
    if (isLog) [low, high] = [Math.log10(low), Math.log10(high)];
    const pad = (high - low) * 0.06 || (isLog ? 0.02 : Math.abs(high) * 0.1 || 1);
    return [low - pad, high + pad];
  }

  function layoutOf(figure, traces) {
    const template = { layout: page.layout };
    if (figure.isOfDepth) return { ...structuredClone(figure.layout), template, dragmode: false };
    const isLog = state.log && traces.every(({ y }) => y.every((value) => value > 0));
    const range = valueRange(figure, traces, isLog);
    const ends = isLog ? range.map((end) => 10 ** end) : range;
    const bands = figure.layout.shapes.map((band) => ({ ...band, y0: band.y0 ?? ends[0], y1: band.y1 ?? ends[1] }));
    const restarts = page.marks.filter(({ name }) => !state.hidden.has(Number(name)));
    return {
      ...figure.layout,
      template,
      dragmode: isTouch ? false : "zoom",
      legend: { uirevision: "kept" },
      xaxis: { range: [...(state.range ?? span)] },  // plotly writes into it
      yaxis: { ...figure.layout.yaxis, type: isLog ? "log" : "linear", range },
      shapes: [...bands, ...restarts],
    };
  }

  function draw(plot) {
    const figure = page.figures[plot.dataset.chart], isFirst = !plot.data, traces = tracesOf(figure);
    Plotly.react(plot, traces, layoutOf(figure, traces), CONFIG);
    if (!isFirst) return;
    plot.on("plotly_doubleclick", () => setRange(null));
    plot.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change && !figure.isOfDepth) setRange([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
    });
  }

  /* Charts close to the screen first; the page answers between them. */
  let turn = 0;
  async function drawAll() {
    const mine = ++turn;
    document.documentElement.dataset.drawn = "some";
    const distance = new Map(plots.map((plot) => [plot, Math.abs(plot.getBoundingClientRect().top - innerHeight / 2)]));
    for (const plot of [...plots].sort((a, b) => distance.get(a) - distance.get(b))) {
      draw(plot);
      await new Promise((resolve) => { setTimeout(resolve); });
      if (mine !== turn) return;
    }
    document.documentElement.dataset.drawn = "all";
  }

  function setRange(range) {
    const [from, to] = [Math.max(range?.[0] ?? -Infinity, span[0]), Math.min(range?.[1] ?? Infinity, span[1])];
    if (to - from < 0.5) return;
    state.range = from > span[0] || to < span[1] ? [from, to] : null;
    $("reset").disabled = state.range === null;
    drawAll();
  }

  const press = (button, isOn) => button.setAttribute("aria-pressed", String(isOn));
  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button"), run = button?.dataset.run;
    if (button?.id === "reset") setRange(null);
    if (button?.id === "log") press(button, state.log = !state.log);
    if (button?.id === "smooth") press(button, state.smooth = !state.smooth);
    if (run !== undefined) press(button, state.hidden.delete(Number(run)) || !state.hidden.add(Number(run)));
    if (button) drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { load(); plots.forEach(draw); });
  for (const { textContent, parentElement } of document.querySelectorAll("section > h2")) {
    const link = document.createElement("a");
    [link.href, link.textContent] = [`#${parentElement.id}`, textContent];
    document.querySelector("nav ul").appendChild(document.createElement("li")).append(link);
  }
  load();
  drawAll();
})();
