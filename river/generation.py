"""A run of a loaded model and what comes out of it, token by token; and a chat, which is one run after another."""

import time
from collections import Counter

from .controller import Oracle
from .decode import generate
from .errors import RiverError
from .lossless import Drafting, draft_and_verify


def first_turn(text, system):
    """The messages that a conversation begins with: the system text unless it is None, and the user's."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


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
        """Mean bytes of weights that were read for a decoded token; None without decode steps, or under the oracle."""
        if not self.exit_layers or isinstance(self.decoder.exit_rule, Oracle):
            return None
        how = self.decoder.kv, self.decoder.exit_rule
        if self.drafting:
            verifying = self.llm.step_nbytes(self.llm.config.n_layers, *how)
            drafting = self.llm.step_nbytes(self.decoder.exit_rule.exit_layer, *how)
            drafting += self.draft_head.nbytes - self.llm.model.lm_head.nbytes
            counts = self.drafting.verifications, self.drafting.drafted
            return (counts[0] * verifying + counts[1] * drafting) / len(self.exit_layers)
        depths = Counter(self.exit_layers)
        return sum(self.llm.step_nbytes(d, *how) * n for d, n in depths.items()) / len(self.exit_layers)


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
            ids = self.llm.tokenizer.chat_prompt(first_turn(text, self.system))
        else:
            # The latest token has not been run yet; a stop token is part of what follows anyway.
            latest = self.reply.tokens[0][-1:]
            unrun = [token for token in latest if token not in self.llm.config.eos_token_ids]
            ids = unrun + self.llm.tokenizer.chat_turn(text)
        self.next_reply = Generation(self.llm, [ids], self.settings, self.decoder)
        return self.next_reply
