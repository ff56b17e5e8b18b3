"""A checkpoint, its river and its tokenizer behind one object: text in, text and exit depths out.

llm = load("weights/HuggingFaceTB/SmolLM2-135M-Instruct")
run = llm.generate("What is the capital of France?")
for step in run:
    print(step.texts[0], step.tokens[0], step.exit_layer)
print(run.mean_exit_layer)
"""

import functools
import time
from collections import Counter
from pathlib import Path

import torch

from .checkpoint import load_model
from .compile import compile_blocks, compile_model
from .controller import make_exit_rule
from .decode import Decoder, generate
from .errors import RiverError
from .exits import load_quantized_head, load_river, quantized_path
from .guarantee import load as load_guarantee
from .linear import layout_for
from .lossless import BLOCK, Drafting, draft_and_verify
from .offload import check_offload, offload_layers
from .quantize import check_settings
from .settings import Settings
from .tokenizer import load_tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load(
    folder,
    device="auto",
    dtype="bfloat16",
    quantizer="hqq",
    group_size=64,
    bits=4,
    chat_format=None,
    quantize_head=False,
    compile=False,
    offload=None,
    log=lambda line, done: None,
):
    """Load a checkpoint folder with its tokenizer and its exit river (built at the first time).

    Args:
        folder: config.json, safetensors and tokenizer files, as on the Hugging Face hub.
        device: "auto" (CUDA if there is one), "cpu", "cuda", ...
        dtype: of weights and activations: "bfloat16", "float16" or "float32".
        quantizer, group_size, bits: of the river (and the head), see quantize.py.
        chat_format: a name of chat.py, or None to detect it from the checkpoint.
        quantize_head: the LM head in as few bits too, for backbone and river alike.
        compile: decode through compiled layers, see compile.py.
        offload: keep only so many backbone layers in fast memory, see offload.py; None keeps all.
        log: called with (line, done) about slow work.

    Raises:
        RiverError: anything that the user can put right.
    """
    folder = Path(folder)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_settings(quantizer, group_size, bits)
    try:
        torch.ones(1, device=device).item()  # what there is a name for need not be there, or hold data
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RiverError(f"device {device!r} cannot be used here: {str(error).splitlines()[0][:120]}") from error
    if dtype not in DTYPES:
        raise RiverError(f"dtype {dtype!r} is not known; known are {', '.join(DTYPES)}")
    model = load_model(folder, DTYPES[dtype], device)
    if offload is not None:
        check_offload(model.layers, offload)  # now, and not after the river has been built
    tokenizer = load_tokenizer(folder, chat_format)
    river = load_river(model, folder, quantizer, group_size, bits, log)
    slow = [name for name, linear in river[0].parts() if getattr(linear, "layout", "").startswith("plain")]
    if slow:
        what = f"int8 kernel takes {dtype}" if bits == 8 else f"int4 kernel takes {dtype} in groups of {group_size}"
        log(f"no {what} for {', '.join(slow)}: the river will be slow", True)
    if quantize_head:
        model.lm_head = load_quantized_head(model, folder, quantizer, group_size, bits, log)
    if compile:
        model, river = compile_model(model, river, log)
    if offload is not None:
        model.layers = offload_layers(model.layers, offload)

    def prepare_drafts():
        if compile and compile_blocks(model, BLOCK, log):
            choices = (0, BLOCK - 1)
        else:
            choices = Drafting.choices
        if quantize_head or layout_for(model.lm_head.shape, group_size, model.dtype, device) == "plain":
            return model.lm_head, choices
        return load_quantized_head(model, folder, "best", group_size, log=log), choices

    return RiverLLM(
        model, river, tokenizer, prepare_drafts, quantized_path("river", model, folder, quantizer, group_size, bits)
    )


