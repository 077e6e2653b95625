"use strict";
// Shows the words of the spot under the pointer at once, and copies what a click on `data-copy` stands for.
const hover = document.getElementById("hover");

function wordsOf(spot) {
  const title = spot.querySelector("title");
  if (title) { // else the browser would show it as well, later
    spot.dataset.words = title.textContent;
    title.remove();
  }
  return spot.dataset.words;
}

function show(words, event) {
  hover.textContent = words;
  hover.hidden = false;
  const { width, height } = hover.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const top = event.clientY + 14 + height > innerHeight ? event.clientY - 14 - height : event.clientY + 14;
  hover.style.left = `${Math.max(4, left)}px`;
  hover.style.top = `${Math.max(4, top)}px`;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // a page from an address without encryption has no clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new Error("the browser refused");
}

document.addEventListener("pointermove", (event) => {
  const spot = event.target.closest(".spots > *");
  if (spot) show(wordsOf(spot), event);
  else hover.hidden = true;
});

document.addEventListener("click", (event) => {
  const source = event.target.closest("[data-copy]");
  if (!source) return;
  copy(source.dataset.copy).then(
    () => show(`copied: ${source.dataset.copy}`, event),
    (error) => show(`not copied (${error.message}): ${source.dataset.copy}`, event),
  );
});
