// Uses two runs in the viewer by mouse and keyboard, and replaces the page by what it
// showed. TREE_STEP is a step with drafts of the second run.
"use strict";
const log = { steps: [], keys: [], texts: [], unnamed: [] };
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const seen = (name, root) => root.querySelector(`[data-name=${name}]`).textContent;
function press(key) {
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  log.keys.push(get("clock").textContent, get("play").textContent);
}
for (const step of [0, 67, 144]) {
  get("scrub").value = step;
  get("scrub").dispatchEvent(new Event("input"));
  log.steps.push(all("article").map((root) => ({
    numbers: Object.fromEntries(all("dd[data-name], dd [data-name]", root).map((part) =>
      [part.dataset.name, part.textContent])),
    labels: all("[data-name=pool] button", root).map((part) => part.ariaLabel),
    events: all("[data-name=events] li:not(.empty)", root).map((part) => part.textContent),
  })));
}
["Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home", " ", " "].forEach(press);
get("scrub").value = 67;
get("scrub").dispatchEvent(new Event("input"));
const [first, second] = all("article");
all("[data-name=pool] button", first)[3].click();
log.page = seen("detail", first);
log.picked = all("[data-name=pool] .picked", first).map((part) => part.title);
all("[data-name=lives] .owner", first)[0].click();
log.life = all("[data-name=detail] p", first).map((part) => part.textContent);
log.events = all("[data-name=detail] li", first).map((part) => part.textContent);
get("scrub").value = TREE_STEP;
get("scrub").dispatchEvent(new Event("input"));
log.trees = all(".tree", second).map((tree) => all(".node", tree).map((node) =>
  [node.textContent, node.title, node.style.gridArea]));
for (const node of all("body *")) {
  const isText = [...node.childNodes].some((x) => x.nodeType === 3 && x.data.trim());
  if (!isText || !node.getClientRects().length || node.tagName === "OPTION") continue;
  let ground = node;
  const look = (x) => getComputedStyle(x);
  while (ground !== document.documentElement && look(ground).backgroundColor === "rgba(0, 0, 0, 0)") {
    ground = ground.parentElement;
  }
  const style = look(node);
  const back = look(ground).backgroundColor;
  log.texts.push([parseFloat(style.fontSize), style.color, back, node.textContent.slice(0, 30)]);
}
log.unnamed = all("button, input, select, [tabindex], [role=img]").filter((node) =>
  !(node.ariaLabel || node.textContent.trim() || node.title)).length;
log.width = document.documentElement.scrollWidth;
log.title = document.title;
all("body *").forEach((node) => node.remove());
document.body.append(make("pre", JSON.stringify(log)));