class RiverLLM:
    """A loaded model: `model` (the backbone), `river` (its exit layers) and `tokenizer`.

    `prepare_drafts` is a function without arguments, called before the first lossless run, that returns the head
    that drafts are read with and the numbers of drafts that pay. `river_path` is the river's file.
    """

    def __init__(self, model, river, tokenizer, prepare_drafts=None, river_path=None):
        self.model, self.river, self.tokenizer = model, river, tokenizer
        self.prepare_drafts, self.river_path = prepare_drafts, river_path

    @functools.cached_property
    def draft_head_and_choices(self):
        """(head, numbers of drafts): the head is in 4 bits where a kernel takes it, since a draft need not be exact."""
        return self.prepare_drafts()

    @functools.cached_property
    def guarantee(self):
        """What `tau="auto"` stands for: a dict with "tau", "target", "confidence", "text" and "texts".

        Raises:
            RiverError: nothing has been calibrated for this river.
        """
        return load_guarantee(self.river_path)

    @property
    def config(self):
        return self.model.config

    def generate(self, prompts, raw=False, system=None, **settings):
        """Start generating; returns a `Generation` to iterate over.

        Args:
            prompts: a string, or a list of strings that run as one batch.
            raw: complete the text as it stands, instead of answering it as one user turn of a chat.
            system: the system text of the chat, or None for the checkpoint's own.
            settings: the fields of `Settings`.

        Raises:
            RiverError: a setting is out of range, or a prompt is empty or longer than the context.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not prompts or not all(prompts):
            raise RiverError("the prompt is empty")
        if raw or not self.tokenizer.chat_format:
            ids = [self.tokenizer.encode(prompt, bos=True) for prompt in prompts]
        else:
            ids = [self.tokenizer.chat_prompt(_messages(prompt, system)) for prompt in prompts]
        if not all(ids):
            raise RiverError("the prompt has no tokens")
        return Generation(self, ids, Settings(**settings))

    def chat(self, system=None, **settings):
        """Start a chat that keeps its cache from turn to turn; returns a `Chat`."""
        return Chat(self, system, Settings(**settings))

    def decoder(self, settings, batch, max_len):
        """A `Decoder` with an empty cache for these `Settings`."""
        if settings.lossless:
            if batch > 1:
                raise RiverError("lossless decoding is for one prompt at a time")
            drafts_leave = make_exit_rule("fixed", self.model, exit_layer=settings.exit_layer or 0)
            return Decoder(self.model, self.river, drafts_leave, "backbone", batch, max_len)
        uses_tau = settings.tau == "auto" and settings.exit_layer is None
        tau = self.guarantee["tau"] if uses_tau else settings.tau
        rule = make_exit_rule(settings.exit_rule, self.model, tau, settings.exit_layer)
        prefill = settings.prefill
        if prefill is None and settings.exit_rule == "oracle":
            prefill = "backbone"
        if settings.exit_rule == "oracle" and (batch > 1 or prefill == "exit" or settings.kv != "share"):
            raise RiverError("the oracle is for one prompt, with --kv share and not --prefill exit")
        return Decoder(self.model, self.river, rule, prefill, batch, max_len, settings.kv)

    def step_nbytes(self, exit_layer, kv):
        """Bytes of weights that a decode step reads when it leaves after `exit_layer` layers, under a strategy."""
        backbone = sum(layer.nbytes for layer in self.model.layers[:exit_layer])
        return backbone + kv.nbytes(exit_layer) + self.model.norm.weight.nbytes + self.model.lm_head.nbytes


class Generation:
    """One run over a batch of prompts: iterate for its `Step`s, then (or meanwhile) read what came out.

    Attributes:
        prompt_ids: token ids of each prompt.
        tokens: new token ids of each row so far, its stop token included.
        texts: text of each row so far, without special tokens.
        stop_reasons: of each row, "stop" (a stop token), "length" (max_new_tokens), "context" (the
            model's context is full), or None while it runs.
        prefill_exit_layer: backbone layers that the prompt went through, or None before it has.
        exit_layers: backbone layers run, one for each decode step.
        drafting: the `Drafting` of a lossless run, with its counts, or None.
        ttft_s: seconds from the start to the first token, or None.
        decode_s: seconds from the first token to the latest.
    """

    def __init__(self, llm, prompt_ids, settings, decoder=None):
        self.llm, self.prompt_ids, self.settings = llm, prompt_ids, settings
        self.used = used = decoder.length if decoder else 0  # cache slots before the prompt
        longest = used + max(len(ids) for ids in prompt_ids)
        highest, vocab_size = max(max(ids) for ids in prompt_ids), llm.config.vocab_size
        if highest >= vocab_size:  # some tokenizers have a few more tokens than the model, which are not used
            raise RiverError(
                f"the prompt has the token {highest}, but the model knows {vocab_size}: is the "
                "tokenizer from the same checkpoint?"
            )
        context = llm.config.context
        if longest > context:
            with_cache = " with the conversation so far" if used else ""
            raise RiverError(f"the prompt has {longest} tokens{with_cache}, but the model's context is {context}")
        self.limit = min(settings.max_new_tokens, context - longest + 1)  # the last token is never run
        self.decoder = decoder or llm.decoder(settings, len(prompt_ids), longest + self.limit)
        self.decoder.cache.grow(longest + self.limit)
        self.sampler = settings.sampler(llm.model.device)
        rows = len(prompt_ids)
        self.tokens = [[] for _ in range(rows)]
        self.texts = [""] * rows
        self.stop_reasons = [None] * rows
        self.prefill_exit_layer, self.exit_layers = None, []
        self.drafting = None
        if settings.lossless:
            self.draft_head, choices = llm.draft_head_and_choices
            self.drafting = Drafting(choices if settings.draft is None else (settings.draft,))
        self.ttft_s, self.decode_s = None, 0.0
        self._steps = self._run()

    def __iter__(self):
        """The steps that are still to come: a run goes once, and a second loop goes on where the first left."""
        return self._steps

    def _run(self):
        stops = self.llm.config.eos_token_ids
        streams = [self.llm.tokenizer.stream() for _ in self.tokens]
        started = time.perf_counter()
        for step in self._decode(stops):
            if self.ttft_s is None:
                self.ttft_s = time.perf_counter() - started
                self.prefill_exit_layer = step.exit_layer
            else:
                self.decode_s = time.perf_counter() - started - self.ttft_s
                self.exit_layers.append(step.exit_layer)
            step.texts = [self._extend(row, token, stops, streams[row]) for row, token in enumerate(step.tokens)]
            yield step

    def _decode(self, stops):
        if not self.drafting:
            return generate(self.decoder, self.prompt_ids, self.limit, stops, self.sampler)
        (prompt,) = self.prompt_ids
        return draft_and_verify(self.decoder, self.draft_head, prompt, self.limit, stops, self.sampler, self.drafting)

    def _extend(self, row, token, stops, stream):
        """Take one row's new token; returns what its text grew by."""
        if token is None:
            return ""
        self.tokens[row].append(token)
        text = "" if token in stops else stream.feed(token)
        if token in stops:
            self.stop_reasons[row] = "stop"
        elif len(self.tokens[row]) == self.limit:
            self.stop_reasons[row] = "length" if self.limit == self.settings.max_new_tokens else "context"
        if self.stop_reasons[row]:
            text += stream.flush()
        self.texts[row] += text
        return text

    @property
    def has_begun(self):
        """Whether the prompt is in the cache."""
        return self.decoder.length > self.used

    @property
    def new_tokens(self):
        """New tokens of all rows together."""
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def mean_exit_layer(self):
        """Mean backbone layers run over the decode steps (the prefill's where there were none), or None."""
        if self.exit_layers:
            return sum(self.exit_layers) / len(self.exit_layers)
        return self.prefill_exit_layer

    @property
    def decode_tokens_per_s(self):
        """Tokens after each row's first, over the seconds they took; None if there are none."""
        decoded = self.new_tokens - len(self.tokens)
        return decoded / self.decode_s if decoded > 0 and self.decode_s > 0 else None

    @property
    def nbytes_per_step(self):
        """Mean bytes of weights that were read for a decoded token; None without decode steps."""
        if not self.exit_layers:
            return None
        if self.drafting:
            verifying = self.llm.step_nbytes(self.llm.config.n_layers, self.decoder.kv)
            drafting = self.llm.step_nbytes(self.decoder.exit_rule.exit_layer, self.decoder.kv)
            drafting += self.draft_head.nbytes - self.llm.model.lm_head.nbytes
            counts = self.drafting.verifications, self.drafting.drafted
            return (counts[0] * verifying + counts[1] * drafting) / len(self.exit_layers)
        depths = Counter(self.exit_layers)
        return sum(self.llm.step_nbytes(d, self.decoder.kv) * n for d, n in depths.items()) / len(self.exit_layers)


class Chat:
    """A conversation on one cache: each turn runs only what is new.

    A reply that was cut short (by max_new_tokens, or by leaving the loop) is closed with the end-of-turn
    token before the next user turn.
    """

    def __init__(self, llm, system, settings):
        if not llm.tokenizer.chat_format:
            raise RiverError(
                "this checkpoint has no chat template that is known: choose a --chat-format, or "
                "give a --prompt, which is completed as it stands"
            )
        self.llm, self.system, self.settings = llm, system, settings
        self.decoder = llm.decoder(settings, batch=1, max_len=1)
        self.reply = None  # the last `Generation` that has begun
        self.next_reply = None  # the one that `say` returned

    def say(self, text):
        """Start the answer to a user turn; returns a `Generation` to iterate over before the next turn.

        A turn whose answer was never begun (not iterated over, or broken off during the prompt) is dropped.

        Raises:
            RiverError: the turn is empty, or does not fit into the model's context any more.
        """
        if not text:
            raise RiverError("the prompt is empty")
        if self.next_reply and self.next_reply.has_begun:
            self.reply = self.next_reply
        if self.reply is None:
            ids = self.llm.tokenizer.chat_prompt(_messages(text, self.system))
        else:
            # The latest token has not been run yet; a stop token is part of what follows anyway.
            latest = self.reply.tokens[0][-1:]
            unrun = [token for token in latest if token not in self.llm.config.eos_token_ids]
            ids = unrun + self.llm.tokenizer.chat_turn(text)
        self.next_reply = Generation(self.llm, [ids], self.settings, self.decoder)
        return self.next_reply


def _messages(prompt, system):
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": prompt}]
