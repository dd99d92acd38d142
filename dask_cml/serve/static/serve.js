"use strict";

// ---- Refresh: replace only the elements that changed on the server.

const INTERVAL = 2000;
// Attributes that users and this script change, not the server.
const KEPT = new Set(["open", "aria-busy", "aria-invalid"]);

function morph(old, fresh) {
    if (old.hasAttribute("data-keep")) return;
    for (const {name} of [...old.attributes])
        if (!fresh.hasAttribute(name) && !KEPT.has(name)) old.removeAttribute(name);
    for (const {name, value} of fresh.attributes)
        if (old.getAttribute(name) !== value && !KEPT.has(name)) old.setAttribute(name, value);
    const ids = new Set([...fresh.children].map((each) => each.id));
    for (const child of [...old.children]) if (child.id && !ids.has(child.id)) child.remove();
    let place = old.firstChild;
    for (const child of [...fresh.childNodes]) {
        const known = child.id ? [...old.children].find((each) => each.id === child.id) : null;
        const here = known ?? (place && !place.id && !child.id ? place : null);
        if (!here || here.nodeName !== child.nodeName) {
            old.insertBefore(child, place);
            continue;
        }
        if (here !== place) old.insertBefore(here, place);
        place = here.nextSibling;
        if (here.nodeType === Node.ELEMENT_NODE) morph(here, child);
        else if (here.nodeValue !== child.nodeValue) here.nodeValue = child.nodeValue;
    }
    while (place) {
        const next = place.nextSibling;
        place.remove();
        place = next;
    }
}

const banner = document.getElementById("connection");
let seen = new Date();

async function look() {
    try {
        const answer = await fetch(location.href, {headers: {"X-Live": "1"}});
        if (answer.status >= 500) throw new Error(answer.status); // other answers are pages with a reason
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const region of document.querySelectorAll("[data-live]")) {
            const drawn = fresh.querySelector(`[data-live="${region.dataset.live}"]`);
            if (drawn) morph(region, drawn);
        }
        document.title = fresh.title;
        seen = new Date();
        banner.hidden = true;
    } catch {
        const words = `Connection lost. The web UI tries to reconnect. It shows the state at ${seen.toLocaleTimeString()}.`;
        if (banner.textContent !== words) banner.textContent = words;
        banner.hidden = false;
    }
}

async function live() {
    if (document.visibilityState === "visible") {
        await look();
        await readLog();
    }
    setTimeout(live, INTERVAL);
}

// ---- Buttons and forms

document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const {opens, copies, log} = button.dataset;
    if (opens) document.getElementById(opens).showModal();
    if ("closes" in button.dataset) button.closest("dialog").close();
    if (copies) copy(button, document.getElementById(copies));
    if (log) showLog(log);
});

// A dialog that opens again shows the current values.
document.addEventListener("close", (event) => {
    for (const form of event.target.querySelectorAll("form")) {
        form.reset();
        refuse(form, "");
    }
}, true);

function copy(button, element) {
    getSelection().selectAllChildren(element);
    document.execCommand("copy"); // without TLS, browsers lack the newer interface
    getSelection().removeAllRanges();
    const words = button.firstChild.nodeValue;
    button.firstChild.nodeValue = "Copied";
    setTimeout(() => { button.firstChild.nodeValue = words; }, 1500);
}

document.addEventListener("submit", async (event) => {
    const form = event.target;
    const {method, action, then} = form.dataset;
    if (!action) return;
    event.preventDefault();
    if (form.ariaBusy === "true") return;
    form.ariaBusy = "true";
    refuse(form, "");
    try {
        const answer = await fetch(action, {
            method,
            headers: {
                "Content-Type": "application/json",
                "X-XSRFToken": document.querySelector('meta[name="xsrf-token"]').content,
            },
            body: method === "DELETE" ? null : JSON.stringify(values(form)),
        });
        const found = await answer.json().catch(() => ({}));
        if (!answer.ok) {
            refuse(form, found.error ?? `The server answered ${answer.status} ${answer.statusText}.`);
        } else if (then) {
            location.href = then + (method === "POST" ? encodeURIComponent(found.name) : "");
        } else {
            form.closest("dialog")?.close();
            await look();
        }
    } catch {
        refuse(form, "The server does not respond. Try again.");
    } finally {
        form.ariaBusy = null;
    }
});

function values(form) {
    const found = {};
    for (const each of form.elements) {
        if (!each.name || (each.type === "checkbox" && !each.checked)) continue;
        found[each.name] = each.type === "number" ? each.valueAsNumber : each.value; // JSON has null in place of NaN
    }
    return found;
}

// A message about a field appears below it, others at the end of the form.
function refuse(form, words) {
    for (const each of form.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
    const place = form.querySelector(".answer");
    if (!place) return;
    const field = form.elements[words.match(/^invalid (\w+)/)?.[1]];
    const own = field?.closest(".field");
    if (own) own.append(place);
    else if (place.closest(".field")) form.append(place);
    place.textContent = words;
    if (!field) return;
    field.setAttribute("aria-invalid", "true");
    const folded = field.closest("details");
    if (folded) folded.open = true;
    field.focus();
}

// ---- Details. They appear and disappear with the cluster's state, so the document listens.

document.addEventListener("toggle", (event) => {
    if (event.target.id === "dashboard") showPane();
    if (event.target.id === "logs") readLog();
}, true);

document.addEventListener("change", (event) => {
    if (event.target.id === "pane") showPane();
    if (event.target.id === "log") readLog();
});

// The dashboard loads only while it is open.
function showPane() {
    const pane = document.getElementById("pane");
    const frame = document.createElement("iframe");
    frame.src = pane.value;
    frame.title = pane.selectedOptions[0].text;
    const open = document.getElementById("dashboard").open;
    document.getElementById("view").replaceChildren(...(open ? [frame] : []));
}

// ---- Logs

const MOST_CHARACTERS = 1_000_000;
let read = {};

function showLog(name) {
    const logs = document.getElementById("logs");
    logs.open = true;
    document.getElementById("log").value = name;
    logs.scrollIntoView();
    readLog();
    document.getElementById("log-text").focus({preventScroll: true});
}

async function readLog() {
    const logs = document.getElementById("logs");
    if (!logs?.open) return;
    const chosen = document.getElementById("log");
    const place = document.getElementById("log-text");
    const session = chosen.value;
    const begins = session !== read.session || place !== read.place;
    if (!begins && !document.getElementById("follow").checked) return;
    const {offset} = read;
    const query = new URLSearchParams(begins ? {session} : {session, offset});
    const answer = await fetch(`${logs.dataset.url}?${query}`).catch(() => null);
    const found = answer?.ok ? await answer.json() : null;
    // The user has chosen another log, or another answer was faster.
    if (session !== chosen.value || (!begins && offset !== read.offset)) return;
    const state = document.getElementById("log-state");
    if (!found) {
        state.textContent = "The log cannot be read.";
        return;
    }
    // Scroll only if the end of the log was visible.
    const follows = begins || place.scrollHeight - place.scrollTop - place.clientHeight < 50;
    const text = (begins ? "" : place.textContent) + found.text;
    if (begins || found.text) place.textContent = text.slice(-MOST_CHARACTERS);
    if (follows) place.scrollTop = place.scrollHeight;
    read = {session, place, offset: found.offset};
    state.textContent = text ? "" : "The log is empty.";
}

if (document.querySelector("[data-live]")) setTimeout(live, INTERVAL);
