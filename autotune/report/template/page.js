const narrow = window.matchMedia("(max-width: 32rem)").matches;
const config = {
  background: "transparent",
  font: "system-ui, sans-serif",
  view: { stroke: null },
  axis: {
    labelColor: "var(--ink)", titleColor: "var(--muted)", gridColor: "var(--line)", domainColor: "var(--line)",
    tickColor: "var(--line)", labelFontSize: narrow ? 11 : 12, titleFontSize: 12, titleFontWeight: "normal",
    labelLimit: narrow ? 138 : 220,
  },
  axisY: { grid: false },
  axisQuantitative: { grid: true, tickCount: narrow ? 4 : 8 },
};
const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: false, tooltip: { disableDefaultStyle: true }, config };

async function drawAll() {
  for (const place of document.querySelectorAll(".plot")) {
    try {
      await vegaEmbed(place, JSON.parse(document.getElementById(place.id + "-spec").textContent), options);
    } catch (error) {
      console.error(place.id, error);
      place.classList.add("failed");
      place.textContent = "This chart could not be drawn here. Its values are in the table below.";
    }
  }
  document.documentElement.dataset.drawn = Math.round(performance.now());
}
drawAll();
