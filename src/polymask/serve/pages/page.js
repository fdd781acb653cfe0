"use strict";

const byId = (id) => document.getElementById(id);
const SHOWN = 60; // cards at first
const MOST = 64; // images at once
const AT_ONCE = 4; // of them on the way to the server
const DETECT = "Auto-detect";
const state = { images: [], leftOut: 0, turn: 0, domains: [], rejected: [], writable: true, shown: SHOWN, names: null };

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

/* Images, each asked about by itself */

function take(files) {
  const images = [...files].filter((file) => !file.type || file.type.startsWith("image/"));
  if (!images.length) {
    showProblem(new Error(files.length > 1 ? "none of these is an image" : "that is not an image"));
    return;
  }
  state.images.forEach((image) => URL.revokeObjectURL(image.address));
  state.images = images.slice(0, MOST).map((file) => ({ file, address: URL.createObjectURL(file) }));
  state.leftOut = images.length - state.images.length;
  const one = state.images.length === 1;
  byId("preview").replaceChildren(...(one ? [pictureOf(state.images[0])] : []));
  byId("invitation").hidden = one;
  byId("invited").textContent = one ? "" : `${plural(state.images.length, "image")} chosen`;
  byId("ask").disabled = false;
  ask();
}

/* The image, or where the browser cannot show its format, words in its place. */
function pictureOf(image) {
  const made = element("img");
  made.alt = `The image ${image.file.name}`;
  made.addEventListener("error", () => {
    const dot = image.file.name.lastIndexOf(".");
    const kind = dot > 0 ? image.file.name.slice(dot + 1).toUpperCase() : "image";
    made.replaceWith(element("span", "unseen", `${kind} file: this browser cannot show it`));
  }, { once: true });
  made.src = image.address;
  return made;
}

async function ask() {
  const domain = byId("domain").value;
  const images = state.images;
  const turn = ++state.turn;
  if (!state.domains.length && state.names !== null) {
    showProblem(new Error("the library has no domain yet that could answer"));
    return;
  }
  const box = byId("answer");
  box.classList.add("busy");
  const began = performance.now();
  const places = images.map(() => null);
  if (images.length > 1) showSeveral(images, places);
  let next = 0;
  async function work() {
    while (next < images.length && turn === state.turn) {
      const place = next++;
      places[place] = await askOne(images[place].file, domain);
      if (turn === state.turn && images.length > 1) showSeveral(images, places);
    }
  }
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, images.length) }, work));
  if (turn !== state.turn) return;
  box.classList.remove("busy");
  if (images.length === 1) {
    const [found] = places;
    if (found.problem) showProblem(found.problem);
    else showAnswer(found.answer, performance.now() - began);
  }
  refresh();
}

async function askOne(file, domain) {
  const form = new FormData();
  form.append("images", file, "image");
  if (domain) form.append("domain", domain);
  try {
    return { answer: await call(domain ? "v1/predict" : "v1/predict/auto", { method: "POST", body: form }) };
  } catch (problem) {
    return { problem };
  }
}

/* A row for each image; rows that are there already stay, so that pictures do not flicker. */
function showSeveral(images, places) {
  const box = byId("answer");
  let list = box.querySelector(".several");
  if (!list || list.dataset.turn !== String(state.turn)) {
    list = element("ol", "several", images.map((image) => element("li", "", [
      element("div", "thumb", [pictureOf(image)]),
      element("div", "", [element("h3", "", image.file.name), element("div", "said", "…")]),
    ])));
    list.dataset.turn = String(state.turn);
    const left = state.leftOut ? `${state.leftOut.toLocaleString("en")} more are left out` : "";
    box.replaceChildren(element("h2", "", plural(images.length, "image")), element("p", "note", left), list);
  }
  places.forEach((found, place) => {
    const said = list.children[place].querySelector(".said");
    if (!found || said.dataset.done) return;
    said.dataset.done = "yes";
    if (found.problem) {
      said.replaceChildren(element("p", "problem", sentence(found.problem.message)));
      return;
    }
    const [image] = found.answer.images;
    const domain = found.answer.domain || image.domain;
    said.replaceChildren(element("p", "note", domain), ...verdictOf(image), saidOf(image, 2));
  });
}

