"""`python -m river.evaluate`: every setting on the same problems, scored rightly, and resumable."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_checkpoint

from river import RiverError, load
from river.evaluate import main
from river.records import Records
from river.settings import parse_setting
from river.tasks import GSM8K, Agreement, HumanEval, Perplexity

QUESTIONS = [
    {"question": "Ann has 2 apples and gets 3 more. How many?", "answer": "2+3=<<2+3=5>>5 apples.\n#### 5"},
    {"question": "A box holds 1,200 pens. Two boxes?", "answer": "1,200*2=<<1200*2=2400>>2,400\n#### 2,400"},
    {"question": "Tom pays $3.50 twice.", "answer": "#### 7"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("evaluate") / "tiny")


@pytest.fixture
def questions(tmp_path):
    return write_lines(tmp_path / "questions.jsonl", QUESTIONS)


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def evaluate(folder, task, file, *more):
    return main([task, str(file), "--model", str(folder), "--device", "cpu", *map(str, more)])


@pytest.mark.parametrize(
    "text, number",
    [
        ("So she has 5 left.\n#### 18", "18"),
        ("#### $1,234.50 in all, of 7", "1234.5"),
        ("#### -3", "-3"),
        ("It is \\boxed{42} and not 41", "42"),
        ("5-3 = 2", "2"),
        ("That is 10-3", "3"),
        ("He owes -20.", "-20"),
        ("The answer is 18.00.", "18"),
        ("No number at all", None),
        ("####", None),
        ("#### Step 1: add 3 and 4\nthat is 7\n#### 7", "7"),
        ("#### Step 1: add\nthe sum is 9", "9"),
        ("#### **42**", "42"),
        ("one of 3,4,5", "5"),
        ("it is .5", "0.5"),
        ("it is \u22125", "-5"),
        ("1,234,567 in all", "1234567"),
    ],
)
def test_final_number(text, number):
    found = GSM8K.final_number(text)
    assert found is None if number is None else found == pytest.approx(type(found)(number), abs=0)


def test_exemplars_come_first_and_without_calculator_marks(questions):
    task = GSM8K(questions, limit=1, shots=2, train=questions)
    text = task.problems["0"]["text"]
    assert text.startswith("Question: Ann has 2 apples") and text.endswith("How many?\nAnswer:")
    assert "2+3=5 apples.\n#### 5\n\nQuestion: A box" in text and "<<" not in text
    # What a model writes after its answer is no part of it.
    assert task.score(" It is 5.\n\nQuestion: Bob has 9. How many?", task.problems["0"])[0]


def test_all_settings_run_on_a_problem_before_the_next(folder, questions, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    settings = ["--setting", "backbone", "--setting", "tau=0.5", "--setting", "kv=mask,tau=0.9"]
    assert evaluate(folder, "gsm8k", questions, "--output", out, "--max-new-tokens", 6, *settings) == 0
    _, *records = map(json.loads, out.read_text().splitlines())
    names = ["backbone", "tau=0.5", "kv=mask,tau=0.9"]
    rotated = [names[i:] + names[:i] for i in range(3)]  # none always runs behind the same other
    assert [(r["problem"], r["setting"]) for r in records] == [(p, s) for p in "012" for s in rotated[int(p)]]
    table = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:5]] == names


def test_a_broken_run_goes_on_where_it_was(folder, questions, tmp_path, capsys):
    """Cut at any byte of the last line, the file gives the same answers, and those before it are not made again."""
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    args = ["--max-new-tokens", 5, "--setting", "backbone", "--setting", "full4bit", "--json"]
    assert evaluate(folder, "gsm8k", questions, "--output", whole, *args) == 0
    lines = whole.read_text().splitlines(keepends=True)
    marked = lines[1].replace('"answer": ', '"answer": "not made again", "made": ')
    for kept in (0, 1, len(lines[3]) - 1):
        cut.write_text(lines[0] + marked + lines[2] + lines[3][:kept])
        assert evaluate(folder, "gsm8k", questions, "--output", cut, *args) == 0
        again = cut.read_text().splitlines(keepends=True)
        assert again[:3] == [lines[0], marked, lines[2]]
        answers = [
            [(r["problem"], r["setting"], r["answer"]) for r in map(json.loads, of[3:])] for of in (again, lines)
        ]
        assert answers[0] == answers[1]


def test_settings_and_problems_may_be_added_later(folder, questions, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    args = ["--output", out, "--max-new-tokens", 4, "--json"]
    assert evaluate(folder, "gsm8k", questions, *args, "--limit", 1, "--setting", "backbone") == 0
    first = out.read_text()
    assert (
        evaluate(folder, "gsm8k", questions, *args, "--limit", 2, "--setting", "backbone", "--setting", "tau=0.5") == 0
    )
    assert out.read_text().startswith(first) and len(out.read_text().splitlines()) == 5
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["problems"] == 2


def test_answers_of_another_run_are_not_mixed(folder, questions, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    args = ["--output", out, "--limit", 1, "--setting", "backbone", "--max-new-tokens"]
    assert evaluate(folder, "gsm8k", questions, *args, 4) == 0
    before = out.read_text()
    assert evaluate(folder, "gsm8k", questions, *args, 5) == 2
    assert "max_new_tokens 4 instead of 5" in capsys.readouterr().err and out.read_text() == before
    others = (
        "my diary\n",
        '{"my": "only copy of data"}',
        '{"a": 1}\n{"b": 2}\nno newline',
        '{"a": 1}\n{"problem": "0"}\n',
    )
    for text in others:  # not even a last line that looks broken may be lost
        (tmp_path / "mine").write_text(text)
        assert evaluate(folder, "gsm8k", questions, "--output", tmp_path / "mine") == 2
        assert (tmp_path / "mine").read_text() == text and "choose another --output" in capsys.readouterr().err


def test_answers_of_other_code_are_not_mixed(folder, questions, tmp_path, capsys, monkeypatch):
    """Whoever changed a rule and ran the same command again was shown the table of the rule before."""
    args = [questions, "--limit", 1, "--model", folder, "--output", tmp_path / "o.jsonl", "--max-new-tokens", 4]
    assert main(["gsm8k", *map(str, args)]) == 0
    read_text = Path.read_text
    changed = lambda self, **how: read_text(self, **how) + "#" * (self.name == "controller.py")  # noqa: E731
    monkeypatch.setattr(Path, "read_text", changed)
    assert main(["gsm8k", *map(str, args)]) == 2
    assert "of another run (code" in capsys.readouterr().err


def test_a_command_that_failed_does_not_block_the_right_one(folder, questions, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    args = ["--output", out, "--limit", 1, "--max-new-tokens", 3, "--setting"]
    for wrong in (["backbone", "--quantizer", "hqqq"], ["kv=zzz"], ["exit-layer=9"]):
        assert evaluate(folder, "gsm8k", questions, *args, *wrong) == 2
        assert not out.exists()
    assert evaluate(folder, "gsm8k", questions, *args, "backbone") == 0


def test_a_wrong_setting_does_not_wait_for_its_turn(folder, questions, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert (
        evaluate(folder, "gsm8k", questions, "--output", out, "--setting", "backbone", "--setting", "exit-layer=9") == 2
    )
    assert "exit layer 9" in capsys.readouterr().err and not out.exists()


def test_two_runs_do_not_write_to_one_file(tmp_path):
    first, second = (Records(tmp_path / "out.jsonl", {"task": "t"}) for _ in range(2))
    record = {"sums": {"score": 1.0}, "count": 1}
    first.add("0", "backbone", record)
    with pytest.raises(RiverError, match="another run writes"):
        second.add("0", "backbone", record)
    first.file.close()
    assert Records(tmp_path / "out.jsonl", {"task": "t"}).of[("0", "backbone")]["sums"] == {"score": 1.0}


def test_other_exemplars_and_another_checkpoint_are_another_run(folder, questions, tmp_path, capsys):
    out, others = tmp_path / "out.jsonl", write_lines(tmp_path / "others.jsonl", QUESTIONS[1:])
    args = ["--output", out, "--limit", 1, "--max-new-tokens", 3, "--setting", "backbone"]
    assert evaluate(folder, "gsm8k", questions, *args, "--shots", 1, "--train", questions) == 0
    assert evaluate(folder, "gsm8k", questions, *args, "--shots", 1, "--train", others) == 2
    assert "shown" in capsys.readouterr().err
    other = write_tiny_checkpoint(tmp_path / "other" / "tiny", num_hidden_layers=3)  # a folder of the same name
    assert evaluate(other, "gsm8k", questions, *args, "--shots", 1, "--train", questions) == 2
    assert "checkpoint" in capsys.readouterr().err


def test_speeds_of_other_runs_are_said_to_be_so(folder, questions, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    args = ["--output", out, "--limit", 1, "--max-new-tokens", 3, "--setting", "backbone"]
    assert evaluate(folder, "gsm8k", questions, *args) == 0
    write_lines(out, [r | ({"run": 1} if "run" in r else {}) for r in map(json.loads, out.read_text().splitlines())])
    assert "timed in another run" not in capsys.readouterr().out
    assert evaluate(folder, "gsm8k", questions, *args, "--setting", "full4bit") == 0
    assert "timed in another run than backbone: full4bit" in capsys.readouterr().out


def test_scores_differences_and_constants(folder, questions, tmp_path, capsys):
    """A table made from answers whose truth is known: 3 of 3, 2 of 3, 1 of 3 right."""
    out = tmp_path / "out.jsonl"
    args = ["--output", out, "--max-new-tokens", 4]
    settings = [word for s in ("backbone", "tau=0.9", "exit-layer=2") for word in ("--setting", s)]
    assert evaluate(folder, "gsm8k", questions, *args, *settings) == 0
    header, *records = map(json.loads, out.read_text().splitlines())
    right = {"backbone": 3, "tau=0.9": 2, "exit-layer=2": 1}
    for r in records:
        r |= {"sums": {"score": float(int(r["problem"]) < right[r["setting"]])}, "steps": 10, "decode_s": 1.0}
        r["layers"] = {"backbone": 40, "tau=0.9": 22, "exit-layer=2": 20}[r["setting"]]
    write_lines(out, [header, *records])
    capsys.readouterr()
    assert evaluate(folder, "gsm8k", questions, *args, *settings, "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = result["settings"]
    assert {s: round(row["measures"]["score"][0], 3) for s, row in rows.items()} == {
        "backbone": 1.0, "tau=0.9": 0.667, "exit-layer=2": 0.333
    }  # fmt: skip
    assert rows["exit-layer=2"]["differences"]["score"][0] == pytest.approx(-2 / 3)
    assert [row["layers"] for row in rows.values()] == [4.0, 2.2, 2.0]
    assert result["notes"][0].startswith("tau=0.9 (2.2 layers) less exit-layer=2: score, % 33.3 [")
    assert evaluate(folder, "gsm8k", questions, *args, "--setting", "tau=0.9") == 0
    assert "add --setting exit-layer=2" in capsys.readouterr().out


def test_backbone_agrees_with_itself_and_a_text_is_one_group(folder):
    llm = load(folder, device="cpu")
    task = Agreement.__new__(Agreement)
    task.max_new_tokens = 12
    settings = {name: parse_setting(name) for name in ("backbone", "full4bit")}
    records = dict(task.run(llm, settings, "Hello, river"))
    assert records["backbone"]["sums"]["agreement"] == records["backbone"]["count"] == 12
    assert abs(records["backbone"]["sums"]["kl"]) < 1e-4 < records["full4bit"]["sums"]["kl"]
    assert records["full4bit"]["layers"] == 0 and records["backbone"]["layers"] == 11 * llm.config.n_layers


def test_perplexity_is_that_of_one_pass_over_each_window(folder, tmp_path):
    llm = load(folder, device="cpu", dtype="float32")
    (tmp_path / "text.txt").write_text("The river leaves the mountains and the sea takes it. " * 4)
    task = Perplexity(tmp_path / "text.txt", llm.tokenizer, 512, window=20)
    assert sum(map(len, task.problems.values())) == len(llm.tokenizer.encode((tmp_path / "text.txt").read_text()))
    for ids in task.problems.values():
        record = dict(task.run(llm, {"backbone": parse_setting("backbone")}, ids))["backbone"]
        decoder = llm.decoder(parse_setting("backbone"), 1, len(ids))
        with torch.inference_mode():
            h, _ = decoder.forward(torch.tensor([ids]), decoder.prefill_rule)
            logits = llm.model.logits(h)[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        assert record["sums"]["nll"] == pytest.approx(nll, rel=1e-4) and record["count"] == len(ids) - 1
    with pytest.raises(RiverError, match="512"):
        Perplexity(tmp_path / "text.txt", llm.tokenizer, 512, window=513)
    assert task.measures["nll"].show(math.log(8.0)) == "8.000"


HALVE = {
    "task_id": "T/0",
    "prompt": 'import math\n\n\ndef twice(x):\n    return 2 * x\n\n\ndef halve(x):\n    """Half of it."""\n',
    "entry_point": "halve",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n    assert twice(2) == 4\n    assert math.pi > 3\n",
}


@pytest.mark.parametrize(
    "answer, right",
    [
        ("Sure:\n```python\ndef halve(x):\n    return x // 2\n```\nIt halves.", True),
        ("```\nimport os\ndef halve(x):\n    return x / 2\n```", True),
        ("def halve(x):\n    return x / 2\n", True),
        ("    return x / 2\n", True),
        ("```python\n    return x / 2\n```", True),
        ("```python\nprint(1)\n```\n```python\ndef halve(x):\n    return x / 2\n```", True),
        ("```python\ndef halve(x):\n    return x / 2", True),  # cut off at the token limit
        ("```python\ndef halve_all(x):\n    return 0\n```\n```python\ndef halve(x):\n    return x / 2\n```", True),
        ("1. This:\n   ```python\n   def halve(x):\n       return x / 2\n   ```", True),
        ("```python\nfrom __future__ import annotations\ndef halve(x):\n    return x / 2\n```", True),
        ("```python-repl\n>>> 1\n```\n```python\ndef halve(x):\n    return x / 2\n```", True),
        ("```python\ndef halve(x):\n    return x / 3\n```", False),
        ("I cannot help with that.", False),
        ("", False),
    ],
)
def test_humaneval_finds_the_function_in_an_answer(answer, right, tmp_path):
    task = HumanEval(write_lines(tmp_path / "p.jsonl", [HALVE]), allow_code_execution=True)
    passed, why = task.score(answer, task.problems["T/0"])
    assert passed == right, why
    assert bool(why) != right


def test_code_does_not_run_unasked(folder, tmp_path, capsys):
    assert evaluate(folder, "humaneval", write_lines(tmp_path / "p.jsonl", [HALVE])) == 2
    assert "--allow-code-execution" in capsys.readouterr().err


@pytest.mark.parametrize(
    "task, content, more, named",
    [
        ("gsm8k", "not json\n", [], "line 1"),
        ("gsm8k", "[" * 200_000 + "\n", [], "line 1"),
        ("gsm8k", '{"question": ' + "1" * 5000 + "}\n", [], "line 1"),
        ("gsm8k", '{"question": "?"}\n', [], "'answer'"),
        ("gsm8k", '["question", "answer"]\n', [], "'question'"),
        ("gsm8k", '{"question": "?", "answer": "none"}\n', [], "no number"),
        ("gsm8k", "", [], "nothing in it"),
        ("gsm8k", None, [], "No such file"),
        ("gsm8k", '{"question": "?", "answer": "#### 1"}\n', ["--shots", "5"], "--train"),
        ("gsm8k", '{"question": "?", "answer": "#### 1"}\n', ["--limit", "0"], "--limit"),
        ("gsm8k", '{"question": "?", "answer": "#### 1"}\n', ["--setting", "tau"], "'tau'"),
        ("perplexity", "a", [], "too short"),
        ("perplexity", "a b c d", ["--window", "2"], "--window"),
        ("agreement", "\n\n", [], "nothing in it"),
        ("agreement", "Hello\n", ["--max-new-tokens", "0"], "--max-new-tokens"),
    ],
)
def test_bad_input_gets_one_line_that_names_it(task, content, more, named, folder, tmp_path, capsys):
    file = tmp_path / ("in.txt" if task != "gsm8k" else "in.jsonl")
    if content is not None:
        file.write_text(content)
    assert evaluate(folder, task, file, "--output", tmp_path / "out.jsonl", *more) == 2
    err = capsys.readouterr().err
    assert named in err and err.count("\n") == 1 and not (tmp_path / "out.jsonl").exists()


def test_an_answer_ends_where_nothing_more_can_count(folder, questions):
    """Time is for answers: after #### and a number, or a whole function, the rest of the text plays no part."""
    task = GSM8K(questions)
    assert not task.is_complete("#### Step 1: eggs\n", {})
    assert task.is_complete("so 5\n#### 5\n", {}) and not task.is_complete("so 5\n#### 5", {})
    humaneval = HumanEval.__new__(HumanEval)
    assert humaneval.is_complete("```python\ndef halve(x):\n    pass\n```", HALVE)
    assert not humaneval.is_complete("```python\ndef halve(x):\n    pass\n", HALVE)
    assert not humaneval.is_complete("```python\ndef halve_all(x):\n    pass\n```", HALVE)
    assert not humaneval.is_complete("```sh\nls\n```\n```python\ndef halve(x):", HALVE)


def test_settings_reach_the_answer(folder, questions):
    llm = load(folder, device="cpu")
    task = GSM8K(questions)
    setting = dataclasses.replace(parse_setting("exit-layer=3"), max_new_tokens=5)
    ((_, record),) = task.run(llm, {"s": setting}, task.problems["0"])
    assert record["layers"] == 3 * record["steps"] and record["new_tokens"] <= 5 and record["stop_reason"]
