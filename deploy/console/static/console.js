"use strict";
// Replaces sections of the page by those of the event stream. It reads only while the page is visible.

const connection = document.getElementById("connection");
let source = null;

function say(text, isLive) {
  connection.textContent = text;
  connection.className = isLive ? "live" : "";
}

function follow() {
  if (source !== null || document.hidden) return;
  source = new EventSource(document.body.dataset.events);
  source.onopen = () => say("● live", true);
  source.onerror = () => {
    say("○ the console does not answer; trying again", false);
    if (source.readyState === EventSource.CLOSED) {
      stop();
      setTimeout(follow, 2000);
    }
  };
  source.addEventListener("sections", (event) => JSON.parse(event.data).forEach(replace));
}

function stop() {
  if (source !== null) source.close();
  source = null;
}

// The server escapes names, and the content security policy forbids inline scripts.
function replace(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  const fresh = template.content.firstElementChild;
  const old = document.getElementById(fresh.id);
  if (old === null) return;
  for (const details of old.querySelectorAll("details[id]")) {
    const same = template.content.getElementById(details.id);
    if (same !== null) same.open = details.open;
  }
  const scrolled = [...old.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  const focusable = "a, button, summary, [tabindex]";
  const focused = [...old.querySelectorAll(focusable)].indexOf(document.activeElement);
  old.replaceWith(fresh);
  stack(fresh);
  fresh.querySelectorAll(".scroll").forEach((box, index) => (box.scrollLeft = scrolled[index] ?? 0));
  if (focused >= 0) fresh.querySelectorAll(focusable)[focused]?.focus({ preventScroll: true });
}

// A narrow window shows each row of a table as a list, with the names of the columns.
const narrow = matchMedia("(max-width: 40rem)");

function stack(root) {
  if (!narrow.matches) return;
  for (const table of root.querySelectorAll("table:not(.stacked)")) {
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    table.classList.add("stacked");
    table.setAttribute("role", "table");
    for (const row of table.tBodies[0].rows) {
      row.setAttribute("role", "row");
      [...row.cells].forEach((cell, index) => {
        cell.dataset.label = names[index];
        cell.setAttribute("role", index === 0 ? "rowheader" : "cell");
        if (cell.textContent.length > 60) cell.classList.add("long");
      });
    }
  }
}

narrow.addEventListener("change", () => stack(document));
stack(document);

// A command leaves the page where it is; the event stream shows what it does. Without this, the form goes back to it.
document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (form.method !== "post") return;
  event.preventDefault();
  const body = new URLSearchParams(new FormData(form, event.submitter));
  const answer = await fetch(form.getAttribute("action"), { method: "POST", body, redirect: "manual" }).catch(() => null);
  if (answer === null) return say("○ the console does not answer", false);
  const refusal = answer.type === "opaqueredirect" ? "" : await answer.text();
  document.getElementById("refusal").textContent = refusal;
});

// Times go on between two readings. Each reading replaces them.
setInterval(() => {
  if (source === null || source.readyState !== EventSource.OPEN) return;
  for (const time of document.querySelectorAll("[data-per-second]")) {
    time.textContent = Math.max(0, Number(time.textContent) + time.dataset.perSecond / 10).toFixed(1);
  }
}, 100);

document.addEventListener("visibilitychange", () => (document.hidden ? stop() : follow()));
follow();
