"use strict";

const byId = (id) => document.getElementById(id);
const SHOWN = 60; // cards at first
const state = { image: null, domains: [], rejected: [], writable: true, shown: SHOWN, names: "" };

/* Asking the server */

async function call(address, options = {}) {
  const headers = { ...options.headers };
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  let reply;
  try {
    reply = await fetch(address, { ...options, headers });
  } catch {
    throw new Error("the server does not answer");
  }
  if (reply.status === 401 && (await askForToken())) return call(address, options);
  if (reply.status === 204) return null;
  const content = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(content.error || `the server answered ${reply.status}`);
  return content;
}

let openDialog = null; // one dialog for all requests that wait for a token

function askForToken() {
  openDialog ??= new Promise((resolve) => {
    const dialog = byId("token-dialog");
    dialog.returnValue = "";
    byId("token").value = "";
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok" ? byId("token").value.trim() : "";
      if (given) sessionStorage.setItem("token", given);
      else sessionStorage.removeItem("token");
      openDialog = null;
      resolve(Boolean(given));
    }, { once: true });
    dialog.showModal();
  });
  return openDialog;
}

/* One image */

function take(file) {
  if (!file || !file.type.startsWith("image/")) {
    showProblem(new Error("that is not an image"));
    return;
  }
  state.image = file;
  const preview = byId("preview");
  URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(file);
  preview.hidden = false;
  byId("invitation").hidden = true;
  byId("ask").disabled = false;
  ask();
}

async function ask() {
  const domain = byId("domain").value;
  const form = new FormData();
  form.append("images", state.image, "image");
  if (domain) form.append("domain", domain);
  const box = byId("answer");
  box.classList.add("busy");
  const began = performance.now();
  const asked = { image: state.image, domain };
  try {
    const answer = await call(domain ? "v1/predict" : "v1/predict/auto", { method: "POST", body: form });
    if (asked.image !== state.image || asked.domain !== byId("domain").value) return;
    showAnswer(answer, performance.now() - began);
    refresh();
  } catch (problem) {
    showProblem(problem);
  } finally {
    box.classList.remove("busy");
  }
}

function showAnswer(answer, milliseconds) {
  const [image] = answer.images;
  const name = answer.domain || image.domain;
  const times = `${round(answer.milliseconds)} ms in the server, ${round(milliseconds)} ms in all`;
  const how = answer.warm === false ? "; the domain was cold" : "";
  const bars = element("ol", "bars", image.top.map((guess) => {
    const fill = element("i");
    fill.style.width = `${100 * guess.probability}%`;
    return element("li", "", [
      element("span", "", guess.class),
      element("span", "", `${(100 * guess.probability).toFixed(1)} %`),
      element("div", "bar", [fill]),
    ]);
  }));
  const parts = [element("h2", "", name), element("p", "note", times + how), bars];
  if (image.ranking && image.ranking.length > 1) {
    const rows = image.ranking.slice(0, 6).map((one) => element("li", "", [
      element("span", "", one.domain), element("span", "", one.score.toFixed(2).replace("-", "−")),
    ]));
    const how = answer.rule === "likeness" ? "by the look of the image" : "by how sure each one is";
    parts.push(element("h3", "", `Domains compared ${how}`), element("ol", "ranking", rows));
  }
  byId("answer").replaceChildren(...parts);
}

function showProblem(problem) {
  byId("answer").replaceChildren(element("p", "problem", sentence(problem.message)));
}

/* The library */

async function refresh() {
  let list;
  try {
    const found = [];
    let after = "";
    do {
      list = await call(`v1/domains?after=${encodeURIComponent(after)}`);
      found.push(...list.domains);
      after = list.next;
    } while (after);
    Object.assign(state, { domains: found, rejected: list.rejected, writable: list.writable });
  } catch (problem) {
    say(problem.message, true);
    return;
  }
  byId("base").textContent = `one network, ${list.base.name}, and ${plural(state.domains.length, "domain")}`;
  draw();
}

function draw() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const found = state.domains.filter((domain) => domain.name.toLowerCase().includes(wanted));
  const names = state.domains.map((domain) => domain.name);
  if (names.join() !== state.names) {
    const chosen = byId("domain").value;
    state.names = names.join();
    byId("domain").replaceChildren(option("", "Find it"), ...names.map((name) => option(name, name)));
    byId("domain").value = names.includes(chosen) ? chosen : "";
  }
  drawCards(found.slice(0, state.shown));

  const warm = state.domains.filter((domain) => domain.warm).length;
  byId("count").textContent = `${plural(state.domains.length, "domain")}, ${warm} warm`;
  byId("empty").textContent = state.domains.length ? "No domain has that in its name." : "The library is empty: upload a pack.";
  byId("empty").hidden = found.length > 0;
  byId("more").hidden = found.length <= state.shown;
  byId("pack-label").hidden = !state.writable;
  byId("pack").disabled = !state.writable;

  const rejected = byId("rejected");
  rejected.hidden = !state.rejected.length;
  rejected.querySelector("summary").textContent = `${plural(state.rejected.length, "pack")} in the folder cannot be served`;
  rejected.querySelector("ul").replaceChildren(
    ...state.rejected.map((one) => element("li", "", `${one.name}: ${one.reason}`)));
}

