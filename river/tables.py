"""What is measured, as tables in Markdown; and the columns of those that analyze.py prints."""

import string

# Of each WHAT: titles, and the format of the cells below them, given a row of the result.
COLUMNS = {
    "similarity": {"layer": "{layer}", "mean": "{mean:.3f}", "5th percentile": "{p5:.3f}", "95th": "{p95:.3f}"},
    "correlation": {
        "left after layer": "{layer}", "r": "{r:+.2f}", "mean similarity": "{similarity:.3f}",
        "mean V cosine": "{v:.3f}",
    },
    "optimal-exit": {"depth": "{depth}", "tokens": "{token_count}", "texts": "{sequence_count}"},
    "strategies": {
        "strategy": "{group}", "tau": "{tau}", "ms/token": "{ms_per_token:.2f}", "backbone layers": "{exit_layer:.1f}",
    },
    "pareto": {
        "setting": "{group}", "tau or depth": "{value}", "backbone layers": "{exit_layer:.2f}",
        "agreement, %": "{agreement:.1f}", "KL, nats": "{kl:.3f}", "tokens/s": "{tokens_per_s:.1f}",
    },
    "quantizers": {
        "quantiser": "{name}", "weight error": "{weight_error:.4f}", "seconds to build": "{build_s:.1f}",
        "agreement, %": "{agreement:.1f}", "to the first's [95%]": "{agreement_difference:.1f}",
        "KL, nats": "{kl:.4f}", "to the first's": "{kl_difference:.4f}",
    },
    "lossless": {
        "text": "{text}", "tokens": "{tokens}", "drafted": "{drafted}", "accepted": "{accepted}",
        "first other token": "{differs_at}", "lead of the best logit there": "{lead:.3f}",
    },
}  # fmt: skip


def columns(what, result):
    """The table of a WHAT: title to the format of its cells."""
    if what == "kv-error":
        depths = list(enumerate(result["exit_layers"]))
        return {"layer": "{layer}"} | {
            f"{part.upper()}, depth {depth}": f"{{{part}[{number}]:.3f}}" for part in "kv" for number, depth in depths
        }
    if what == "memory":
        return {
            "positions": "{positions}",
            "cache": "{cache:.3f}",
            "backbone": "{backbone:.3f}",
            "full 4-bit": "{full_4_bit:.3f}",
            f"River, {result['offload']} backbone layers kept": "{river:.3f}",
            "River, all kept": "{river_all:.3f}",
            "to full 4-bit": "{ratio:.2f}",
        }
    return COLUMNS[what]


class Cell(string.Formatter):
    """Leaves a cell empty where there is no value."""

    def format_field(self, value, spec):
        return "" if value is None else super().format_field(value, spec)


def print_table(columns, rows):
    """Print a line for each of the rows, dicts; `columns` are titles and the formats of the cells below them."""
    print("| " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * (len(columns) - 1))
    for row in rows:
        print("| " + " | ".join(Cell().vformat(template, (), row) for template in columns.values()) + " |")
