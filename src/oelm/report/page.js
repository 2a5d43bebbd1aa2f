"use strict";
(() => {
  // A click on a name in a legend hides its lines, and a second one shows them again.
  for (const figure of document.querySelectorAll("figure"))
    for (const entry of figure.querySelectorAll("[data-legend]")) {
      entry.ownerSVGElement.setAttribute("role", "group"); // An element with the role img cannot contain buttons.
      entry.setAttribute("role", "button");
      entry.setAttribute("tabindex", "0");
      const toggle = () => {
        const hidden = entry.classList.toggle("hidden");
        entry.setAttribute("aria-pressed", String(!hidden));
        for (const part of figure.querySelectorAll("[data-series]"))
          if (part.dataset.series === entry.dataset.legend) part.style.display = hidden ? "none" : "";
      };
      entry.addEventListener("click", toggle);
      entry.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } });
    }

  // A click on a column's title sorts the table by it.
  const sortKey = (cell) => {
    const text = cell.textContent.trim().replace(/−/g, "-").replace(/,/g, ""), value = parseFloat(text);
    return /^[-+]?[\d.]/.test(text) && Number.isFinite(value) ? value : text;
  };
  for (const table of document.querySelectorAll("table.data"))
    table.querySelectorAll("thead th").forEach((head, column) => head.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending", body = table.tBodies[0];
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [sortKey(row.cells[column]), row]);
      rows.sort(([a], [b]) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1) * (up ? 1 : -1));
      body.append(...rows.map(([, row]) => row));
    }));

  // Dark or light: as the system is set, until the reader chooses. A browser may refuse to store the choice.
  const root = document.documentElement;
  const stored = (action) => { try { return action(localStorage); } catch { return null; } };
  const theme = stored((storage) => storage.getItem("oelm-theme"));
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    stored((storage) => storage.setItem("oelm-theme", root.dataset.theme));
  });
  root.dataset.ready = "true";
})();
