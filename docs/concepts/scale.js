/* The explorer of docs/concepts/scale.md: frequencies of a head by method, for a scale, base, dimension and length that
 * the reader sets. Nothing is loaded. The formulas are those of hf_posenc/methods; tests/test_concepts.py runs them with
 * node and compares. Without JavaScript the page shows pictures/scale.png. */
(function () {
  "use strict";

  const range = (count) => Array.from({ length: count }, (_, i) => i);
  const frequencies = ({ base, dim }) => range(dim / 2).map((i) => base ** ((-2 * i) / dim));
  const turns = (head) => frequencies(head).map((f) => (head.context * f) / (2 * Math.PI));

  /* The pair index, not rounded, that makes so many turns over the context (YaRN, eq. 18). */
  const pairIndex = ({ base, dim, context }, rotations) =>
    (dim * Math.log(context / (rotations * 2 * Math.PI))) / (2 * Math.log(base));

  function byParts(head) {
    const low = Math.max(Math.floor(pairIndex(head, 32)), 0);
    let high = Math.min(Math.ceil(pairIndex(head, 1)), head.dim - 1);
    if (low === high) high += 0.001;
    return frequencies(head).map((f, i) => {
      const share = Math.min(Math.max((i - low) / (high - low), 0), 1);
      return (f / head.scale) * share + f * (1 - share);
    });
  }

  function llama3(head) {
    const [slowest, fastest] = [1, 4];
    const over = turns(head);
    return frequencies(head).map((f, i) => {
      if (over[i] < slowest) return f / head.scale;
      if (over[i] > fastest) return f;
      const smooth = (over[i] - slowest) / (fastest - slowest);
      return ((1 - smooth) * f) / head.scale + smooth * f;
    });
  }

  const METHODS = {
    pi: (head) => frequencies(head).map((f) => f / head.scale),
    ntk: (head) => {
      const last = Math.max(head.dim - 2, 1);
      return frequencies(head).map((f, i) => f * head.scale ** ((-2 * i) / last));
    },
    ntk_by_parts: byParts,
    yarn: byParts,
    llama3,
  };

  /* What multiplies cos and sin. */
  const factor = (name, { scale }) => (name === "yarn" && scale > 1 ? 0.1 * Math.log(scale) + 1 : 1);

  /* The longest text in which no pair without a full turn in training leaves the angles of the training. */
  function trainedUntil(head, table) {
    const [plain, over] = [frequencies(head), turns(head)];
    const ratios = range(head.dim / 2).filter((i) => over[i] < 1).map((i) => plain[i] / table[i]);
    return ratios.length ? head.context * Math.min(...ratios) : Infinity;
  }

  /* How many pairs are kept, changed in part, and divided by the scale. */
  function counts(head, table) {
    const plain = frequencies(head);
    const found = { kept: 0, between: 0, divided: 0 };
    table.forEach((f, i) => {
      const divisor = plain[i] / f;
      if (divisor < 1 + 1e-9) found.kept += 1;
      else if (divisor > head.scale * (1 - 1e-9)) found.divided += 1;
      else found.between += 1;
    });
    return found;
  }

  if (typeof module !== "undefined") {
    module.exports = { METHODS, frequencies, turns, factor, trainedUntil, counts };
    return;
  }

  /* ---- the page ---- */

  const LINES = [
    { name: "pi", label: "pi", dash: "" },
    { name: "ntk", label: "ntk", dash: "8 4" },
    { name: "yarn", label: "ntk_by_parts, yarn", dash: "2 3" },
    { name: "llama3", label: "llama3", dash: "12 3 2 3" },
  ];
  const HEADS = {
    "Llama 2 (7B)": { base: 10000, dim: 128, context: 4096 },
    "Llama 3 (8B)": { base: 500000, dim: 128, context: 8192 },
    "the Llama in the package": { base: 10000, dim: 32, context: 256 },
  };
  const CONTROLS = [
    { key: "scale", label: "scale s", values: [1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64], start: 8 },
    {
      key: "base", label: "base (rope_theta)", start: 10000,
      values: [1000, 5000, 10000, 50000, 100000, 250000, 500000, 1e6, 2e6, 5e6, 1e7],
    },
    { key: "dim", label: "rotary dimension d", values: [16, 32, 48, 64, 80, 96, 112, 128, 192, 256], start: 128 },
    { key: "context", label: "original length L (tokens)", values: range(10).map((k) => 256 * 2 ** k), start: 4096 },
  ];
  const number = (value) => value.toLocaleString("en-US", { maximumFractionDigits: value < 10 ? 2 : 0 });
  const short = (value) => (value === Infinity ? "any length" : number(Math.floor(value + 1e-6)));

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    made.append(...children);
    return made;
  }

  function drawn(tag, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    if (text !== undefined) made.textContent = text;
    return made;
  }

  const WIDE = { width: 600, left: 66, right: 10, top: 12, bottom: 42 };

  /* A chart with a logarithmic axis; lines are { values, kind, dash }. */
  function chart({ height, pairs, from, to, ticks, lines, levels, slow, title, name, bottom }) {
    const svg = drawn("svg", { viewBox: `0 0 ${WIDE.width} ${height}`, role: "img", "aria-label": name });
    const low = WIDE.top, high = height - (bottom ? WIDE.bottom : 12);
    const x = (i) => WIDE.left + ((WIDE.width - WIDE.left - WIDE.right) * i) / Math.max(pairs - 1, 1);
    const y = (v) => high - ((high - low) * Math.log(v / from)) / Math.log(to / from);
    if (slow < pairs) {
      svg.append(drawn("rect", { class: "slow", x: x(slow), y: low, width: x(pairs - 1) - x(slow), height: high - low }));
    }
    ticks.forEach(({ at, text }) => {
      svg.append(drawn("line", { class: "grid", x1: WIDE.left, x2: x(pairs - 1), y1: y(at), y2: y(at) }));
      svg.append(drawn("text", { x: WIDE.left - 6, y: y(at) + 5, "text-anchor": "end" }, text));
    });
    levels.forEach(({ at, text }) => {
      svg.append(drawn("line", { class: "level", x1: WIDE.left, x2: x(pairs - 1), y1: y(at), y2: y(at) }));
      svg.append(drawn("text", { x: WIDE.left + 6, y: y(at) - 5 }, text));
    });
    lines.forEach(({ values, kind, dash }) => {
      const points = values.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
      svg.append(drawn("polyline", { class: `line ${kind}`, points, "stroke-dasharray": dash }));
    });
    svg.append(
      drawn("text", { transform: `translate(15 ${(low + high) / 2}) rotate(-90)`, "text-anchor": "middle" }, title),
    );
    if (bottom) {
      const step = [1, 2, 4, 5, 8, 10, 16, 20, 32].find((s) => pairs / s <= 9);
      for (let i = 0; i < pairs; i += step) {
        svg.append(drawn("text", { x: x(i), y: high + 18, "text-anchor": "middle" }, i));
      }
      const middle = (WIDE.left + WIDE.width) / 2;
      svg.append(drawn("text", { x: middle, y: high + 37, "text-anchor": "middle" }, "pair of features, the fastest first"));
    }
    return svg;
  }

  function powers(from, to) {
    const found = [];
    const first = Math.ceil(Math.log10(from) - 1e-9), last = Math.floor(Math.log10(to) + 1e-9);
    const step = last - first > 7 ? 2 : 1;
    for (let k = first; k <= last; k += step) found.push({ at: 10 ** k, text: String(Number(`1e${k}`)) });
    return found;
  }

  function charts(head) {
    const pairs = head.dim / 2, plain = frequencies(head);
    const slow = turns(head).filter((t) => t >= 1).length;
    const tables = LINES.map(({ name, dash }) => ({ kind: name, dash, table: METHODS[name](head) }));
    const top = Math.max(head.scale, 2);
    const waves = (table) => table.map((f) => (2 * Math.PI) / f / head.context);
    const all = [plain, ...tables.map(({ table }) => table)].flatMap(waves);
    const from = Math.min(...all), to = Math.max(...all, head.scale, 1) * 1.3;
    const doubled = range(8).map((k) => 2 ** k).filter((v) => v <= top);
    return [
      chart({
        height: 190, pairs, slow, from: 1 / 1.06, to: top * 1.06, levels: [], title: "divided by",
        ticks: doubled.map((at) => ({ at, text: String(at) })),
        lines: tables.map(({ table, ...look }) => ({ values: table.map((f, i) => plain[i] / f), ...look })),
        name: "Divisor of each pair's frequency, by method. The table below has the same in numbers.",
      }),
      chart({
        height: 290, pairs, slow, from, to, ticks: powers(from, to), title: "tokens per turn / L", bottom: true,
        levels: [{ at: 1, text: "L" }, ...(head.scale > 1 ? [{ at: head.scale, text: `${head.scale} L` }] : [])],
        lines: [
          { values: waves(plain), kind: "plain", dash: "" },
          ...tables.map(({ table, ...look }) => ({ values: waves(table), ...look })),
        ],
        name: "Tokens that each pair takes for a turn, as a multiple of L, by method.",
      }),
    ];
  }

  function numbers(head) {
    const heading = ["", "pairs kept", "between", `divided by ${head.scale}`, "trained angles up to", "longest turn / L", "factor"];
    const rows = ["unscaled", ...Object.keys(METHODS)].map((name) => {
      const table = name === "unscaled" ? frequencies(head) : METHODS[name](head);
      const { kept, between, divided } = counts(head, table);
      const longest = (2 * Math.PI) / table[table.length - 1] / head.context;
      const cells = [kept, between, divided, short(trainedUntil(head, table)), number(longest), factor(name, head).toFixed(3)];
      return element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((c) => element("td", {}, String(c))));
    });
    const head_row = element("tr", {}, ...heading.map((text) => element("th", { scope: "col" }, text)));
    return element("table", { class: "numbers" }, element("thead", {}, head_row), element("tbody", {}, ...rows));
  }

  function start() {
    const place = document.getElementById("scale-explorer");
    if (!place || place.childElementCount) return;
    const plots = element("div", { class: "plots" });
    const table = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The same in numbers" });
    const summary = element("p", { class: "summary", role: "status" });
    const inputs = {};

    function head() {
      return Object.fromEntries(CONTROLS.map(({ key, values }) => [key, values[Number(inputs[key].value)]]));
    }

    function update() {
      const now = head();
      CONTROLS.forEach(({ key }) => {
        inputs[key].setAttribute("aria-valuetext", number(now[key]));
        inputs[key].nextElementSibling.textContent = number(now[key]);
      });
      const slow = turns(now).filter((t) => t < 1).length;
      summary.textContent =
        `${slow} of ${now.dim / 2} pairs made no full turn over ${number(now.context)} tokens` +
        `${slow ? " (the grey area)" : ""}. The target is ${number(now.scale * now.context)} tokens.`;
      plots.replaceChildren(...charts(now));
      table.replaceChildren(numbers(now));
    }

    const controls = CONTROLS.map(({ key, label, values, start: first }) => {
      const id = `scale-explorer-${key}`;
      inputs[key] = element("input", { type: "range", id, min: 0, max: values.length - 1, step: 1 });
      inputs[key].value = values.indexOf(first);
      inputs[key].addEventListener("input", update);
      return element("div", {}, element("label", { for: id }, label), inputs[key], element("output", { for: id }));
    });
    const heads = Object.entries(HEADS).map(([name, values]) => {
      const button = element("button", { type: "button", class: "md-button" }, name);
      button.addEventListener("click", () => {
        CONTROLS.forEach((control) => {
          if (control.key in values) inputs[control.key].value = control.values.indexOf(values[control.key]);
        });
        update();
      });
      return button;
    });
    const legend = [{ name: "plain", label: "unscaled", dash: "" }, ...LINES].map(({ name, label, dash }) => {
      const sample = drawn("svg", { viewBox: "0 0 34 8", width: 34, height: 8, "aria-hidden": "true" });
      sample.append(drawn("line", { class: `line ${name}`, x1: 0, x2: 34, y1: 4, y2: 4, "stroke-dasharray": dash }));
      return element("span", {}, sample, ` ${label}`);
    });
    place.append(
      element("div", { class: "heads" }, ...heads),
      element("div", { class: "controls" }, ...controls),
      summary, element("div", { class: "legend" }, ...legend), plots, table,
    );
    update();
    const picture = document.querySelector('img[src*="pictures/scale.png"]');
    if (picture) {
      const shown = picture.closest("p");
      shown.hidden = true;
      if (shown.nextElementSibling && shown.nextElementSibling.querySelector("em")) shown.nextElementSibling.hidden = true;
    }
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
