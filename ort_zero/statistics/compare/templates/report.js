"use strict";
(async function () {
  const TITLES = {
    forward: "Forward: inputs and outputs of modules",
    backward: "Backward: their gradients",
    parameter: "Parameters as the step begins",
    parameter_gradient: "Gradients of parameters",
  };
  const PAGE = 300;
  const LABEL = 26; // pixels from one label to the next
  const NO_NUMBER = new Set(["nan", "missing", "extra", "shape"]);
  const byId = (id) => document.getElementById(id);

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  const number = (value) => (typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value);

  function show(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "string") return value;
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const size = Math.abs(value);
    return size >= 1e5 || size < 1e-3 ? value.toExponential(4) : String(Number(value.toPrecision(6)));
  }

  const short = (value) => (value === null ? "" : typeof value === "string" ? value : value.toExponential(2));

  function rowsOf(data) {
    const rows = [];
    for (const series of data.series) {
      series.module.forEach((module, i) => {
        rows.push({
          step: series.step, rank: series.rank, phase: series.phase, order: i,
          module: data.texts[module], tensor: data.texts[series.tensor[i]], kind: data.texts[series.kind[i]],
          error: series.error[i], tolerance: series.tolerance[i], a: sideOf(data, series.a, i), b: sideOf(data, series.b, i),
        });
      });
    }
    for (const row of rows) {
      row.ratio = number(row.error) / number(row.tolerance);
      row.search = (row.module + " " + row.tensor).toLowerCase();
    }
    return rows;
  }

  function sideOf(data, side, i) {
    if (side.shape[i] < 0) return data.bare ? {} : null;
    const record = { shape: data.texts[side.shape[i]], dtype: data.texts[side.dtype[i]] };
    data.statistics.forEach((name, k) => { record[name] = side.numbers[k][i]; });
    return record;
  }

  const data = await unpack(byId("payload").textContent.trim());
  const begin = data.series[0];
  const phaseNumber = (series) => Object.keys(TITLES).indexOf(series.phase);
  data.series.sort((x, y) => x.step - y.step || x.rank - y.rank || phaseNumber(x) - phaseNumber(y));
  const rows = rowsOf(data);
  const first = data.verdict ? rows.find((row) => isFirst(row)) : undefined;
  const state = {
    step: data.verdict ? data.verdict.step : begin.step,
    rank: data.verdict ? data.verdict.rank : begin.rank,
    sort: null, descending: false, limit: PAGE, chosen: null,
  };
  const steps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b);
  const ranks = [...new Set(rows.map((row) => row.rank))].sort((a, b) => a - b);
  if (!steps.includes(state.step)) state.step = steps[0];
  if (!ranks.includes(state.rank)) state.rank = ranks[0];

  function isFirst(row) {
    const v = data.verdict;
    return row.step === v.step && row.rank === v.rank && row.phase === v.phase && v.modules.includes(row.module) &&
      row.tensor === v.tensor;
  }

  // --- buttons for steps and ranks

  function buttons(place, label, values, key) {
    place.replaceChildren();
    const head = document.createElement("span");
    head.textContent = label;
    place.append(head);
    for (const value of values) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = value;
      button.dataset.value = value;
      const here = rows.filter((row) => row[key] === value && (key === "rank" || row.rank === state.rank));
      const bad = here.filter((row) => row.kind).length;
      button.className = (bad ? "bad " : "") + (first && first[key] === value ? "first" : "");
      button.title = bad ? `${bad} records differ` : "no record differs";
      button.setAttribute("aria-pressed", String(value === state[key]));
      button.onclick = () => { state[key] = value; state.chosen = null; refresh(); };
      place.append(button);
    }
  }

  // --- charts

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const escape = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const root = (name) => name || "(root)";

  function hover(row) {
    const lines = [
      `<b>${escape(root(row.module))}</b>  ${escape(row.tensor)}`,
      `step ${row.step}, rank ${row.rank}, ${row.phase.replace("_", " ")} ${row.order}`,
      `error ${short(row.error)}, tolerance ${short(row.tolerance)}${row.kind ? "  <b>" + row.kind + "</b>" : ""}`,
    ];
    const pad = (text, size) => "\u00a0".repeat(Math.max(0, size - text.length)) + escape(text);
    lines.push(pad("", 9) + pad("A", 15) + pad("B", 15));
    for (const name of ["shape", "dtype", ...data.statistics]) {
      const [a, b] = [row.a, row.b].map((side) => (side ? show(side[name]) : "missing"));
      lines.push(pad(name, 9) + pad(a, 15) + pad(b, 15));
    }
    return lines.join("<br>");
  }

  function edges(chosen) {
    const sizes = chosen.flatMap((row) => [number(row.error), number(row.tolerance)])
      .filter((value) => Number.isFinite(value) && value > 0);
    const low = sizes.length ? Math.log10(Math.min(...sizes)) : -8;
    const high = sizes.length ? Math.log10(Math.max(...sizes)) : 0;
    return [Math.floor(low - 0.6), Math.ceil(high + 0.6)];
  }

  function height(row, low, high) {
    const error = number(row.error);
    if (row.error === null || !Number.isFinite(error) || NO_NUMBER.has(row.kind)) return 10 ** high;
    return error > 0 ? error : 10 ** low;
  }

  function ticksOf(low, high) {
    const stride = Math.max(1, Math.ceil((high - low) / 8));
    const values = [10 ** low];
    const texts = ["0"];
    for (let decade = low + 1; decade < high; decade += stride) {
      values.push(10 ** decade);
      texts.push("1e" + decade);
    }
    values.push(10 ** high);
    texts.push("no number");
    return [values, texts];
  }

  function labelsOf(chosen, width) {
    const starts = [];
    chosen.forEach((row, i) => { if (!i || row.module !== chosen[i - 1].module) starts.push([i, row]); });
    const minDistance = chosen.length / Math.max(4, (width - 90) / LABEL);
    const kept = [];
    for (const [i, row] of starts) if (!kept.length || i - kept[kept.length - 1][0] >= minDistance) kept.push([i, row]);
    const cut = (name) => {
      if (name.length <= 22) return name;
      const tail = name.slice(-21);
      const dot = tail.indexOf(".");
      return "…" + tail.slice(dot + 1);
    };
    return [kept.map(([i]) => i), kept.map(([, row]) => escape(cut(root(row.module))))];
  }

  function trace(chosen, test, low, high, extra) {
    const picked = chosen.map((row, i) => [row, i]).filter(([row]) => test(row));
    return {
      type: "scatter", mode: "markers", x: picked.map(([, i]) => i),
      y: picked.map(([row]) => height(row, low, high)), text: picked.map(([row]) => hover(row)),
      customdata: picked.map(([, i]) => i), hovertemplate: "%{text}<extra></extra>", ...extra,
    };
  }

  function draw(place, chosen) {
    const [low, high] = edges(chosen);
    const [tickvals, ticktext] = ticksOf(low, high);
    const [labels, names] = labelsOf(chosen, place.clientWidth);
    const [ink, grid, point, bad, limit] = ["--ink", "--grid", "--point", "--bad", "--limit"].map(colour);
    const top = (row) => height(row, low, high) === 10 ** high;
    const traces = [
      {
        type: "scatter", mode: "lines", name: "tolerance", x: chosen.map((_, i) => i),
        y: chosen.map((row) => (number(row.tolerance) > 0 ? Math.min(number(row.tolerance), 10 ** high) : null)),
        line: { color: limit, width: 1.5, dash: "dot", shape: "hvh" }, hoverinfo: "skip",
      },
      trace(chosen, (row) => !row.kind, low, high, { name: "within", marker: { color: point, size: 6, opacity: 0.85 } }),
      trace(chosen, (row) => row.kind && !top(row), low, high,
        { name: "differs", marker: { color: bad, size: 8, symbol: "diamond" } }),
      trace(chosen, (row) => row.kind && top(row), low, high,
        { name: "NaN, inf, shape or missing", marker: { color: bad, size: 9, symbol: "x" } }),
      trace(chosen, (row) => row === first, low, high, {
        name: "first divergence", hoverinfo: "skip", hovertemplate: null,
        marker: { color: "rgba(0,0,0,0)", size: 20, line: { color: bad, width: 2.5 } },
      }),
    ].filter((one) => one.x.length);
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11 },
      margin: { l: 70, r: 16, t: 28, b: 40 }, hovermode: "closest", showlegend: true,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left", itemsizing: "constant" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--dim"), activecolor: ink },
      hoverlabel: { font: { family: "ui-monospace, Menlo, DejaVu Sans Mono, monospace", size: 11, color: ink },
        bgcolor: colour("--panel"), bordercolor: colour("--line"), align: "left" },
      xaxis: { ticklabeloverflow: "allow", tickvals: labels, ticktext: names, tickangle: -45, automargin: true, gridcolor: grid, zeroline: false,
        range: [-0.8, chosen.length - 0.2] },
      yaxis: { type: "log", tickvals, ticktext, gridcolor: grid, zeroline: false, range: [low - 0.35, high + 0.35],
        title: { text: "relative error" } },
    };
    const config = { displaylogo: false, responsive: true, scrollZoom: false,
      modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]] };
    Plotly.newPlot(place, traces, layout, config).then(() => {
      place.on("plotly_click", (event) => choose(chosen[event.points[0].customdata]));
    });
  }

  function charts() {
    const place = byId("charts");
    place.querySelectorAll(".chart").forEach((chart) => Plotly.purge(chart));
    place.replaceChildren();
    for (const phase of Object.keys(TITLES)) {
      const chosen = rows.filter((r) => r.step === state.step && r.rank === state.rank && r.phase === phase);
      if (!chosen.length) continue;
      const title = document.createElement("h3");
      title.textContent = `${TITLES[phase]} (step ${state.step}, rank ${state.rank}, ${chosen.length} records)`;
      const chart = document.createElement("div");
      chart.className = "chart";
      chart.id = "chart-" + phase;
      place.append(title, chart);
      draw(chart, chosen);
    }
  }

  // --- the table

  const COLUMNS = [
    ["step", (row) => row.step, true], ["rank", (row) => row.rank, true],
    ["phase", (row) => row.phase.replace("_", " ")], ["order", (row) => row.order, true],
    ["module", (row) => root(row.module), false, "name"], ["tensor", (row) => row.tensor, false, "name"],
    ["shape", (row) => (row.a || row.b || {}).shape || ""], ["differs", (row) => row.kind, false, "kind-of"],
    ["error", (row) => row.error, true, "", short], ["tolerance", (row) => row.tolerance, true, "", short],
    ["× tolerance", (row) => (Number.isNaN(row.ratio) ? null : row.ratio), true, "",
      (value) => (value === null ? "" : Number(value.toPrecision(3)).toString())],
    ["l2 of A", (row) => (row.a ? row.a.l2 : null), true], ["l2 of B", (row) => (row.b ? row.b.l2 : null), true],
  ];

  function heads() {
    const place = document.querySelector("#table thead tr");
    COLUMNS.forEach(([name, , numeric], k) => {
      const head = document.createElement("th");
      head.textContent = name;
      head.scope = "col";
      head.tabIndex = 0;
      if (numeric) head.className = "number";
      head.onclick = () => {
        // the first click sorts numbers from the largest down
        const again = state.sort === k;
        state.descending = again ? !state.descending : Boolean(numeric);
        state.sort = k;
        state.limit = PAGE;
        table();
      };
      head.onkeydown = (event) => { if (event.key === "Enter") head.onclick(); };
      place.append(head);
    });
  }

  function filtered() {
    const wanted = byId("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const [phase, only, everything] = [byId("phase").value, byId("only").checked, byId("everything").checked];
    return rows.filter((row) => (everything || (row.step === state.step && row.rank === state.rank)) &&
      (!phase || row.phase === phase) && (!only || row.kind) && wanted.every((word) => row.search.includes(word)));
  }

  function sorted(list) {
    if (state.sort === null) return list;
    const [, value, numeric] = COLUMNS[state.sort];
    const sign = state.descending ? -1 : 1;
    const key = (row) => {
      const cell = value(row);
      if (!numeric) return cell;
      // NaN sorts like the largest error
      return cell === null ? NaN : Number.isNaN(number(cell)) ? Infinity : number(cell);
    };
    return list.map((row) => [key(row), row]).sort(([a], [b]) => {
      if (!numeric) return sign * a.localeCompare(b, "en", { numeric: true });
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
      return a === b ? 0 : sign * (a < b ? -1 : 1);
    }).map(([, row]) => row);
  }

  function details(row) {
    const line = document.createElement("tr");
    line.className = "details";
    const cell = line.insertCell();
    cell.colSpan = COLUMNS.length;
    const inner = document.createElement("table");
    const names = ["shape", "dtype", ...data.statistics];
    const add = (values) => {
      const made = inner.insertRow();
      values.forEach((value) => { const td = made.insertCell(); td.textContent = value; td.className = "number"; });
    };
    add(["", ...names]);
    add(["A", ...names.map((name) => (row.a ? show(row.a[name]) : "missing"))]);
    add(["B", ...names.map((name) => (row.b ? show(row.b[name]) : "missing"))]);
    const title = document.createElement("code");
    title.textContent = `${root(row.module)} ${row.tensor}`;
    const scroll = document.createElement("div");
    scroll.className = "scroll";
    scroll.append(inner);
    cell.append(title, scroll);
    return line;
  }

  function table() {
    const list = sorted(filtered());
    const body = document.querySelector("#table tbody");
    const made = [];
    for (const row of list.slice(0, state.limit)) {
      const line = document.createElement("tr");
      line.className = (row.kind ? "bad " : "") + (row === state.chosen ? "chosen" : "");
      for (const [, value, numeric, style, format] of COLUMNS) {
        const cell = line.insertCell();
        const content = value(row);
        cell.textContent = (format || show)(content);
        cell.className = numeric ? "number" : style || "";
        if (style === "name") cell.title = content;
      }
      line.onclick = () => { state.chosen = state.chosen === row ? null : row; table(); };
      made.push(line);
      if (row === state.chosen) made.push(details(row));
    }
    body.replaceChildren(...made);
    document.querySelectorAll("#table th").forEach((head, k) => {
      if (k === state.sort) head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    byId("found").textContent = `${list.length.toLocaleString("en")} records`;
    byId("more").hidden = list.length <= state.limit;
  }

  function choose(row) {
    byId("filter").value = row.module ? row.module.replace(/#\d+$/, "") : "";
    byId("phase").value = row.phase;
    byId("only").checked = false;
    state.chosen = row;
    table();
    const line = document.querySelector("#table tr.chosen");
    if (line) line.scrollIntoView({ block: "center" });
  }

  function refresh() {
    buttons(byId("steps"), "step", steps, "step");
    buttons(byId("ranks"), "rank", ranks, "rank");
    charts();
    state.limit = PAGE;
    table();
  }

  // --- light and dark

  function theme(name) {
    document.documentElement.dataset.theme = name;
    if (byId("charts").children.length) charts();
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  byId("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  for (const phase of Object.keys(TITLES)) {
    if (rows.some((row) => row.phase === phase)) byId("phase").add(new Option(phase.replace("_", " "), phase));
  }
  for (const id of ["filter", "phase", "only", "everything"]) {
    byId(id).addEventListener("input", () => { state.limit = PAGE; table(); });
  }
  byId("more").onclick = () => { state.limit += 3 * PAGE; table(); };
  heads();
  refresh();
  document.body.dataset.ready = "yes";
})();
