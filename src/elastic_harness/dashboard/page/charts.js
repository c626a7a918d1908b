// Curves and bars on a canvas. Text is drawn or set as text, never as HTML.

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Clear a canvas, fit it to its size on the page, and return its context with that size in CSS pixels. */
function fitted(canvas) {
  const box = canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(box.width * scale);
  canvas.height = Math.round(box.height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "11px system-ui, sans-serif";
  return [pen, box.width, box.height];
}

/** Round values between two others, about so many. */
export function ticks(low, high, about) {
  if (!(high > low)) return [low];
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  const apart = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough);
  const found = [];
  for (let value = Math.ceil(low / apart) * apart; value <= high + apart * 1e-9; value += apart) found.push(value);
  return found;
}

export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return `${+value.toPrecision(4)}`;
}

/** A curve over steps. `lines()` gives what is drawn: {rows, value, low, high, colour, name, dashed}; a row begins with
 * its first and its last step. `marks()` gives vertical lines: {step}. All charts of a group have one `view`,
 * the steps that are shown, or null for all. */
export class Chart {
  constructor(canvas, group, lines, marks = () => [], least = null) {
    Object.assign(this, { canvas, group, lines, marks, least, log: false, pointer: null, from: null });
    group.charts.push(this);
    canvas.addEventListener("pointermove", event => this.#point(event));
    canvas.addEventListener("pointerleave", () => { if (this.from === null) this.group.hover(null); });
    canvas.addEventListener("pointerdown", event => {
      if (event.pointerType === "touch" && !event.isPrimary) return;
      this.from = this.#step(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointercancel", () => { this.from = null; });
    canvas.addEventListener("pointerup", event => {
      const to = this.#step(event), from = this.from, moved = Math.abs(this.x?.(to) - this.x?.(from));
      this.from = null;
      if (from !== null && moved > 8) this.group.zoom([Math.min(from, to), Math.max(from, to)]);
      else this.group.draw();
    });
    canvas.addEventListener("dblclick", () => this.group.zoom(null));
  }

  #step(event) {
    const at = event.clientX - this.canvas.getBoundingClientRect().left;
    return Math.round(this.left + (at - this.box.left) / this.box.width * (this.right - this.left));
  }

  #point(event) {
    if (this.box) this.group.hover(this.#step(event));
  }

  draw() {
    const [pen, width, height] = fitted(this.canvas);
    const lines = this.lines().filter(line => line.rows.length);
    const box = this.box = { left: 52, top: 8, width: Math.max(10, width - 60), height: height - 30 };
    const rows = lines.flatMap(line => line.rows);
    if (!rows.length) {
      pen.fillStyle = colour("--faint");
      pen.fillText("no step yet", box.left, height / 2);
      return;
    }
    [this.left, this.right] = this.group.view ?? [Math.min(...lines.map(l => l.rows[0][0])),
      Math.max(...lines.map(l => l.rows.at(-1)[1]))];
    if (this.right <= this.left) this.right = this.left + 1;
    const inside = row => row[1] >= this.left && row[0] <= this.right;
    let low = Infinity, high = -Infinity;
    for (const line of lines) {
      for (const row of line.rows) {
        if (!inside(row)) continue;
        for (const get of [line.low ?? line.value, line.high ?? line.value]) {
          const value = get(row);
          if (value === null || (this.log && value <= 0)) continue;
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
      }
    }
    if (low > high) [low, high] = [0, 1];
    if (this.least !== null) low = Math.min(low, this.least);
    const scaled = this.log ? Math.log10 : value => value;
    let [bottom, top] = [scaled(low), scaled(high)];
    const margin = (top - bottom || Math.abs(top) || 1) * 0.06;
    if (this.least === null) bottom -= margin;
    top += margin;
    const x = this.x = step => box.left + (step - this.left) / (this.right - this.left) * box.width;
    const y = value => box.top + box.height - (scaled(value) - bottom) / (top - bottom) * box.height;
    this.#axes(pen, box, bottom, top, x, height);
    pen.save();
    pen.beginPath();
    pen.rect(box.left, 0, box.width + 4, height);
    pen.clip();
    const marked = new Set(this.marks().filter(mark => mark.step >= this.left && mark.step <= this.right)
      .map(mark => Math.round(x(mark.step))));
    pen.strokeStyle = colour("--bad");
    pen.globalAlpha = Math.min(0.5, 25 / (marked.size + 1));
    pen.lineWidth = 1;
    for (const at of marked) this.#path(pen, [[at, box.top], [at, box.top + box.height]]);
    pen.globalAlpha = 1;
    for (const line of lines) this.#line(pen, line, x, y, inside);
    pen.restore();
    this.#hovered(pen, box, lines, x, y, width);
    if (this.from !== null && this.group.at !== null) {
      pen.fillStyle = colour("--accent");
      pen.globalAlpha = 0.15;
      pen.fillRect(x(this.from), box.top, x(this.group.at) - x(this.from), box.height);
      pen.globalAlpha = 1;
    }
  }

  #axes(pen, box, bottom, top, x, height) {
    pen.strokeStyle = colour("--line");
    pen.fillStyle = colour("--faint");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const tick of ticks(bottom, top, Math.max(2, box.height / 45))) {
      const at = box.top + box.height - (tick - bottom) / (top - bottom) * box.height;
      this.#path(pen, [[box.left, at], [box.left + box.width, at]]);
      pen.fillText(short(this.log ? 10 ** tick : tick), box.left - 6, at);
    }
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    for (const tick of ticks(this.left, this.right, Math.max(2, box.width / 110))) {
      if (Number.isInteger(tick)) pen.fillText(short(tick), Math.min(x(tick), box.left + box.width - 12), height - 6);
    }
  }

  #line(pen, line, x, y, inside) {
    const shown = line.rows.filter((row, at) => inside(row)
      || (line.rows[at + 1] && inside(line.rows[at + 1])) || (line.rows[at - 1] && inside(line.rows[at - 1])));
    const good = value => value !== null && !(this.log && value <= 0);
    if (line.low) {
      const banded = shown.filter(row => good(line.low(row)) && good(line.high(row)) && row[0] !== row[1]);
      pen.globalAlpha = 0.18;
      pen.fillStyle = line.colour;
      if (banded.length > 1) {
        pen.beginPath();
        banded.forEach(row => pen.lineTo(x((row[0] + row[1]) / 2), y(line.high(row))));
        banded.toReversed().forEach(row => pen.lineTo(x((row[0] + row[1]) / 2), y(line.low(row))));
        pen.fill();
      }
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = pen.fillStyle = line.colour;
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    pen.setLineDash(line.dashed ? [5, 4] : []);
    let part = [];
    for (const row of [...shown, null]) {
      const value = row && line.value(row);
      if (row && good(value)) part.push([x((row[0] + row[1]) / 2), y(value)]);
      else {
        if (part.length === 1) pen.fillRect(part[0][0] - 1.5, part[0][1] - 1.5, 3, 3);
        if (part.length > 1) this.#path(pen, part);
        part = [];
      }
    }
    pen.setLineDash([]);
  }

  #hovered(pen, box, lines, x, y, width) {
    const at = this.group.at;
    if (at === null || at < this.left || at > this.right) return;
    pen.strokeStyle = colour("--faint");
    this.#path(pen, [[x(at), box.top], [x(at), box.top + box.height]]);
    const told = [`step ${at}`];
    for (const line of lines.filter(each => !each.quiet)) {
      const row = nearest(line.rows, at);
      const value = row ? line.value(row) : null;
      if (value === null) continue;
      told.push(`${line.name}  ${short(value)}`);
      pen.fillStyle = line.colour;
      pen.beginPath();
      pen.arc(x((row[0] + row[1]) / 2), y(value), 3, 0, 7);
      pen.fill();
    }
    const wide = Math.max(...told.map(text => pen.measureText(text).width)) + 16;
    const left = x(at) + 12 + wide > width ? x(at) - 12 - wide : x(at) + 12;
    pen.fillStyle = colour("--card");
    pen.strokeStyle = colour("--line");
    pen.fillRect(left, box.top, wide, told.length * 15 + 8);
    pen.strokeRect(left, box.top, wide, told.length * 15 + 8);
    pen.textAlign = "left";
    told.forEach((text, number) => {
      pen.fillStyle = number ? colour("--ink") : colour("--faint");
      pen.fillText(text, left + 8, box.top + 16 + number * 15);
    });
  }

