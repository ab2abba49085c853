// Typesets the formulas that pymdownx.arithmatex marks. KaTeX is loaded only by pages
// that have a formula; its files are next to this one.
(() => {
  const formulas = document.querySelectorAll(".arithmatex");
  if (!formulas.length) return;
  const base = document.currentScript.src;
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL("katex.min.css", base).href;
  const script = document.createElement("script");
  script.src = new URL("katex.min.js", base).href;
  script.onload = () => {
    for (const element of formulas) {
      const text = element.textContent;
      const displayMode = text.startsWith("\\[");
      katex.render(text.slice(2, -2), element, { displayMode });
    }
  };
  document.head.append(style, script);
})();
