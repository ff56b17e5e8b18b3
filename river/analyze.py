"""The paper's figures, measured: `python -m river.analyze WHAT [MODEL]`; `--help` lists what there is.

Quality is measured on texts that the backbone itself writes, greedily, in answer to PROMPTS or to the lines of
`--text`. Every result is a table, with `--json` one JSON object on the last line too, and with `--figure` an SVG.
"""

import json
import math
import statistics
import sys

import torch

from .agreement import reference_texts
from .commands import DEFAULT_MODEL, Parser, exit_status, log, warn_if_busy
from .config import load_config, parse_config
from .drawing import check_figure, draw
from .errors import RiverError
from .llm import load
from .pareto import (
    BASELINES,
    at_neighbouring_depths,
    by_strategy,
    compare_with_fixed,
    in_words,
    interleaved,
    quality,
    summary,
)
from .probe import kv_cosines, layer_similarities, pearson, sequence_depths, similarities_and_values, token_depths
from .shapes import SHAPES
from .tasks import read_prompts

PROMPTS = (
    "What is the capital of Australia, and why is it not Sydney?",
    "Write a Python function that tells whether a string is a palindrome.",
    "List seven things to take along on a walk in the mountains.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Tell a short story about a lighthouse keeper who finds a letter.",
    'Translate into French: "The ferry does not run on Sundays in winter."',
    "Explain to a child why the moon changes its shape.",
    "Summarise in one sentence: The mill closed in 1931, stood empty for forty years, and is a library today.",
    "Write a polite e-mail that moves a meeting from Tuesday to Thursday.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for a simple vegetable soup, step by step.",
    "Is it true that goldfish forget everything after three seconds?",
)


def similarity(llm, texts, args):
    values = layer_similarities(llm, texts)
    low, high = values.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64), dim=1).tolist()
    layers = zip(values.mean(1).tolist(), low, high)
    return {
        "rows": [{"layer": l, "mean": mean, "p5": p5, "p95": p95} for l, (mean, p5, p95) in enumerate(layers, 1)],
        "notes": [f"{values.shape[1]} tokens of {len(texts)} texts"],
    }


