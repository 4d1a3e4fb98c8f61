/* Shows the plotly figures in #data with one range of steps and smoothing. */
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const SMOOTHING = [0, 0.02, 0.08];  // window of the average as a fraction of the points, by level
  const LONGEST_BUSY = 40;  // ms of drawing until the page answers
  const CONFIG = { displayModeBar: isTouch, displaylogo: false, modeBarButtons: [["zoomIn2d", "zoomOut2d", "pan2d"]], doubleClick: false, responsive: true };
  const state = { smoothing: 0, log: false, range: null, runs: new Set(), lines: new Set() };  // the sets: hidden ones
  let page, plots = [];

  /* ---- Figures: columns of numbers are base64, colors are names of CSS variables, with an opacity ---- */
  function decode({ dtype, bdata }) {
    const bytes = Uint8Array.from(atob(bdata), (letter) => letter.charCodeAt(0)).buffer;
    return Array.from(dtype === "f4" ? new Float32Array(bytes) : new Float64Array(bytes));
  }

  function load() {
    const columns = [], colors = new Map(), probe = document.body.appendChild(document.createElement("i"));
    const color = (words) => {
      if (!colors.has(words)) {
        const [name, opacity = 1] = words.split("/");
        probe.style.color = `var(--${name})`;
        colors.set(words, `rgba(${getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3)}, ${opacity})`);
      }
      return colors.get(words);
    };
    page = JSON.parse($("data").textContent, (key, value) => {
      if (typeof value === "string" && key.endsWith("color")) return color(value);
      if (value?.bdata) columns.push(decode(value));
      return value?.column !== undefined ? columns[value.column] : value;
    });
    probe.remove();
    page.template.layout.font.family = getComputedStyle(document.body).fontFamily;
    plots = [...document.querySelectorAll(".plot")];
  }

  const figureOf = (plot) => page.charts[plot.dataset.chart];
  const isLog = (figure) => figure.isLog || (state.log && figure.canBeLog);

  /* Exponential moving average with normalized weights, so that it is not biased towards the first value. */
  function smooth(values) {
    const keep = 1 - 1 / Math.max(2, values.length * SMOOTHING[state.smoothing]);
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (Number.isNaN(value)) return value;
      [sum, weight] = [keep * sum + value, keep * weight + 1];
      return sum / weight;
    });
  }

  function tracesOf(figure) {
    return figure.data.filter((trace) => !state.runs.has(trace.meta?.run)).flatMap((trace) => {
      const shown = { ...trace, visible: state.lines.has(`${figure.name}\n${trace.legendgroup}`) ? "legendonly" : true };
      if (!state.smoothing || !trace.meta?.smooths || trace.fill) return [shown];
      const calm = { ...shown, y: smooth(trace.y), mode: "lines", line: { ...trace.line, width: 2.2 }, showlegend: false, hoverinfo: "skip", hovertemplate: null };
      return [{ ...shown, opacity: 0.28 }, calm];
    });
  }

  /* The range of the visible values, so that a zoomed chart uses its full height. */
  function valueRange(figure, traces) {
    const [from, to] = state.range ?? page.span;
    const skipped = state.range ? -Infinity : figure.skipped ?? -Infinity;
    let low = Infinity, high = -Infinity;
    for (const { x, y, visible } of traces) {
      if (visible !== true) continue;
      x.forEach((step, i) => {
        if (!(step >= from && step <= to && step > skipped)) return;
        if (y[i] < low) low = y[i];
        if (y[i] > high) high = y[i];
      });
    }
    if (low > high) return null;
    const [bottom, top] = isLog(figure) ? [Math.log10(low), Math.log10(high)] : [low, high];
    const pad = (top - bottom) * 0.06 || (isLog(figure) ? 0.02 : Math.abs(top) * 0.1 || 1);
    return [bottom - pad, top + pad];
  }

  function layoutOf(figure, traces) {
    if (figure.isOfSteps === false) return { ...structuredClone(figure.layout), template: page.template, dragmode: false };
    const layout = { ...figure.layout, template: page.template, dragmode: isTouch ? false : "zoom", xaxis: { range: [...(state.range ?? page.span)] } };  // plotly writes into it
    if (figure.isHeat) return layout;
    const type = isLog(figure) ? "log" : "linear", range = valueRange(figure, traces);
    layout.yaxis = { ...layout.yaxis, type, ...(range ? { range } : { rangemode: "tozero" }) };
    if (type === "log") layout.yaxis.title = { text: `${figure.layout.yaxis.title.text}, log scale` };
    const ends = (range ?? [0, 1]).map((end) => (type === "log" ? 10 ** end : end));
    const isShown = ({ name }) => name === undefined || !state.runs.has(Number(name));
    layout.shapes = layout.shapes.filter(isShown).map((shape) => ({ ...shape, y0: shape.y0 ?? ends[0], y1: shape.y1 ?? ends[1] }));
    layout.annotations = layout.annotations.filter(isShown);
    return layout;
  }

  /* A drawing that can be scaled to the width of paper. */
  function scalable(plot) {
    for (const svg of plot.querySelectorAll(".main-svg")) svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
    plot.style.setProperty("--ratio", `${plot.clientWidth} / ${plot.clientHeight}`);
  }

  function draw(plot) {
    const figure = figureOf(plot), isFirst = !plot.data, traces = tracesOf(figure);
    Plotly.react(plot, traces, layoutOf(figure, traces), CONFIG);
    if (!isFirst) return;
    plot.on("plotly_afterplot", () => scalable(plot));
    scalable(plot);
    if (figure.isOfSteps === false) return;
    plot.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) setRange([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
    });
    plot.on("plotly_doubleclick", () => setRange(null));
    plot.on("plotly_legendclick", ({ curveNumber, data }) => {
      const name = `${figureOf(plot).name}\n${data[curveNumber].legendgroup}`;
      if (!state.lines.delete(name)) state.lines.add(name);
      draw(plot);
      return false;
    });
  }

  /* Charts close to the screen first, in pieces between which the page answers. */
  let turn = 0;
  async function drawAll() {
    const mine = ++turn;
    document.documentElement.dataset.drawn = "some";
    const distance = new Map(plots.map((plot) => [plot, Math.abs(plot.getBoundingClientRect().top - innerHeight / 2)]));
    let start = performance.now();
    for (const plot of [...plots].sort((a, b) => distance.get(a) - distance.get(b))) {
      draw(plot);
      if (performance.now() - start < LONGEST_BUSY) continue;
      await new Promise((resolve) => { setTimeout(resolve); });
      if (mine !== turn) return;
      start = performance.now();
    }
    document.documentElement.dataset.drawn = "all";
  }

  /* ---- Steps: one range for all charts ---- */
  function setRange(range) {
    const [from, to] = [Math.max(range?.[0] ?? -Infinity, page.span[0]), Math.min(range?.[1] ?? Infinity, page.span[1])];
    if (to - from < 0.5) return;
    state.range = from > page.span[0] || to < page.span[1] ? [from, to] : null;
    $("reset").disabled = state.range === null;
    drawAll();
  }

  /* ---- Controls ---- */
  const press = (button, isOn) => button.setAttribute("aria-pressed", String(isOn));
  const onClick = (selector, act) => document.querySelectorAll(selector).forEach((button) => button.addEventListener("click", () => { act(button); drawAll(); }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { load(); drawAll(); });
  onClick("[data-smoothing]", (button) => {
    state.smoothing = Number(button.dataset.smoothing);
    document.querySelectorAll("[data-smoothing]").forEach((other) => press(other, other === button));
  });
  onClick("#log", (button) => press(button, state.log = !state.log));
  onClick("#reset", () => setRange(null));
  onClick("[data-switch]", (button) => {
    const run = Number(button.dataset.switch);
    press(button, state.runs.delete(run) || !state.runs.add(run));
  });
  document.addEventListener("click", ({ target }) => {
    const step = Number(target.closest("[data-step]")?.dataset.step), half = Math.max((page.span[1] - page.span[0]) / 20, 5);
    if (Number.isNaN(step)) return;
    setRange([step - half, step + half]);
    $("charts").scrollIntoView();
  });

  /* Paper gets the light theme; the style sheet does the rest. */
  matchMedia("print").addEventListener("change", ({ matches }) => {
    document.documentElement.dataset.theme = matches ? "light" : "auto";
    load();
    if (matches) plots.forEach(draw); else drawAll();
  });

  load();
  drawAll();
})();