/* Cards that stay are changed in place, so that what has the focus keeps it. */
function drawCards(domains) {
  const list = byId("cards");
  const old = new Map([...list.children].map((made) => [made.dataset.name, made]));
  const kept = new Set(domains.map((domain) => domain.name));
  for (const [name, made] of old) if (!kept.has(name)) made.remove();
  domains.forEach((domain, place) => {
    const made = old.get(domain.name) || newCard(domain.name);
    fill(made, domain);
    if (list.children[place] !== made) list.insertBefore(made, list.children[place] || null);
  });
}

function newCard(name) {
  const made = byId("card").content.cloneNode(true).firstElementChild;
  made.dataset.name = name;
  made.querySelector("h3").textContent = name;
  const use = made.querySelector(".use");
  use.setAttribute("aria-label", `Use ${name}`);
  use.addEventListener("click", () => {
    byId("domain").value = name;
    draw();
    byId("domain").focus();
    if (state.image) ask();
  });
  const remove = made.querySelector(".delete");
  remove.setAttribute("aria-label", `Delete ${name}`);
  remove.addEventListener("click", () => removeAfterAsking(remove, name));
  return made;
}

function fill(made, domain) {
  const put = (selector, text) => { made.querySelector(selector).textContent = text; };
  made.classList.toggle("chosen", domain.name === byId("domain").value);
  put(".classes", domain.class_count.toLocaleString("en"));
  put(".accuracy", domain.test_accuracy === null ? "–" : `${domain.test_accuracy.toFixed(1)} %`);
  put(".size", bytes(domain.bytes));
  put(".method", domain.method);
  made.querySelector(".warm").classList.toggle("cold", !domain.warm);
  made.querySelector(".delete").hidden = !state.writable;
}

function removeAfterAsking(button, name) {
  if (!button.classList.contains("sure")) {
    button.classList.add("sure");
    button.textContent = "Really delete?";
    button.setAttribute("aria-label", `Really delete ${name}?`);
    setTimeout(() => {
      button.classList.remove("sure");
      button.textContent = "Delete";
      button.setAttribute("aria-label", `Delete ${name}`);
    }, 5000);
    return;
  }
  change(`deleted ${name}`, () => call(`v1/domains/${encodeURIComponent(name)}`, { method: "DELETE" }));
}

function upload(files) {
  for (const file of files) {
    const name = file.name.replace(/\.safetensors$/, "");
    say(`uploading ${name} …`);
    const options = { method: "PUT", body: file, headers: { "Content-Type": "application/octet-stream" } };
    change(`uploaded ${name}`, () => call(`v1/domains/${encodeURIComponent(name)}`, options));
  }
}

async function change(done, work) {
  try {
    await work();
    say(done);
  } catch (problem) {
    say(problem.message, true);
  }
  await refresh();
}

/* Words and elements */

function say(message, isProblem = false) {
  byId("status").textContent = sentence(message);
  byId("status").classList.toggle("problem", isProblem);
}

function element(tag, name = "", content = []) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (typeof content === "string") made.textContent = content;
  else made.append(...content);
  return made;
}

function option(value, text) {
  const made = element("option", "", text);
  made.value = value;
  return made;
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const round = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
const bytes = (count) => (count < 1e6 ? `${Math.ceil(count / 1e3)} kB` : `${(count / 1e6).toFixed(1)} MB`);

/* What the reader does */

byId("file").addEventListener("change", (event) => take(event.target.files[0]));
byId("pack").addEventListener("change", (event) => {
  upload([...event.target.files]);
  event.target.value = "";
});
byId("form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
byId("domain").addEventListener("change", () => { draw(); if (state.image) ask(); });
byId("filter").addEventListener("input", () => { state.shown = SHOWN; draw(); });
byId("more").addEventListener("click", () => { state.shown += SHOWN; draw(); });
document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
  if (file) take(file);
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  byId("drop").classList.add("over");
});
for (const kind of ["dragleave", "drop"]) {
  document.addEventListener(kind, () => byId("drop").classList.remove("over"));
}
document.addEventListener("drop", (event) => {
  event.preventDefault();
  const files = [...event.dataTransfer.files];
  const packs = files.filter((file) => file.name.endsWith(".safetensors"));
  if (packs.length && state.writable) upload(packs);
  else if (files.length) take(files[0]);
});
setInterval(() => { if (!document.hidden && !openDialog) refresh(); }, 5000);
refresh();
