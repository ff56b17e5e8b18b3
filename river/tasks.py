"""What `python -m river.evaluate` measures: problems, how a setting runs one of them, and how it is scored.

Every task has `options` (what a result depends on besides model and setting), `problems` (id to problem),
`measures`, and `run(llm, settings, problem)`, which yields the record of each of several settings: "sums" (of each
measure) over "count", and what it took.
"""

import dataclasses
import gzip
import hashlib
import json
import math
import re
import textwrap
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from .agreement import agreement, forced_steps, reference_texts
from .errors import RiverError
from .sandbox import run_python


def read_jsonl(path, *fields):
    """The objects of a .jsonl or .jsonl.gz file, each of which has the string `fields`.

    Raises:
        RiverError: no such file, a line that is no such object, or none at all.
    """
    path = Path(path)
    try:
        opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8")
        with opened as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise RiverError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    records = []
    for number, line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # a number too long, or too many brackets
            raise RiverError(f"{path}, line {number}: not JSON ({error})") from error
        for field in fields:
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                raise RiverError(f"{path}, line {number}: there is no {field!r} with a text in it")
        records.append(record)
    if not records:
        raise RiverError(f"{path}: there is nothing in it")
    return records


def read_text(path):
    """A text file in UTF-8; a RiverError if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RiverError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def read_prompts(path):
    """The prompts of a file: "prompt" or "question" of each object of a .jsonl, or one a line; a RiverError if none."""
    if Path(path).name.endswith((".jsonl", ".jsonl.gz")):
        records = read_jsonl(path)
        prompts = [r.get("prompt", r.get("question")) if isinstance(r, dict) else None for r in records]
        if not all(isinstance(prompt, str) and prompt for prompt in prompts):
            raise RiverError(f"{path}: there are lines without a 'prompt' or a 'question'")
    else:
        prompts = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not prompts:
        raise RiverError(f"{path}: there is nothing in it")
    return prompts


class Measure(NamedTuple):
    """How a number is shown: its title, and functions of a value and of a difference between two."""

    title: str
    show: Callable
    show_difference: Callable


def _percent(share):
    return f"{100 * share:.1f}"


class GeneratedAnswers:
    """Tasks whose problems are answered by a text, which is right or wrong."""

    measures = {"score": Measure("score, %", _percent, _percent)}
    solves = True  # a problem is right or wrong

    @property
    def chats(self):
        """Whether a question is a turn of a chat."""
        return not self.raw

    def run(self, llm, settings, problem):
        """Yield (name, record) for a dict of name to `Settings`."""
        for name, setting in settings.items():
            yield name, self.answer(llm, setting, problem)

    def answer(self, llm, setting, problem):
        """The record of one setting's answer."""
        run = llm.generate(problem["text"], raw=self.raw, **dataclasses.asdict(setting))
        for _ in run:
            if self.is_complete(run.texts[0], problem):
                break
        score, why = self.score(run.texts[0], problem)
        return {
            "sums": {"score": float(score)},
            "count": 1,
            "answer": run.texts[0],
            "why": why,
            "new_tokens": run.new_tokens,
            "steps": len(run.exit_layers),
            "layers": sum(run.exit_layers),
            "decode_s": run.decode_s,
            "ttft_s": run.ttft_s,
            "stop_reason": run.stop_reasons[0],
        }


class GSM8K(GeneratedAnswers):
    """Grade-school arithmetic in words (Cobbe et al., 2021): exact match on the final number.

    Without exemplars a question is one turn of a chat; with them it is text to be completed, after the first
    `shots` problems of the file `train`.
    """

    ASK = "\nReason step by step, and end with #### and the answer as a number."
    # In "5-3" the 3 is not negative, and in "3,4" no comma is a thousand's.
    NUMBER = r"(?:(?<![\w)])[-\u2212])?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])\.\d+"
    MARKED = rf"####\s*\**\s*({NUMBER})"  # and not "#### Step 1", a heading

    def __init__(self, path, limit=None, shots=0, train=None):
        if shots and not train:
            raise RiverError(f"--shots {shots} needs --train, the file of the problems that are shown with answers")
        self.raw = shots > 0
        shown = read_jsonl(train, "question", "answer")[:shots] if shots else []
        if len(shown) < shots:
            raise RiverError(f"{train}: --shots {shots}, but there are {len(shown)} problems")
        self.options = {"shots": shots, "shown": hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]}
        prefix = "".join(f"Question: {p['question']}\nAnswer: {_plain(p['answer'])}\n\n" for p in shown)
        self.problems = {}
        for number, problem in enumerate(read_jsonl(path, "question", "answer")[:limit]):
            question = f"{prefix}Question: {problem['question']}\nAnswer:" if shots else problem["question"] + self.ASK
            truth = self.final_number(problem["answer"])
            if truth is None:
                raise RiverError(f"{path}: the answer of problem {number} has no number")
            self.problems[str(number)] = {"text": question, "answer": truth}

    def is_complete(self, text, problem):
        return bool(re.search(rf"{self.MARKED}[^\n]*\n", text)) or (self.raw and "\nQuestion:" in text)

    def score(self, text, problem):
        found = self.final_number(text.split("\nQuestion:")[0])
        return found is not None and found == problem["answer"], f"answered {found}, right is {problem['answer']}"

    @classmethod
    def final_number(cls, text):
        """The number after the last ####, in the last \\boxed{}, or the last of the text; None if there is none."""
        boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
        for numbers in (re.findall(cls.MARKED, text), re.findall(cls.NUMBER, boxed[-1] if boxed else "")[:1]):
            if numbers:
                return _decimal(numbers[-1])
        numbers = re.findall(cls.NUMBER, text)
        return _decimal(numbers[-1]) if numbers else None


