"""Find the threshold for a target: `python -m river.calibrate MODEL --target agreement=0.98`.

Texts, the model's own or pieces of a file, are read under each threshold as the decode loop would, token by token. The
laxest threshold that keeps the target with 95% confidence is stored beside the river, for `--tau auto`. A speedup is
this machine's, with a bootstrap interval; of agreement and divergence see guarantee.py.
"""

import itertools
import sys
from pathlib import Path

import torch

from . import guarantee
from .agreement import BACKBONE, agreement
from .commands import DEFAULT_MODEL, MODEL_HELP, Parser, exit_status, find_model, log
from .errors import RiverError
from .generation import Generation
from .guarantee import CONFIDENCE, MOST_KL, TAUS
from .intervals import bootstrap
from .llm import load
from .pareto import summary
from .settings import NAMED_SETTINGS, Settings
from .tables import print_table
from .tasks import read_text

PROMPT, SCORED = 32, 16  # tokens of a text that are given, and that are compared
BATCH = 32


def main(argv=None):
    return exit_status("river.calibrate", run, parse_arguments(argv))


def parse_arguments(argv):
    parser = Parser(prog="python -m river.calibrate", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)
    parser.add_argument(
        "--target",
        required=True,
        metavar="T",
        help="agreement=0.98, speedup=1.5, or kl=0.05 (nats a token; one counts for 2 at most)",
    )
    parser.add_argument("--text", metavar="FILE", help="calibrate on this text (default: what the model writes itself)")
    parser.add_argument("--texts", type=int, default=400, metavar="N", help="pieces of text (default: 400)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true", help="compiled layers, as in generate.py")
    parser.add_argument("--quantizer", default="hqq", help="of the river")
    parser.add_argument("--group-size", type=int, default=64, metavar="N")
    parser.add_argument("--bits", type=int, default=4, metavar="N")
    return parser.parse_args(argv)


def run(args):
    kind, target = parse_target(args.target)
    if args.texts < 2:
        raise RiverError(f"--texts is {args.texts}, but should be 2 or above")
    text = read_text(args.text) if args.text else None  # before the model, which may be a long download
    options = {"quantizer": args.quantizer, "group_size": args.group_size, "bits": args.bits}
    llm = load(find_model(args.model), args.device, compile=args.compile, log=log, **options)
    if not llm.river_path.exists():
        raise RiverError(f"{llm.river_path} is not there, to store a threshold beside: can the folder be written to?")
    if llm.config.context < PROMPT + SCORED:
        raise RiverError(f"the model's context is {llm.config.context}, and a piece has {PROMPT + SCORED} tokens")
    texts, source = texts_of_file(llm, text, args) if args.text else own_texts(llm, args.texts)
    results = measure(llm, texts)
    print_table(COLUMNS, [{"tau": tau, "speedup": speedup(results, tau)} | summary(results[tau]) for tau in TAUS])
    if kind != "speedup":
        kept, broke, none = guarantee.held_out(*losses_and_bound(results, kind, target))
        print(
            f"of 100 thresholds, each chosen on a random half of the texts, {kept} kept the target on the other half "
            f"and {broke} did not; on {none} halves none was chosen"
        )
    tau = laxest_tau(results, kind, target)
    sure = f"{args.target} with {CONFIDENCE:.0%} confidence"
    if tau is None:
        print(f"no threshold is sure to keep {sure} on {len(texts)} pieces of {source}: nothing is stored")
        return 1
    found = {"tau": tau, "target": args.target, "confidence": CONFIDENCE, "text": source, "texts": len(texts)}
    guarantee.save(llm.river_path, found)
    print(f"tau {tau} keeps {sure} on {len(texts)} pieces of {source}; --tau auto will use it")
    return 0


def parse_target(text):
    """("agreement", "kl" or "speedup", value); a RiverError for anything else."""
    kind, _, value = text.partition("=")
    bounds = {"agreement": (0, 1), "kl": (0, MOST_KL), "speedup": (1, float("inf"))}
    try:
        low, high = bounds[kind]
        if low < float(value) < high:
            return kind, float(value)
    except (KeyError, ValueError):
        pass
    raise RiverError(f"--target {text!r} should be agreement=0.98, kl=0.05 or speedup=1.5, or the like")


