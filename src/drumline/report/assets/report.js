"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const COLORS = {
    light: ["#1d5fd1", "#c4570a", "#0d8057", "#a21caf", "#b3261e", "#0e7490", "#6d5a00", "#5b21b6"],
    dark: ["#7fb0ff", "#ffab66", "#5fd3a4", "#e58df2", "#ff9c94", "#67d4ea", "#d9c35a", "#b79bff"],
  };
  const KINDS = { raw: "", line: "", smooth: "", validation: "validation", stall: "waiting for a commit" };
  const AXES = { step: ["step", "~s"], tokens: ["tokens", "~s"], hours: ["hours of training", "~g"] };
  const choice = { over: "step", losses: "linear" };

  const theme = () => root.dataset.theme;
  const color = (run, isSecond) => COLORS[theme()][(data.runs.length > 1 ? run : isSecond ? 1 : 0) % 8];
  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

  function trace(series, chart) {
    const isSecond = series.kind === "validation" || series.kind === "stall";
    const isMarked = isSecond || series.y.length < 30;
    const names = [data.runs.length > 1 ? data.runs[series.run].name : "", series.name ?? KINDS[series.kind]].filter(Boolean);
    const paint = series.hue === undefined ? color(series.run, isSecond) : COLORS[theme()][series.hue % 8];
    const alone = series.kind === "smooth" ? "smoothed" : chart.key === "loss" && series.kind === "line" ? "training" : "each step";
    return {
      type: "scatter",
      mode: series.kind === "stall" ? "markers" : isMarked ? "lines+markers" : "lines",
      name: escape(names.join(", ") || alone),
      legendgroup: data.runs.length > 1 ? String(series.run) : undefined,
      showlegend: !(series.kind === "raw" && data.runs.length > 1),
      hoverinfo: series.kind === "raw" && data.runs.length > 1 ? "skip" : undefined,
      opacity: series.kind === "raw" ? 0.35 : 1,
      x: series[choice.over],
      y: series.y,
      connectgaps: false,
      line: { color: paint, width: series.kind === "raw" ? 1 : 2, dash: isSecond && data.runs.length > 1 ? "dot" : "solid" },
      marker: { color: paint, size: series.kind === "stall" ? 6 : 7, symbol: isSecond ? "diamond" : "circle" },
      hovertemplate: `%{y:${chart.hoverformat}}${chart.suffix}`,
    };
  }

  function resumeLines() {
    return data.runs.flatMap((run, index) =>
      run.resumes[choice.over].map((x) => ({
        type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, layer: "below",
        line: { color: data.runs.length > 1 ? color(index) : style("--soft"), width: 1, dash: "dash" },
      })));
  }

  function resumeLabels(chart) {
    if (chart !== data.charts[0]) return [];
    return data.runs.flatMap((run) =>
      run.resumes[choice.over].slice(0, 12).map((x) => ({
        x, y: 1, xref: "x", yref: "paper", text: "resumed", showarrow: false, xanchor: "left", yanchor: "top",
        font: { size: 11, color: style("--soft") },
      })));
  }

  function layout(chart) {
    const axis = {
      gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line"), automargin: true,
      tickfont: { color: style("--soft") }, title: { font: { color: style("--soft"), size: 12 }, standoff: 8 },
    };
    const [title, tickformat] = AXES[choice.over];
    const isLog = chart.key === "loss" ? choice.losses === "log" : chart.log;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: { family: "system-ui, sans-serif", size: 12, color: style("--ink") },
      margin: { l: 56, r: 18, t: 8, b: 40 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--ink") } },
      showlegend: chart.series.length > 1,
      legend: { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
      xaxis: { ...axis, title: { ...axis.title, text: title }, tickformat, hoverformat: choice.over === "step" ? ",d" : "" },
      yaxis: {
        ...axis, type: isLog ? "log" : "linear", tickformat: chart.tickformat, ticksuffix: chart.ticksuffix,
        rangemode: ["tokens_per_s", "mfu", "memory_bytes", "step_s"].includes(chart.key) ? "tozero" : "normal",
        ...(isLog ? { dtick: span(chart) < 2 ? "D2" : 1, minor: { dtick: "D1", showgrid: true, gridcolor: style("--line") } } : {}),
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--line"), activecolor: style("--soft") },
      shapes: resumeLines(),
      annotations: resumeLabels(chart),
    };
  }

  // How many powers of ten the values of a chart cover.
  function span(chart) {
    const values = chart.series.flatMap((series) => series.y).filter((value) => value > 0);
    const [least, greatest] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, 0]);
    return values.length ? Math.log10(greatest / least) : 0;
  }

  const plots = [];
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };
  function draw() {
    document.querySelectorAll(".swatch").forEach((swatch) => { swatch.style.background = color(Number(swatch.dataset.run)); });
    for (const { chart, plot } of plots) {
      Plotly.react(plot, chart.series.map((series) => trace(series, chart)), layout(chart), config);
    }
  }

  // A zoom in one chart is a zoom in all: they share their x.
  let isFollowing = false;
  function follow(source, change) {
    if (isFollowing) return;
    const update = {};
    if ("xaxis.range[0]" in change) update["xaxis.range"] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    else if (change["xaxis.autorange"]) update["xaxis.autorange"] = true;
    else return;
    isFollowing = true;
    Promise.all(plots.filter(({ plot }) => plot !== source).map(({ plot }) => Plotly.relayout(plot, update)))
      .finally(() => { isFollowing = false; });
  }

  function build() {
    const host = document.getElementById("charts");
    if (!host) return;
    for (const chart of data.charts) {
      const card = document.createElement("section");
      const title = document.createElement("h2");
      const plot = document.createElement("div");
      card.className = "chart"; plot.className = "plot"; plot.id = `chart-${chart.key}`; title.textContent = chart.title;
      card.append(title, plot);
      host.append(card);
      plots.push({ chart, plot });
    }
    draw();
    for (const { plot } of plots) plot.on("plotly_relayout", (change) => follow(plot, change));
    for (const group of document.querySelectorAll(".choice")) {
      group.addEventListener("click", (event) => {
        const value = event.target.dataset.value;
        if (!value) return;
        choice[group.id] = value;
        for (const button of group.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button === event.target));
        draw();
      });
    }
  }

  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  root.dataset.theme = prefersDark.matches ? "dark" : "light";
  const button = document.getElementById("theme");
  const label = () => { button.textContent = theme() === "dark" ? "light theme" : "dark theme"; };
  const choose = (name) => { root.dataset.theme = name; label(); draw(); };
  button.addEventListener("click", () => choose(theme() === "dark" ? "light" : "dark"));
  prefersDark.addEventListener("change", (event) => choose(event.matches ? "dark" : "light"));
  label();
  build();
})();
