// Adds filters, a switch between light and dark, and drawings and tables as files. The page says everything without it.
(() => {
  "use strict";
  const root = document.documentElement;
  const form = document.getElementById("filters");
  const names = ["model", "wire", "workers"];
  const marked = [...document.querySelectorAll("main [data-model], main [data-wire], main [data-workers]")]
    .filter((element) => !form || !form.contains(element));
  const rows = marked.filter((element) => element.tagName === "TR");

  function chosen(name) {
    return new Set([...form.querySelectorAll(`input[name="${name}"]:checked`)].map((box) => box.value));
  }

  // a group whose panels are all hidden has nothing to open
  function hideEmpty() {
    for (const more of document.querySelectorAll("details.more")) {
      more.classList.toggle("off", !more.querySelector(".panel:not(.off)"));
    }
  }

  function apply() {
    const sets = Object.fromEntries(names.map((name) => [name, chosen(name)]));
    for (const element of marked) {
      const hidden = names.some((name) => element.dataset[name] !== undefined && element.dataset[name] !== ""
        && !sets[name].has(element.dataset[name]));
      element.classList.toggle("off", hidden);
    }
    hideEmpty();
    const seen = rows.filter((row) => !row.classList.contains("off")).length;
    document.getElementById("shown").textContent = seen === rows.length ? "" : `${seen} of ${rows.length} rows shown`;
  }

  if (form) {
    form.hidden = false;
    form.addEventListener("change", apply);
    form.addEventListener("reset", () => setTimeout(apply));
    form.addEventListener("submit", (event) => event.preventDefault());
    // a browser that comes back to the page may have kept the boxes
    apply();
  }

  const theme = document.getElementById("theme");
  if (theme) {
    theme.hidden = false;
    theme.addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
    });
  }

  const cells = (row) => [...row.cells].map((cell) => cell.textContent);
  const rowsOf = (table) => [...table.rows].filter((row) => !row.classList.contains("off"));

  function csv(table) {
    const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    return rowsOf(table).map((row) => cells(row).map(quoted).join(",")).join("\n") + "\n";
  }

  const SIGNS = {
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "\u00a0": "~", "\u00d7": "$\\times$",
    "\u2212": "$-$", "\u2013": "--", "\u2014": "---", "\u00b1": "$\\pm$", "\u00b7": "$\\cdot$", "\u221e": "$\\infty$", "\u2026": "\\ldots{}",
    "<": "$<$", ">": "$>$", "\u2713": "", "\u2717": "", "\u201c": "``", "\u201d": "''",
  };
  const escaped = (text) => text.trim().replace(/[\\~^\u00a0\u00d7\u2212\u2013\u2014\u00b1\u00b7\u221e\u2026<>\u2713\u2717\u201c\u201d]|[&%$#_{}]/g,
    (sign) => SIGNS[sign] ?? `\\${sign}`);

  function latex(table) {
    const [head, ...rows] = rowsOf(table).map((row) => cells(row).map(escaped).join(" & ") + " \\\\");
    const sides = [...table.rows[0].cells].map((cell, i) => {
      const first = table.tBodies[0]?.rows[0]?.cells[i] ?? cell;
      return getComputedStyle(first).textAlign === "left" ? "l" : "r";
    });
    return ["% needs \\usepackage{booktabs}", "\\begin{table}", `\\caption{${escaped(table.caption?.textContent ?? "")}}`,
      `\\begin{tabular}{${sides.join("")}}`, "\\toprule", head, "\\midrule", ...rows, "\\bottomrule", "\\end{tabular}",
      "\\end{table}", ""].join("\n");
  }

  const KEPT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin",
    "opacity", "paint-order", "font-family", "font-size", "font-weight", "text-anchor", "display"];

  // what the style sheet says goes into each element, in the colours of paper
  function picture(svg) {
    const theme = root.dataset.theme;
    root.dataset.theme = "light";
    const copy = svg.cloneNode(true);
    const from = [...svg.querySelectorAll("*")];
    [...copy.querySelectorAll("*")].forEach((element, i) => {
      const style = getComputedStyle(from[i]);
      element.removeAttribute("class");
      for (const name of KEPT) {
        const value = style.getPropertyValue(name);
        if (value) element.style.setProperty(name, value);
      }
    });
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    const hatch = document.getElementById("hatch");
    if (hatch && copy.outerHTML.includes("#hatch")) {
      copy.insertAdjacentHTML("afterbegin", `<defs>${hatch.outerHTML.replace('class="hatch"', 'fill="none" stroke="#000" stroke-width="0.7" opacity="0.28"')}</defs>`);
    }
    copy.insertAdjacentHTML("afterbegin", '<rect width="100%" height="100%" style="fill:#fff"/>');
    return new XMLSerializer().serializeToString(copy);
  }

  function hand(text, type, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  const fileName = (text) => (text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "table");

  function button(kind, of, take) {
    const made = document.createElement("button");
    made.type = "button";
    made.className = "take";
    made.textContent = kind;
    made.setAttribute("aria-label", `${kind} of ${of}`);
    made.addEventListener("click", take);
    return made;
  }

  for (const svg of document.querySelectorAll('svg[role="img"]')) {
    const name = svg.getAttribute("aria-label");
    svg.before(button("SVG", name, () => hand(picture(svg), "image/svg+xml", `${fileName(name)}.svg`)));
  }
  for (const table of document.querySelectorAll(".scroll > table")) {
    const name = table.caption?.textContent ?? document.title;
    const bar = document.createElement("div");
    bar.className = "takes";
    bar.append(button("CSV", name, () => hand(csv(table), "text/csv", `${fileName(name)}.csv`)),
      button("LaTeX", name, () => hand(latex(table), "application/x-tex", `${fileName(name)}.tex`)));
    table.parentElement.before(bar);
  }
})();
