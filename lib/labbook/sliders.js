// Draws what labbook.sliders has written: the state under the sliders, a bar for each of its numbers.
(function (figure, root) {
  const cell = (text, style = "") => `<td style="text-align:left;${style}">${text}</td>`;
  const html = at => {
    // The last slider varies fastest, as in Python.
    const place = figure.controls.reduce((sum, [, values], n) => sum * values.length + at[n], 0);
    const values = figure.states[place];
    const most = Math.max(figure.limit, ...values);
    const rows = values.map((value, n) => {
      const width = 100 * value / most;
      const color = value > figure.limit ? "#D55E00" : "#0072B2";
      const bar = `<div style="height:1em;width:${width}%;background:${color}"></div>`;
      const text = `${value.toLocaleString("en-US", {maximumSignificantDigits: 3})} ${figure.unit}`;
      return `<tr>${cell(figure.labels[n])}${cell(bar, "width:55%")}${cell(text)}</tr>`;
    });
    return `<table style="width:100%">${rows.join("")}</table>`;
  };
  if (!root) return html; // for who has no page
  root.innerHTML = figure.controls.map(([name, values], n) =>
    `<label style="display:inline-block;margin-right:2em">${name}: <b></b><br><input type="range" min="0" ` +
    `max="${values.length - 1}" value="${figure.start[n]}"></label>`).join("") + "<div></div>";
  const sliders = [...root.querySelectorAll("input")];
  const words = root.querySelectorAll("b");
  const renew = () => {
    const at = sliders.map(slider => Number(slider.value));
    root.lastChild.innerHTML = html(at);
    at.forEach((value, n) => { words[n].textContent = figure.controls[n][1][value]; });
  };
  sliders.forEach(slider => slider.addEventListener("input", renew));
  renew();
})
