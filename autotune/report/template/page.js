// `config` is config.json, which stands before this script.
if (window.matchMedia("(max-width: 32rem)").matches) {
  Object.assign(config.axis, { labelFontSize: 11, labelLimit: 138 });
  config.axisQuantitative.tickCount = 4;
}
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
