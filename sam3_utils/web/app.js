// Copyright 2026 The SAM3 offline inference kit authors. SPDX-License-Identifier: Apache-2.0
"use strict";

const TEXTS = {
  en: {
    open: "Open picture", pictures: "Pictures", hint: "Drop a picture here", phrase: "Words: find all", find: "Find",
    new: "New object", undo: "Undo", objects: "Objects", png: "PNG", drop: "delete", mask: "mask", object: "object",
    encoding: "reading the picture …", thinking: "…", ready: "ready", token: "This service wants its token:",
    none: "nothing of that name is here", name: "name of the object",
    help: "Left click: this. Right click: not this. Drag: a box around it.\n" +
      "Keys: O open, N new object, U undo, 1 2 3 choose a mask, / words.\n" +
      "On the picture, arrow keys move a cross, Enter clicks, Shift+Enter: not this.",
  },
  zh: {
    open: "打开图片", pictures: "图片", hint: "把图片拖到这里", phrase: "文字:找出全部", find: "查找",
    new: "新对象", undo: "撤销", objects: "对象", png: "PNG", drop: "删除", mask: "掩码", object: "对象",
    encoding: "正在读取图片…", thinking: "…", ready: "就绪", token: "此服务需要令牌:",
    none: "图中没有这样的东西", name: "对象名称",
    help: "左键:就是它。右键:不是它。拖动:画框。\n" +
      "按键:O 打开,N 新对象,U 撤销,1 2 3 选择掩码,/ 输入文字。\n" +
      "焦点在图上时,方向键移动十字,Enter 点击,Shift+Enter:不是它。",
  },
};
const $ = (id) => document.getElementById(id);
const canvas = $("canvas"), pen = canvas.getContext("2d");
let language = localStorage.getItem("language") || (navigator.language.startsWith("zh") ? "zh" : "en");
let picture = null; // {image_id, width, height, bitmap}
let sessions = []; // as the service has them, each with .layers: a canvas for each instance
let active = null; // session_id that clicks go on with
let cross = null, drag = null, queue = Promise.resolve();

const text = (key) => TEXTS[language][key];
const colour = (number, alpha = 1) => `hsla(${(number * 137.5) % 360}, 85%, 50%, ${alpha})`;

function say(message, isError = false) {
  $("status").textContent = message;
  $("status").classList.toggle("error", isError);
}

async function call(method, path, body) {
  const headers = {}, token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body && !(body instanceof Blob)) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(body);
  } else if (body) {
    headers["Content-Type"] = "application/octet-stream";
  }
  const response = await fetch(path, {method, headers, body});
  if (response.status === 401) {
    const given = prompt(text("token"));
    if (given) {
      sessionStorage.setItem("token", given);
      return call(method, path, body instanceof Blob ? body : body && JSON.parse(body));
    }
  }
  if (!response.ok) {
    const fault = await response.json().then((answer) => answer.error.message, () => response.statusText);
    throw new Error(fault);
  }
  return response;
}

// One thing after another: a click waits for the answer to the one before, which it corrects.
function doing(message, work) {
  queue = queue.then(async () => {
    say(message);
    try {
      await work();
    } catch (error) {
      say(error.message, true);
    }
  });
  return queue;
}

// COCO's compressed RLE: runs down the columns, 5 bits to a character, from the third run on as differences.
function runsOf(counts) {
  const runs = [];
  for (let at = 0; at < counts.length;) {
    let value = 0, shift = 0, more = true;
    while (more) {
      const bits = counts.charCodeAt(at++) - 48;
      value |= (bits & 31) << shift;
      more = (bits & 32) !== 0;
      shift += 5;
      if (!more && bits & 16) value |= -1 << shift;
    }
    runs.push(runs.length > 2 ? value + runs[runs.length - 2] : value);
  }
  return runs;
}