def texts_of_file(llm, text, args):
    """Pieces of a text, in random order: a list of (prompt ids, ids to compare), and what they are."""
    ids, size = llm.tokenizer.encode(text), PROMPT + SCORED
    pieces = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
    if max(ids, default=0) >= llm.config.vocab_size:
        raise RiverError(f"{args.text} has the token {max(ids)}, but the model knows {llm.config.vocab_size}")
    if len(pieces) < 2:
        raise RiverError(f"{args.text}: is too short, a piece has {size} tokens")
    chosen = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))[: args.texts].tolist()
    return [(pieces[i][:PROMPT], pieces[i][PROMPT:]) for i in chosen], f"the text {Path(args.text).name}"


def own_texts(llm, count):
    """As `texts_of_file`, of texts that the backbone samples at temperature 1, in batches."""
    # Between documents stands a beginning, or in some models an end.
    start = llm.tokenizer.encode("", bos=True) or sorted(llm.config.eos_token_ids)[:1] or [0]
    settings = {**NAMED_SETTINGS["backbone"], "temperature": 1.0, "max_new_tokens": PROMPT + SCORED}
    texts = []
    for seed in range(2 + 10 * count // BATCH):
        run = Generation(llm, [list(start)] * min(BATCH, count), Settings(**settings, seed=seed))
        for _ in run:
            pass
        written = [[*start, *tokens] for tokens in run.tokens]
        texts += [(ids[:-SCORED], ids[-SCORED:]) for ids in written if len(ids) > SCORED]
        if len(texts) >= count:
            return texts[:count], "text that the model writes itself"
    raise RiverError("the model ends its texts at once: give it a --text")


def measure(llm, texts):
    """Of the backbone (None) and each tau, a `TextAgreement` for each text."""
    settings = {None: BACKBONE} | {tau: Settings(tau=tau) for tau in TAUS}
    results = {name: [] for name in settings}
    for count, of_text in enumerate(agreement(llm, settings, texts), 1):
        for name, result in of_text.items():
            results[name].append(result)
        log(f"calibrating: {count}/{len(texts)} texts", count == len(texts))
    return results


def laxest_tau(results, kind, target):
    """The laxest tau that keeps the target, or None."""
    if kind == "speedup":  # from the laxest on, as the strictest is the best that is fast enough
        fast = itertools.takewhile(lambda tau: speedup(results, tau).low >= target, reversed(TAUS))
        return next(iter([*fast][::-1]), None)
    return guarantee.laxest(*losses_and_bound(results, kind, target))


def losses_and_bound(results, kind, target):
    """For guarantee.py: of each tau the loss of each text, and the bound of their mean that is the target."""
    losses = {tau: [loss(result, kind) for result in results[tau]] for tau in TAUS}
    return losses, 1 - target if kind == "agreement" else target / MOST_KL


def loss(result, kind):
    """Of one text, in [0, 1]: the share of other tokens, or the mean divergence as a share of the most it counts.

    The first token does not count: it comes from the prompt, which no threshold touches on a CPU.
    """
    if kind == "agreement":
        return 1 - sum(result.hits[1:]) / (result.tokens - 1)
    return sum(min(max(kl, 0.0), MOST_KL) for kl in result.kls[1:]) / (result.tokens - 1) / MOST_KL


def speedup(results, tau):
    """`Interval` of the backbone's time over tau's, texts resampled."""
    return bootstrap([r.decode_s for r in results[None]], [r.decode_s for r in results[tau]])


COLUMNS = {
    "tau": "{tau}", "agreement, %": "{agreement:.1f}", "KL, nats": "{kl:.4f}",
    "speedup [95%]": "{speedup.mean:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]",
    "backbone layers": "{exit_layer:.1f}",
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
