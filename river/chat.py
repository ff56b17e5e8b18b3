"""Chat formats: how each model family writes a conversation down.

A prompt is a list of parts. `Special` parts are control tokens, which the tokenizer looks up by name;
plain strings are text, whatever they contain, so nothing a user writes can become a control token.
A checkpoint's own template is a program, and it is never run: marker strings in it tell which of the
formats below it is.
"""

import datetime
import re

from .errors import RiverError


class Special(str):
    """The name of a control token."""


def today():
    """Return today's date as Llama 3.2's template writes it."""
    return datetime.date.today().strftime("%d %b %Y")


class ChatFormat:
    """What the formats have in common; each says how a turn looks and how the assistant's opens and ends."""

    bos = []  # parts in front of everything
    header = []  # parts that open the assistant's turn
    end = []  # parts that close it
    system = None  # system text for a conversation that has none; None: do without

    def __init__(self, template=""):
        """Take what the format needs from the text of the checkpoint's template."""

    def turn(self, role, content):
        """Return the parts of one complete message."""
        raise NotImplementedError

    def place_system(self, messages):
        """Return `messages` with the system text where the family has it."""
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def prompt(self, messages):
        """Return the parts of a conversation, up to the point where the assistant continues.

        Args:
            messages: a list of {"role", "content"}: a system message or none, then user and assistant
                by turns, the last one from the user.

        Raises:
            RiverError: `messages` is not such a list.
        """
        roles = [message.get("role") for message in messages]
        talk = roles[1:] if roles[:1] == ["system"] else roles
        if len(talk) % 2 == 0 or talk != (["user", "assistant"] * len(talk))[: len(talk)]:
            raise RiverError(f"a chat needs [system,] user, assistant, ..., user messages, not {roles}")
        turns = [self.turn(message["role"], message["content"]) for message in self.place_system(messages)]
        return [*self.bos, *sum(turns, []), *self.header]

    def next_turn(self, content):
        """Return the parts that follow the assistant's text: its end, the user's `content`, a new header."""
        return [*self.end, *self.turn("user", content), *self.header]


class ChatML(ChatFormat):
    """SmolLM2 and Qwen2.5, whose templates bring a system text of their own, and others without one."""

    header = [Special("<|im_start|>"), "assistant\n"]
    end = [Special("<|im_end|>"), "\n"]

    def __init__(self, template=""):
        # The line break is a character or an escape sequence, as the template's author liked.
        own = re.search(
            r"<\|im_start\|>system(?:\n|\\n)((?:\\.|(?!['\"]\s*\+|\{\{|<\|).)+)<\|im_end\|>", template, re.DOTALL
        )
        self.system = own and literal(own.group(1))

    def turn(self, role, content):
        return [Special("<|im_start|>"), f"{role}\n{content}", *self.end]


class Qwen3(ChatML):
    """Qwen3 with thinking off: the answer follows an empty thought."""

    header = [*ChatML.header, Special("<think>"), "\n\n", Special("</think>"), "\n\n"]


class Llama3(ChatFormat):
    """Llama 3.0."""

    bos = [Special("<|begin_of_text|>")]
    header = [Special("<|start_header_id|>"), "assistant", Special("<|end_header_id|>"), "\n\n"]
    end = [Special("<|eot_id|>")]

    def turn(self, role, content):
        text = "\n\n" + self.text(role, content)
        return [Special("<|start_header_id|>"), role, Special("<|end_header_id|>"), text, *self.end]

    def text(self, role, content):
        return content.strip()


class Llama31(Llama3):
    """Llama 3.1 and 3.3: there is always a system block, and it opens with two dates."""

    system = ""

    def text(self, role, content):
        dates = f"Cutting Knowledge Date: December 2023\nToday Date: {self.date()}\n\n"
        return (dates if role == "system" else "") + content.strip()

    def date(self):
        return "26 Jul 2024"


class Llama32(Llama31):
    """Llama 3.2 puts the real date there."""

    def date(self):
        return today()


class Llama2(ChatFormat):
    """Llama 2: all but <s> and </s> is text, and the system text is part of the first user message."""

    end = [" ", Special("</s>")]

    def turn(self, role, content):
        if role == "user":
            return [Special("<s>"), f"[INST] {content.strip()} [/INST]"]
        return [" " + content.strip(), *self.end]

    def place_system(self, messages):
        if messages[0]["role"] != "system":
            return messages
        system, first, *rest = messages
        text = f"<<SYS>>\n{system['content']}\n<</SYS>>\n\n{first['content']}"
        return [{"role": "user", "content": text}, *rest]


class Mistral1(ChatFormat):
    """Mistral 7B v0.1 and v0.2: [INST] is text; the system text is put before the first user message."""

    bos = [Special("<s>")]
    end = [Special("</s>")]

    def turn(self, role, content):
        return [f"[INST] {content} [/INST]"] if role == "user" else [" " + content, *self.end]

    def place_system(self, messages):
        return self.join_system(messages, 1)

    def join_system(self, messages, place):
        """Put the text of the system message, if there is one, before the user message at `place`."""
        if messages[0]["role"] != "system":
            return messages
        messages = list(messages)
        text = f"{messages[0]['content']}\n\n{messages[place]['content']}"
        messages[place] = {"role": "user", "content": text}
        return messages[1:]