function layerOf(mask, hue) {
  const [height, width] = mask.size, layer = document.createElement("canvas");
  layer.width = width;
  layer.height = height;
  const context = layer.getContext("2d"), image = context.createImageData(width, height);
  const pixel = document.createElement("canvas").getContext("2d");
  pixel.fillStyle = colour(hue);
  pixel.fillRect(0, 0, 1, 1);
  const [red, green, blue] = pixel.getImageData(0, 0, 1, 1).data;
  let at = 0, inside = false;
  for (const run of runsOf(mask.counts)) {
    if (inside) {
      for (let index = at; index < at + run; index++) {
        image.data.set([red, green, blue, 120], ((index % height) * width + Math.floor(index / height)) * 4);
      }
    }
    at += run;
    inside = !inside;
  }
  context.putImageData(image, 0, 0);
  return layer;
}

function shown(session) {
  const result = session.result;
  if (!result) return [];
  return result.kind === "concept" ? result.instances : [result.instances[result.best]];
}

function keep(session) {
  const place = sessions.findIndex((one) => one.session_id === session.session_id);
  const number = place < 0 ? sessions.length : place;
  session.layers = shown(session).map((instance) => layerOf(instance.mask, number));
  if (place < 0) sessions.push(session);
  else sessions[place] = session;
}

function draw() {
  if (!picture) return;
  pen.drawImage(picture.bitmap, 0, 0);
  sessions.forEach((session, number) => {
    session.layers.forEach((layer) => pen.drawImage(layer, 0, 0));
    if (session.session_id !== active || !session.result) return;
    const {points = [], labels = [], box} = session.result.prompt, size = Math.max(4, canvas.width / 120);
    points.forEach(([x, y], index) => {
      pen.beginPath();
      pen.arc(x, y, size, 0, 7);
      pen.fillStyle = labels[index] ? "#12a150" : "#d00020";
      pen.fill();
      pen.lineWidth = size / 3;
      pen.strokeStyle = "#fff";
      pen.stroke();
    });
    if (box) frame(box, colour(number));
  });
  if (drag && drag.moved) frame([drag.x, drag.y, drag.toX, drag.toY], "#fff");
  if (cross && document.activeElement === canvas) {
    pen.strokeStyle = "#000";
    pen.lineWidth = Math.max(1, canvas.width / 400);
    pen.strokeRect(cross.x - 8, cross.y - 0.5, 16, 1);
    pen.strokeRect(cross.x - 0.5, cross.y - 8, 1, 16);
  }
}

function frame([x1, y1, x2, y2], style) {
  pen.strokeStyle = style;
  pen.lineWidth = Math.max(2, canvas.width / 300);
  pen.strokeRect(x1, y1, x2 - x1, y2 - y1);
}

