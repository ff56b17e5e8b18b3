"""A model for EleutherAI's lm-evaluation-harness, so that its tasks run on River as on any other model:

pip install lm_eval
python -m river.harness --model_args pretrained=FOLDER,setting=full4bit --tasks arc_easy,boolq --limit 100

The switches are those of lm_eval's own command line. --model_args takes pretrained=FOLDER, what `river.load` takes
(dtype=float32, device, compile=True, quantizer, group_size, quantize_head, offload, chat_format), max_length=N tokens
for less than the model's context, and the setting. As lm_eval splits at commas, a setting is written as
setting=backbone or setting=full4bit, as switches of generate.py (tau=0.9,kv=mask), or both. From Python, after
`import river.harness`: `lm_eval.simple_evaluate(model="river", model_args={"pretrained": FOLDER, "tau": 0.9}, ...)`.

A context is a prompt; a continuation is fed token by token, and leaves early where the setting lets it. The first
token of either comes from the prompt's prefill: options of one token (MMLU's letters) are as good as the prefill, and
tell settings apart only with prefill=exit or prefill=river. Requests run one by one, whatever --batch_size says.
"""

import dataclasses
import inspect
import math
import statistics
import sys

import torch

from .decode import teacher_force
from .errors import RiverError
from .files import read_json
from .generation import Generation
from .llm import load
from .settings import PARTS, Settings, parse_setting

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from tqdm import tqdm
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    LM = None

LOAD_ARGS = [name for name in inspect.signature(load).parameters if name not in ("folder", "log")]
MAX_GEN_TOKS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one given counts


