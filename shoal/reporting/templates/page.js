"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const report = read("report-data"), charts = read("report-charts");
  const root = document.documentElement;

  // Light, dark, or as the system has it.
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => { try { return localStorage.getItem("shoal-theme"); } catch { return null; } };
  const show = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", "Switch to " + (theme === "dark" ? "light" : "dark"));
  };
  show(kept() || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", (event) => { if (!kept()) show(event.matches ? "dark" : "light"); });
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    show(theme);
    try { localStorage.setItem("shoal-theme", theme); } catch { /* a page from disk may not keep it */ }
  });

  // Charts: colours are CSS variables, so that themes and print need no second drawing.
  for (const [name, { spec, data }] of Object.entries(charts)) {
    const place = document.getElementById("chart-" + name);
    const whole = { ...spec, datasets: { ...spec.datasets, [data]: report.data[data] } };
    vegaEmbed(place, whole, { renderer: "svg", actions: false, ast: true, tooltip: { theme: "shoal" } })
      .then(() => place.classList.add("drawn"))
      .catch((error) => { place.textContent = "This chart could not be drawn: " + error.message; console.error(error); });
  }

  // Numbers of a plan's stages where one points at them.
  const tip = document.getElementById("tip");
  for (const stage of document.querySelectorAll(".plan .stage")) {
    const title = stage.querySelector("title"), text = title.textContent;
    title.remove();
    stage.setAttribute("tabindex", "0");
    stage.setAttribute("role", "img");
    stage.setAttribute("aria-label", text);
    const put = () => {
      const [name, ...lines] = text.split("\n");
      tip.replaceChildren(Object.assign(document.createElement("strong"), { textContent: name }));
      for (const line of lines) tip.append(Object.assign(document.createElement("div"), { textContent: line }));
      tip.hidden = false;
      const box = stage.getBoundingClientRect();
      const left = Math.min(box.right + 10, innerWidth - tip.offsetWidth - 8);
      tip.style.left = Math.max(8, left) + scrollX + "px";
      tip.style.top = Math.max(box.top, 8) + scrollY + "px";
    };
    for (const event of ["pointerenter", "focus"]) stage.addEventListener(event, put);
    for (const event of ["pointerleave", "blur"]) stage.addEventListener(event, () => { tip.hidden = true; });
  }

  // One of several at a time.
  for (const select of document.querySelectorAll("select[data-shows]")) {
    const options = document.querySelectorAll("[data-of='" + select.dataset.shows + "']");
    const choose = () => options.forEach((part, number) => { part.classList.toggle("chosen", number === select.selectedIndex); });
    select.addEventListener("change", choose);
    choose(); // a browser may keep what was chosen before
  }

  // What the page holds, as files.
  const save = (name, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const csv = (rows) => {
    const names = [...new Set(rows.flatMap(Object.keys))];
    const cell = (value) => {
      const text = value === null || value === undefined ? "" : String(value);
      return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
    };
    return [names, ...rows.map((row) => names.map((name) => row[name]))].map((line) => line.map(cell).join(",") + "\n").join("");
  };
  for (const link of document.querySelectorAll("[data-save]")) {
    link.addEventListener("click", () => {
      const name = link.dataset.save;
      if (name === "json") save("report.json", "application/json", document.getElementById("report-data").textContent);
      else save(name + ".csv", "text/csv", csv(report.data[name]));
    });
  }
})();
