
/* A page of a run that is followed: asks the server for what has changed, and leaves the reader's view as it is. */
(() => {
  const PAUSE = 2000;  // ms between questions
  const bar = document.getElementById("live");
  let version = bar.dataset.version, timer = null, lostAt = null, isPressed = false;
  const now = () => new Date().toLocaleTimeString("en-GB");

  async function ask() {
    const answer = await fetch(`/parts?since=${encodeURIComponent(version)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    return answer.json();
  }

  async function poll() {
    const found = await ask().catch((error) => ({ error }));
    timer = document.hidden ? null : setTimeout(poll, PAUSE);
    if (found.error) {
      lostAt ??= now();
      bar.textContent = `No answer from train report --follow since ${lostAt}; the page keeps what it shows.`;
      return;
    }
    lostAt = null;
    // New charts under a pressed mouse would break off a zoom.
    if (found.version !== version && !isPressed) {
      replace(found.html);
      window.showCharts(found.data);
      version = found.version;
    }
    if (bar.textContent !== found.line) bar.textContent = found.line;
  }

  /* ---- New elements for old ones, with plots, open sections, focus and scroll position kept ---- */
  const OWNERS = "[data-name], section[id]";
  const ownerName = (owner) => owner.dataset.name ?? owner.id;
  const ownerOf = (name) => [...document.querySelectorAll(OWNERS)].find((owner) => ownerName(owner) === name);

  /* Where to find the element that takes this one's place. */
  function placeOf(element, selector) {
    const owner = element.closest(OWNERS);
    return owner && { name: ownerName(owner), selector, at: [...owner.querySelectorAll(selector)].indexOf(element) };
  }
  const found = (place) => place && ownerOf(place.name)?.querySelectorAll(place.selector)[place.at];

  function anchor() {
    if (scrollY === 0) return null;
    const owners = [...document.querySelectorAll(OWNERS)];
    const seen = owners.find((owner) => owner.getBoundingClientRect().top >= 0) ?? owners.findLast((owner) => owner.getBoundingClientRect().top < 0);
    return seen && { name: ownerName(seen), top: seen.getBoundingClientRect().top };
  }

  function replace(html) {
    const seen = anchor();
    const sections = [...document.querySelectorAll("main details")].map((details) => [placeOf(details, "details"), details.open]);
    const active = document.activeElement;
    const focused = active.closest("#overview, #details") && placeOf(active, active.classList.length ? `.${active.classList[0]}` : active.tagName);
    for (const [id, text] of Object.entries(html)) {
      const old = document.getElementById(id);
      const next = document.createElement("div");
      next.innerHTML = text;
      adoptPlots(old, next);
      old.replaceChildren(...next.childNodes);
    }
    for (const [place, isOpen] of sections) {
      const details = found(place);
      if (details) details.open = isOpen;
    }
    found(focused)?.focus({ preventScroll: true });
    const moved = seen && ownerOf(seen.name);
    if (moved) scrollBy({ top: moved.getBoundingClientRect().top - seen.top, behavior: "instant" });
  }

  /* A drawn plot moves into its new card, so that it need not be drawn from nothing. */
  function adoptPlots(old, next) {
    const drawn = new Map([...old.querySelectorAll(".plot")].map((plot) => [plot.closest(".card").dataset.name, plot]));
    for (const place of next.querySelectorAll(".plot")) {
      const plot = drawn.get(place.closest(".card").dataset.name);
      if (!plot) continue;
      for (const { name, value } of place.attributes) if (name !== "class") plot.setAttribute(name, value);
      place.replaceWith(plot);
    }
  }

  addEventListener("pointerdown", () => { isPressed = true; }, true);
  for (const end of ["pointerup", "pointercancel", "blur"]) addEventListener(end, () => { isPressed = false; }, true);
  // A tab that nobody sees asks nothing.
  document.addEventListener("visibilitychange", () => { if (!document.hidden && timer === null) poll(); });
  // `replace` keeps the position itself: not every browser does, and none twice.
  document.documentElement.style.overflowAnchor = "none";
  timer = setTimeout(poll, PAUSE);
})();
