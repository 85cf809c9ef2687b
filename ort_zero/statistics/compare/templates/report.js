"use strict";
(async function () {
  const PHASES = [ // by the number of the phase
    ["parameter", "Parameters as the step begins"], ["forward", "Forward: inputs and outputs of modules"],
    ["backward", "Backward: their gradients"], ["gradient", "Gradients of parameters"],
  ];
  const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT, LABEL, LINES] = [70, 16, 16, 240, 364, 26, 500]; // pixels; lines of the table
  const SVG = "http://www.w3.org/2000/svg";
  const byId = (id) => document.getElementById(id);

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  function make(parent, tag, attributes = {}, text) {
    const inSvg = tag === "svg" || parent.namespaceURI === SVG;
    const element = inSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  function show(value) {
    if (typeof value === "string") return value;
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(4) : String(Number(value.toPrecision(6)));
  }
  const short = (value) => (Number.isFinite(value) ? value.toExponential(2) : "nan");

  const { names, groups } = await unpack(byId("payload").textContent);
  groups.sort((x, y) => x.step - y.step || x.rank - y.rank);
  const rows = groups.flatMap(({ step, rank, first, rows }) => rows.map(
    ([phase, module, tensor, kind, error, tolerance, a, b], order) => ({
      step, rank, phase, order, module, tensor, kind, error: Number(error), tolerance: Number(tolerance), a, b,
      isFirst: order === first, words: `${PHASES[phase][0]} ${module} ${tensor}`.toLowerCase(),
    })));
  const begin = rows.find((row) => row.isFirst) || rows[0];
  const state = { step: begin.step, rank: begin.rank, sort: -1, descending: false, chosen: null };
  const here = (row) => row.step === state.step && row.rank === state.rank;

  function buttons(place, key) {
    place.replaceChildren(key);
    for (const value of [...new Set(rows.map((row) => row[key]))].sort((x, y) => x - y)) {
      const bad = rows.some((row) => row.kind && row[key] === value && (key === "rank" || row.rank === state.rank));
      const names = (bad ? "bad " : "") + (begin.isFirst && begin[key] === value ? "first" : "");
      const button = make(place, "button", { "data-value": value, class: names, "aria-pressed": value === state[key] }, value);
      button.onclick = () => { state[key] = value; state.chosen = null; refresh(); };
    }
  }

  function details(place, row) {
    make(place, "b", {}, `${row.module} ${row.tensor}`);
    make(place, "div", {}, `step ${row.step}, rank ${row.rank}, ${PHASES[row.phase][0]}: error ${short(row.error)}, ` +
      `tolerance ${short(row.tolerance)} ${row.kind}`);
    const table = make(place, "table");
    [["", "A", "B"], ...names.map((name, i) => [name, show(row.a[i]), show(row.b[i])])].forEach((cells) => {
      const line = make(table, "tr");
      cells.forEach((cell) => make(line, "td", {}, cell));
    });
  }

  // --- charts

  function draw(place, chosen, phase) {
    const sizes = chosen.flatMap((row) => [row.error, row.tolerance]).filter((v) => v > 0 && Number.isFinite(v)).map(Math.log10);
    const low = Math.floor(sizes.reduce((a, b) => Math.min(a, b), -6)), high = Math.ceil(sizes.reduce((a, b) => Math.max(a, b), low + 1));
    const width = Math.max(place.clientWidth, LEFT + RIGHT + 5 * chosen.length);
    const stride = (width - LEFT - RIGHT) / chosen.length;
    const x = (i) => LEFT + (i + 0.5) * stride;
    const y = (value) => (!Number.isFinite(value) ? TOP : value <= 0 ? BOTTOM
      : BOTTOM - 16 - ((Math.log10(value) - low) / (high - low)) * (BOTTOM - TOP - 32));
    const svg = make(place, "svg", { id: "chart-" + PHASES[phase][0], width, height: HEIGHT });
    const tick = (height, text) => {
      make(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: height, y2: height });
      make(svg, "text", { class: "y", x: LEFT - 6, y: height + 4, "text-anchor": "end" }, text);
    };
    tick(TOP, "no number");
    tick(BOTTOM, "0");
    for (let decade = low; decade <= high; decade += Math.ceil((high - low) / 8)) tick(y(10 ** decade), "1e" + decade);
    let last = -LABEL;
    chosen.forEach((row, i) => {
      if ((i && row.module === chosen[i - 1].module) || x(i) - last < LABEL) return;
      last = x(i);
      const name = row.module.split(".").slice(-3).join(".").slice(-24);
      make(svg, "text", { class: "x", "text-anchor": "end", transform: `translate(${last},${BOTTOM + 14}) rotate(-45)` }, name);
    });
    const line = chosen.map((row, i) => `${i ? "L" : "M"}${x(i) - stride / 2} ${y(row.tolerance)}h${stride}`);
    make(svg, "path", { class: "tolerance", d: line.join("") });
    chosen.forEach((row, i) => {
      const at = { transform: `translate(${x(i)},${y(row.error)})` };
      if (row.kind) make(svg, "path", { class: "point bad", d: "M0-6L6 0L0 6L-6 0Z", ...at });
      else make(svg, "circle", { class: "point", r: 3, ...at });
      if (row.isFirst) make(svg, "circle", { class: "first", r: 11, ...at });
    });
    const rowAt = (event) => chosen[Math.floor((event.clientX - svg.getBoundingClientRect().left - LEFT) / stride)];
    svg.onmouseleave = () => { byId("tip").hidden = true; };
    svg.onmousemove = (event) => {
      const tip = byId("tip"), row = rowAt(event);
      tip.hidden = !row;
      if (!row) return;
      tip.replaceChildren();
      details(tip, row);
      tip.style.left = Math.max(0, Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8)) + "px";
      tip.style.top = Math.max(0, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)) + "px";
    };
    svg.onclick = (event) => {
      state.chosen = rowAt(event);
      if (!state.chosen) return;
      byId("filter").value = state.chosen.module;
      table();
      document.querySelector("#table tr.chosen").scrollIntoView({ block: "center" });
    };
  }

  function charts() {
    const place = byId("charts");
    place.replaceChildren();
    for (const phase of [1, 2, 0, 3]) {
      const chosen = rows.filter((row) => here(row) && row.phase === phase);
      if (!chosen.length) continue;
      make(place, "h3", {}, `${PHASES[phase][1]} (step ${state.step}, rank ${state.rank}, ${chosen.length} records)`);
      draw(make(place, "div", { class: "scroll chart" }), chosen, phase);
    }
  }

  // --- the table

  const COLUMNS = [ // name, value, text of the value
    ["step", (row) => row.step], ["rank", (row) => row.rank], ["phase", (row) => PHASES[row.phase][0]],
    ["order", (row) => row.order], ["module", (row) => row.module], ["tensor", (row) => row.tensor],
    ["shape", (row) => row.a[0]], ["differs", (row) => row.kind], ["error", (row) => row.error, short],
    ["tolerance", (row) => row.tolerance, short],
    ...["A", "B"].map((side) => [`l2 of ${side}`, (row) => row[side.toLowerCase()][names.indexOf("l2")]]),
  ];
  COLUMNS.forEach(([name], column) => {
    make(document.querySelector("#table thead tr"), "th", {}, name).onclick = () => {
      state.descending = state.sort === column ? !state.descending : typeof COLUMNS[column][1](begin) === "number";
      state.sort = column;
      table();
    };
  });

  function compare(x, y) {
    if (typeof x === "string" && typeof y === "string") return x.localeCompare(y, "en", { numeric: true });
    const [a, b] = [x, y].map((value) => (Number.isNaN(Number(value)) ? Infinity : Number(value))); // NaN sorts as the largest
    return a === b ? 0 : a - b;
  }

  function table() {
    const words = byId("filter").value.toLowerCase().split(/\s+/);
    const list = rows.filter((row) => (byId("everything").checked || here(row)) && (!byId("only").checked || row.kind) &&
      words.every((word) => row.words.includes(word)));
    if (state.sort >= 0) {
      const [value, sign] = [COLUMNS[state.sort][1], state.descending ? -1 : 1];
      list.sort((x, y) => sign * compare(value(x), value(y)));
    }
    const body = document.querySelector("#table tbody");
    body.replaceChildren();
    const last = Math.max(LINES, list.indexOf(state.chosen) + 1);
    for (const row of list.slice(0, last)) {
      const line = make(body, "tr", { class: (row.kind ? "bad " : "") + (row === state.chosen ? "chosen" : "") });
      for (const [name, value, text] of COLUMNS) {
        make(line, "td", { class: name === "differs" ? "kind-of" : "", title: value(row) }, (text || show)(value(row)));
      }
      line.onclick = () => { state.chosen = state.chosen === row ? null : row; table(); };
      if (row === state.chosen) details(make(make(body, "tr", { class: "details" }), "td", { colspan: COLUMNS.length }), row);
    }
    document.querySelectorAll("#table thead th").forEach((head, column) => {
      head.setAttribute("aria-sort", column !== state.sort ? "none" : state.descending ? "descending" : "ascending");
    });
    byId("count").textContent = `${list.length.toLocaleString("en")} records` + (list.length > last ? `, the first ${last} shown` : "");
  }

  function refresh() {
    buttons(byId("steps"), "step");
    buttons(byId("ranks"), "rank");
    charts();
    table();
  }

  byId("theme").onclick = () => {
    const style = document.documentElement.style;
    const dark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    style.colorScheme = dark ? "light" : "dark";
  };
  for (const id of ["filter", "only", "everything"]) byId(id).addEventListener("input", table);
  addEventListener("resize", charts);
  refresh();
  document.body.dataset.ready = "yes";
})();
