// What the theme leaves out for readers without a mouse or a screen: names of dialogs, and keys that scroll.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    part.tabIndex = 0;
  }
  document.querySelectorAll(".md-code__nav, .md-nav").forEach((nav, number) => {
    if (!nav.hasAttribute("aria-label")) nav.setAttribute("aria-label", `part ${number}`);
  });
});
