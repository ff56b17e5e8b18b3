"""Compare settings on the same problems: `python -m river.evaluate gsm8k FILE --setting backbone --setting tau=0.5`.

Every problem runs under every setting before the next problem begins, so that a machine that slows down slows
all of them. Each answer is a line of a JSONL file, from which a run that broke off goes on. The table has the
columns of the paper's Table 3, with 95% intervals, and the paired difference to the first setting.
"""

import dataclasses
import hashlib
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch

from .checkpoint import checkpoint_files
from .commands import DEFAULT_MODEL, MODEL_HELP, Parser, exit_status, find_model, log
from .config import load_config
from .errors import RiverError
from .files import digest_of_sources, read_bytes
from .intervals import bootstrap, paired_difference, proportion
from .llm import load
from .records import Records
from .settings import parse_setting
from .tasks import GSM8K, Agreement, HumanEval, Perplexity, read_text
from .tokenizer import load_tokenizer

FILES = {
    "gsm8k": "the problems as released, .jsonl or .jsonl.gz",
    "humaneval": "the problems as released, .jsonl or .jsonl.gz",
    "agreement": "prompts, one a line, or a .jsonl with a prompt or question in each",
    "perplexity": "any text",
}
MAX_NEW_TOKENS = {"gsm8k": 320, "humaneval": 384, "agreement": 64}
DEFAULT_SETTINGS = ["backbone", "full4bit", "tau=0.5", "tau=0.9"]


def main(argv=None):
    return exit_status("river.evaluate", run, parse_arguments(argv))


def parse_arguments(argv):
    parser = Parser(prog="python -m river.evaluate", description=__doc__.splitlines()[0])
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, title in (
        ("gsm8k", "arithmetic in words: exact match on the final number"),
        ("humaneval", "Python functions: the share that passes its tests"),
        ("agreement", "how often a setting gives the backbone's own next token, on the backbone's own answers"),
        ("perplexity", "of a text"),
    ):
        task = tasks.add_parser(name, help=title, description=title)
        add = task.add_argument
        add("file", help=FILES[name])
        add(
            "--setting",
            action="append",
            metavar="S",
            help="backbone, full4bit, tau=0.5, kv=mask,tau=0.9 ...; repeat it",
        )
        add("--limit", type=int, metavar="N", help="the first N problems alone")
        add("--output", metavar="JSONL", help=f"answers, and where to go on from (default: {name}-MODEL.jsonl)")
        add("--model", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)
        add("--device", default="auto")
        add("--compile", action="store_true", help="compiled layers, as in generate.py")
        add("--quantizer", default="hqq", help="of the river")
        add("--bits", type=int, default=4, help="of the river's weights: 4 (default), 3 or 8")
        add("--quantize-head", action="store_true", help="the LM head quantised too")
        add("--json", action="store_true", help="one JSON object too, on the last line")
        if name in MAX_NEW_TOKENS:
            add("--max-new-tokens", type=int, default=MAX_NEW_TOKENS[name], metavar="N", help="(default: %(default)s)")
    add = tasks.choices["gsm8k"].add_argument
    add("--shots", type=int, default=0, metavar="N", help="show N solved problems first (default: 0, a chat)")
    add("--train", metavar="FILE", help="where they are from")
    add = tasks.choices["humaneval"].add_argument
    add("--allow-code-execution", action="store_true", help="run what the model writes, within limits")
    add = tasks.choices["perplexity"].add_argument
    add("--window", type=int, default=512, metavar="N", help="tokens (default: 512)")
    return parser.parse_args(argv)


def run(args):
    """Run what the output file lacks, and print the table."""
    for name in ("limit", "max_new_tokens"):
        if vars(args).get(name) is not None and vars(args)[name] < 1:
            raise RiverError(f"--{name.replace('_', '-')} is {vars(args)[name]}, but should be 1 or above")
    generation = {"max_new_tokens": args.max_new_tokens} if args.task in MAX_NEW_TOKENS else {}
    settings = {name: parse_setting(name, **generation) for name in args.setting or DEFAULT_SETTINGS}
    task = make_task(args)  # before the model, which may be a long download
    args.model = find_model(args.model)
    output = Path(args.output or f"{args.task}-{Path(args.model).resolve().name}.jsonl")
    records = Records(output, {**describe(args), **generation, **task.options})
    if any((problem, setting) not in records.of for problem in task.problems for setting in settings):
        how = {name: getattr(args, name) for name in ("quantizer", "bits", "quantize_head", "compile")}
        llm = load(args.model, args.device, **how, log=log)
        complete(records, llm, task, settings)
    baseline = next(iter(settings))
    rows = {setting: summarise(setting, baseline, records.of, task) for setting in settings}
    notes = against_constants(settings, rows, records.of, task) + timed_apart(settings, baseline, records.of, task)
    print_table(rows, task)
    print(*notes, sep="\n")
    if args.json:
        print(json.dumps({"task": args.task, "problems": len(task.problems), "settings": rows, "notes": notes}))


