"use strict";
// Draws the charts whose data is in the page: lines over one axis or several, and intervals. No library, no network.
(() => {
  const DATA = JSON.parse(document.getElementById("charts").textContent);
  const WORDS = DATA.words;
  const NS = "http://www.w3.org/2000/svg";
  const node = (name, attributes = {}, text) => {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // Styles: colour, dash and mark together, so that no difference rests on colour alone.
  const colour = (style) => `var(--c${style % DATA.colours})`;
  const turn = (style, list) => list[(style + Math.floor(style / DATA.colours)) % list.length];
  const mark = (style, x, y, size, attributes) => {
    const s = size, k = turn(style, DATA.marks);
    const paths = {
      o: `M${x - s},${y}a${s},${s} 0 1,0 ${2 * s},0a${s},${s} 0 1,0 ${-2 * s},0Z`,
      s: `M${x - s},${y - s}h${2 * s}v${2 * s}h${-2 * s}Z`,
      "^": `M${x},${y - 1.2 * s}L${x + 1.15 * s},${y + s}H${x - 1.15 * s}Z`,
      v: `M${x},${y + 1.2 * s}L${x + 1.15 * s},${y - s}H${x - 1.15 * s}Z`,
      D: `M${x},${y - 1.3 * s}L${x + 1.3 * s},${y}L${x},${y + 1.3 * s}L${x - 1.3 * s},${y}Z`,
      P: `M${x - 0.45 * s},${y - 1.2 * s}h${0.9 * s}v${0.75 * s}h${0.75 * s}v${0.9 * s}h${-0.75 * s}v${0.75 * s}h${-0.9 * s}v${-0.75 * s}h${-0.75 * s}v${-0.9 * s}h${0.75 * s}Z`,
      X: `M${x - s},${y - s}L${x},${y - 0.35 * s}L${x + s},${y - s}L${x + 0.35 * s},${y}L${x + s},${y + s}L${x},${y + 0.35 * s}L${x - s},${y + s}L${x - 0.35 * s},${y}Z`,
      "*": `M${x},${y - 1.4 * s}L${x + 0.4 * s},${y - 0.4 * s}L${x + 1.4 * s},${y}L${x + 0.4 * s},${y + 0.4 * s}L${x},${y + 1.4 * s}L${x - 0.4 * s},${y + 0.4 * s}L${x - 1.4 * s},${y}L${x - 0.4 * s},${y - 0.4 * s}Z`,
    };
    return node("path", { d: paths[k], ...attributes });
  };

  // Numbers and scales
  const number = (value) => {
    if (value < 0) return `−${number(-value)}`;
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6) return (value / 1e6).toPrecision(3).replace(/\.?0+$/, "") + "M";
    if (size >= 1e4) return Math.round(value).toLocaleString("en");
    if (size < 1e-4) return value.toExponential(1).replace(".0", "").replace("e-", "e−");
    return String(Number(value.toPrecision(4)));
  };
  const ticksOf = (low, high, log, room) => {
    if (log) {
      const all = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
        for (const part of [1, 1.5, 2, 3, 4, 5, 6, 7, 8]) all.push(part * 10 ** power);
      const inside = all.filter((value) => value >= low && value <= high);
      const coarse = inside.filter((value) => [1, 2, 5].includes(Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9))));
      return coarse.length >= 3 ? coarse : inside;
    }
    const raw = (high - low) / Math.max(2, room), unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((part) => part * unit).find((size) => size >= raw);
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step)
      found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
    return found;
  };
  const scaleOf = (low, high, from, to, log) => {
    const a = log ? Math.log(low) : low, b = log ? Math.log(high) : high;
    return (value) => from + ((to - from) * ((log ? Math.log(value) : value) - a)) / (b - a || 1);
  };
  const padded = (values, log, share = 0.05) => {
    let low = Math.min(...values), high = Math.max(...values);
    if (low === high) [low, high] = log ? [low / 1.1, high * 1.1] : [low - Math.abs(low || 1) * 0.05, high + Math.abs(high || 1) * 0.05];
    if (log) { const room = (high / low) ** share; return [low / room, high * room]; }
    const room = (high - low) * share;
    return [low - room, high + room];
  };

  // The box that follows the pointer
  const tooltip = (plot) => {
    const box = element("div", "tip");
    box.hidden = true;
    plot.append(box);
    return {
      show(x, y, title, rows) {
        box.replaceChildren(element("b", "", title));
        const table = document.createElement("table");
        for (const [style, name, value] of rows) {
          const row = table.insertRow();
          const swatch = row.insertCell();
          if (style !== null) swatch.append(sample(style, true));
          row.insertCell().textContent = name;
          const cell = row.insertCell();
          cell.textContent = value;
          cell.style.textAlign = "right";
        }
        box.append(table);
        box.hidden = false;
        const width = plot.clientWidth, own = box.offsetWidth;
        box.style.left = `${x + 14 + own > width ? Math.max(0, x - own - 14) : x + 14}px`;
        box.style.top = `${Math.max(0, y - 20)}px`;
      },
      hide() { box.hidden = true; },
    };
  };
  const sample = (style, line) => {
    const svg = node("svg", { width: 26, height: 12, viewBox: "0 0 26 12", "aria-hidden": "true" });
    if (line) svg.append(node("path", { d: "M1,6H25", stroke: colour(style), "stroke-width": 2, "stroke-dasharray": turn(style, DATA.dashes) }));
    svg.append(mark(style, 13, 6, 3.6, { fill: colour(style) }));
    return svg;
  };
  const choices = (label, options, chosen, act) => {
    const group = element("div", "group");
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", label);
    const buttons = options.map(([value, text]) => {
      const button = element("button", "choice", text);
      button.type = "button";
      button.dataset.value = value;
      button.setAttribute("aria-pressed", String(value === chosen));
      button.addEventListener("click", () => {
        buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
        act(value);
      });
      return button;
    });
    group.append(...buttons);
    return group;
  };

  function lines(place, chart) {
    const axes = Object.keys(chart.axes).filter((axis) => chart.series.some((one) => axis in one.x));
    const state = { axis: axes[0], log: chart.log_y, hidden: new Set() };
    const controls = element("div", "controls"), plot = element("div", "plot"), legend = element("div", "legend");
    if (axes.length > 1)
      controls.append(choices("x", axes.map((axis) => [axis, WORDS[`${axis}_axis`] || axis]), state.axis, (value) => { state.axis = value; draw(); }));
    if (chart.can_log)
      controls.append(choices("y", [["linear", WORDS.linear], ["log", WORDS.log]], state.log ? "log" : "linear", (value) => { state.log = value === "log"; draw(); }));
    chart.series.forEach((one, index) => {
      const button = element("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(sample(one.style, one.line), one.name);
      button.addEventListener("click", () => {
        const on = state.hidden.has(index);
        state.hidden[on ? "delete" : "add"](index);
        button.setAttribute("aria-pressed", String(on));
        draw();
      });
      legend.append(button);
    });
    if (controls.children.length) controls.append(element("span", "hint", WORDS.hint));
    place.append(controls, plot, legend);
    const draw = () => {
      const width = Math.max(260, plot.clientWidth), height = width < 520 ? 260 : 330;
      const box = { left: 66, right: width - 14, top: 12, bottom: height - 44 };
      const shown = chart.series.filter((one, index) => !state.hidden.has(index) && state.axis in one.x);
      const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${chart.y_label}: ${shown.map((one) => one.name).join(", ")}` });
      plot.replaceChildren(svg);
      const tip = tooltip(plot);
      if (!shown.length) return;
      const everyX = shown.flatMap((one) => one.x[state.axis]);
      const everyY = shown.flatMap((one) => [...one.y, ...(one.low || []), ...(one.high || [])]);
      const log = state.log && Math.min(...everyY) > 0;
      const [x0, x1] = padded(everyX, chart.log_x, shown.every((one) => one.line) ? 0.02 : 0.06), [y0, y1] = padded(everyY, log);
      const sx = scaleOf(x0, x1, box.left, box.right, chart.log_x), sy = scaleOf(y0, y1, box.bottom, box.top, log);
      for (const value of ticksOf(y0, y1, log, (box.bottom - box.top) / 55)) {
        svg.append(node("line", { class: "rule", x1: box.left, x2: box.right, y1: sy(value), y2: sy(value) }));
        svg.append(node("text", { x: box.left - 7, y: sy(value) + 4, "text-anchor": "end" }, number(value)));
      }
      const places = [...new Set(everyX)].sort((a, b) => a - b);
      const ticks = chart.log_x && places.length <= 8 ? places : ticksOf(x0, x1, chart.log_x, (box.right - box.left) / 85);
      for (const value of ticks) {
        svg.append(node("line", { class: "axis", x1: sx(value), x2: sx(value), y1: box.bottom, y2: box.bottom + 4 }));
        svg.append(node("text", { x: sx(value), y: box.bottom + 18, "text-anchor": "middle" }, number(value)));
      }
      svg.append(node("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
      svg.append(node("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, chart.axes[state.axis]));
      svg.append(node("text", { transform: `translate(13 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, chart.y_label));
      for (const one of shown) {
        const xs = one.x[state.axis].map(sx), ys = one.y.map(sy), ink = colour(one.style);
        if (one.line && one.low) {
          const up = one.high.map((value, i) => `${xs[i]},${sy(value)}`), down = one.low.map((value, i) => `${xs[i]},${sy(value)}`).reverse();
          svg.append(node("polygon", { points: [...up, ...down].join(" "), fill: ink, opacity: 0.13 }));
        }
        if (one.line)
          svg.append(node("polyline", { points: xs.map((x, i) => `${x},${ys[i]}`).join(" "), fill: "none", stroke: ink, "stroke-width": one.faint ? 1.2 : 2, "stroke-dasharray": turn(one.style, DATA.dashes), opacity: one.faint ? 0.6 : 1, "stroke-linejoin": "round" }));
        else if (one.low)
          one.low.forEach((value, i) => svg.append(node("line", { x1: xs[i], x2: xs[i], y1: sy(value), y2: sy(one.high[i]), stroke: ink, "stroke-width": 1.8 })));
        if (one.marks || !one.line) xs.forEach((x, i) => svg.append(mark(one.style, x, ys[i], one.line ? 3.2 : 5, { fill: ink })));
      }
      const rule = node("line", { class: "axis", y1: box.top, y2: box.bottom, x1: 0, x2: 0, visibility: "hidden", "stroke-dasharray": "3 3" });
      svg.append(rule);
      const follow = (event) => {
        const frame = svg.getBoundingClientRect(), at = ((event.clientX - frame.left) * width) / frame.width;
        const up = ((event.clientY - frame.top) * height) / frame.height;
        let best = null;
        for (const one of shown)
          one.x[state.axis].forEach((x, i) => {
            const away = one.line ? Math.abs(sx(x) - at) : Math.hypot(sx(x) - at, sy(one.y[i]) - up);
            if (!best || away < best.away) best = { away, x, one, i };
          });
        const rows = [];
        for (const one of shown) {
          const i = nearest(one.x[state.axis], best.x);
          const close = Math.abs(sx(one.x[state.axis][i]) - sx(best.x)) < 14;
          if (!close || (!one.line && one !== best.one)) continue;
          const band = one.low && one.low[i] !== one.high[i] ? ` (${number(one.low[i])} – ${number(one.high[i])})` : "";
          rows.push([one.style, one.name, number(one.y[i]) + band, one.y[i]]);
        }
        rows.sort((a, b) => b[3] - a[3]);
        rule.setAttribute("x1", sx(best.x));
        rule.setAttribute("x2", sx(best.x));
        rule.setAttribute("visibility", "visible");
        tip.show((sx(best.x) * frame.width) / width, 24, `${chart.axes[state.axis]} ${number(best.x)}`, rows);
      };
      svg.addEventListener("pointermove", follow);
      svg.addEventListener("pointerdown", follow);
      svg.addEventListener("pointerleave", () => { tip.hide(); rule.setAttribute("visibility", "hidden"); });
    };
    observe(plot, draw);
  }
  const nearest = (values, wanted) => {
    let best = 0;
    values.forEach((value, index) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = index; });
    return best;
  };

  function intervals(place, chart) {
    const plot = element("div", "plot");
    place.append(plot);
    const draw = () => {
      const width = Math.max(260, plot.clientWidth), narrow = width < 560, band = narrow ? 50 : 38;
      const longest = Math.max(...chart.rows.map((row) => row.label.length));
      const box = { left: narrow ? 14 : Math.min(width * 0.4, 26 + longest * 7.1), right: width - 18, top: 8, bottom: 14 + band * chart.rows.length };
      const legend = chart.line_label || (chart.cross_label && chart.rows.some((row) => row.cross !== null));
      const height = box.bottom + 42 + (legend ? 20 : 0);
      const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": chart.x_label });
      plot.replaceChildren(svg);
      const tip = tooltip(plot);
      const every = chart.rows.flatMap((row) => [row.value, row.low, row.high, row.cross, ...row.dots]).filter((value) => value !== null);
      if (chart.line !== null) every.push(chart.line);
      const [x0, x1] = padded(every, false), sx = scaleOf(x0, x1, box.left, box.right, false);
      for (const value of ticksOf(x0, x1, false, (box.right - box.left) / 85)) {
        svg.append(node("line", { class: "rule", x1: sx(value), x2: sx(value), y1: box.top, y2: box.bottom }));
        svg.append(node("text", { x: sx(value), y: box.bottom + 17, "text-anchor": "middle" }, number(value)));
      }
      svg.append(node("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
      svg.append(node("text", { x: (box.left + box.right) / 2, y: box.bottom + 36, "text-anchor": "middle" }, chart.x_label));
      if (chart.line !== null)
        svg.append(node("line", { x1: sx(chart.line), x2: sx(chart.line), y1: box.top, y2: box.bottom, stroke: "var(--muted)", "stroke-width": 1.4, "stroke-dasharray": "5 4" }));
      chart.rows.forEach((row, index) => {
        const y = box.top + band * (index + (narrow ? 0.64 : 0.5)), ink = colour(row.style);
        svg.append(node("text", narrow ? { class: "name", x: box.left, y: y - 15 } : { class: "name", x: box.left - 12, y: y + 4, "text-anchor": "end" }, row.label));
        if (row.low !== null) {
          svg.append(node("line", { x1: sx(row.low), x2: sx(row.high), y1: y, y2: y, stroke: ink, "stroke-width": 2.4 }));
          for (const end of [row.low, row.high]) svg.append(node("line", { x1: sx(end), x2: sx(end), y1: y - 5, y2: y + 5, stroke: ink, "stroke-width": 2.4 }));
        }
        for (const dot of row.dots) svg.append(node("circle", { cx: sx(dot), cy: y + 11, r: 2.2, fill: ink, opacity: 0.75 }));
        svg.append(mark(row.style, sx(row.value), y, 5, { fill: row.hollow ? "var(--paper)" : ink, stroke: ink, "stroke-width": 1.8 }));
        if (row.cross !== null) {
          const x = sx(row.cross);
          svg.append(node("path", { d: `M${x - 5},${y - 5}l10,10M${x - 5},${y + 5}l10,-10`, stroke: "var(--ink)", "stroke-width": 2 }));
        }
        const hit = node("rect", { x: 0, y: box.top + band * index, width, height: band, fill: "transparent" });
        const show = (event) => {
          const frame = svg.getBoundingClientRect(), rows = [[row.style, "", number(row.value)]];
          if (row.low !== null) rows.push([null, "", `${number(row.low)} – ${number(row.high)}`]);
          if (row.cross !== null) rows.push([null, chart.cross_label, number(row.cross)]);
          tip.show(event.clientX - frame.left, ((y - 10) * frame.height) / height, row.label, rows);
        };
        hit.addEventListener("pointermove", show);
        hit.addEventListener("pointerdown", show);
        hit.addEventListener("pointerleave", () => tip.hide());
        svg.append(hit);
      });
      if (legend) {
        const text = [chart.line_label ? `┆ ${chart.line_label}` : "", chart.cross_label && chart.rows.some((row) => row.cross !== null) ? `✕ ${chart.cross_label}` : ""];
        svg.append(node("text", { x: (box.left + box.right) / 2, y: box.bottom + 56, "text-anchor": "middle" }, text.filter(Boolean).join("   ")));
      }
    };
    observe(plot, draw);
  }

  // Charts are drawn when they come into sight, and again when their width changes.
  const observe = (plot, draw) => {
    let width = 0;
    plot.style.minHeight = "240px";
    new ResizeObserver(() => {
      if (plot.clientWidth && plot.clientWidth !== width) { width = plot.clientWidth; draw(); plot.style.minHeight = ""; }
    }).observe(plot);
  };
  for (const place of document.querySelectorAll("[data-chart]")) {
    const chart = DATA.charts[place.dataset.chart];
    (chart.kind === "lines" ? lines : intervals)(place, chart);
  }

  // A click on a column's title sorts the table by it.
  const plain = (cell) => {
    const text = cell.textContent.trim().replace(/−/g, "-").replace(/,/g, ""), value = parseFloat(text);
    return /^[-+]?[\d.]/.test(text) && Number.isFinite(value) ? value : text;
  };
  for (const table of document.querySelectorAll("table.data"))
    table.querySelectorAll("thead th").forEach((head, column) => head.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending", body = table.tBodies[0];
      table.querySelectorAll("thead th").forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [plain(row.cells[column]), row]);
      rows.sort(([a], [b]) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1) * (up ? 1 : -1));
      body.append(...rows.map(([, row]) => row));
    }));

  // Dark or light: as the system has it until the reader chooses.
  const root = document.documentElement;
  const keep = (value) => { try { localStorage.setItem("oelm-theme", value); } catch { /* a browser that keeps nothing */ } };
  try { const kept = localStorage.getItem("oelm-theme"); if (kept === "dark" || kept === "light") root.dataset.theme = kept; } catch { /* the same */ }
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    keep(root.dataset.theme);
  });
  root.dataset.ready = "true";
})();