def _decimal(number):
    return Decimal(re.sub(r"[$,]", "", number).replace("\u2212", "-"))


def _plain(answer):
    """An answer of the training file without its <<calculator>> marks."""
    return re.sub(r"<<.*?>>", "", answer)


class HumanEval(GeneratedAnswers):
    """Python functions from their docstrings (Chen et al., 2021): pass@1, by running the tests."""

    ASK = "Complete this Python function. Answer with the whole function in one code block.\n```python\n{}\n```"
    BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)

    def __init__(self, path, limit=None, allow_code_execution=False, timeout_s=10.0):
        if not allow_code_execution:
            raise RiverError(
                "humaneval runs code that the model has written: give --allow-code-execution to let it, in a "
                "process of its own with limits on time, memory and files"
            )
        self.raw = False
        self.options, self.timeout_s = {}, timeout_s
        fields = ("task_id", "prompt", "entry_point", "test")
        self.problems = {}
        for problem in read_jsonl(path, *fields)[:limit]:
            if not self.header(problem).search(problem["prompt"]):
                raise RiverError(f"{path}: the prompt of {problem['task_id']} does not define {problem['entry_point']}")
            self.problems[problem["task_id"]] = {**problem, "text": self.ASK.format(problem["prompt"].rstrip())}

    def is_complete(self, text, problem):
        closed = (block for block in self.BLOCK.finditer(text) if block[0].rstrip().endswith("```"))
        return any(self.header(problem).search(block[1]) for block in closed)

    def score(self, text, problem):
        result = run_python(self.program(text, problem), self.timeout_s)
        return result.passed, result.reason

    def program(self, text, problem):
        """The answer's function, or its body, behind what the prompt has defined, and the tests."""
        header = self.header(problem)
        blocks = [textwrap.dedent(block) for block in self.BLOCK.findall(text)] or [text]
        code = next((block for block in blocks if header.search(block)), None)
        if code is None:
            before, code = problem["prompt"], textwrap.indent(textwrap.dedent(blocks[0]), "    ")
        else:
            before = problem["prompt"][: header.search(problem["prompt"]).start()]
        # Python wants these at the top.
        future = re.findall(r"^from __future__ .*\n", code, re.MULTILINE)
        code = re.sub(r"^from __future__ .*\n", "", code, flags=re.MULTILINE)
        return f"{''.join(future)}{before}{code}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"

    @staticmethod
    def header(problem):
        """What the definition of a problem's function begins with; not that of a function whose name goes on."""
        return re.compile(rf"^[ \t]*def {re.escape(problem['entry_point'])}\b", re.MULTILINE)


class Agreement:
    """How often a setting gives the backbone's own next token, on the backbone's own texts: see agreement.py."""

    measures = {
        "agreement": Measure("agreement, %", _percent, _percent),
        "kl": Measure("KL, nats", "{:.4f}".format, "{:+.4f}".format),
    }
    solves, chats = False, False

    def __init__(self, path, limit=None, max_new_tokens=64):
        self.options, self.max_new_tokens = {}, max_new_tokens
        prompts = read_prompts(path)
        self.problems = {str(number): prompt for number, prompt in enumerate(prompts[:limit])}

    def run(self, llm, settings, problem):
        texts = reference_texts(llm, [problem], self.max_new_tokens)
        for name, result in next(agreement(llm, settings, texts)).items():
            sums = {"agreement": sum(result.hits), "kl": sum(result.kls)}
            yield name, _forced_record(sums, result.tokens, result.exit_layers, result.decode_s)


class Perplexity:
    """The perplexity of a text, in windows of so many tokens that know nothing of each other.

    A window begins as the model's texts do, with a BOS token where it has one, else with the window's own first
    token. All its other tokens are scored, each after a decode step (the first after a prompt of one token), so that
    each of them may leave.
    """

    measures = {"nll": Measure("perplexity", lambda v: f"{math.exp(v):.3f}", lambda v: f"x{math.exp(v):.4f}")}
    solves, chats = False, False

    def __init__(self, path, tokenizer, context, limit=None, window=512):
        if not 3 <= window <= context:
            raise RiverError(
                f"--window is {window}, but should be 3 or above, and at most the model's context, {context}"
            )
        ids, begin = tokenizer.encode(read_text(path)), tokenizer.encode("", bos=True)
        size = window - len(begin)
        windows = [begin + ids[i : i + size] for i in range(0, len(ids), size)]
        self.options = {"window": window}
        self.problems = {str(number): ids for number, ids in enumerate(windows[:limit]) if len(ids) > 2}
        if not self.problems:
            raise RiverError(f"{path}: the text is too short")

    def run(self, llm, settings, problem):
        prompt, tokens = problem[:1], problem[1:]
        for name, setting in settings.items():
            nll, depths, seconds = 0.0, [], []
            for token, (logits, depth, taken) in zip(tokens, forced_steps(llm, setting, prompt, tokens)):
                nll -= logits.log_softmax(-1)[token].item()
                depths.append(depth)
                seconds.append(taken)
            yield name, _forced_record({"nll": nll}, len(tokens), depths[1:], sum(seconds[1:]))


def _forced_record(sums, count, exit_layers, decode_s):
    steps = len(exit_layers)
    return {
        "sums": sums,
        "count": count,
        "new_tokens": count,
        "steps": steps,
        "layers": sum(exit_layers),
        "decode_s": decode_s,
    }
