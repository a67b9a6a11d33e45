"use strict";
// Filters the matrix, opens cells, copies commands. The page is readable without it; texts are only ever set as text.
(() => {
  const one = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const data = (id) => JSON.parse(document.getElementById(id).textContent);

  // ---- the index: a line per cell, with its id, a value for each key, and free text ----

  let index;
  function cells() {
    if (!index) {
      index = data("index");
      index.position = new Map(index.rows.map((row, number) => [row[0], number]));
      index.texts = index.rows.map((row) => row.join(" ").toLowerCase());
    }
    return index;
  }

  // ---- the filter ----

  // `cause:hang,crash -layout:dp* any words`: a key's value is matched whole unless it ends in *, other words anywhere.
  function parse(query) {
    const keys = cells().keys;
    return (query.toLowerCase().match(/-?(?:[\w-]+:)?(?:"[^"]*"?|[^\s"]+)/g) || []).map((token) => {
      const not = token.length > 1 && token[0] === "-";
      const rest = (not ? token.slice(1) : token).replaceAll('"', "");
      const colon = rest.indexOf(":");
      const column = colon < 0 ? -1 : keys.indexOf(rest.slice(0, colon));
      if (column < 0) return { not, column, wanted: [rest] };
      return { not, column, wanted: rest.slice(colon + 1).split(",") };
    });
  }

  function holds(term, number) {
    if (term.column < 0) return cells().texts[number].includes(term.wanted[0]);
    const value = String(cells().rows[number][term.column + 1]).toLowerCase();
    return term.wanted.some((word) => (word.endsWith("*") ? value.startsWith(word.slice(0, -1)) : value === word));
  }

  const input = one("#q");
  const found = one("#q-found");
  const table = one(".matrix");
  const more = one("#more"); // there when the matrix has more lines than are laid out at once
  let most = more ? Number(more.dataset.lines) : Infinity;
  let lines;

  function arranged() {
    lines ??= [...table.tBodies[0].rows].map((line) => ({
      line,
      cells: [...line.cells].slice(1).map((cell) => ({
        cell,
        marks: [...cell.children].map((mark) => [mark, cells().position.get(mark.getAttribute("href").slice(1))]),
      })),
    }));
    return lines;
  }

  function filter() {
    const terms = parse(input.value.trim());
    const kept = cells().rows.map((_, number) => terms.every((term) => holds(term, number) !== term.not));
    const columns = [];
    let shown = 0;
    let waits = 0;
    for (const { line, cells } of arranged()) {
      let any = false;
      cells.forEach(({ marks }, column) => {
        for (const [mark, number] of marks) {
          mark.classList.toggle("off", !kept[number]);
          if (kept[number]) any = columns[column] = true;
        }
      });
      const holdsAny = any || !terms.length;
      if (holdsAny) shown += 1;
      line.hidden = !holdsAny || shown > most;
      waits += holdsAny && line.hidden;
    }
    if (more) more.hidden = !waits;
    if (more && waits) more.textContent = `Show all ${shown.toLocaleString("en")} lines`;
    showColumns(terms.length ? columns : null);
    for (const section of all("details.cell")) section.hidden = !kept[cells().position.get(section.id)];
    const count = kept.filter(Boolean).length;
    const total = kept.length.toLocaleString("en");
    found.textContent = !terms.length ? "" : count ? `${count.toLocaleString("en")} of ${total} cells` : nothing(terms);
    rove();
  }

  function nothing(terms) {
    const keyed = terms.find((term) => term.column >= 0 && !term.not);
    if (!keyed) return `No cell. Keys: ${cells().keys.join(", ")}`;
    const values = new Set(cells().rows.map((row) => row[keyed.column + 1]).filter(Boolean));
    const some = [...values].slice(0, 12).join(", ") + (values.size > 12 ? " …" : "");
    return `No cell. ${cells().keys[keyed.column]} is one of ${some}`;
  }

  let hiddenColumns = new Set();
  function showColumns(shown) {
    const width = arranged().length ? arranged()[0].cells.length : 0;
    const hide = new Set();
    for (let column = 0; column < width; column++) if (shown && !shown[column]) hide.add(column);
    const changed = [...Array(width).keys()].filter((column) => hide.has(column) !== hiddenColumns.has(column));
    hiddenColumns = hide;
    if (!changed.length) return;
    for (const { cells } of arranged()) for (const column of changed) cells[column].cell.hidden = hide.has(column);
    for (const head of all("thead th[data-first]", table)) {
      const first = Number(head.dataset.first);
      let span = 0;
      for (let column = first; column < first + Number(head.dataset.width); column++) span += !hide.has(column);
      head.hidden = !span;
      head.colSpan = span || 1;
    }
  }

  let waiting;
  function filterSoon() {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      filter();
      const hash = input.value.trim() ? "#q=" + encodeURIComponent(input.value.trim()) : "#matrix";
      try { history.replaceState(null, "", hash); } catch { /* some viewers forbid it; the filter works without */ }
    }, 120);
  }

  // ---- the section of a cell, for reports too large to hold them as HTML: the same blocks as blocks.html.j2 ----

  function make(tag, name, ...children) {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.append(...children);
    return element;
  }

  function pre(text) {
    const element = make("pre", "", text);
    element.tabIndex = 0;
    return element;
  }

  function fold(title, ...children) {
    return make("details", "fold", make("summary", "", title), ...children);
  }

  let shared;
  const draw = {
    text: (text) => make("p", "", text),
    advice: (text) => make("p", "advice", text),
    pairs: (pairs) => make("dl", "pairs", ...pairs.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value)))),
    pre: (_, text) => pre(text),
    fold: (title, text) => fold(title, pre(text)),
    code(place, texts) {
      const body = pre("");
      for (const [number, text, here] of texts) {
        const gutter = make("i", "", `${here ? "▶" : " "}${String(number).padStart(5)}  `);
        body.append(make("span", here ? "here" : "line", gutter, text + "\n"));
      }
      return make("figure", "code", make("figcaption", "", make("code", "", place)), body);
    },
    svg(caption, markup) {
      const image = new DOMParser().parseFromString(markup.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" '), "image/svg+xml");
      return make("figure", "drawing", document.importNode(image.documentElement, true), make("figcaption", "", caption));
    },
    diff(title, texts) {
      const body = pre("");
      body.className = "diff";
      const names = { "+": "added", "-": "deleted", "@": "hunk" };
      for (const text of texts) body.append(make("span", names[text[0]] || "line", text + "\n"));
      return fold(title, body);
    },
    table(head, rows) {
      const top = make("thead", "", make("tr", "", ...head.map((text) => make("th", "", text))));
      const body = make("tbody", "", ...rows.map((row) => make("tr", "", ...row.map((text) => make("td", "", text)))));
      const scroll = make("div", "scroll", make("table", "plain", top, body));
      scroll.tabIndex = 0;
      return scroll;
    },
    command: (text) => withButton(make("div", "command", pre(text))),
    shared(number) {
      shared ??= data("shared");
      const [kind, ...rest] = shared[number];
      return draw[kind](...rest);
    },
    link: (words, address) => make("p", "", `${words}: ${address}`),
  };

  function render(number) {
    const size = Number(document.getElementById("index").dataset.chunk);
    const groups = data(`chunk-${Math.floor(number / size)}`)[number % size];
    const row = cells().rows[number];
    const article = one("#opened");
    article.replaceChildren(make("h3", "", row[1]));
    for (const [heading, blocks] of groups) {
      article.append(make("section", "group", make("h3", "", heading), ...blocks.map(([kind, ...rest]) => draw[kind](...rest))));
    }
    article.dataset.id = row[0];
    article.hidden = false;
    one("#pick").hidden = true;
    return article;
  }

  // ---- opening, copying, moving ----

  let cameFrom;
  function follow() {
    const hash = location.hash.slice(1);
    if (hash.startsWith("q=")) {
      try { input.value = decodeURIComponent(hash.slice(2)); } catch { input.value = ""; }
      filter();
      one("#matrix").scrollIntoView();
      return;
    }
    if (!hash.startsWith("c-")) return;
    const number = cells().position.get(hash);
    if (number === undefined) return;
    const section = document.getElementById(hash) || render(number);
    section.hidden = false;
    if ("open" in section) section.open = true;
    section.scrollIntoView();
    (one(":scope > summary", section) || section).focus({ preventScroll: true });
  }

  function withButton(command) {
    const button = make("button", "", "Copy");
    button.type = "button";
    button.addEventListener("click", async () => {
      const text = one("pre", command).textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch { // no permission, or no clipboard for pages from a file: select it instead
        getSelection().selectAllChildren(one("pre", command));
        button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    command.append(button);
    return command;
  }

  // One stop for the Tab key in the matrix; the arrow keys move within it.
  let stop;
  function rove(target) {
    const next = target || (stop && !stop.matches(".off, [hidden] *") ? stop : one("tbody tr:not([hidden]) a:not(.off)", table));
    if (stop) stop.tabIndex = -1;
    stop = next;
    if (stop) stop.tabIndex = 0;
  }

  function neighbour(mark, key) {
    const cell = mark.parentElement;
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const side = key === "ArrowLeft" ? "previousElementSibling" : "nextElementSibling";
      for (let next = cell[side]; next; next = next[side]) {
        const target = !next.hidden && one("a:not(.off)", next);
        if (target) return target;
      }
      return null;
    }
    const within = mark[key === "ArrowUp" ? "previousElementSibling" : "nextElementSibling"];
    if (within && !within.matches(".off")) return within;
    const side = key === "ArrowUp" ? "previousElementSibling" : "nextElementSibling";
    for (let line = cell.parentElement[side]; line; line = line[side]) {
      const target = !line.hidden && one("a:not(.off)", line.cells[cell.cellIndex]);
      if (target) return target;
    }
    return null;
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = document.activeElement;
    if (event.key === "/" && at !== input) {
      event.preventDefault();
      one("#matrix").scrollIntoView();
      input.focus({ preventScroll: true });
    } else if (event.key === "Escape") {
      if (at === input && input.value) {
        input.value = "";
        filterSoon();
      } else if (cameFrom?.isConnected) {
        cameFrom.focus();
      }
    } else if (event.key === "Enter" && at === input) {
      event.preventDefault();
      clearTimeout(waiting);
      filter();
      stop?.focus();
    } else if (event.key.startsWith("Arrow") && at.matches(".matrix tbody a")) {
      const target = neighbour(at, event.key);
      event.preventDefault();
      if (target) {
        rove(target);
        target.focus();
      }
    }
  });

  for (const mark of all("tbody a", table)) mark.tabIndex = -1;
  rove();
  table.addEventListener("focusin", (event) => { if (event.target.matches("tbody a")) rove(event.target); });
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (!link) return;
    if (link.getAttribute("href").startsWith("#c-")) cameFrom = link;
    if (link.getAttribute("href") === location.hash) follow(); // a second click on the same link is no change of hash
  });
  all(".command").forEach(withButton);
  one(".filter").hidden = false;
  one(".filter").addEventListener("submit", (event) => event.preventDefault());
  input.addEventListener("input", filterSoon);
  more?.addEventListener("click", () => {
    most = Infinity;
    filter();
  });
  (window.requestIdleCallback || setTimeout)(arranged); // so that the first filter need not wait for it
  addEventListener("hashchange", follow);
  follow();
})();
