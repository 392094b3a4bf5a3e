"use strict";
const valueOf = (row, at) => {
  const cell = row.cells[at];
  if (!cell || cell.colSpan > 1) return null;
  const value = cell.dataset.value ?? cell.textContent.trim();
  if (value === "") return null;
  return Number.isNaN(Number(value)) ? value : Number(value);
};
const compare = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });

for (const button of document.querySelectorAll("table.sorts th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, at = head.cellIndex, body = head.closest("table").tBodies[0];
    const first = head.dataset.first ?? "ascending", other = first === "ascending" ? "descending" : "ascending";
    const order = head.ariaSort === first ? other : first;
    for (const one of head.parentElement.cells) one.ariaSort = one === head ? order : "none";
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...body.rows].map((row) => ({ row, value: valueOf(row, at) }));
    rows.sort((a, b) => (a.value === null) - (b.value === null) || (a.value === null ? 0 : sign * compare(a.value, b.value)));
    body.append(...rows.map((one) => one.row));
  });
}

for (const field of document.querySelectorAll("[data-filters]")) {
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    for (const row of document.getElementById(field.dataset.filters).tBodies[0].rows)
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}

const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;
tip.setAttribute("role", "tooltip");
const show = (target, x, y) => {
  tip.textContent = target.dataset.tip;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
};
const hide = () => { tip.hidden = true; };
let pointer = null;
const follow = () => {
  const target = pointer && document.elementFromPoint(...pointer)?.closest("[data-tip]");
  if (target) show(target, ...pointer);
  else hide();
};
for (const name of ["pointermove", "pointerdown"])
  document.addEventListener(name, (event) => { pointer = [event.clientX, event.clientY]; follow(); });
document.addEventListener("scroll", follow, { capture: true, passive: true });
document.addEventListener("focusin", (event) => {
  const target = event.target.closest?.("[data-tip]");
  const box = target?.getBoundingClientRect();
  if (target?.matches(":focus-visible")) show(target, box.left, box.bottom);
});
document.documentElement.addEventListener("mouseleave", () => { pointer = null; hide(); });  // not pointerleave: a lifted finger leaves, too
document.addEventListener("focusout", hide);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

const tag = document.body.dataset.tag;  // of a page that is served: it is asked for again when it has changed
if (tag !== undefined) {
  setInterval(async () => {
    const answer = await fetch(location.href, { method: "HEAD", cache: "no-store" }).catch(() => null);
    if (answer?.ok && answer.headers.get("ETag") !== `"${tag}"`) location.reload();
  }, 2000);
}
