"""The figures of `river.analyze`, drawn from what its `--json` prints. Nothing else imports matplotlib.

Lines differ by marker and dashes and bars by hatching, so that a figure can be read without its colours. The same
result gives the same file.
"""

from pathlib import Path

from .errors import RiverError

MARKERS, DASHES, HATCHES = "osD^vPX*", ("-", "--", "-.", ":"), ("", "//", "..", "xx", "\\\\")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "river", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}


def check_figure(path):
    """Raise a RiverError, before anything is measured, if a figure could not be drawn or written."""
    if Path(path).suffix != ".svg":
        raise RiverError(f"--figure {path}: figures are written as .svg")
    if not Path(path).absolute().parent.is_dir():
        raise RiverError(f"--figure {path}: there is no such folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RiverError("matplotlib is not installed: pip install matplotlib, or leave out --figure") from error


def draw(result, path):
    """Write the figure of a result of `river.analyze` as an SVG; a RiverError if the file cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        DRAWINGS[result["what"]](result, figure)
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as error:
            raise RiverError(f"--figure {path}: {error.strerror}") from error


def _axes(figure, x, y, where=111):
    axes = figure.add_subplot(where)
    axes.set(xlabel=x, ylabel=y)
    return axes


def _style(number, points=1):
    """How line `number` is drawn; of many points some have a marker, which is most of what an SVG consists of."""
    marker, dashes = MARKERS[number % len(MARKERS)], DASHES[number % len(DASHES)]
    return {"marker": marker, "linestyle": dashes, "markersize": 4, "markevery": max(1, points // 8)}


def _column(rows, key):
    return [row[key] for row in rows]


def _similarity(result, figure):
    axes, rows = _axes(figure, "backbone layer", "similarity of the states before and after (cosine)"), result["rows"]
    layers = _column(rows, "layer")
    axes.fill_between(
        layers, _column(rows, "p5"), _column(rows, "p95"), color="0.8", label="5th to 95th percentile of the tokens"
    )
    axes.plot(layers, _column(rows, "mean"), color="black", label="mean", **_style(0))
    axes.legend()


def _kv_error(result, figure):
    for where, (part, name) in enumerate((("k", "K"), ("v", "V")), 121):
        axes = _axes(figure, "layer", f"cosine of {name}, river against backbone", where)
        for number, depth in enumerate(result["exit_layers"]):
            values = [row[part][number] for row in result["rows"]]
            axes.plot(_column(result["rows"], "layer"), values, label=str(depth), **_style(number, len(values)))
        axes.legend(title="exit depth", fontsize=8)


def _correlation(result, figure):
    axes = _axes(figure, "layer after which the token leaves", "Pearson r")
    axes.axhline(0, color="black", linewidth=0.8)
    label = "similarity there, with the last layer's V cosine"
    axes.plot(_column(result["rows"], "layer"), _column(result["rows"], "r"), color="black", label=label, **_style(0))
    axes.legend()


def _optimal_exit(result, figure):
    axes = _axes(figure, "depth (backbone layers run)", "leaving there or before (%)")
    for number, level in enumerate(("token", "sequence")):
        counts = _column(result["rows"], f"{level}_count")
        shares = [100 * sum(counts[: depth + 1]) / sum(counts) for depth in range(len(counts))]
        label = f"{level} level, mean {result[f'{level}_mean']:.1f}"
        axes.step(_column(result["rows"], "depth"), shares, where="post", label=label, **_style(number, len(shares)))
    axes.set_ylim(0, 105)
    axes.legend()


def _strategies(result, figure):
    axes, bars = _axes(figure, "", "milliseconds a token"), [row for row in result["rows"] if row["tau"] is not None]
    names, taus = list(dict.fromkeys(_column(bars, "group"))), list(dict.fromkeys(_column(bars, "tau")))
    width = 0.8 / len(taus)
    for number, tau in enumerate(taus):
        heights = [row["ms_per_token"] for row in bars if row["tau"] == tau]
        places = [place + (number - (len(taus) - 1) / 2) * width for place in range(len(names))]
        fill = {"hatch": HATCHES[number % len(HATCHES)], "edgecolor": "black", "color": str(0.9 - 0.25 * (number % 3))}
        axes.bar(places, heights, width, label=f"tau {tau}", **fill)
    for number, row in enumerate(row for row in result["rows"] if row["tau"] is None):
        axes.axhline(row["ms_per_token"], color="black", linestyle=DASHES[1 + number % 3], label=row["group"])
    axes.set_xticks(range(len(names)), names)
    axes.legend(fontsize=8)


def _pareto(result, figure):
    left = _axes(figure, "decode tokens/s", "agreement with the backbone (%)", 121)
    right = _axes(figure, "mean exit depth (backbone layers)", "agreement with the backbone (%)", 122)
    groups = {}
    for row in result["rows"]:
        groups.setdefault(row["group"], []).append(row)
    for number, (group, rows) in enumerate(groups.items()):
        style = _style(number) | ({} if len(rows) > 1 else {"linestyle": "none", "markersize": 8})
        agreements = _column(rows, "agreement")
        left.plot(_column(rows, "tokens_per_s"), agreements, label=group, **style)
        if group in ("share", "fixed depth"):
            right.plot(_column(rows, "exit_layer"), agreements, label=group, **style)
    left.legend(fontsize=7)
    right.legend(fontsize=7)


def _memory(result, figure):
    axes, rows = _axes(figure, "context (positions)", "weights and cache (GB)"), result["rows"][1:]
    kept = f"River, {result['offload']} backbone layers kept"
    titles = {"backbone": "backbone", "full_4_bit": "full 4-bit", "river": kept, "river_all": "River, all kept"}
    for number, (key, title) in enumerate(titles.items()):
        axes.plot(_column(rows, "positions"), _column(rows, key), label=title, **_style(number))
    axes.set_xscale("log", base=2)
    axes.set_xticks(_column(rows, "positions"), [f"{row['positions'] / 1024:g}K" for row in rows])
    axes.legend()


DRAWINGS = {
    "similarity": _similarity,
    "kv-error": _kv_error,
    "correlation": _correlation,
    "optimal-exit": _optimal_exit,
    "strategies": _strategies,
    "pareto": _pareto,
    "memory": _memory,
}