def make_task(args):
    if args.task == "gsm8k":
        return GSM8K(args.file, args.limit, args.shots, args.train)
    if args.task == "humaneval":
        return HumanEval(args.file, args.limit, args.allow_code_execution)
    if args.task == "agreement":
        return Agreement(args.file, args.limit, args.max_new_tokens)
    read_text(args.file)  # for its errors, before a download
    folder = find_model(args.model)
    return Perplexity(args.file, load_tokenizer(folder), load_config(folder).context, args.limit, args.window)


def describe(args):
    """What all records of one output file have in common, with the task's options; settings and problems may come
    to it later."""
    folder = Path(args.model)
    sizes = {path.name: path.stat().st_size for path in checkpoint_files(folder)}
    checkpoint = read_bytes(folder / "config.json") + json.dumps(sizes, sort_keys=True).encode()
    cuda = args.device == "auto" and torch.cuda.is_available()
    return {
        "task": args.task,
        "code": digest_of_sources()[:16],
        "file": hashlib.sha256(Path(args.file).read_bytes()).hexdigest()[:16],
        "model": folder.resolve().name,
        "checkpoint": hashlib.sha256(checkpoint).hexdigest()[:16],
        "device": "cuda" if cuda else args.device.replace("auto", "cpu"),
        "quantizer": args.quantizer,
        "bits": args.bits,
        "quantize_head": args.quantize_head,
        "compile": args.compile,
    }


def complete(records, llm, task, settings):
    """Run every setting on every problem that `records` lacks, problem by problem, beginning with another each time."""
    started = int(time.time())
    for setting in settings.values():
        llm.decoder(setting, 1, 1)  # a setting that this model cannot have should not wait for its turn
    if task.chats and not llm.tokenizer.chat_format:
        print(
            "no chat template is known for this checkpoint: it completes the questions as they stand", file=sys.stderr
        )
    for setting in settings.values():  # pages are read and kernels chosen outside the first problem
        list(llm.generate("1", raw=True, **{**dataclasses.asdict(setting), "max_new_tokens": 8}))
    names = list(settings)
    with Progress(task, settings, records) as progress:
        for number, problem in enumerate(task.problems):
            first = number % len(names)
            order = [name for name in names[first:] + names[:first] if (problem, name) not in records.of]
            lacking = {name: settings[name] for name in order}
            for name, record in task.run(llm, lacking, task.problems[problem]) if lacking else ():
                records.add(problem, name, record | {"run": started})
                progress.show()


