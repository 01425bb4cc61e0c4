// Adds filters and a switch between light and dark. The page says everything without it.
(() => {
  "use strict";
  const form = document.getElementById("filters");
  const names = ["model", "wire", "workers"];
  const marked = [...document.querySelectorAll("main [data-model], main [data-wire], main [data-workers]")]
    .filter((element) => !form.contains(element));
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

  form.hidden = false;
  form.addEventListener("change", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.addEventListener("submit", (event) => event.preventDefault());
  // a browser that comes back to the page may have kept the boxes
  apply();

  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
