const wantsDark = matchMedia("(prefers-color-scheme: dark)");

// Figures are drawn on nothing: the page is their ground, and lends them its colours.
function coloured(layout, ground) {
  const made = structuredClone(layout);
  Object.assign(made, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" });
  made.font = { ...made.font, color: ground.text, size: 12 };
  made.hoverlabel = { bgcolor: ground.page, bordercolor: ground.line, font: { color: ground.text } };
  for (const name of Object.keys(made).filter((key) => /^[xy]axis\d*$/.test(key))) {
    Object.assign(made[name], { gridcolor: ground.line, zerolinecolor: ground.line, linecolor: ground.line });
    made[name].tickfont = { color: ground.soft };
  }
  return made;
}

function draw() {
  const name = wantsDark.matches ? "dark" : "light";
  for (const plot of PLOTS) {
    for (const [at, scale] of Object.entries(plot[name])) plot.figure.data[at].colorscale = scale;
    const layout = coloured(plot.figure.layout, GROUNDS[name]);
    Plotly.react(plot.name, plot.figure.data, layout, { responsive: true, displaylogo: false });
  }
}

wantsDark.addEventListener("change", draw);
draw();