class Progress:
    """One line on standard error with a bar and the scores so far: rewritten on a terminal, else now and then."""

    def __init__(self, task, settings, records):
        self.task, self.settings, self.records, self.shown = task, settings, records, None

    def __enter__(self):
        self.show()
        return self

    def __exit__(self, *error):
        if sys.stderr.isatty():
            print(file=sys.stderr)

    def show(self):
        task, records = self.task, self.records.of
        total = len(task.problems) * len(self.settings)
        done = sum((problem, setting) in records for problem in task.problems for setting in self.settings)
        terminal, tenth = sys.stderr.isatty(), 10 * done // total
        if not terminal and tenth == self.shown:
            return
        self.shown = tenth
        measure = next(iter(task.measures))
        scores = []
        for setting in self.settings:
            of = [records[problem, setting] for problem in task.problems if (problem, setting) in records]
            if count := sum(record["count"] for record in of):
                score = sum(record["sums"][measure] for record in of) / count
                scores.append(f"{setting} {task.measures[measure].show(score)}")
        bar = "#" * (20 * done // total)
        line = f"[{bar:<20}] {done}/{total}  {'  '.join(scores)}"
        width = shutil.get_terminal_size().columns
        print(
            f"\r\033[K{line[: width - 1]}" if terminal else line,
            end="" if terminal else "\n",
            file=sys.stderr,
            flush=True,
        )


def summarise(setting, baseline, records, task):
    """One row of the table: each measure and its difference to the baseline's, with intervals, and what it took."""
    mine = [records[problem, setting] for problem in task.problems]
    row = {"measures": {}, "differences": {}}
    for measure in task.measures:
        sums, counts = [r["sums"][measure] for r in mine], [r["count"] for r in mine]
        row["measures"][measure] = proportion(sum(sums), sum(counts)) if task.solves else bootstrap(sums, counts)
        if setting != baseline:
            row["differences"][measure] = difference(measure, setting, baseline, records, task)
    speeds = {
        s: [r["steps"] / r["decode_s"] for r in (records[p, s] for p in task.problems) if r["steps"]]
        for s in (setting, baseline)
    }
    steps = sum(record["steps"] for record in mine)
    row["tokens_per_s"] = statistics.median(speeds[setting]) if steps else None
    row["speedup"] = row["tokens_per_s"] / statistics.median(speeds[baseline]) if all(speeds.values()) else None
    row["layers"] = sum(record["layers"] for record in mine) / steps if steps else None
    row["new_tokens"] = sum(record["new_tokens"] for record in mine) / len(mine)
    return row


def difference(measure, setting, baseline, records, task):
    """`Interval` of the difference between two settings on the same problems."""
    pairs = [(records[problem, setting], records[problem, baseline]) for problem in task.problems]
    gains = [a["sums"][measure] - b["sums"][measure] for a, b in pairs]
    if task.solves:
        return paired_difference(sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains), len(gains))
    return bootstrap(gains, [a["count"] for a, _ in pairs])


def print_table(rows, task):
    """The columns of the paper's Table 3, and the difference to the first row."""
    baseline = next(iter(rows))
    titles = ["setting"]
    for measure in task.measures.values():
        titles += [f"{measure.title} [95%]", f"to {baseline}'s [95%]"]
    print("| " + " | ".join([*titles, "tokens/s", "speedup", "backbone layers", "new tokens"]) + " |")
    print("| --- |" + " ---: |" * (len(titles) + 3))
    for setting, row in rows.items():
        cells = [setting]
        for name, measure in task.measures.items():
            cells.append(interval(row["measures"][name], measure.show))
            cells.append(interval(row["differences"][name], measure.show_difference) if row["differences"] else "")
        forms = {"tokens_per_s": "{:.1f}", "speedup": "{:.2f}", "layers": "{:.1f}", "new_tokens": "{:.0f}"}
        cells += ["" if row[key] is None else form.format(row[key]) for key, form in forms.items()]
        print("| " + " | ".join(cells) + " |")


def interval(estimate, show):
    return f"{show(estimate.mean)} [{show(estimate.low)}, {show(estimate.high)}]"


def against_constants(settings, rows, records, task):
    """Does an exit rule beat leaving at a fixed depth? One line for each rule that was run, down the river."""
    constants = {name: s for name, s in settings.items() if s.exit_layer is not None}
    lines = []
    for name, setting in settings.items():
        mean = rows[name]["layers"]
        exits = setting.kv == "share" and setting.exit_rule not in ("never", "oracle") and not setting.lossless
        if not exits or name in constants or mean is None:
            continue
        alike = {
            constant: s.exit_layer
            for constant, s in constants.items()
            if dataclasses.replace(s, exit_layer=None, exit_rule=setting.exit_rule, tau=setting.tau) == setting
        }
        nearest = min(alike, key=lambda constant: abs(alike[constant] - mean), default=None)
        if nearest is None or abs(alike[nearest] - mean) > 0.5:
            lines.append(f"{name} left after {mean:.1f} layers; add --setting exit-layer={round(mean)} to compare")
            continue
        parts = []
        for key, measure in task.measures.items():
            estimate = difference(key, name, nearest, records, task)
            parts.append(f"{measure.title} {interval(estimate, measure.show_difference)}")
        lines.append(f"{name} ({mean:.1f} layers) less {nearest}: {', '.join(parts)}")
    return lines


def timed_apart(settings, baseline, records, task):
    """A line about settings that did not run beside the baseline, and whose speedup says the less for that."""
    runs = {s: {records[problem, s].get("run") for problem in task.problems} for s in settings}
    apart = [setting for setting in settings if runs[setting] != runs[baseline]]
    return [f"timed in another run than {baseline}: {', '.join(apart)}"] if apart else []


if __name__ == "__main__":
    sys.exit(main())
