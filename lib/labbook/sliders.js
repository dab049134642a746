// Draws what labbook.sliders has written: the state under the sliders, as bars, curves or cells.
(function (figure, root) {
  const colors = ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#6B7077"];
  const short = value => value.toLocaleString("en-US", {maximumSignificantDigits: 3});
  const state = at => // the last slider varies fastest, as in Python
    figure.states[figure.controls.reduce((place, [, values], n) => place * values.length + at[n], 0)];
  const cell = (text, style = "") => `<td style="text-align:left;${style}">${text}</td>`;
  const table = rows => `<table style="width:100%">${rows.map(row => `<tr>${row}</tr>`).join("")}</table>`;
  const ranges = [0, 1].map(axis => { // powers of ten around the curves and points of all states
    const powers = [...figure.fixed, ...figure.states.flat()].flat().map(point => Math.log10(point[axis]));
    return [Math.floor(Math.min(...powers)), Math.ceil(Math.max(...powers))];
  });
  const place = (value, axis) => {
    const share = (Math.log10(value) - ranges[axis][0]) / (ranges[axis][1] - ranges[axis][0]);
    return (axis ? 250 - 240 * share : 50 + 540 * share).toFixed(1);
  };
  const text = (x, y, said) => `<text x="${x}" y="${y}" font-size="12" fill="currentColor">${said}</text>`;
  const curve = (points, n) => {
    const [[x, y]] = points.map(([x, y]) => [place(x, 0), place(y, 1)]), color = colors[n] ?? "gray";
    if (points.length === 1) return `<circle cx="${x}" cy="${y}" r="6" fill="${color}"/>`;
    const at = points.map(([x, y]) => `${place(x, 0)},${place(y, 1)}`).join(" ");
    return `<polyline points="${at}" fill="none" stroke-width="2" stroke="${color}"/>`;
  };
  const draw = {
    bars(values) {
      const most = Math.max(...values), limit = figure.limit ?? most;
      return table(values.map((value, n) => {
        const width = 100 * value / Math.max(most, limit), said = `${short(value)} ${figure.unit}`;
        const bar = `<div style="height:1em;width:${width}%;background:${colors[Number(value > limit)]}"></div>`;
        return cell(figure.labels[n]) + cell(bar, "width:55%") + cell(value === most ? `<b>${said}</b>` : said);
      }));
    },
    cells(rows) {
      const shade = said => `background:rgba(0,114,178,${0.7 * parseFloat(said) / rows.length || 0})`;
      return table(rows.map((row, n) => [figure.labels[n], ...row].map(said => cell(said, shade(said))).join("")));
    },
    lines(curves) {
      const powers = ([low, high]) => Array.from({length: high - low + 1}, (_, n) => 10 ** (low + n));
      const across = powers(ranges[0]).map(x => text(place(x, 0) - 4, 268, short(x)));
      const up = powers(ranges[1]).map(y => text(2, place(y, 1), short(y)));
      const known = curves.map((points, n) => [points, n]).filter(([points]) => points.length);
      const told = known.map(([points, n]) => '<span style="white-space:nowrap">' +
        `<span style="color:${colors[n]}">●</span> ${figure.labels[n]} ` +
        `${points.length > 1 ? "" : short(points[0][1])}</span>`);
      const drawn = [...figure.fixed.map(points => curve(points)), ...known.map(pair => curve(...pair))];
      return `<svg viewBox="0 0 640 290" style="width:100%">${[...across, ...up, ...drawn].join("")}` +
        `${text(300, 286, figure.xlabel)}</svg>${figure.ylabel}: ${told.join(" &emsp;")}`;
    },
  };
  const html = at => draw[figure.kind](state(at));
  if (!root) return html; // for who has no page
  root.innerHTML = figure.controls.map(([name, values], n) =>
    `<label style="display:inline-block;margin-right:2em">${name}: <b></b><br><input type="range" min="0" ` +
    `max="${values.length - 1}" value="${figure.start[n]}"></label>`).join("") + "<div></div>";
  const sliders = [...root.querySelectorAll("input")], words = root.querySelectorAll("b");
  const renew = () => {
    const at = sliders.map(slider => Number(slider.value));
    root.lastChild.innerHTML = html(at);
    at.forEach((value, n) => { words[n].textContent = figure.controls[n][1][value]; });
  };
  sliders.forEach(slider => slider.addEventListener("input", renew));
  renew();
})