class Mistral3(Mistral1):
    """Mistral 7B v0.3, Nemo: [INST] is a control token; the system text precedes the last user message."""

    def turn(self, role, content):
        return [Special("[INST]"), content, Special("[/INST]")] if role == "user" else [content, *self.end]

    def place_system(self, messages):
        return self.join_system(messages, -1)


class Ministral3(Mistral3):
    """Ministral 3: the system text has control tokens of its own, and the template brings one."""

    def __init__(self, template=""):
        self.system = default_system_message(template) or None

    def turn(self, role, content):
        if role == "system":
            return [Special("[SYSTEM_PROMPT]"), content, Special("[/SYSTEM_PROMPT]")]
        return super().turn(role, content)

    def place_system(self, messages):
        return ChatFormat.place_system(self, messages)


class Zephyr(ChatFormat):
    """TinyLlama: the role tags are text."""

    header = ["<|assistant|>\n"]
    end = [Special("</s>"), "\n"]

    def turn(self, role, content):
        return [f"<|{role}|>\n{content}", *self.end]


class Phi(ChatFormat):
    """Phi-4-mini."""

    header = [Special("<|assistant|>")]
    end = [Special("<|end|>")]

    def turn(self, role, content):
        return [Special(f"<|{role}|>"), content, *self.end]


FORMATS = {
    "chatml": ChatML,
    "qwen3": Qwen3,
    "llama3": Llama3,
    "llama3.1": Llama31,
    "llama3.2": Llama32,
    "llama2": Llama2,
    "mistral-v1": Mistral1,
    "mistral-v3": Mistral3,
    "ministral3": Ministral3,
    "zephyr": Zephyr,
    "phi": Phi,
}


def detect(template, specials):
    """Return the name of the format that `template` (the text of a chat template) is; None if unknown.

    `specials` are the names of the checkpoint's control tokens.
    """

    def has(*markers):
        return all(marker in template for marker in markers)

    def roles_after(marker):
        """Whether the template writes every message's own role after `marker`, with nothing special-cased."""
        return re.search(re.escape(marker) + r"['\"]\s*(\+|~|\}\}\{\{)\s*message", template)

    if has("<|start_header_id|>", "<|eot_id|>"):
        if has("Cutting Knowledge Date"):
            return "llama3.2" if has("strftime_now") else "llama3.1"
        # Others make one instruction of the messages (Llama Guard), or bring a system text of their own.
        return "llama3" if roles_after("<|start_header_id|>") and not has("<|start_header_id|>system") else None
    if has("<|im_start|>") and not has("<|im_sep|>"):
        if has("enable_thinking"):
            return "qwen3"
        # Others write a BOS, open the answer with a thought, or set the system text as no turn.
        opens_with_thought = re.search(r"<\|im_start\|>assistant(\n|\\n)<think>", template)
        by_role = roles_after("<|im_start|>") or has("<|im_start|>system")
        return "chatml" if by_role and not opens_with_thought and not has("bos_token") else None
    if has("<<SYS>>", "[INST]"):
        return "llama2"
    if has("[INST]"):
        if has("[SYSTEM_PROMPT]"):
            return None if default_system_message(template) is None else "ministral3"
        return "mistral-v3" if "[INST]" in specials else "mistral-v1"
    if has("<|end|>") and not has("<|start|>"):
        return "phi"
    ends_turns = re.search(r"<\|user\|>(\n|\\n)?['\"]\s*\+\s*message\[['\"]content['\"]\]\s*\+\s*eos_token", template)
    return "zephyr" if ends_turns and has("<|assistant|>") else None


def literal(text):
    """Undo the escapes of a template's string: a line break is written as \\n there, a quote as \\'."""
    return re.sub(r"\\(.)", lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]), text, flags=re.DOTALL)


def default_system_message(template):
    """The system text that a Mistral template sets for chats without one: "" if none, None if it cannot be told.

    It is a sum of strings and perhaps of a variable `today`, which is a date.
    """
    found = re.search(r"set default_system_message\s*=\s*(.*?)\s*-?%\}", template, re.DOTALL)
    if not found:
        return ""
    text = ""
    for string, _today, other in re.findall(
        r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|\b(today)\b|([^\s+~]+)""", found.group(1), re.DOTALL
    ):
        if other:
            return None
        text += literal(string[1:-1]) if string else f"{datetime.date.today():%Y-%m-%d}"
    return text


def make_format(name, template=""):
    """Return the ChatFormat called `name`.

    Raises:
        RiverError: there is no such format.
    """
    if name not in FORMATS:
        raise RiverError(f"unknown chat format {name!r}; the known ones are {', '.join(FORMATS)}")
    return FORMATS[name](template)
