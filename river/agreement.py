"""How often a setting gives the backbone's own next word: on texts that the backbone wrote, teacher forced.

A text that a setting generates by itself may leave the backbone's at one near tie between two words and be
as good for all that. Here every setting reads the backbone's text and is asked for each next token, so that
one mistake costs one token.
"""

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .decode import teacher_force
from .errors import RiverError
from .settings import NAMED_SETTINGS, Settings

BACKBONE = Settings(**NAMED_SETTINGS["backbone"])
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


class TextAgreement(NamedTuple):
    """One setting on one text.

    hits: whether the setting's most likely token is the backbone's, for each token. tokens: of the text, its stop
    token included. kls: KL(backbone || setting) of each token, in nats. exit_layers: backbone layers run, one for each
    decode step; the first token comes from the prompt, which is no decode step. decode_s: seconds that the decode
    steps took.
    """

    hits: list
    tokens: int
    kls: list
    exit_layers: list
    decode_s: float


def reference_texts(llm, prompts, max_new_tokens):
    """The backbone's greedy continuations of `prompts`, each a user turn where the checkpoint knows chats.

    Returns:
        A list of (prompt ids, continuation ids); a continuation ends with a stop token, or is
        `max_new_tokens` (or what the context has room for) long.

    Raises:
        RiverError: a prompt is empty or longer than the context.
    """
    texts = []
    for prompt in prompts:
        run = llm.generate(prompt, **NAMED_SETTINGS["backbone"], max_new_tokens=max_new_tokens)
        for _ in run:
            pass
        texts.append((run.prompt_ids[0], run.tokens[0]))
    return texts


def agreement(llm, settings, texts):
    """Yield for each text a dict of setting name to its `TextAgreement`.

    All settings go through a text before the next begins, since the backbone's log-probabilities, vocab
    floats a token, are kept for one text only.

    Args:
        llm: a `RiverLLM`.
        settings: a dict of name to `Settings`; how to sample and how many tokens play no part.
        texts: as `reference_texts` returns them.

    Raises:
        RiverError: a setting that this model cannot have.
    """
    for prompt, tokens in texts:
        reference = torch.stack([logits.log_softmax(-1) for logits, *_ in forced_steps(llm, BACKBONE, prompt, tokens)])
        yield {name: _compare(llm, setting, prompt, tokens, reference) for name, setting in settings.items()}


def forced_steps(llm, setting, prompt, tokens):
    """Yield (logits [vocab], exit_layer, seconds) for each of `tokens`, teacher forced; what is done with the logits
    in between does not count as time."""
    if setting.lossless:
        raise RiverError("a lossless setting gives the backbone's own tokens: it has nothing to compare, but its speed")
    steps = teacher_force(llm.decoder(setting, 1, len(prompt) + len(tokens)), prompt, tokens)
    for _ in tokens:
        started = time.perf_counter()
        logits, exit_layer = next(steps)
        logits.argmax().item()  # a device may still be computing
        yield logits, exit_layer, time.perf_counter() - started


def _compare(llm, setting, prompt, tokens, reference):
    hits, kls, depths, seconds = [], [], [], []
    for expected, step in zip(reference, forced_steps(llm, setting, prompt, tokens), strict=True):
        logits, depth, taken = step
        hits.append(int(logits.argmax()) == int(expected.argmax()))
        kls.append(F.kl_div(logits.log_softmax(-1), expected, reduction="sum", log_target=True).item())
        depths.append(depth)
        seconds.append(taken)
    return TextAgreement(hits, len(tokens), kls, depths[1:], sum(seconds[1:]))
