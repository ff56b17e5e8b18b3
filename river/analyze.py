"""The paper's figures and more, measured: `python -m river.analyze WHAT [MODEL]`; `--help` lists what there is.

Quality is measured on texts that the backbone itself writes, greedily, in answer to PROMPTS or to the lines of
`--text`. Every result is a table, with `--json` one JSON object on the last line too, and with `--figure` an SVG.
"""

import json
import math
import statistics
import sys
import time

import torch

from .agreement import PROMPTS, reference_texts
from .commands import DEFAULT_MODEL, MODEL_HELP, Parser, exit_status, find_model, log, warn_if_busy
from .config import load_config, parse_config
from .drawing import DRAWINGS, check_figure, draw
from .errors import RiverError
from .exits import build_river
from .llm import DTYPES, RiverLLM, load
from .pareto import (
    BASELINES,
    FULL_4_BIT,
    at_neighbouring_depths,
    by_strategy,
    compare_with_first,
    compare_with_fixed,
    in_words,
    interleaved,
    quality,
    summary,
)
from .probe import (
    kv_cosines,
    layer_similarities,
    lossless_against_plain,
    pearson,
    sequence_depths,
    similarities_and_values,
    token_depths,
    weight_error,
)
from .quantize import BITS, QUANTIZERS
from .shapes import SHAPES, gigabytes
from .tables import columns, print_table
from .tasks import read_prompts


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


def quantizers(llm, texts, args):
    scores, built = {}, {}
    for name in args.quantizer or QUANTIZERS:
        started = time.perf_counter()
        river = build_river(llm.model, args.model, name, bits=args.bits, log=log)
        built[name] = time.perf_counter() - started
        scores[name] = quality(RiverLLM(llm.model, river, llm.tokenizer), {name: FULL_4_BIT}, texts)[name]
    rows = compare_with_first(scores)
    for row in rows:
        row |= {"weight_error": weight_error(llm.model, row["name"], args.bits), "build_s": built[row["name"]]}
    first = rows[0]["name"]
    return {
        "bits": args.bits,
        "rows": rows,
        "notes": [f"all layers in {args.bits} bits, teacher forced; differences to {first}, texts resampled"],
    }


def lossless(llm, texts, args):
    rows = [{"text": number} | lossless_against_plain(llm, *text) for number, text in enumerate(texts, 1)]
    drafted, equal = (sum(row[key] for row in rows) for key in ("drafted", "equal"))
    accepted = f"{sum(row['accepted'] for row in rows) / drafted:.0%}" if drafted else "none"
    return {
        "rows": rows,
        "notes": [
            f"{equal} of {len(rows)} texts are the backbone's own; of {drafted} drafts were accepted: {accepted}"
        ],
    }


def memory(args):
    config = parse_config(SHAPES[args.shape]) if args.shape else load_config(args.model)
    if not 0 <= args.offload <= config.n_layers:
        raise RiverError(f"--offload {args.offload} is out of range: this model has 0 to {config.n_layers} layers")
    positions = [0, *(n for n in (1024, 4096, 16384, 65536) if n < config.context), config.context]
    rows = [gigabytes(config, n, args.offload) for n in positions]
    return {"offload": args.offload, "rows": rows, "notes": ["GB are 10^9 bytes; a row of 0 positions is the weights"]}


# Of each WHAT: its line in --help, and the function; tables.py has its columns.
LINES = {
    "similarity": "cosine of the states before and after each backbone layer: mean and spread over the tokens",
    "kv-error": "cosine of K and of V, river against backbone, by layer and exit depth",
    "correlation": "Pearson r of a layer's similarity with the last layer's V cosine of a token that leaves there",
    "optimal-exit": "the depth that would have been enough, token by token and for whole texts",
    "strategies": "milliseconds a token of the five KV strategies",
    "pareto": "agreement with the backbone against tokens/s, over tau, and tau against fixed depths",
    "quantizers": "error of the weights, and agreement with the backbone, of fully quantised models",
    "lossless": "whether lossless decoding gives the backbone's own text, and where it does not, how near a tie",
    "memory": "gigabytes of weights and cache by context length, by arithmetic",
}
MEASURES = {
    "similarity": similarity, "kv-error": kv_error, "correlation": correlation, "optimal-exit": optimal_exit,
    "strategies": strategies, "pareto": pareto, "quantizers": quantizers, "lossless": lossless,
}  # fmt: skip


def parse_arguments(argv):
    parser = Parser(prog="python -m river.analyze", description=__doc__.splitlines()[0])
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for what, line in LINES.items():
        subparser = whats.add_parser(what, help=line, description=line)
        subparser.set_defaults(figure=None, text=None, shape=None, compile=False, dtype="bfloat16")
        add = subparser.add_argument
        add("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)
        add("--json", action="store_true", help="one JSON object too, on the last line")
        if what in DRAWINGS:
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
        if what == "quantizers":
            add("--quantizer", choices=QUANTIZERS, action="append", help="may repeat (default: all)")
            add("--bits", type=int, choices=BITS, default=4)
        if what == "lossless":
            add("--dtype", choices=DTYPES, default="bfloat16")
    args = parser.parse_args(argv)
    if "max_new_tokens" in args and args.max_new_tokens < 2:
        parser.error("--max-new-tokens should be 2 or above: the last token of a text is never run")
    if "rounds" in args and args.rounds < 1:
        parser.error("--rounds should be 1 or above")
    return args


def measure(args):
    """The result of one WHAT, a dict that JSON can hold."""
    prompts = read_prompts(args.text) if args.text else PROMPTS  # before the model, which may be a long download
    args.model = args.shape or find_model(args.model)
    result = {"what": args.what, "model": str(args.model), "torch": torch.__version__}
    if args.what == "memory":
        return result | memory(args)
    if "rounds" in args:
        warn_if_busy()
    llm = load(args.model, device=args.device, dtype=args.dtype, compile=args.compile, log=log)
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