function list() {
  $("objects").replaceChildren(...sessions.map((session, number) => {
    const item = document.createElement("li"), name = document.createElement("input");
    item.style.setProperty("--colour", colour(number));
    item.classList.toggle("active", session.session_id === active);
    name.value = session.name;
    name.placeholder = text("object");
    name.setAttribute("aria-label", text("name"));
    name.onchange = () => doing(text("thinking"), async () => {
      await call("PATCH", `/v1/sessions/${session.session_id}`, {name: name.value});
      session.name = name.value;
      say(text("ready"));
    });
    name.onfocus = () => select(session.session_id);
    const score = document.createElement("small"), found = shown(session);
    score.textContent = session.kind === "concept" ? `× ${found.length}` : found.map((one) => one.score.toFixed(2)).join("");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "✕";
    remove.setAttribute("aria-label", `${text("drop")} ${session.name}`);
    remove.onclick = () => doing(text("thinking"), async () => {
      await call("DELETE", `/v1/sessions/${session.session_id}`);
      await load(picture.image_id);
    });
    item.append(name, score, remove);
    return item;
  }));
  const session = sessions.find((one) => one.session_id === active);
  const masks = session && session.result && session.kind === "visual" ? session.result.instances : [];
  $("choices").hidden = masks.length < 2;
  $("choices").replaceChildren(...masks.map((mask, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${text("mask")} ${index + 1}: ${mask.score.toFixed(2)}`;
    button.setAttribute("aria-pressed", String(index === session.result.best));
    button.onclick = () => choose(index);
    return button;
  }));
  $("undo").disabled = !session || !session.steps;
  for (const [id, path] of [["png", "labels.png"], ["coco", "coco.json"], ["labelme", "labelme.json"]]) {
    $(id).setAttribute("aria-disabled", String(!sessions.length));
    $(id).href = picture ? `/v1/images/${picture.image_id}/${path}` : "#";
  }
}

function select(id) {
  active = id;
  for (const [number, item] of [...$("objects").children].entries()) {
    item.classList.toggle("active", sessions[number].session_id === active);
  }
  draw();
}

function refresh() {
  list();
  draw();
}

async function load(id) {
  const found = await (await call("GET", `/v1/images/${id}`)).json();
  if (!picture || picture.image_id !== id) {
    const blob = await (await call("GET", `/v1/images/${id}/file`)).blob();
    picture = {...found, bitmap: await createImageBitmap(blob)};
    canvas.width = found.width;
    canvas.height = found.height;
    $("stage").classList.add("full");
  }
  sessions = [];
  found.sessions.forEach(keep);
  if (!sessions.some((one) => one.session_id === active)) active = null;
  location.hash = id;
  refresh();
  say(text("ready"));
}

async function listPictures() {
  const found = await (await call("GET", "/v1/images")).json();
  $("pictures").replaceChildren(new Option("", ""), ...found.map((one) => new Option(one.name, one.image_id)));
  $("pictures").value = picture ? picture.image_id : "";
}

function send(file) {
  return doing(text("encoding"), async () => {
    const form = file instanceof File ? file.name : "picture";
    const bytes = new Uint8Array(await file.arrayBuffer());
    let binary = "";
    for (let at = 0; at < bytes.length; at += 32768) binary += String.fromCharCode(...bytes.subarray(at, at + 32768));
    const stored = await (await call("POST", "/v1/images", {image: btoa(binary), name: form})).json();
    active = null;
    await load(stored.image_id);
    await listPictures();
  });
}

function ask(points, box) {
  return doing(text("thinking"), async () => {
    const body = {image_id: picture.image_id, points};
    if (active && sessions.some((one) => one.session_id === active && one.kind === "visual")) body.session_id = active;
    if (box) body.box = box;
    const answer = await (await call("POST", "/v1/segment/points", body)).json();
    active = answer.results[0].session_id;
    keep(await (await call("GET", `/v1/sessions/${active}`)).json());
    refresh();
    say(`${text("ready")} (${Math.round(answer.timings_ms.predict_points)} ms)`);
  });
}

function choose(index) {
  const session = sessions.find((one) => one.session_id === active);
  if (!session || !session.result || index >= session.result.instances.length) return;
  doing(text("thinking"), async () => {
    keep(await (await call("PATCH", `/v1/sessions/${active}`, {best: index})).json());
    refresh();
    say(text("ready"));
  });
}

function undo() {
  if (!active) return;
  doing(text("thinking"), async () => {
    const session = await (await call("POST", `/v1/sessions/${active}/undo`)).json();
    if (session.steps) keep(session);
    else {
      await call("DELETE", `/v1/sessions/${active}`);
      sessions = sessions.filter((one) => one.session_id !== active);
      active = null;
    }
    refresh();
    say(text("ready"));
  });
}

function place(event) {
  const box = canvas.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * canvas.width;
  const y = ((event.clientY - box.top) / box.height) * canvas.height;
  return {x: Math.min(Math.max(x, 0), canvas.width), y: Math.min(Math.max(y, 0), canvas.height)};
}

canvas.addEventListener("pointerdown", (event) => {
  const at = place(event);
  drag = {...at, toX: at.x, toY: at.y, button: event.button, moved: false, from: [event.clientX, event.clientY]};
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const at = place(event);
  drag.toX = at.x;
  drag.toY = at.y;
  drag.moved ||= Math.hypot(event.clientX - drag.from[0], event.clientY - drag.from[1]) > 6;
  draw();
});
canvas.addEventListener("pointerup", () => {
  const done = drag;
  drag = null;
  if (!done || !picture) return;
  if (done.moved && done.button === 0) {
    const box = [Math.min(done.x, done.toX), Math.min(done.y, done.toY), Math.max(done.x, done.toX), Math.max(done.y, done.toY)];
    active = null;
    ask([], box);
  } else if (!done.moved) {
    ask([{x: done.x, y: done.y, label: done.button === 2 ? 0 : 1}]);
  }
});
canvas.addEventListener("contextmenu", (event) => event.preventDefault());
canvas.addEventListener("keydown", (event) => {
  const step = event.shiftKey ? 20 : 5;
  cross ||= {x: canvas.width / 2, y: canvas.height / 2};
  const moves = {ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step]};
  if (moves[event.key]) {
    cross.x = Math.min(Math.max(cross.x + moves[event.key][0], 0), canvas.width);
    cross.y = Math.min(Math.max(cross.y + moves[event.key][1], 0), canvas.height);
    event.preventDefault();
    draw();
  } else if (event.key === "Enter" && picture) {
    ask([{x: cross.x, y: cross.y, label: event.shiftKey ? 0 : 1}]);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {o: () => $("file").click(), n: fresh, u: undo, "/": () => $("phrase").focus()};
  if (["1", "2", "3"].includes(event.key)) choose(Number(event.key) - 1);
  else if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});

function fresh() {
  active = null;
  refresh();
}

$("open").onclick = () => $("file").click();
$("file").onchange = () => $("file").files.length && send($("file").files[0]);
$("new").onclick = fresh;
$("undo").onclick = undo;
$("pictures").onchange = () => $("pictures").value && doing(text("encoding"), () => load($("pictures").value));
$("words").onsubmit = (event) => {
  event.preventDefault();
  const phrase = $("phrase").value.trim();
  if (!phrase || !picture) return;
  doing(text("thinking"), async () => {
    const body = {image_id: picture.image_id, prompts: [phrase]};
    const answer = await (await call("POST", "/v1/segment/text", body)).json();
    const {session_id: id, instances} = answer.results[0];
    if (instances.length) {
      active = id;
      keep(await (await call("GET", `/v1/sessions/${id}`)).json());
      $("phrase").value = "";
      say(text("ready"));
    } else {
      await call("DELETE", `/v1/sessions/${id}`);
      say(text("none"));
    }
    refresh();
  });
};
// Links cannot carry the token; what they name is fetched and handed over.
for (const id of ["png", "coco", "labelme"]) {
  $(id).onclick = (event) => {
    if (!sessionStorage.getItem("token")) return;
    event.preventDefault();
    doing(text("thinking"), async () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await (await call("GET", $(id).getAttribute("href"))).blob());
      link.download = $(id).download;
      link.click();
      say(text("ready"));
    });
  };
}
for (const name of ["dragover", "dragleave", "drop"]) {
  $("stage").addEventListener(name, (event) => {
    event.preventDefault();
    $("stage").classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files.length) send(event.dataTransfer.files[0]);
  });
}

function translate() {
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = text(element.dataset.text);
  $("language").textContent = language === "en" ? "中文" : "English";
  $("language").lang = language === "en" ? "zh" : "en";
  canvas.setAttribute("aria-label", text("hint"));
  list();
}
$("language").onclick = () => {
  language = language === "en" ? "zh" : "en";
  localStorage.setItem("language", language);
  translate();
};

translate();
doing(text("thinking"), async () => {
  await listPictures();
  const id = location.hash.slice(1);
  if (/^[0-9a-f]{64}$/.test(id)) {
    await load(id);
    $("pictures").value = id;
  } else say(text("ready"));
});
