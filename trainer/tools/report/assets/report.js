/* Draws the charts of a run report with plotly.js. Reads the JSON in #data; makes no network request. */
"use strict";
(() => {
  let page = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  // Elements by the number of their chart in the data; charts without a curve have none.
  let plots = [];
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const DASHES = ["solid", "dot", "dash", "dashdot"];
  // Window of the average as a fraction of the points, by level.
  const SMOOTHING = [0, 0.02, 0.08];
  const FEWEST_TO_SMOOTH = 12;
  // In units of the median distance between points; randomly sparse keys stay below it.
  const WIDEST_GAP = 12;
  // More labels than this would overlap; the lines are still drawn.
  const MOST_RESTART_WORDS = 6;
  // While the rest of the charts is drawn, the page answers at least this often, in ms.
  const LONGEST_BUSY = 40;
  const state = { smoothing: 0, log: false, range: null, hiddenRuns: new Set(), hiddenLines: new Set() };
  const drawn = new WeakSet();
  const fresh = new WeakSet();  // drawn, and nothing has changed since
  let colors = {};

  /* ---- Theme ---- */
  const THEMES = ["auto", "light", "dark"];
  let theme = "auto";
  try { theme = localStorage.getItem("report-theme") || "auto"; } catch { /* Pages opened from disk may have no storage. */ }

  function applyTheme() {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    document.getElementById("theme").textContent = `Theme: ${theme}`;
    readColors();
    redraw();
  }

  function readColors() {
    const probe = document.body.appendChild(document.createElement("i"));
    const names = ["card", "ink", "muted", "line", "grid", "band", "mark", "good", "bad"];
    for (let i = 0; i < 8; i++) names.push(`c${i}`);
    for (const name of names) {
      probe.style.color = `var(--${name})`;
      colors[name] = getComputedStyle(probe).color;
    }
    probe.remove();
  }

  const faded = (color, alpha) => `rgba(${color.match(/[\d.]+/g).slice(0, 3).join(", ")}, ${alpha})`;

  /* ---- Numbers ---- */
  const formats = new Map();  // making one takes longer than drawing a point

  function formatted(value, digits) {
    if (!formats.has(digits)) formats.set(digits, new Intl.NumberFormat("en", digits ? { maximumSignificantDigits: digits } : {}));
    return formats.get(digits).format(value);
  }

  function text(value) {
    if (!Number.isFinite(value)) return String(value);
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e9) return formatted(value, 0);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3);
    return formatted(value, Math.max(5, Math.ceil(Math.log10(size + 1)) + 1));
  }

  /* Exponential moving average with normalized weights, so that it is not biased towards the first value. */
  function smooth(values, level) {
    const reach = Math.max(2, values.length * SMOOTHING[level]);
    const keep = 1 - 1 / reach;
    let sum = 0, weight = 0;
    return values.map((value) => {
      sum = keep * sum + value;
      weight = keep * weight + 1;
      return sum / weight;
    });
  }

  /* ---- One chart ---- */
  const nameOf = (index, line) => `${page.charts[index].title}\n${line.run}\n${line.label}`;
  const isHidden = (index, place, line) => state.hiddenRuns.has(line.run) || state.hiddenLines.has(nameOf(index, line));

  function canBeLog(chart) {
    return chart.style === "line" && chart.lines.every((line) => line.y.every((v) => v > 0) && (line.low ?? line.y).every((v) => v > 0));
  }

  const isLog = (chart) => (state.log || chart.log) && canBeLog(chart);

  /* The area between low and high, one polygon for each range without a gap. */
  function envelope(x, low, high, color, alpha, common, onLog) {
    const floor = onLog ? Math.min(...high.filter((v) => v > 0)) / 1e3 : -Infinity;
    const most = widestGap(x);
    const outline = { x: [], y: [] };
    for (let from = 0; from < x.length;) {
      let to = from + 1;
      while (to < x.length && x[to] - x[to - 1] <= most) to++;
      outline.x.push(...x.slice(from, to), ...x.slice(from, to).reverse(), null);
      outline.y.push(...high.slice(from, to), ...low.slice(from, to).reverse().map((v) => Math.max(v, floor)), null);
      from = to;
    }
    return { ...common, ...outline, mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: faded(color, alpha), hoverinfo: "skip" };
  }

  /* ---- Heat maps: a row of cells for each line, with logarithmic colors ---- */
  const isHeat = (index) => page.charts[index].style === "heat";
  const ROW_HEIGHT = 17, HEAT_MARGIN = 60, LOWEST_HEIGHT = 160;

  function heatTrace(index) {
    const chart = page.charts[index];
    const x = [...new Set(chart.lines.flatMap((line) => page.steps[line.steps].x))].sort((a, b) => a - b);
    const columns = new Map(x.map((step, column) => [step, column]));
    const positive = chart.lines.flatMap((line) => line.y.filter((v) => v > 0)).map(Math.log10);
    const low = positive.length ? Math.min(...positive) : -1, high = positive.length ? Math.max(...positive) : 0;
    const z = [], words = [];
    for (const line of chart.lines) {
      const cells = Array(x.length).fill(null), own = Array(x.length).fill("");
      const texts = hoverTexts(line, chart);
      page.steps[line.steps].x.forEach((step, i) => {
        const column = columns.get(step);
        // A value of 0 or below has no logarithm: it takes the color of the lowest.
        cells[column] = line.y[i] > 0 ? Math.log10(line.y[i]) : low;
        own[column] = `${line.label}: ${texts[i]}`;
      });
      z.push(cells);
      words.push(own);
    }
    const powers = [];
    for (let power = Math.ceil(low); power <= Math.floor(high); power++) powers.push(power);
    const ticks = powers.length > 1 ? powers : [low, high];
    return { type: "heatmap", name: "", x, y: chart.lines.map((_, row) => row), z, customdata: words, hovertemplate: "step %{x}<br>%{customdata}",
      colorscale: "Viridis", zmin: low, zmax: high > low ? high : low + 1, hoverongaps: false,
      colorbar: { title: { text: chart.axis, side: "right", font: { size: 11, color: colors.muted } }, thickness: 10, outlinewidth: 0, tickvals: ticks, ticktext: ticks.map((power) => text(Number((10 ** power).toPrecision(2)))),
        tickfont: { size: 10, color: colors.muted } } };
  }

  function tracesOf(index) {
    if (isHeat(index)) return [heatTrace(index)];
    const chart = page.charts[index];
    const traces = [];
    chart.lines.forEach((line, place) => {
      if (isHidden(index, place, line)) return;
      const steps = page.steps[line.steps];
      const color = colors[`c${line.color % 8}`];
      const common = { type: "scatter", name: line.label };
      if (line.spread) {
        traces.push(envelope(page.steps[line.spread.steps].x, line.spread.low, line.spread.high, color, 0.16, common, isLog(chart)));
      }
      if (line.low && chart.style !== "area") traces.push(envelope(steps.x, line.low, line.high, color, 0.2, common, isLog(chart)));
      const isSmoothed = state.smoothing > 0 && chart.style !== "area" && line.y.length >= FEWEST_TO_SMOOTH;
      const shown = {
        ...common, x: steps.x, y: line.y, meta: place, mode: line.y.length <= 25 ? "lines+markers" : "lines",
        line: { color, width: line.dash ? 1.6 : 1.8, dash: DASHES[line.dash % DASHES.length] }, marker: { size: 5, color },
        customdata: hoverTexts(line, chart), hovertemplate: "%{customdata}",
      };
      if (chart.style === "area") Object.assign(shown, { stackgroup: "one", stackgaps: "interpolate", fillcolor: faded(color, 0.45), line: { color, width: 1 } });
      if (!isSmoothed) { traces.push(withGaps(steps.x, shown)); return; }
      traces.push(withGaps(steps.x, { ...shown, opacity: 0.28, line: { ...shown.line, width: 1 } }));
      traces.push(withGaps(steps.x, { ...common, x: steps.x, y: smooth(line.y, state.smoothing), mode: "lines", hoverinfo: "skip",
        line: { color, width: 2.2, dash: DASHES[line.dash % DASHES.length] } }));
    });
    return traces;
  }

  function widestGap(x) {
    if (x.length < FEWEST_TO_SMOOTH) return Infinity;
    const spacing = x.slice(1).map((step, i) => step - x[i]).sort((a, b) => a - b);
    return WIDEST_GAP * spacing[spacing.length >> 1];
  }

  /* Breaks the line where a key was absent for long. */
  function withGaps(x, trace) {
    const most = widestGap(x);
    if (most === Infinity || trace.stackgroup) return trace;
    const found = { ...trace, x: [], y: [] };
    if (trace.customdata) found.customdata = [];
    x.forEach((step, i) => {
      if (i > 0 && step - x[i - 1] > most) {
        found.x.push((step + x[i - 1]) / 2);
        found.y.push(null);
        found.customdata?.push("");
      }
      found.x.push(step);
      found.y.push(trace.y[i]);
      found.customdata?.push(trace.customdata[i]);
    });
    return found;
  }

  const texts = new WeakMap();
  /* The value of each point, with its step if the line has other steps than the first line, whose steps are in the heading. */
  function hoverTexts(line, chart) {
    if (texts.has(line)) return texts.get(line);
    const steps = page.steps[line.steps];
    const isElsewhere = line.steps !== chart.lines[0].steps;
    const found = line.y.map((v, i) => {
      if (line.low && steps.last[i] > steps.first[i]) {
        return `${text(v)} [${text(line.low[i])} … ${text(line.high[i])}] in steps ${text(steps.first[i])}–${text(steps.last[i])}`;
      }
      return isElsewhere ? `${text(v)} at ${text(steps.x[i])}` : text(v);
    });
    texts.set(line, found);
    return found;
  }

  /* The range of the visible values, so that a zoomed chart uses its full height. */
  function valueRange(index) {
    const chart = page.charts[index];
    let low = Infinity, high = -Infinity;
    const totals = new Map();
    const [from, to] = state.range ?? [-Infinity, Infinity];
    const take = (x, lows, highs) => x.forEach((step, i) => {
      if (step < from || step > to) return;
      if (lows[i] < low) low = lows[i];
      if (highs[i] > high) high = highs[i];
    });
    chart.lines.forEach((line, place) => {
      if (isHidden(index, place, line)) return;
      const x = page.steps[line.steps].x;
      if (chart.style === "area") x.forEach((step, i) => totals.set(step, (totals.get(step) ?? 0) + line.y[i]));
      else {
        take(x, line.low ?? line.y, line.high ?? line.y);
        // A wide band must not flatten the curve: beyond three times the height of the curve it is clipped.
        if (line.spread) {
          const reach = 2 * (Math.max(...line.y) - Math.min(...line.y)) || Math.abs(line.y[0]);
          take(page.steps[line.spread.steps].x, line.spread.low.map((v) => Math.max(v, Math.min(...line.y) - (isLog(chart) ? 0 : reach))),
            line.spread.high.map((v) => Math.min(v, Math.max(...line.y) + reach)));
        }
      }
    });
    if (chart.style === "area") take([...totals.keys()], [...totals.values()].map(() => 0), [...totals.values()]);
    if (low > high) return null;
    // Of times, the first step may take as long as a hundred others: the whole run is shown without it, a zoom with it.
    if (chart.top !== null && !state.range) high = Math.min(high, chart.top);
    // A distant reference would flatten the curves; its value is in the legend.
    const [least, most] = [low, high];
    for (const { value, run } of chart.references) {
      if ((run !== null && state.hiddenRuns.has(run)) || value > 4 * most || value < least - 3 * (most - least)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (isLog(chart)) {
      const pad = Math.max((Math.log10(high) - Math.log10(low)) * 0.06, 0.02);
      return [Math.log10(low) - pad, Math.log10(high) + pad];
    }
    if (low === 0 && high === 0) return [-0.05, 1];
    const pad = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
    return [chart.style === "area" ? 0 : low - pad, high + pad];
  }

  function shapesOf(index) {
    const chart = page.charts[index];
    const shapes = [];
    if (chart.band) {
      const [low, high] = chart.band;
      const isLevel = low !== null && low === high;
      if (isLevel) shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: low, y1: low, line: { color: colors.good, width: 4 }, opacity: 0.35, layer: "below" });
      else {
        const ends = chartEnds(index);
        shapes.push({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: low ?? ends[0], y1: high ?? ends[1], fillcolor: colors.band, line: { width: 0 }, layer: "below" });
      }
    }
    for (const reference of chart.references) {
      if (reference.run !== null && state.hiddenRuns.has(reference.run)) continue;
      const color = page.runs.length > 1 && reference.run !== null ? colors[`c${reference.run % 8}`] : colors.mark;
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: reference.value, y1: reference.value, line: { color, width: 1.5, dash: "dash" } });
    }
    page.runs.forEach((run, number) => {
      if (state.hiddenRuns.has(number) || !chart.lines.some((line) => line.run === number)) return;
      const color = page.runs.length > 1 ? colors[`c${number % 8}`] : colors.mark;
      for (const step of run.restarts) {
        shapes.push({ type: "line", yref: "paper", y0: 0, y1: 1, x0: step, x1: step, line: { color, width: 1.2, dash: "dot" }, name: "restart" });
      }
    });
    return shapes;
  }

  /* Limits far outside the visible range, for a band that is open on one side. */
  function chartEnds(index) {
    const range = valueRange(index) ?? [0, 1];
    if (isLog(page.charts[index])) return [10 ** (range[0] - 3), 10 ** (range[1] + 3)];
    const size = range[1] - range[0];
    return [range[0] - 5 * size, range[1] + 5 * size];
  }

  function marksOf(index) {
    const chart = page.charts[index];
    const notes = [];
    const restarts = page.runs.flatMap((run) => run.restarts).length;
    page.runs.forEach((run, number) => {
      if (restarts > MOST_RESTART_WORDS || state.hiddenRuns.has(number) || !chart.lines.some((line) => line.run === number)) return;
      for (const step of run.restarts) {
        notes.push({ x: step, y: 1, yref: "paper", yanchor: "bottom", xanchor: "center", text: "restart", showarrow: false, font: { size: 10, color: colors.muted } });
      }
    });
    chart.lines.forEach((line, place) => {
      if (isHidden(index, place, line)) return;
      for (const step of line.bad ?? []) {
        notes.push({ x: step, y: 0, yref: "paper", yanchor: "bottom", text: "×", showarrow: false, font: { size: 15, color: colors.bad } });
      }
    });
    return notes;
  }

  function layoutOf(index) {
    const chart = page.charts[index];
    const axis = {
      gridcolor: colors.grid, linecolor: colors.line, zeroline: false, tickfont: { size: 11, color: colors.muted },
      automargin: true, showspikes: false,
    };
    const titled = (words) => ({ text: words, standoff: 6, font: { size: 11, color: colors.muted } });
    const measure = isHeat(index) ? "" : chart.axis + (isLog(chart) ? ", log scale" : "");
    const range = isHeat(index) ? [chart.lines.length - 0.5, -0.5] : valueRange(index);
    const rows = { tickmode: "array", tickvals: chart.lines.map((_, row) => row), ticktext: chart.lines.map((line) => line.label), showgrid: false };
    return {
      margin: { l: 44, r: 10, t: 16, b: 28 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, color: colors.ink, size: 12 },
      hovermode: isHeat(index) ? "closest" : "x unified", hoverlabel: { bgcolor: colors.card, bordercolor: colors.line, font: { size: 12, color: colors.ink } },
      dragmode: isTouch ? false : "zoom",
      xaxis: { ...axis, title: titled("optimizer step"), range: state.range ? [...state.range] : wholeRange(), autorange: false, nticks: 6, tickformat: "~s", hoverformat: ",.6~f",
        unifiedhovertitle: { text: "step %{x}" }, showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "solid", spikecolor: colors.mark },
      yaxis: { ...axis, title: titled(measure), type: isLog(chart) ? "log" : "linear", fixedrange: true, nticks: 5, exponentformat: range && !isLog(chart) && range[1] >= 1e4 ? "SI" : "power", minexponent: 4,
        ...(isLog(chart) && range ? logTicks(range) : {}), ...(isHeat(index) ? rows : {}), ...(range ? { range, autorange: false } : { autorange: true }) },
      shapes: shapesOf(index), annotations: marksOf(index),
    };
  }

  /* 1, 2, 5, 10, ..., or only powers of ten if those are too many. */
  function logTicks([from, to]) {
    const digits = to - from < 2.5 ? [1, 2, 5] : [1];
    const values = [];
    for (let power = Math.floor(from); power <= Math.ceil(to); power++) values.push(...digits.map((d) => d * 10 ** power));
    const inside = values.filter((v) => Math.log10(v) >= from && Math.log10(v) <= to);
    return inside.length > 1 ? { tickmode: "array", tickvals: inside, ticktext: inside.map(text) } : {};
  }

  const CONFIG = {
    displaylogo: false, responsive: true, doubleClick: false, displayModeBar: false, showTips: false, scrollZoom: false,
  };

  function draw(index) {
    const target = plots[index];
    fresh.add(target);
    const isFirst = !drawn.has(target);
    drawn.add(target);
    if (isHeat(index)) target.style.height = `${Math.max(ROW_HEIGHT * page.charts[index].lines.length + HEAT_MARGIN, LOWEST_HEIGHT)}px`;
    const layout = layoutOf(index);
    Plotly.react(target, tracesOf(index), layout, CONFIG);
    tellReferences(target, layout.yaxis);
    if (isFirst) listen(target);
  }

  /* A reference outside the axis is not drawn, and its legend says so. */
  function tellReferences(target, { range, type }) {
    const isShown = (value) => !range || ((at) => at >= range[0] && at <= range[1])(type === "log" ? Math.log10(value) : value);
    for (const entry of target.closest(".card").querySelectorAll("[data-references]")) {
      entry.classList.toggle("beyond", !entry.dataset.references.split(" ").map(Number).some(isShown));
    }
  }

  const numberOf = (plot) => Number(plot.dataset.chart);

  function listen(target) {
    target.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) setRange([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
    });
    target.on("plotly_doubleclick", () => setRange(null));
    target.on("plotly_hover", (event) => readOut(numberOf(target), event.points));
    target.addEventListener("keydown", (event) => onKey(event, numberOf(target)));
  }

  /* ---- When: charts close to the viewport at once, the others right after, in pieces between which the page answers ---- */
  const nearby = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) { nearby.delete(entry.target); continue; }
      nearby.add(entry.target);
      if (!fresh.has(entry.target)) draw(numberOf(entry.target));
    }
  }, { rootMargin: "400px 0px" });

  // A chart that is filtered out has no size to draw in.
  const waiting = () => plots.filter((plot) => plot && !fresh.has(plot) && plot.offsetParent !== null);
  let timer = null;

  function drawRest() {
    root.dataset.drawn = "some";
    timer ??= setTimeout(() => {
      timer = null;
      const end = performance.now() + LONGEST_BUSY;
      for (const plot of waiting()) {
        if (performance.now() > end) { drawRest(); return; }
        draw(numberOf(plot));
      }
      root.dataset.drawn = "all";
    });
  }

  function redraw() {
    for (const plot of plots) fresh.delete(plot);
    for (const plot of nearby) draw(numberOf(plot));
    drawRest();
  }

  /* ---- Print: every chart and section, in the light theme, charts scaled to the paper ---- */
  let beforePrint = null;

  function toPrint() {
    if (beforePrint) return;
    beforePrint = { closed: [...document.querySelectorAll("details:not([open])")] };
    const ink = colors.ink;
    root.dataset.theme = "light";
    readColors();
    if (colors.ink !== ink) for (const plot of plots) fresh.delete(plot);
    for (const plot of waiting()) draw(numberOf(plot));
    for (const details of beforePrint.closed) details.open = true;
    for (const svg of document.querySelectorAll(".plot .main-svg")) {
      const [width, height] = [svg.getAttribute("width"), svg.getAttribute("height")];
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.closest(".plot").style.setProperty("--ratio", `${width} / ${height}`);
    }
  }

  function fromPrint() {
    if (!beforePrint) return;
    for (const details of beforePrint.closed) details.open = false;
    for (const svg of document.querySelectorAll(".plot .main-svg")) svg.removeAttribute("viewBox");
    beforePrint = null;
    applyTheme();
  }

  addEventListener("beforeprint", toPrint);
  addEventListener("afterprint", fromPrint);
  matchMedia("print").addEventListener("change", (media) => (media.matches ? toPrint() : fromPrint()));

  function setRange(range) {
    if (range && !(range[1] > range[0])) return;
    state.range = range;
    document.getElementById("reset").disabled = range === null;
    redraw();
  }

  /* ---- Keyboard: a cursor along the first visible line ---- */
  const cursors = new WeakMap();  // the position in each plot

  function visibleLine(index) {
    const chart = page.charts[index];
    const place = chart.lines.findIndex((line, i) => !isHidden(index, i, line) && line.y.length);
    return place < 0 ? null : chart.lines[place];
  }

  function bounds() {
    let low = Infinity, high = -Infinity;
    for (const { x } of page.steps) if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
    return low > high ? [0, 1] : [low, high];
  }

  /* The same for all charts, so that their steps align. */
  function wholeRange() {
    const [low, high] = bounds();
    const pad = Math.max((high - low) * 0.015, 0.5);
    return [low - pad, high + pad];
  }

  function zoom(factor, center) {
    const whole = bounds();
    const [from, to] = state.range ?? whole;
    const half = ((to - from) * factor) / 2;
    const next = [Math.max(center - half, whole[0]), Math.min(center + half, whole[1])];
    if (next[0] <= whole[0] && next[1] >= whole[1]) setRange(null);
    else if (next[1] - next[0] >= 1) setRange(next);
  }

  function onKey(event, index) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const line = visibleLine(index);
    if (!line) return;
    const x = page.steps[line.steps].x;
    const last = x.length - 1;
    const at = Math.min(cursors.get(plots[index]) ?? -1, last);
    const stride = event.shiftKey ? Math.max(1, Math.round(x.length / 20)) : 1;
    const moves = { ArrowRight: at + stride, ArrowLeft: at < 0 ? last : at - stride, Home: 0, End: last };
    if (event.key in moves) moveTo(index, x, Math.max(0, Math.min(last, moves[event.key])));
    else if (event.key === "+" || event.key === "=") zoom(0.5, at < 0 ? (x[0] + x[last]) / 2 : x[at]);
    else if (event.key === "-") zoom(2, at < 0 ? (x[0] + x[last]) / 2 : x[at]);
    else if (event.key === "0" || event.key === "Escape") { setRange(null); Plotly.Fx.unhover(plots[index]); }
    else return;
    event.preventDefault();
  }

  function moveTo(index, x, place) {
    cursors.set(plots[index], place);
    const step = x[place];
    if (state.range && (step < state.range[0] || step > state.range[1])) {
      const half = (state.range[1] - state.range[0]) / 2;
      setRange([step - half, step + half]);
    }
    Plotly.Fx.hover(plots[index], { xval: step, yval: 0 }, "xy");
    readOutStep(index, step);
  }

  /* ---- Readout below a chart ---- */
  function readOutStep(index, step) {
    const points = [];
    page.charts[index].lines.forEach((line, place) => {
      if (isHidden(index, place, line)) return;
      const i = page.steps[line.steps].x.indexOf(step);
      if (i >= 0) points.push(`${line.label} ${hoverTexts(line, page.charts[index])[i]}`);
    });
    say(index, step, points);
  }

  function readOut(index, points) {
    const known = points.filter((point) => point.customdata !== undefined);
    if (known.length) say(index, known[0].x, known.map((point) => `${point.data.name} ${point.customdata}`.trim()));
  }

  function say(index, step, values) {
    const shown = page.charts[index].lines.length > 1 ? values : values.map((value) => value.replace(/^train /, ""));
    plots[index].parentElement.querySelector(".readout").textContent = `step ${text(step)}: ${shown.join(" · ")}`;
  }

  /* ---- Controls ---- */
  const press = (button, isOn) => button.setAttribute("aria-pressed", String(isOn));

  document.getElementById("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.setItem("report-theme", theme); } catch { /* The choice is lost when the page is closed. */ }
    applyTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);

  for (const button of document.querySelectorAll("[data-smoothing]")) {
    button.addEventListener("click", () => {
      state.smoothing = Number(button.dataset.smoothing);
      for (const other of document.querySelectorAll("[data-smoothing]")) press(other, other === button);
      redraw();
    });
  }
  document.getElementById("log").addEventListener("click", (event) => {
    state.log = !state.log;
    press(event.currentTarget, state.log);
    redraw();
  });
  for (const button of document.querySelectorAll("[data-move]")) {
    button.addEventListener("click", () => {
      const whole = bounds();
      const [from, to] = state.range ?? whole;
      const half = (to - from) / 2;
      if (button.dataset.move === "in") zoom(0.5, from + half);
      else if (button.dataset.move === "out") zoom(2, from + half);
      else if (state.range) {
        const by = button.dataset.move === "earlier" ? Math.max(-half, whole[0] - from) : Math.min(half, whole[1] - to);
        setRange([from + by, to + by]);
      }
    });
  }
  document.getElementById("reset").addEventListener("click", () => setRange(null));
  for (const button of document.querySelectorAll("[data-switch]")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.switch);
      const isHiding = !state.hiddenRuns.has(run);
      if (isHiding) state.hiddenRuns.add(run); else state.hiddenRuns.delete(run);
      press(button, !isHiding);
      redraw();
    });
  }
  /* Of the button of a legend: (number of the chart, names of the lines). */
  function linesOf(button) {
    const index = numberOf(button.closest(".card").querySelector(".plot"));
    return [index, button.dataset.lines.split(" ").map((place) => nameOf(index, page.charts[index].lines[place]))];
  }
  // Elements that a live page replaces: one listener for all.
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-lines], [data-step]");
    if (button?.dataset.lines) switchLines(button);
    else if (button?.dataset.step) showStep(Number(button.dataset.step));
  });
  function switchLines(button) {
    const [index, names] = linesOf(button);
    const isHiding = button.getAttribute("aria-pressed") === "true";
    for (const name of names) {
      if (isHiding) state.hiddenLines.add(name); else state.hiddenLines.delete(name);
    }
    press(button, !isHiding);
    draw(index);
  }
  function showStep(step) {
    const [low, high] = bounds();
    const half = Math.max((high - low) / 20, 5);
    setRange([Math.max(low, step - half), Math.min(high, step + half)]);
    document.getElementById("charts").scrollIntoView();
  }
  document.getElementById("find").addEventListener("input", () => {
    filter();
    drawRest();
  });
  function filter() {
    const words = document.getElementById("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    // Cards, and what is said in words instead of drawn.
    for (const part of document.querySelectorAll("[data-words]")) {
      part.hidden = !words.every((word) => part.dataset.words.includes(word));
      found += !part.hidden;
    }
    for (const whole of document.querySelectorAll("section.charts, div.still")) {
      whole.hidden = words.length > 0 && !whole.querySelector("[data-words]:not([hidden])");
    }
    const none = document.getElementById("no-match");
    none.hidden = found > 0 || words.length === 0;
    none.textContent = "No chart title or key matches.";
  }

  function collectPlots() {
    const byNumber = new Map([...document.querySelectorAll(".plot")].map((plot) => [numberOf(plot), plot]));
    plots = page.charts.map((_, number) => byNumber.get(number) ?? null);
    observer.disconnect();
    nearby.clear();
    for (const plot of byNumber.values()) observer.observe(plot);
  }

  /* For a live page, which has put new elements into the document: draws new data, in the view as it is. */
  window.showCharts = (data) => {
    page = data;
    for (const button of document.querySelectorAll("[data-lines]")) {
      press(button, !linesOf(button)[1].every((name) => state.hiddenLines.has(name)));
    }
    filter();
    collectPlots();
    // The observer calls for the charts on the screen, also for unchanged ones: all are stale now.
    for (const plot of plots) fresh.delete(plot);
    if (!beforePrint) drawRest();
  };

  collectPlots();
  applyTheme();
})();