  #path(pen, points) {
    pen.beginPath();
    for (const [px, py] of points) pen.lineTo(px, py);
    pen.stroke();
  }
}

/** The row at a step, or the one before it. Rows are in order. */
export function nearest(rows, step) {
  let low = 0, high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] <= step) low = middle + 1;
    else high = middle;
  }
  return rows[Math.max(0, low - 1)] ?? null;
}

/** Charts that are zoomed and pointed at together. `zoomed(view)` is called when the steps that are shown change. */
export class Group {
  constructor(zoomed) {
    Object.assign(this, { charts: [], view: null, at: null, zoomed, waiting: false });
  }

  zoom(view) {
    this.view = view;
    this.zoomed(view);
    this.draw();
  }

  hover(step) {
    this.at = step;
    this.draw();
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      for (const chart of this.charts) chart.draw();
    });
  }
}

const ROW = 26;

/** What each worker did over time, a row for each place. `crew` is the page's part of that name, `failures` when there
 * were some. */
export function drawTimeline(canvas, crew, failures, [from, to]) {
  const places = [...new Set(crew.workers.map(worker => worker.place))].sort(
    (one, other) => one.localeCompare(other, undefined, { numeric: true }));
  canvas.style.height = `${Math.max(1, places.length) * ROW + 26}px`;
  const [pen, width, height] = fitted(canvas);
  const left = Math.min(90, 12 + Math.max(24, ...places.map(place => pen.measureText(place).width)));
  const wide = Math.max(10, width - left - 8);
  const x = t => left + (t - from) / Math.max(1e-9, to - from) * wide;
  const bars = [];
  const bar = (begin, end, row, name, worker) => {
    const a = Math.max(left, x(begin)), b = Math.min(left + wide, x(end));
    if (b < left || a > left + wide) return;
    pen.fillStyle = colour(name);
    pen.fillRect(a, row * ROW + 5, Math.max(1, b - a), ROW - 9);
    bars.push({ left: a, right: Math.max(a + 3, b), top: row * ROW, bottom: (row + 1) * ROW, worker });
  };
  pen.textBaseline = "middle";
  places.forEach((place, row) => {
    pen.fillStyle = colour("--faint");
    pen.fillText(place, 4, row * ROW + ROW / 2, left - 8);
    pen.fillStyle = colour("--line");
    pen.fillRect(left, row * ROW + ROW / 2, wide, 1);
  });
  for (const worker of crew.workers) {
    const row = places.indexOf(worker.place), end = worker.ended ?? to;
    const placed = Math.min(worker.placed ?? end, end);
    bar(worker.started, placed, row, worker.born_spare ? "--waiting" : "--starting", worker);
    bar(placed, end, row, "--training", worker);
  }
  for (const [begin, end] of crew.waits) {
    places.forEach((_, row) => crew.workers.some(w => w.place === places[row] && w.started < (end ?? to)
      && (w.ended ?? to) > begin) && bar(begin, end ?? to, row, "--waiting", null));
  }
  const visible = t => t >= from && t <= to;
  const marked = new Set(failures.filter(visible).map(t => Math.round(x(t))));
  pen.fillStyle = colour("--bad");
  pen.globalAlpha = Math.min(0.4, 20 / (marked.size + 1));
  for (const at of marked) pen.fillRect(at, 0, 1, places.length * ROW);
  pen.globalAlpha = 1;
  pen.textAlign = "center";
  for (const worker of crew.workers) {
    const middle = places.indexOf(worker.place) * ROW + ROW / 2 + 1;
    if (worker.placed !== null && visible(worker.placed)) {
      pen.fillStyle = colour("--ink");
      pen.fillText("▸", x(worker.placed) + 3, middle);
    }
    if ((worker.end === "failed" || worker.end === "killed") && visible(worker.ended)) {
      pen.fillStyle = colour("--bad");
      pen.font = "bold 13px system-ui, sans-serif";
      pen.fillText("✕", x(worker.ended), middle);
      pen.font = "11px system-ui, sans-serif";
    }
  }
  pen.fillStyle = colour("--faint");
  pen.textBaseline = "alphabetic";
  for (const tick of ticks(0, to - from, Math.max(2, wide / 110))) {
    const at = x(from + tick), text = clock(from + tick, to - from);
    const half = pen.measureText(text).width / 2;
    if (at - half > 0 && at + half < width) pen.fillText(text, at, height - 6);
  }
  return bars;
}

export function clock(t, span = 0) {
  const date = new Date(t * 1000), two = number => String(number).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}`;
  if (span > 86400 * 1.5) return `${date.getMonth() + 1}/${date.getDate()} ${time}`;
  return span > 3600 ? time : `${time}:${two(date.getSeconds())}`;
}