class Scorer:
    """A model under one setting that scores and completes texts; it needs no lm_eval.

    Args:
        pretrained: the checkpoint folder.
        setting: as `parse_setting` takes it.
        max_length: tokens that a text is cut to, or None for the model's context.
        model_args: switches of the setting (over `setting`), and arguments of `river.load`.

    Raises:
        RiverError: an unknown argument or value, and what `river.load` raises.
    """

    def __init__(self, pretrained=None, setting="", max_length=None, **model_args):
        switches = {name: model_args.pop(name) for name in list(model_args) if name.replace("-", "_") in PARTS}
        unknown = sorted(set(model_args) - set(LOAD_ARGS))
        if pretrained is None or unknown:
            what = f"{unknown[0]!r} is not known; they" if unknown else "pretrained=FOLDER is missing; they"
            known = ", ".join(["pretrained", "setting", "max_length", *LOAD_ARGS, *PARTS])
            raise RiverError(f"--model_args: {what} are {known}")
        text = ",".join([str(setting)] * bool(setting) + [f"{name}={value}" for name, value in switches.items()])
        self.settings = parse_setting(text) if text else Settings()
        self.llm = load(pretrained, log=lambda line, done: done and print(line, file=sys.stderr), **model_args)
        self.llm.decoder(self.settings, 1, 1)  # refuses what the model cannot take before the tasks are loaded
        self.max_length = self.llm.config.context if max_length is None else max_length
        if not isinstance(self.max_length, int) or not 2 <= self.max_length <= self.llm.config.context:
            raise RiverError(f"max_length={max_length}, but it should be from 2 to {self.llm.config.context}")
        self.prefix_id = prefix_id(self.llm)
        self.exit_layers = []  # of all decode steps so far
        self.latest = None, None  # a prompt, and its prefill's logits
        # Without a seed of the setting's own, lm_eval's --seed, which it gives to PyTorch, decides.
        seed = torch.initial_seed() if self.settings.seed is None else self.settings.seed
        self.seeds = torch.Generator().manual_seed(seed)

    def encode(self, text, bos=True):
        """The ids of a text, in which names of special tokens stand for them; with one BOS, if the family has it."""
        ids, bos_id = self.llm.tokenizer.encode(text, specials=True), self.llm.tokenizer.bos_id
        return [bos_id, *ids] if bos and bos_id is not None and ids[:1] != [bos_id] else ids

    def encode_pair(self, context, continuation):
        """Ids of a context and its continuation, encoded as one text; spaces between them go to the continuation."""
        stripped = context.rstrip()
        if not stripped:
            ids = self.encode(context + continuation, bos=False)
            return [self.prefix_id], ids[1:] if ids[:1] == [self.prefix_id] else ids
        prompt = self.encode(stripped)
        return prompt, self.encode(context + continuation)[len(prompt) :]

    def score(self, prompt, continuation):
        """Sum of the log-probabilities (nats) of a continuation, and whether it is the greedy one.

        Args:
            prompt, continuation: lists of ids, neither empty; the prompt loses on the left what is too long.

        Raises:
            RiverError: the continuation is empty or longer than max_length, or its logits are no numbers.
        """
        if not 1 <= len(continuation) <= self.max_length:
            raise RiverError(f"a continuation has {len(continuation)} tokens, but should have 1 to {self.max_length}")
        prompt = (prompt + continuation)[-self.max_length - 1 : -len(continuation)]
        total, greedy = 0.0, True
        for token, logits in zip(continuation, self.logits(prompt, continuation)):
            total += logits.log_softmax(-1)[token].item()
            greedy = greedy and logits.argmax().item() == token
        if not math.isfinite(total):
            raise RiverError("the model's logits are not finite numbers: try dtype=float32")
        return total, greedy

    def logits(self, prompt, continuation):
        """Yield the logits [vocab] of each token of the continuation, under the setting."""
        if len(continuation) == 1 and prompt == self.latest[0]:
            yield self.latest[1]  # another option of one token after the same question
            return
        decoder = self.llm.decoder(self.settings, 1, len(prompt) + len(continuation) - 1)
        for index, (logits, exit_layer) in enumerate(teacher_force(decoder, prompt, continuation)):
            if index == 0:
                self.latest = prompt, logits
            else:
                self.exit_layers.append(exit_layer)
            yield logits

    def loglikelihood(self, context, continuation):
        """`score` of a continuation after a context, which may be empty."""
        return self.score(*self.encode_pair(context, continuation))

    def loglikelihood_rolling(self, text):
        """Log-probability (nats) of a whole text, BOS not counted, in windows of max_length tokens."""
        ids = self.encode(text, bos=False)
        return sum((self.score(*window)[0] for window in windows(ids, self.prefix_id, self.max_length)), 0.0)

    def generate_until(self, context, gen_kwargs):
        """The text that follows a context, up to a stop string; see `generation_settings`."""
        stops, settings = self.generation_settings(gen_kwargs)
        room = self.max_length - settings.max_new_tokens
        if room < 1:
            raise RiverError(f"max_gen_toks={settings.max_new_tokens} leaves no room for a prompt in {self.max_length}")
        stop_ids = {self.llm.tokenizer.added[stop].id for stop in stops if stop in self.llm.tokenizer.added}
        run = Generation(self.llm, [self.encode(context)[-room:] or [self.prefix_id]], settings)
        for step in run:
            if step.tokens[0] in stop_ids or cut(run.texts[0], stops) != run.texts[0]:
                break
        self.exit_layers += run.exit_layers
        return cut(run.texts[0], stops)

    def generation_settings(self, gen_kwargs):
        """(stop strings, `Settings`) from a task's until, max_gen_toks, do_sample, temperature, top_k and top_p.

        What it leaves out is the setting's. do_sample=True alone is temperature 1; every sample has its own seed.

        Raises:
            RiverError: another key (num_beams=1 may stay), or a value out of range.
        """
        given = {name: value for name, value in gen_kwargs.items() if (name, value) != ("num_beams", 1)}
        until = given.pop("until", None) or []
        lengths = [given.pop(name, None) for name in MAX_GEN_TOKS]
        do_sample = given.pop("do_sample", None)
        unknown = sorted(set(given) - {"temperature", "top_k", "top_p"})
        if unknown:
            raise RiverError(f"gen_kwargs: {unknown[0]}={given[unknown[0]]} cannot be had; leave it out")
        if do_sample is False:
            given["temperature"] = 0.0
        elif do_sample:
            given.setdefault("temperature", self.settings.temperature or 1.0)
        given["max_new_tokens"] = int(next((length for length in lengths if length is not None), 256))
        given["seed"] = torch.randint(2**62, (), generator=self.seeds).item()
        return [until] if isinstance(until, str) else list(until), dataclasses.replace(self.settings, **given)

    def chat_text(self, messages, add_generation_prompt=True):
        """A conversation as text, which `encode` turns into its ids.

        Args:
            messages: as `Tokenizer.chat_prompt` takes them.
            add_generation_prompt: False if the last message is the beginning of the assistant's answer.

        Raises:
            RiverError: the checkpoint's chat format is not known, or `messages` is not such a list.
        """
        chat = self.llm.tokenizer.chat
        if chat is None:
            raise RiverError("the checkpoint has no chat template that is known: add chat_format=NAME to --model_args")
        if add_generation_prompt:
            return "".join(chat.prompt(messages))
        text = messages[-1]["content"]
        answer = [text] if chat.header else chat.turn("assistant", text)[: -len(chat.end)]
        return "".join([*chat.prompt(messages[:-1]), *answer])


