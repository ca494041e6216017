"use strict";
// Draws the page's figures from its embedded data, and appends the updates of a live run.
(async () => {
  const NS = "http://www.w3.org/2000/svg", LEAST = 2000, NAMES = /^(c\d|ink|muted|line|paper)$/;
  const paint = (color) => (NAMES.test(color) ? `var(--${color})` : color);
  const tip = document.getElementById("tip");

  function add(parent, tag, attributes, text) {
    const node = document.createElementNS(parent.namespaceURI === NS || tag === "svg" ? NS : parent.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  const data = await unpack();
  for (const { panels } of data.figures)  // panels that share a scale keep sharing it when a live run extends it
    for (const panel of panels) if (`${panel.y.lim}` === `${panels[0].y.lim}`) panel.y.lim = panels[0].y.lim;

  function say(value) {
    if (value === null) return "";
    const size = Math.abs(value);
    if (size && (size < 1e-4 || size >= 1e9)) return value.toExponential(3);
    return Number(value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 8 });
  }

  function findTicks(axis, [low, high], most) {
    const [a, b] = [Math.min(low, high), Math.max(low, high)], inside = (v) => v >= a - 1e-12 && v <= b * (1 + 1e-12);
    if (axis.ticks) return axis.ticks.filter(([at]) => inside(at));
    const found = [];
    if (axis.log) {
      const decades = Math.log10(b / a), parts = decades < 1.5 ? [1, 2, 3, 5] : decades < 3 ? [1, 3] : [1];
      for (let e = Math.floor(Math.log10(a)); e <= Math.log10(b); e++)
        for (const part of parts) if (inside(part * 10 ** e)) found.push(part * 10 ** e);
    } else {
      const rough = (b - a) / most, unit = 10 ** Math.floor(Math.log10(rough || 1));
      const step = unit * [1, 2, 2.5, 5, 10].find((n) => n * unit >= rough);
      for (let at = Math.ceil(a / step - 1e-9); at * step <= b + 1e-9 * step; at++) found.push(at * step);
    }
    const every = Math.ceil(found.length / (most + 1));
    return found.filter((_, n) => n % every === 0).map((at) => [at, say(at)]);
  }

  const scale = (axis, [low, high], from, to) => {
    const f = axis.log ? Math.log : (v) => v, a = f(low), width = f(high) - a || 1;
    return (value) => from + ((f(value) - a) / width) * (to - from);
  };

  // Keeps the first, lowest, highest and last point in each column of pixels, so no peak is lost.
  function thin(points) {
    if (points.length < LEAST || points.some((p, n) => n && p[0] < points[n - 1][0])) return points;
    const kept = [];
    for (let from = 0, to; from < points.length; from = to) {
      const column = Math.floor(points[from][0]);
      let low = from, high = from;
      for (to = from; to < points.length && Math.floor(points[to][0]) === column; to++) {
        if (points[to][1] < points[low][1]) low = to;
        if (points[to][1] > points[high][1]) high = to;
      }
      for (const n of [...new Set([from, low, high, to - 1])].sort((a, b) => a - b)) kept.push(points[n]);
    }
    return kept;
  }

  const SHAPES = {
    s: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`, D: (r) => `M0,${-r}L${r},0L0,${r}L${-r},0z`,
    "^": (r) => `M0,${-r}L${r},${r}H${-r}z`, v: (r) => `M0,${r}L${r},${-r}H${-r}z`, "|": (r) => `M0,${-r}V${r}`,
    _: (r) => `M${-r},0H${r}`, x: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
    X: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`, P: (r) => `M0,${-r}V${r}M${-r},0H${r}`,
    "*": (r) => `M0,${-r}L${r * 0.3},${-r * 0.3}L${r},0L${r * 0.3},${r * 0.3}L0,${r}L${-r * 0.3},${r * 0.3}L${-r},0L${-r * 0.3},${-r * 0.3}z`,
    o: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0z`,
  };

  function drawMarker(parent, mark, x, y) {
    const shape = (SHAPES[mark.marker] || SHAPES.o)(mark.marker === "." ? 2 : mark.ms / 2), color = paint(mark.color);
    const fill = mark.hollow || "|_xXP".includes(mark.marker) ? "var(--paper)" : color;
    add(parent, "path", { d: shape, transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`, fill, stroke: color });
  }

  function drawLine(parent, mark, points) {
    const path = thin(points), parts = [];
    path.forEach(([x, y], n) => {
      if (y === null || Number.isNaN(y)) return;
      const isNew = !n || path[n - 1][1] === null;
      parts.push(!isNew && mark.step ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `${isNew ? "M" : "L"}${x.toFixed(1)},${y.toFixed(1)}`);
    });
    const style = { d: parts.join(""), fill: "none", stroke: paint(mark.color), "stroke-width": Math.max(1.3, mark.w),
      "stroke-opacity": mark.alpha ?? 1, "stroke-linejoin": "round" };
    if (mark.dash) style["stroke-dasharray"] = { "--": "6 4", ":": "2 3", "-.": "7 3 2 3" }[mark.dash];
    if (mark.w) add(parent, "path", style);
    const shown = mark.every || (points.length <= 400 ? points.keys() : []);
    if (mark.marker) for (const n of shown) if (points[n][1] !== null) drawMarker(parent, mark, ...points[n]);
  }

  const values = (mark, axis) => mark.own?.[axis] || data.lists[mark[axis]];
  const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

  function drawPanel(svg, panel, title, isNamed) {
    const width = Math.max(260, svg.clientWidth || 600), rows = panel.y.ticks ? panel.y.ticks.length : 0;
    const height = rows > 6 ? Math.min(900, 70 + 30 * rows) : rows ? 80 + 40 * rows : width < 420 ? 230 : 270;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const yTicks = findTicks(panel.y, panel.y.lim, 6), rTicks = panel.right ? findTicks(panel.right, panel.right.lim, 6) : [];
    const most = Math.floor((width * 0.38) / 6.6), longest = (ticks) => Math.max(0, ...ticks.map(([, t]) => t.length));
    const left = 10 + 6.8 * Math.min(most, longest(yTicks)), right = panel.right ? 14 + 6.8 * longest(rTicks) : 12;
    const top = 8 + (panel.title ? 18 : 0) + (isNamed ? 18 : 0);
    const lines = Math.max(1, ...(panel.x.ticks || []).map(([, text]) => text.split("\n").length));
    const bottom = height - 11 - 13 * lines - (panel.x.label ? 18 : 0), box = [left, width - right, top, bottom];
    const x = scale(panel.x, panel.x.lim, box[0], box[1]), y = scale(panel.y, panel.y.lim, bottom, top);
    const r = panel.right ? scale(panel.right, panel.right.lim, bottom, top) : y;
    const wide = longest(findTicks(panel.x, panel.x.lim, 8)), count = Math.max(2, Math.floor((box[1] - box[0]) / (16 + 7 * wide)));
    let xTicks = findTicks(panel.x, panel.x.lim, Math.min(8, count));
    if (panel.x.ticks) xTicks = xTicks.filter((_, n) => n % Math.ceil(xTicks.length / count) === 0);
    if (panel.title) add(svg, "text", { x: 0, y: 13, class: "name" }, short(panel.title, Math.floor(width / 6.5)));
    if (panel.y.label) add(svg, "text", { x: 0, y: top - 9 }, short(panel.y.label, Math.floor(width / (panel.right ? 13 : 6.5))));
    if (panel.right?.label) add(svg, "text", { x: width, y: top - 9, "text-anchor": "end" }, panel.right.label);
    if (panel.x.label) add(svg, "text", { x: Math.min((box[0] + box[1]) / 2, width - 3.2 * panel.x.label.length), y: height - 4, "text-anchor": "middle" }, panel.x.label);
    for (const [at, text] of yTicks) {
      add(svg, "path", { d: `M${box[0]},${y(at)}H${box[1]}`, stroke: "var(--line)", "stroke-width": 0.7 });
      const node = add(svg, "text", { x: box[0] - 5, y: y(at) + 4, "text-anchor": "end" }, short(text, most));
      if (text.length > most) add(node, "title", {}, text);
    }
    for (const [at, text] of rTicks) add(svg, "text", { x: box[1] + 5, y: r(at) + 4 }, text);
    for (const [at, text] of xTicks)
      text.split("\n").forEach((line, n) => add(svg, "text", { x: x(at), y: bottom + 16 + 13 * n, "text-anchor": "middle" }, line));
    const id = `clip-${title}`, clip = add(add(svg, "defs"), "clipPath", { id });
    add(clip, "rect", { x: box[0] - 1, y: top - 8, width: box[1] - box[0] + 2, height: bottom - top + 10 });
    const inner = add(svg, "g", { "clip-path": `url(#${id})` }), words = [];
    panel.drawn = [];
    for (const mark of panel.marks) {
      const xs = values(mark, "x"), ys = values(mark, "y"), up = mark.right ? r : y;
      const points = xs.map((v, n) => [mark.fx ? box[0] + v * (box[1] - box[0]) : x(v),
        ys[n] === null ? null : mark.fy ? bottom + ys[n] * (top - bottom) : up(ys[n])]);
      if (mark.kind === "text") {
        const place = [points[0][0] + mark.dx, points[0][1] - mark.dy + 4], half = 3.1 * mark.text.length;
        const middle = place[0] + { left: half, right: -half, center: 0 }[mark.side];
        const hits = words.some(([a, b, c]) => Math.abs(a - middle) < half + c + 3 && Math.abs(b - place[1]) < 12);
        if (hits || middle - half < box[0] - 4 || middle + half > box[1] + 4) continue;
        words.push([middle, place[1], half]);
        add(svg, "text", { x: middle, y: place[1], class: "name", "text-anchor": "middle" }, mark.text);
      } else if (mark.kind === "area") {
        const path = points.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join("L");
        const node = add(inner, "path", { d: `M${path}z`, fill: paint(mark.color), "fill-opacity": (mark.alpha ?? 1) * (mark.hatch ? 0.5 : 1) });
        if (mark.label) add(node, "title", {}, mark.label);
      } else {
        drawLine(inner, mark, points);
        if (!mark.fx && !mark.fy && !mark.quiet) panel.drawn.push([mark, points, xs, ys]);
      }
    }
    const cross = add(svg, "path", { stroke: "var(--muted)", "stroke-width": 0.8, d: "" });

    function show(at, page) {
      let best = null;
      for (const [mark, points, xs, ys] of panel.drawn)
        points.forEach(([a, b], n) => {
          if (b === null) return;
          const far = (a - at[0]) ** 2 * 9 + (b - at[1]) ** 2;
          if (!best || far < best.far) best = { far, x: xs[n], a };
        });
      if (!best) return;
      cross.setAttribute("d", `M${best.a},${top}V${bottom}`);
      tip.replaceChildren();
      add(tip, "b", {}, `${panel.x.label || "x"}: ${(panel.x.ticks || []).find(([v]) => v === best.x)?.[1].replace("\n", ", ") ?? say(best.x)}`);
      let rest = 12;
      for (const [mark, , xs, ys] of panel.drawn) {
        const n = xs.indexOf(best.x);
        if (n >= 0 && ys[n] !== null && rest-- > 0)
          add(tip, "span", {}, `${mark.label || panel.y.label}: ${(panel.y.ticks || []).find(([v]) => v === ys[n])?.[1] ?? say(ys[n])}`);
      }
      tip.hidden = false;
      const room = document.documentElement.clientWidth;
      tip.style.left = `${Math.max(4, Math.min(page[0] + 14, room - tip.offsetWidth - 8))}px`;
      tip.style.top = `${page[1] + 16}px`;
    }
    const hide = () => { tip.hidden = true; cross.setAttribute("d", ""); };
    svg.onpointermove = svg.onpointerdown = (event) => {
      const area = svg.getBoundingClientRect(), factor = width / area.width;
      show([(event.clientX - area.left) * factor, (event.clientY - area.top) * factor], [event.pageX, event.pageY]);
    };
    svg.onpointerleave = svg.onblur = hide;
    let place = 0;
    svg.onkeydown = (event) => {
      const step = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      place = Math.max(0, Math.min(box[1] - box[0], place + step));
      const area = svg.getBoundingClientRect();
      show([box[0] + place, (top + bottom) / 2], [area.left + scrollX + place, area.top + scrollY + area.height / 2]);
    };
  }

  function drawLegend(list, figure) {
    list.replaceChildren();
    const seen = new Set();
    for (const panel of figure.panels)
      for (const mark of panel.marks) {
        if (!mark.label || seen.has(mark.label)) continue;
        seen.add(mark.label);
        const item = add(list, "li"), svg = add(item, "svg", { viewBox: "0 0 26 12", "aria-hidden": "true" });
        if (mark.kind === "area") add(svg, "rect", { width: 26, height: 12, fill: paint(mark.color), "fill-opacity": mark.alpha ?? 1 });
        else drawLine(svg, { ...mark, every: [1] }, [[0, 6], [13, 6], [26, 6]]);
        item.append(mark.label);
      }
  }

  function drawFigure(figure, number) {
    const node = document.getElementById(`figure-${number}`), panels = node.querySelector(".panels");
    drawLegend(node.querySelector(".legend"), figure);
    for (const panel of panels.children.length ? [] : figure.panels)
      add(panels, "svg", { role: "img", tabindex: 0, "aria-label": `Chart. ${[figure.title, panel.title].filter(Boolean).join(": ")}` });
    const isNamed = figure.panels.some((panel) => panel.y.label || panel.right?.label);
    figure.panels.forEach((panel, n) => drawPanel(panels.children[n], panel, `${number}-${n}`, isNamed));
  }

  const drawAll = () => data.figures.forEach(drawFigure);

  const quote = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-figure]");
    if (!link) return;
    const lines = ["panel,series,x,y"];
    for (const panel of data.figures[link.dataset.figure].panels)
      for (const mark of panel.marks.filter((one) => one.kind !== "text")) {
        const ys = values(mark, "y");
        values(mark, "x").forEach((x, n) => lines.push([panel.title, mark.label || "", x, ys[n] ?? ""].map(quote).join(",")));
      }
    link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
  });

  // If clipboard access is denied, select the line instead.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
    }
  });

  // A line's `gid` names the row field that it shows: "loss", or "ms:ranks.step_s.1" to convert seconds to ms.
  function append(row) {
    const known = data.figures.some((figure) => figure.panels.some((panel) => panel.marks.some((m) => m.gid === "test_loss")));
    if (typeof row.test_loss === "number" && !known) location.reload();
    for (const figure of data.figures)
      for (const panel of figure.panels)
        for (const mark of panel.marks.filter((one) => one.gid)) {
          const [path, unit] = mark.gid.split(":").reverse();
          const value = path.split(".").reduce((found, key) => found?.[key], row);
          if (typeof value !== "number") continue;
          mark.own ||= { x: [...values(mark, "x")], y: [...values(mark, "y")] };
          mark.own.x.push(row.step);
          mark.own.y.push(value * ({ ms: 1e3, percent: 100 }[unit] || 1));
          const axis = mark.right ? panel.right : panel.y, last = mark.own.y.at(-1);
          panel.x.lim[1] = Math.max(panel.x.lim[1], row.step);
          axis.lim[0] = Math.min(axis.lim[0], last);
          axis.lim[1] = Math.max(axis.lim[1], last * 1.02);
        }
  }

  function follow(live) {
    const status = document.getElementById("status"), source = new EventSource(`events${location.search}&from=${live.from}`);
    let due = 0;
    source.onmessage = (event) => {
      const sent = JSON.parse(event.data);
      if (sent.reload) return source.close(), location.reload();
      sent.rows.forEach((line) => append(JSON.parse(line)));
      status.textContent = sent.status;
      if (sent.verdict) ["verdict", "rest"].forEach((id, n) => (document.getElementById(id).textContent = sent.verdict[n].replaceAll("`", "")));
      if (sent.now) document.getElementById("now").innerHTML = sent.now;
      if (sent.rows.length && !due) due = setTimeout(() => ((due = 0), document.hidden || drawAll()), 30);
    };
    source.onerror = () => {
      if (source.readyState === 2) status.textContent += " The command that served this page has ended.";
      status.classList.remove("running");
    };
    source.onopen = () => status.classList.add("running");
    document.addEventListener("visibilitychange", () => document.hidden || drawAll());
  }

  drawAll();
  let last = innerWidth;
  addEventListener("resize", () => innerWidth !== last && ((last = innerWidth), drawAll()));
  if (data.live?.how === "running") follow(data.live);
  document.documentElement.dataset.ready = "1";
})();
