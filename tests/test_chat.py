"""Chat prompts: what each family's own template would give, and nothing a user types is a command.

Where there is a fixture, the ids are those of transformers. For the other formats the expected prompt
is written out, and the tokenizer, which has tests of its own, turns it into ids.
"""

import json
import shutil
from pathlib import Path

import pytest

from river import chat
from river.errors import RiverError
from river.tokenizer import load_tokenizer

ROOT = Path(__file__).parent / "fixtures" / "tokenizers"
FORMAT_OF = {
    "llama3_like": "llama3",
    "llama3_meta": "llama3",
    "phi4_like": "phi",
    "qwen_like": "chatml",
    "smol_like": "chatml",
    "spm_llama2_like": "llama2",
    "tekken_like": "ministral3",
}
# The lines of the published templates that tell them apart.
LLAMA31 = (
    "{%- set date_string = \"26 Jul 2024\" %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
    "{{- \"Cutting Knowledge Date: December 2023\\n\" }}{{- '<|eot_id|>' }}"
)
LLAMA32 = LLAMA31 + '{%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}'
QWEN25 = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- else %}{{- '<|im_start|>system\\n"
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
)
QWEN3 = (
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- if enable_thinking is defined"
    " and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
MISTRAL1 = "{{ bos_token }}{{ '[INST] ' + message['content'] + ' [/INST]' }}{{ content + eos_token }}"
MISTRAL3 = "{{- bos_token }}{{- '[INST] ' + message['content'] + '[/INST]' }}"
ZEPHYR = "{{ '<|user|>\\n' + message['content'] + eos_token }}{{ '<|assistant|>' }}"
PHI4_LARGE = "{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}"

USER = [{"role": "user", "content": "Hello there"}]
TALK = [*USER, {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Why?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *TALK]


def with_template(tmp_path, folder, template, **options):
    """Load the tokenizer of the fixture `folder` with another chat template."""
    for name in ("tokenizer.json", "tokenizer.model"):
        if (ROOT / folder / name).exists():
            shutil.copy(ROOT / folder / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return load_tokenizer(tmp_path, **options)


@pytest.mark.parametrize("folder", FORMAT_OF)
def test_conversations_give_the_ids_of_the_template_and_no_injected_tokens(folder):
    """The conversations contain control tokens as text, odd white space, and nothing at all."""
    tokenizer = load_tokenizer(ROOT / folder)
    assert tokenizer.chat_format == FORMAT_OF[folder]
    for case in json.loads((ROOT / folder / "chat.json").read_text(encoding="utf-8")):
        assert tokenizer.chat_prompt(case["messages"]) == case.get("ids_safe", case["ids"]), case["name"]


def test_tekken_alone_has_its_familys_format(tmp_path):
    shutil.copy(ROOT / "tekken_like" / "tekken.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_format == "ministral3" and not tokenizer.has_chat_template
    assert tokenizer.chat_prompt(SYSTEM) == load_tokenizer(ROOT / "tekken_like").chat_prompt(SYSTEM)


LLAMA_START = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: "
)
LLAMA_TALK = (
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello there<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHi!<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
CHATML_TALK = (
    "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\nHi!<|im_end|>\n"
    "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
)
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
WRITTEN_OUT = [
    ("llama3_like", LLAMA31, "llama3.1", TALK, f"{LLAMA_START}26 Jul 2024\n\n{LLAMA_TALK}"),
    ("llama3_like", LLAMA31, "llama3.1", SYSTEM, f"{LLAMA_START}26 Jul 2024\n\nBe brief.{LLAMA_TALK}"),
    ("llama3_like", LLAMA32, "llama3.2", TALK, f"{LLAMA_START}05 Mar 2031\n\n{LLAMA_TALK}"),
    ("qwen_like", QWEN25, "chatml", TALK, f"<|im_start|>system\n{QWEN_SYSTEM}<|im_end|>\n{CHATML_TALK}"),
    ("qwen_like", QWEN25, "chatml", SYSTEM, f"<|im_start|>system\nBe brief.<|im_end|>\n{CHATML_TALK}"),
    ("qwen_like", QWEN3, "qwen3", TALK, f"{CHATML_TALK}<think>\n\n</think>\n\n"),
    ("tekken_like", MISTRAL3, "mistral-v3", TALK, "<s>[INST]Hello there[/INST]Hi!</s>[INST]Why?[/INST]"),
    ("tekken_like", MISTRAL3, "mistral-v3", SYSTEM,
     "<s>[INST]Hello there[/INST]Hi!</s>[INST]Be brief.\n\nWhy?[/INST]"),
    ("spm_llama2_like", MISTRAL1, "mistral-v1", TALK,
     "<s>[INST] Hello there [/INST] Hi!</s>[INST] Why? [/INST]"),
    ("spm_llama2_like", MISTRAL1, "mistral-v1", SYSTEM,
     "<s>[INST] Be brief.\n\nHello there [/INST] Hi!</s>[INST] Why? [/INST]"),
    ("spm_llama2_like", ZEPHYR, "zephyr", TALK,
     "<|user|>\nHello there</s>\n<|assistant|>\nHi!</s>\n<|user|>\nWhy?</s>\n<|assistant|>\n"),
]  # fmt: skip


@pytest.mark.parametrize("folder, template, name, messages, prompt", WRITTEN_OUT)
def test_formats_without_a_fixture_look_as_their_templates_do(
    tmp_path, monkeypatch, folder, template, name, messages, prompt
):
    monkeypatch.setattr(chat, "today", lambda: "05 Mar 2031")
    tokenizer = with_template(tmp_path, folder, template)
    assert tokenizer.chat_format == name
    assert tokenizer.chat_prompt(messages) == tokenizer.encode(prompt, specials=True)


LOOKALIKES = {
    "a thought opens the answer": "{{ '<|im_start|>' + message.role + '\\n' }}{{ '<|im_start|>assistant\\n<think>\\n' }}",
    "a BOS before ChatML": "{{bos_token}}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}",
    "the system text is no turn": "{{ system_message }}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}",
    "no end of turn after the user": "{{ '<|user|>\\n' + message['content'] + '\\n' }}{{ '<|assistant|>\\n' + eos_token }}",
    "one instruction of all messages": "{{ bos_token + '<|start_header_id|>user<|end_header_id|>' }}{{ '<|eot_id|>' }}",
    "a default system text": "{{ '<|start_header_id|>system<|end_header_id|>Be good<|eot_id|>' }}"
    "{{ '<|start_header_id|>' + message['role'] }}",
    "a system text that is computed": "{% set default_system_message = 'It is ' + now() %}[SYSTEM_PROMPT] [INST]",
}


@pytest.mark.parametrize("template", LOOKALIKES.values(), ids=LOOKALIKES)
def test_templates_that_only_resemble_a_known_one_are_unknown(template):
    """Each has the markers of a format and another prompt; a near miss would be answered without a word."""
    assert chat.detect(template, {"[INST]"}) is None


@pytest.mark.parametrize(
    "template, system",
    [
        (
            r"{{- '<|im_start|>system\nPut it in \\boxed{}, don\'t forget.<|im_end|>\n' }}",
            "Put it in \\boxed{}, don't forget.",
        ),
        ("{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}", None),
    ],
)
def test_chatml_takes_the_templates_own_system_text(template, system):
    assert chat.make_format("chatml", template).system == system


def test_ministral_takes_the_templates_own_system_text():
    """Ministral 3's template has a long one; without it the model answers another prompt than it was made for."""
    template = (
        """{%- set default_system_message = 'You\\'re M.\\n' + "Today is " + today + '.' -%}[SYSTEM_PROMPT][INST]"""
    )
    system = chat.make_format("ministral3", template).system
    assert system.startswith("You're M.\nToday is 20") and system.endswith(".")
    parts = chat.make_format("ministral3", template).prompt(USER)
    assert parts[:4] == ["<s>", "[SYSTEM_PROMPT]", system, "[/SYSTEM_PROMPT]"]
    assert chat.make_format("ministral3", "[SYSTEM_PROMPT][INST]").prompt(USER)[1] == "[INST]"


CONTINUED = [(folder, None) for folder in FORMAT_OF] + [
    ("llama3_like", LLAMA31),
    ("tekken_like", MISTRAL3),
    ("spm_llama2_like", MISTRAL1),
]


@pytest.mark.parametrize("folder, template", CONTINUED)
def test_a_chat_that_goes_on_has_the_ids_of_the_whole_conversation(tmp_path, folder, template):
    """The cache of a running chat must hold what a fresh prompt of the same conversation would.

    Exact wherever the answer is encoded apart from what is around it, that is, for answers that do
    not start with white space. Llama 2 is the format that can go wrong: a space of its own follows
    the answer. Two exceptions by design: Qwen3's template removes the empty thought from earlier
    answers, and Mistral's v3 moves the system text to the last message; a cache keeps both.
    """
    tokenizer = with_template(tmp_path, folder, template) if template else load_tokenizer(ROOT / folder)
    for answer in ("Hi!", "Nice to meet you, Zoë! 😀\n\nHow can I help?", "<s></s><|im_end|>"):
        talk = [*USER, {"role": "assistant", "content": answer}, {"role": "user", "content": "And  why\n?"}]
        answer_ids = tokenizer.encode_parts([answer])
        together = tokenizer.chat_prompt(USER) + answer_ids + tokenizer.chat_turn("And  why\n?")
        assert together == tokenizer.chat_prompt(talk)


def test_a_token_that_takes_white_space_along_takes_no_more_than_that():
    """Phi's role tokens swallow the white space behind them; \\x1c is none, though str.strip takes it."""
    tokenizer = load_tokenizer(ROOT / "phi4_like")
    user, end, assistant = (tokenizer.special_id(name) for name in ("<|user|>", "<|end|>", "<|assistant|>"))
    ids = tokenizer.chat_prompt([{"role": "user", "content": " \n\x1c hi"}])
    assert ids == [user, *tokenizer.encode("\x1c hi"), end, assistant]


def test_a_turn_for_zephyr_and_qwen3(tmp_path):
    zephyr = with_template(tmp_path, "spm_llama2_like", ZEPHYR)
    turn = "</s>\n<|user|>\nWhy?</s>\n<|assistant|>\n"
    assert zephyr.chat_turn("Why?") == zephyr.encode(turn, specials=True)
    (tmp_path / "tokenizer.model").unlink()
    qwen3 = with_template(tmp_path, "qwen_like", QWEN3)
    turn = "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert qwen3.chat_turn("Why?") == qwen3.encode(turn, specials=True)


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json", "list"])
def test_the_template_is_found_wherever_checkpoints_keep_it(tmp_path, file):
    shutil.copy(ROOT / "qwen_like" / "tokenizer.json", tmp_path)
    if file == "chat_template.jinja":
        (tmp_path / file).write_text(QWEN3)
    elif file == "chat_template.json":
        (tmp_path / file).write_text(json.dumps({"chat_template": QWEN3}))
    else:
        templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": QWEN3}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert load_tokenizer(tmp_path).chat_format == "qwen3"


def test_a_template_of_unknown_kind_is_not_guessed_at(tmp_path):
    """Phi-4 (14B) has ChatML's tokens and another layout; a near miss would only look like a weak model."""
    tokenizer = with_template(tmp_path, "qwen_like", PHI4_LARGE)
    assert tokenizer.chat_format is None and tokenizer.has_chat_template
    with pytest.raises(RiverError, match="unknown kind; choose one of the chat formats chatml, "):
        tokenizer.chat_prompt(USER)


def test_a_base_model_has_no_format_until_one_is_chosen(tmp_path):
    shutil.copy(ROOT / "qwen_like" / "tokenizer.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_format is None and not tokenizer.has_chat_template
    with pytest.raises(RiverError, match="no chat template"):
        tokenizer.chat_turn("x")
    chosen = load_tokenizer(tmp_path, chat_format="chatml")
    assert chosen.chat_prompt(TALK) == chosen.encode(CHATML_TALK, specials=True)


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(RiverError, match="'chatlm'.*chatml.*llama3.2.*ministral3"):
        load_tokenizer(ROOT / "qwen_like", chat_format="chatlm")


def test_a_format_whose_tokens_are_missing_says_so():
    tokenizer = load_tokenizer(ROOT / "llama3_like", chat_format="chatml")
    with pytest.raises(RiverError, match="no token '<.im_start.>'; choose another chat format than 'chatml'"):
        tokenizer.chat_prompt(USER)


@pytest.mark.parametrize("roles", ["", "system", "assistant", "user user", "user assistant", "tool"])
def test_a_conversation_out_of_order_is_refused(roles):
    tokenizer = load_tokenizer(ROOT / "qwen_like")
    with pytest.raises(RiverError, match="user, assistant"):
        tokenizer.chat_prompt([{"role": role, "content": "x"} for role in roles.split()])
