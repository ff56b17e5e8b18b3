"""Compare settings on the same problems: `python -m river.evaluate gsm8k FILE --setting backbone --setting tau=0.5`.

Every problem runs under every setting before the next problem begins, so that a machine that slows down slows
all of them. Each answer is a line of a JSONL file, from which a run that broke off goes on. The table has the
columns of the paper's Table 3, with 95% intervals, and the paired difference to the first setting.
"""

import argparse
import hashlib
import json
import math
import shutil
import statistics
import sys
from pathlib import Path

from .bench import DEFAULT_MODEL, log
from .errors import RiverError
from .intervals import bootstrap, proportion
from .llm import load
from .settings import parse_setting
from .tasks import GSM8K, Agreement, HumanEval, Perplexity
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
    args = parse_arguments(argv)
    try:
        run(args)
    except RiverError as error:
        print(f"river.evaluate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="python -m river.evaluate", description=__doc__.splitlines()[0])
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
        add("--model", default=DEFAULT_MODEL, metavar="FOLDER", help="a checkpoint (default: the default model)")
        add("--device", default="auto")
        add("--compile", action="store_true", help="compiled layers, as in generate.py")
        add("--quantizer", default="hqq", help="of the river")
        add("--bits", type=int, default=4, help="of the river's weights: 4 (default), 3 or 8")
        add("--json", action="store_true", help="print the table as one JSON object instead")
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
    if args.limit is not None and args.limit < 1:
        raise RiverError(f"--limit is {args.limit}, but should be 1 or above")
    generation = {"max_new_tokens": args.max_new_tokens} if args.task in MAX_NEW_TOKENS else {}
    settings = {name: parse_setting(name, **generation) for name in args.setting or DEFAULT_SETTINGS}
    task = make_task(args)
    output = Path(args.output or f"{args.task}-{Path(args.model).resolve().name}.jsonl")
    records = Records(output, {**describe(args), **generation, **task.options})
    if any((problem, setting) not in records.of for problem in task.problems for setting in settings):
        llm = load(args.model, args.device, quantizer=args.quantizer, bits=args.bits, compile=args.compile, log=log)
        complete(records, llm, task, settings)
    rows = {setting: summarise(setting, next(iter(settings)), records.of, task) for setting in settings}
    notes = against_constants(settings, rows, records.of, task)
    if args.json:
        print(json.dumps({"task": args.task, "problems": len(task.problems), "settings": rows, "constants": notes}))
    else:
        print_table(rows, task)
        print("\n".join(notes))


def make_task(args):
    if args.task == "gsm8k":
        return GSM8K(args.file, args.limit, args.shots, args.train)
    if args.task == "humaneval":
        return HumanEval(args.file, args.limit, args.allow_code_execution)
    if args.task == "agreement":
        return Agreement(args.file, args.limit, args.max_new_tokens)
    return Perplexity(args.file, load_tokenizer(Path(args.model)), args.limit, args.window)


def describe(args):
    """What all records of one output file have in common, with the task's options; settings and problems may come
    to it later."""
    return {
        "task": args.task,
        "file": hashlib.sha256(Path(args.file).read_bytes()).hexdigest()[:16],
        "model": Path(args.model).resolve().name,
        "quantizer": args.quantizer + ("" if args.bits == 4 else f"-b{args.bits}"),
        "compile": args.compile,
    }


def complete(records, llm, task, settings):
    """Run every setting on every problem that `records` lacks, problem by problem."""
    list(llm.generate("1", raw=True, max_new_tokens=8))  # pages are read and kernels chosen outside the first problem
    with Progress(task, settings, records) as progress:
        for problem in task.problems:
            lacking = {s: setting for s, setting in settings.items() if (problem, s) not in records.of}
            for name, record in task.run(llm, lacking, task.problems[problem]) if lacking else ():
                records.add(problem, name, record)
                progress.show()


class Records:
    """The answers so far, one JSON object a line, behind a line that says what they are answers to.

    Raises:
        RiverError: the file is there and belongs to another run, or is no such file.
    """

    def __init__(self, path, described):
        self.path, self.of = path, {}
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            whole, _, broken = text.rpartition("\n")  # a run that was killed may have left half a line
            if broken:
                path.write_text(whole + "\n" if whole else "", encoding="utf-8")
            if whole:
                first, *lines = map(json.loads, whole.splitlines())
                self.of = {(line["problem"], line["setting"]): line for line in lines}
            self.file = open(path, "a", encoding="utf-8")
        except OSError as error:
            raise RiverError(f"{path}: {error.strerror}; choose another --output") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RiverError(f"{path}: is no file of answers; choose another --output") from error
        if not whole:
            self._write(described)
        elif first != described:
            other = ", ".join(
                f"{key} {first.get(key) if isinstance(first, dict) else None!r} instead of {value!r}"
                for key, value in described.items()
                if not isinstance(first, dict) or first.get(key) != value
            )
            raise RiverError(f"{path}: is of another run ({other}); choose another --output")

    def add(self, problem, setting, record):
        self.of[problem, setting] = {"problem": problem, "setting": setting, **record}
        self._write(self.of[problem, setting])

    def _write(self, line):
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as error:
            raise RiverError(f"{self.path}: cannot be written ({error.strerror})") from error


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
    """`Interval` of the difference between two settings on the same problems, resampled by problem."""
    pairs = [(records[problem, setting], records[problem, baseline]) for problem in task.problems]
    return bootstrap([a["sums"][measure] - b["sums"][measure] for a, b in pairs], [a["count"] for a, _ in pairs])


def print_table(rows, task):
    """The columns of the paper's Table 3, and the difference to the first row."""
    baseline = next(iter(rows))
    titles = ["setting"]
    for measure in task.measures.values():
        titles += [f"{measure.title} [95%]", f"less {baseline}'s [95%]"]
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
    depths = {s.exit_layer: name for name, s in settings.items() if s.kv == "share" and s.exit_layer}
    lines = []
    for name, setting in settings.items():
        mean = rows[name]["layers"]
        if setting.kv != "share" or setting.exit_layer is not None or setting.exit_rule == "never" or mean is None:
            continue
        nearest = min(depths, key=lambda depth: abs(depth - mean), default=math.inf)
        if abs(nearest - mean) > 0.5:
            lines.append(f"{name} left after {mean:.1f} layers; add --setting exit-layer={round(mean)} to compare")
            continue
        parts = []
        for key, measure in task.measures.items():
            estimate = difference(key, name, depths[nearest], records, task)
            parts.append(f"{measure.title} {interval(estimate, measure.show_difference)}")
        lines.append(f"{name} ({mean:.1f} layers) less {depths[nearest]}: {', '.join(parts)}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