def prefix_id(llm):
    """What a text with nothing before it follows: its tokenizer's BOS, used otherwise or not, or else its EOS."""
    tokenizer = llm.tokenizer
    path = tokenizer.path.with_name("tokenizer_config.json")
    config = read_json(path) if path.exists() else {}
    names = [config.get("bos_token"), config.get("eos_token")]
    names = [name.get("content") if isinstance(name, dict) else name for name in names]
    ids = [tokenizer.added[name].id for name in names if name in tokenizer.added]
    return [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *ids, *sorted(llm.config.eos_token_ids)][0]


def windows(ids, prefix_id, max_length):
    """Yield (prompt, continuation) so that each id is scored once, after as much context as fits."""
    for start in range(0, len(ids), max_length):
        end = min(start + max_length, len(ids))
        yield ids[end - max_length - 1 : start] if start else [prefix_id], ids[start:end]


def cut(text, stops):
    """The text up to the earliest of the stop strings; empty ones do not count."""
    return text[: min((text.index(stop) for stop in stops if stop and stop in text), default=len(text))]


if LM is not None:

    @register_model("river")
    class RiverLM(LM):
        """lm_eval's face of a `Scorer`; each method takes a list of its requests and returns their answers."""

        def __init__(self, batch_size=1, max_batch_size=None, **model_args):
            super().__init__()
            self.scorer = Scorer(**model_args)
            self._device = self.scorer.llm.model.device

        @classmethod
        def create_from_arg_obj(cls, arg_dict, additional_config=None):
            """As lm_eval's, but --model_args' device comes before --device, which is cuda:0 where nobody chose it."""
            given = {name: value for name, value in (additional_config or {}).items() if value is not None} | arg_dict
            if given.get("device") == "cuda:0" and not torch.cuda.is_available():
                given["device"] = "auto"
            return cls(**given)

        def loglikelihood(self, requests, disable_tqdm=False):
            return self._answer("loglikelihood", requests, disable_tqdm)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            return self._answer("loglikelihood_rolling", requests, disable_tqdm)

        def generate_until(self, requests, disable_tqdm=False):
            return self._answer("generate_until", requests, disable_tqdm)

        def _answer(self, kind, requests, disable_tqdm):
            answers = []
            for request in tqdm(requests, desc=kind, disable=disable_tqdm):
                answers.append(getattr(self.scorer, kind)(*request.args))
                self.cache_hook.add_partial(kind, request.args, answers[-1])  # a run that breaks off can go on
            return answers

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            return self.scorer.chat_text(chat_history, add_generation_prompt)

        def chat_template(self, chat_template=False):
            """The name of the chat format, for the log, as no template is ever run."""
            return self.scorer.llm.tokenizer.chat_format if chat_template else ""

        @property
        def tokenizer_name(self):
            """What lm_eval's cache of requests is kept by: the tokenizer's file and the chat format."""
            tokenizer = self.scorer.llm.tokenizer
            return f"{tokenizer.path.resolve()}:{tokenizer.chat_format}".replace("/", "__")

        def get_model_info(self):
            """For the results: the setting, and the mean backbone layers of a decode step (None without any)."""
            depths = self.scorer.exit_layers
            return {
                "river_setting": dataclasses.asdict(self.scorer.settings),
                "backbone_layers": self.scorer.llm.config.n_layers,
                "mean_exit_layer": statistics.fmean(depths) if depths else None,
            }


def main(argv=None):
    """Hand over to lm_eval's command line, with this model chosen; returns the exit status."""
    try:
        if LM is None:
            raise RiverError("lm-evaluation-harness is not installed: pip install lm_eval")
        from lm_eval.__main__ import cli_evaluate

        sys.argv = ["lm_eval", "run", "--model", "river", *(sys.argv[1:] if argv is None else argv)]
        cli_evaluate()
    except RiverError as error:
        print(f"river.harness: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