def kv_error(llm, texts, args):
    L = llm.config.n_layers
    depths = sorted({depth for depth in (0, 1, 2, 4, 8, L // 2) if depth < L})
    k, v = kv_cosines(llm, texts, depths).unbind(-1)  # [exit depth, layer] each
    means = [f"{depth}: K {x:.4f}, V {y:.4f}" for depth, x, y in zip(depths, k.mean(1).tolist(), v.mean(1).tolist())]
    layers = zip(k.T.tolist(), v.T.tolist())
    return {
        "exit_layers": depths,
        "rows": [{"layer": layer, "k": k_row, "v": v_row} for layer, (k_row, v_row) in enumerate(layers, 1)],
        "notes": ["mean over the layers, by exit depth: " + "; ".join(means)],
    }


def correlation(llm, texts, args):
    if llm.config.n_layers < 2:
        raise RiverError("correlation needs a model of 2 layers or more")
    similarities, cosines = similarities_and_values(llm, texts)
    layers = zip(pearson(similarities, cosines).tolist(), similarities.mean(0).tolist(), cosines.mean(0).tolist())
    return {
        "rows": [{"layer": layer, "r": r, "similarity": s, "v": v} for layer, (r, s, v) in enumerate(layers, 1)],
        "notes": [f"{len(similarities)} tokens of {len(texts)} texts; only the token itself leaves early"],
    }


def optimal_exit(llm, texts, args):
    tokens, sequences = token_depths(llm, texts), sequence_depths(llm, texts)
    means = statistics.mean(tokens), statistics.mean(sequences)
    return {
        "rows": [
            {"depth": depth, "token_count": tokens.count(depth), "sequence_count": sequences.count(depth)}
            for depth in range(llm.config.n_layers + 1)
        ],
        "token_mean": means[0],
        "sequence_mean": means[1],
        "notes": [
            f"mean depth: {means[0]:.2f} where each of {len(tokens)} tokens leaves by itself, "
            f"{means[1]:.2f} where all tokens of a text leave together ({len(texts)} texts)"
        ],
    }


def strategies(llm, texts, args):
    times = interleaved(llm, BASELINES | by_strategy(args.tau or [0.5, 0.9]), texts, args.rounds)
    return {
        "rows": [
            {"group": group, "tau": tau, "ms_per_token": 1e3 * taken["step_s"], "exit_layer": taken["depth"]}
            for (group, tau), taken in times.items()
        ],
        "notes": [f"medians of {args.rounds} interleaved rounds, each of one text"],
    }


def pareto(llm, texts, args):
    settings = BASELINES | by_strategy(args.tau or [0.5, 0.8, 0.9, 0.95, 0.97])
    scores = quality(llm, settings, texts)
    river = {tau: scores[group, tau] for group, tau in settings if group == "share"}
    fixed = at_neighbouring_depths(river.values())
    scores |= quality(llm, fixed, texts)
    times = interleaved(llm, settings | fixed, texts, args.rounds)
    comparisons = [
        {"tau": tau} | compare_with_fixed(score, {depth: scores[group, depth] for group, depth in fixed})
        for tau, score in river.items()
    ]
    return {
        "rows": [
            {"group": group, "value": value} | summary(score) | {"tokens_per_s": 1 / times[group, value]["step_s"]}
            for (group, value), score in scores.items()
        ],
        "comparisons": comparisons,
        "notes": [in_words(comparison) for comparison in comparisons],
    }


def memory(args):
    """Bytes of weights and cache in bfloat16, by arithmetic; quantised in groups of 64."""
    config = parse_config(SHAPES[args.shape]) if args.shape else load_config(args.model)
    if not 0 <= args.offload <= config.n_layers:
        raise RiverError(f"--offload {args.offload} is out of range: this model has 0 to {config.n_layers} layers")
    D, q, kv, ff, L = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size, config.n_layers
    linears = D * (2 * q + 2 * kv + 3 * ff)
    biases = (q + 2 * kv) * config.qkv_bias + D * config.o_bias + (2 * ff + D) * config.mlp_bias
    kept = 2 * (2 * D + 2 * config.head_dim * config.qk_norm + biases)  # norms and biases, which the river shares
    head = 2 * (config.vocab_size * D * (1 if config.tie_word_embeddings else 2) + D)  # with embedding and final norm
    full_4_bit = head + L * (linears / 2 + linears / 64 * 4 + kept)  # half a byte a weight, a pair a group
    rows = []
    for positions in [0, *(n for n in (1024, 4096, 16384, 65536) if n < config.context), config.context]:
        cache = 2 * 2 * L * kv * positions
        nbytes = {
            "cache": cache,
            "backbone": head + L * (2 * linears + kept) + cache,
            "full_4_bit": full_4_bit + cache,
            "river": full_4_bit + 2 * linears * args.offload + cache,
            "river_all": full_4_bit + 2 * linears * L + cache,
        }
        ratio = nbytes["river"] / nbytes["full_4_bit"]
        rows.append({"positions": positions, **{name: n / 1e9 for name, n in nbytes.items()}, "ratio": ratio})
    return {"offload": args.offload, "rows": rows, "notes": ["GB are 10^9 bytes; a row of 0 positions is the weights"]}


# Of each WHAT: its line in --help, the function, and its table: titles and the cells below them, given the result.
LINES = {
    "similarity": "cosine of the states before and after each backbone layer: mean and spread over the tokens",
    "kv-error": "cosine of K and of V, river against backbone, by layer and exit depth",
    "correlation": "Pearson r of a layer's similarity with the last layer's V cosine of a token that leaves there",
    "optimal-exit": "the depth that would have been enough, token by token and for whole texts",
    "strategies": "milliseconds a token of the five KV strategies",
    "pareto": "agreement with the backbone against tokens/s, over tau, and tau against fixed depths",
    "memory": "gigabytes of weights and cache by context length, by arithmetic",
}
MEASURES = {
    "similarity": similarity, "kv-error": kv_error, "correlation": correlation, "optimal-exit": optimal_exit,
    "strategies": strategies, "pareto": pareto,
}  # fmt: skip
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


def print_table(columns, rows):
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---:" for _ in columns) + " |")
    for row in rows:
        cells = [template.format_map(row) for template in columns.values()]
        print("| " + " | ".join("" if cell == "None" else cell for cell in cells) + " |")


def parse_arguments(argv):
    parser = Parser(prog="python -m river.analyze", description=__doc__.splitlines()[0])
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for what, line in LINES.items():
        subparser = whats.add_parser(what, help=line, description=line)
        subparser.set_defaults(shape=None, compile=False)
        add = subparser.add_argument
        add("model", nargs="?", default=DEFAULT_MODEL, help="a checkpoint folder (default: the default model)")
        add("--json", action="store_true", help="one JSON object too, on the last line")
        add("--figure", metavar="FILE.svg", help="draw it; needs matplotlib")
        if what == "memory":
            add("--shape", choices=SHAPES, help="of a named shape instead of MODEL")
            add("--offload", type=int, default=4, metavar="N", help="backbone layers that River keeps (default: 4)")
            continue
        add("--device", default="auto")
        add("--text", metavar="FILE", help="prompts, one a line (default: a dozen of our own)")
        add("--max-new-tokens", type=int, default=64, metavar="N", help="of each text (default: 64)")
        if what in ("strategies", "pareto"):
            add("--compile", action="store_true")
            add("--tau", type=float, action="append", help="may repeat")
            add("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    if "max_new_tokens" in args and args.max_new_tokens < 2:
        parser.error("--max-new-tokens should be 2 or above: the last token of a text is never run")
    if "rounds" in args and args.rounds < 1:
        parser.error("--rounds should be 1 or above")
    return args


def measure(args):
    """The result of one WHAT, a dict that JSON can hold."""
    result = {"what": args.what, "model": str(args.shape or args.model), "torch": torch.__version__}
    if args.what == "memory":
        return result | memory(args)
    prompts = read_prompts(args.text) if args.text else PROMPTS
    if "rounds" in args:
        warn_if_busy()
    llm = load(args.model, device=args.device, compile=args.compile, log=log)
    texts = [text for text in reference_texts(llm, prompts, args.max_new_tokens) if len(text[1]) > 1]
    if not texts:
        raise RiverError("the backbone ends every text with its first token: there is nothing to measure")
    result |= {"compile": args.compile, "threads": torch.get_num_threads(), "texts": len(texts)}
    return result | MEASURES[args.what](llm, texts, args)


def run(args):
    """Measure, print the table and, if asked, the JSON, and draw the figure."""
    if args.figure:
        check_figure(args.figure)
    result = measure(args)
    print_table(columns(args.what, result), result["rows"])
    print(*result["notes"], sep="\n")
    if args.json:
        print(json.dumps(without_nan(result)))
    if args.figure:
        draw(result, args.figure)


def without_nan(value):
    """A result with None for each NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def main(argv=None):
    return exit_status("river.analyze", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
