/* Draws the plotly figures in #data, each into the plot at its place, with one range of steps. */
"use strict";
(() => {
  const WINDOW = 0.05;  // of the smoothing average, as a fraction of the points
  const CONFIG = { displayModeBar: false, doubleClick: false, responsive: true };
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const plots = [...document.querySelectorAll(".plot")];
  const [smoothing, reset] = ["smooth", "reset"].map((id) => document.getElementById(id));
  let page, span, range = null, isSmooth = false;

  /* Colors are names of CSS variables, with an opacity. */
  function load() {
    const probe = document.body.appendChild(document.createElement("i"));
    page = JSON.parse(document.getElementById("data").textContent, (key, value) => {
      if (typeof value !== "string" || !key.endsWith("color")) return value;
      const [name, opacity = 1] = value.split("/");
      probe.style.color = `var(--${name})`;
      return `rgba(${getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3)}, ${opacity})`;
    });
    probe.remove();
    page.layout.font.family = getComputedStyle(document.body).fontFamily;
    const traces = page.figures.filter(({ isOfDepth }) => !isOfDepth).flatMap(({ data }) => data);
    const first = Math.min(...traces.map(({ x }) => x[0])), last = Math.max(...traces.map(({ x }) => x.at(-1)));
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

  function withSmooth(trace) {
    if (trace.fill) return [trace];
    const calm = { y: smooth(trace.y), mode: "lines", showlegend: false, hoverinfo: "skip", hovertemplate: null };
    return [{ ...trace, opacity: 0.28 }, { ...trace, ...calm }];
  }

  /* The range of the values in sight, so that a zoomed chart uses its full height. */
  function valueRange(figure, [from, to]) {
    // The first step opens the data and compiles, which may take as long as a hundred others.
    const skipsFirst = figure.layout.yaxis.title.text === "s" && !range;
    let low = Infinity, high = -Infinity;
    for (const { x, y } of figure.data) {
      x.forEach((step, i) => {
        const isSkipped = skipsFirst && step === x[0] && x.length > 2;
        if (isSkipped || step < from || step > to) return;
        [low, high] = [Math.min(low, y[i]), Math.max(high, y[i])];
      });
    }
    if (low > high) return [0, 1];
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low - pad, high + pad];
  }

  function draw(plot) {
    const figure = page.figures[plots.indexOf(plot)], template = { layout: page.layout };
    if (figure.isOfDepth) {
      Plotly.react(plot, figure.data, { ...structuredClone(figure.layout), template, dragmode: false }, CONFIG);
      return;
    }
    const isFirst = !plot.data, steps = range ?? span, values = valueRange(figure, steps);
    const bands = figure.layout.shapes.map((band) => ({ ...band, y0: band.y0 ?? values[0], y1: band.y1 ?? values[1] }));
    Plotly.react(plot, isSmooth ? figure.data.flatMap(withSmooth) : figure.data, {
      ...figure.layout,
      template,
      dragmode: isTouch ? false : "zoom",
      legend: { uirevision: "kept" },
      xaxis: { range: [...steps] },  // plotly writes into it
      yaxis: { ...figure.layout.yaxis, range: values },
      shapes: [...bands, ...page.marks],
    }, CONFIG);
    if (!isFirst) return;
    plot.on("plotly_doubleclick", () => setRange(null));
    plot.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) setRange([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
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

  function setRange(wanted) {
    const [from, to] = [Math.max(wanted?.[0] ?? -Infinity, span[0]), Math.min(wanted?.[1] ?? Infinity, span[1])];
    if (to - from < 0.5) return;
    range = from > span[0] || to < span[1] ? [from, to] : null;
    reset.disabled = range === null;
    drawAll();
  }

  /* A chart as it is shown, or the numbers behind it: without a request, so that it works offline. */
  const SAVED = {
    svg: (plot) => {
      // Apart from the page, the legend has to name the runs.
      const isNamed = ({ meta, hoverinfo }) => meta[0] && hoverinfo !== "skip";
      const named = (trace) => ({ ...trace, name: `${trace.meta[0]}: ${trace.name}`, showlegend: true });
      const data = plot.data.map((trace) => (isNamed(trace) ? named(trace) : trace)), count = data.filter(isNamed).length;
      const figure = { data, layout: { ...plot.layout, showlegend: count > 0 || plot.layout.showlegend } };
      const size = { width: plot.clientWidth, height: plot.clientHeight + 20 * Math.ceil(count / 3) };
      return Plotly.toImage(figure, { format: "svg", imageDataOnly: true, ...size });
    },
    csv: (plot) => {
      const { data, isOfDepth } = page.figures[plots.indexOf(plot)];
      const rows = [["run", "key", isOfDepth ? "first_depth" : "step", "value", "two_standard_errors", "mean"]];
      for (const trace of data.filter(({ fill }) => !fill)) {
        const error = trace.error_y?.array ?? [], at = trace.customdata ?? trace.x;
        const [run, mean] = trace.meta, of = [run || page.title, trace.legendgroup];
        at.forEach((x, i) => rows.push([...of, x, trace.y[i], error[i] ?? "", mean ?? ""]));
      }
      return rows.map((row) => row.map((cell) => `"${String(cell).replaceAll('"', '""')}"`).join(",") + "\r\n").join("");
    },
  };
  document.addEventListener("click", async ({ target }) => {
    const { save } = target.dataset;
    if (!save) return;
    const plot = target.closest(".card").querySelector(".plot"), link = document.createElement("a");
    const type = { svg: "image/svg+xml", csv: "text/csv" }[save];
    link.href = URL.createObjectURL(new Blob([await SAVED[save](plot)], { type }));
    link.download = `${plot.getAttribute("aria-label").replace(/[^\w-]+/g, "_")}.${save}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1e4);
  });
  reset.addEventListener("click", () => setRange(null));
  smoothing.addEventListener("click", () => {
    isSmooth = !isSmooth;
    smoothing.setAttribute("aria-pressed", isSmooth);
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { load(); drawAll(); });
  for (const { textContent, parentElement } of document.querySelectorAll("section > h2")) {
    const link = document.createElement("a");
    [link.href, link.textContent] = [`#${parentElement.id}`, textContent];
    document.querySelector("nav ul").appendChild(document.createElement("li")).append(link);
  }
  load();
  drawAll();
})();