/* Where the domain can tell: that an image shows nothing it learned. What it looks most like still follows. */
function verdictOf(image) {
  if (!image.unknown) return [];
  return [element("p", "unknown", "Unknown: nothing that this domain learned. It looks most like:")];
}

/* Classes or labels as bars; the numbers of a domain of values by their names. */
function saidOf(image, most) {
  if (!image.values) return barsOf(image.top.slice(0, most));
  return element("ul", "ranking", Object.entries(image.values).map(([name, value]) => element("li", "", [
    element("span", "", name), element("span", "", String(Number(value.toPrecision(4))).replace("-", "−")),
  ])));
}

function barsOf(guesses) {
  return element("ol", "bars", guesses.map((guess) => {
    const fill = element("i");
    fill.style.width = `${100 * guess.probability}%`;
    return element("li", "", [
      element("span", "", guess.class),
      element("span", "", `${(100 * guess.probability).toFixed(1)}\u00a0%`),
      element("div", "bar", [fill]),
    ]);
  }));
}

function showAnswer(answer, milliseconds) {
  const [image] = answer.images;
  const name = answer.domain || image.domain;
  const times = `${round(answer.milliseconds)}\u00a0ms in the server, ${round(milliseconds)}\u00a0ms in all`;
  const how = answer.warm === false ? "; the domain was cold" : "";
  const parts = [element("h2", "", name), element("p", "note", times + how), ...verdictOf(image), saidOf(image)];
  if (image.labels) parts.splice(2, 0, element("p", "", image.labels.join(", ") || "No label is likely."));
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
  byId("start-base").textContent = list.base.name;
  byId("start-command").textContent = `polymask learn flowers --data flowers --base ${list.base.name} --out LIBRARY`;
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
    byId("domain").replaceChildren(option("", DETECT), ...names.map((name) => option(name, name)));
    byId("domain").value = names.includes(chosen) ? chosen : "";
  }
  drawCards(found.slice(0, state.shown));

  const warm = state.domains.filter((domain) => domain.warm).length;
  byId("count").textContent = `${plural(state.domains.length, "domain")}, ${warm} warm`;
  byId("empty").hidden = found.length > 0 || !state.domains.length;
  byId("start").hidden = state.domains.length > 0;
  byId("start-upload").hidden = !state.writable;
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
    if (state.images.length) ask();
  });
  const back = made.querySelector(".back");
  back.setAttribute("aria-label", `Roll back ${name} to the version before`);
  back.addEventListener("click", () => {
    const address = `v1/domains/${encodeURIComponent(name)}/rollback`;
    change(`${name} is as it was before`, () => call(address, { method: "POST" }));
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
  const tested = domain.test_result;
  const told = domain.target === "values" ? (error) => `± ${error.toPrecision(3)}` : (share) => `${share.toFixed(1)} %`;
  put(".accuracy", tested === null ? "–" : told(tested));
  put(".size", bytes(domain.bytes));
  put(".method", domain.method);
  made.querySelector(".warm").classList.toggle("cold", !domain.warm);
  made.querySelector(".delete").hidden = !state.writable;
  made.querySelector(".back").hidden = !state.writable || !domain.versions.length;
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

byId("file").addEventListener("change", (event) => take(event.target.files));
byId("pack").addEventListener("change", (event) => {
  upload([...event.target.files]);
  event.target.value = "";
});
byId("form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
byId("domain").addEventListener("change", () => { draw(); if (state.images.length) ask(); });
byId("filter").addEventListener("input", () => { state.shown = SHOWN; draw(); });
byId("more").addEventListener("click", () => { state.shown += SHOWN; draw(); });
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files].filter((one) => one.type.startsWith("image/"));
  if (files.length) take(files);
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
  else if (files.length) take(files);
});
setInterval(() => { if (!document.hidden && !openDialog) refresh(); }, 5000);
refresh();
