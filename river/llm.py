"""A checkpoint, its river and its tokenizer behind one object: text in, text and exit depths out.

llm = load("weights/HuggingFaceTB/SmolLM2-135M-Instruct")
run = llm.generate("What is the capital of France?")
for step in run:
    print(step.texts[0], step.tokens[0], step.exit_layer)
print(run.mean_exit_layer)
"""

import functools
from pathlib import Path

import torch

from .checkpoint import load_model
from .compile import compile_blocks, compile_model
from .controller import make_exit_rule
from .decode import Decoder
from .errors import RiverError
from .exits import load_quantized_head, load_river, quantized_path
from .generation import Chat, Generation, first_turn
from .guarantee import load as load_guarantee
from .linear import layout_for
from .lossless import BLOCK, Drafting
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
    check_settings(quantizer, group_size, bits)
    device = usable_device(device)
    if dtype not in DTYPES:
        raise RiverError(f"dtype {dtype!r} is not known; known are {', '.join(DTYPES)}")
    model = load_model(folder, DTYPES[dtype], device)
    if offload is not None:
        check_offload(model.layers, offload)  # now, and not after the river has been built
    tokenizer = load_tokenizer(folder, chat_format)
    river = load_river(model, folder, quantizer, group_size, bits, log)
    _warn_if_slow(river, dtype, group_size, bits, log)
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


def usable_device(name):
    """The name of the device to run on, "auto" being CUDA if there is one; a RiverError if it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones(1, device=name).item()  # what there is a name for need not be there, or hold data
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RiverError(f"device {name!r} cannot be used here: {str(error).splitlines()[0][:120]}") from error
    return name


def _warn_if_slow(river, dtype, group_size, bits, log):
    """Say so if a linear of the river has no kernel of PyTorch's."""
    slow = [name for name, linear in river[0].parts() if getattr(linear, "layout", "").startswith("plain")]
    if slow:
        what = f"int8 kernel takes {dtype}" if bits == 8 else f"int4 kernel takes {dtype} in groups of {group_size}"
        log(f"no {what} for {', '.join(slow)}: the river will be slow", True)


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
            ids = [self.tokenizer.chat_prompt(first_turn(prompt, system)) for prompt in prompts]
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

    def step_nbytes(self, exit_layer, kv, exit_rule):
        """Bytes of weights that a decode step reads that leaves after `exit_layer` layers, by a strategy and a rule."""
        backbone = sum(layer.nbytes for layer in self.model.layers[:exit_layer])
        heads = 1 + exit_rule.head_reads(min(exit_layer, self.config.n_layers - 1))
        return backbone + kv.nbytes(exit_layer) + heads * (self.model.norm.weight.nbytes + self.model.lm_head.nbytes)
