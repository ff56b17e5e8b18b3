"""Inside the decoder: hidden states, K and V by layer, the depth that would have been enough, and what was quantised.

All but the weights is measured on the decode steps of texts that the backbone wrote (agreement.py): the prompt runs
on the backbone, and then the text's tokens but its last, which is never run. T is the number of these steps.
"""

import torch
import torch.nn.functional as F

from .agreement import BACKBONE, forced_steps
from .controller import Never, Oracle, similarity
from .decode import teacher_force
from .exits import LINEARS
from .generation import Generation
from .linear import layout_for, scale_dtype
from .quantize import quantize
from .settings import Settings


class Recorder(Never):
    """Stays on the backbone, and keeps the states before each of its layers: `states`, L tensors [T, D]."""

    def begin(self, decoder, h, positions):
        self.states = []

    def leaves(self, depth, h_in, h):
        self.states.append(h)
        return False


def layer_similarities(llm, texts):
    """State transition similarity s_l = cos(h_{l-1}, h_l) on the backbone: float64 [L, T], all texts side by side."""
    columns = []
    for prompt, tokens in texts:
        rule = Recorder()
        last, _ = _after_prompt(llm, prompt, tokens, rule)
        states = [*rule.states, last[0]]
        columns.append([similarity(h_in, h) for h_in, h in zip(states, states[1:])])
    return torch.cat([torch.tensor(column, dtype=torch.float64) for column in columns], dim=1)


def kv_cosines(llm, texts, exit_layers):
    """Cosine of the cache's K (as rotated) and V, river against backbone: float64 [exit depth, L, 2 (K, V)].

    Every decode step of the river leaves after the same depth, so that its error is that of its own layers and of
    all earlier steps. The mean is over kv heads and steps. Layers up to the depth are the backbone's own, but see
    such a cache only in higher layers, so that their cosine is 1.
    """
    total, steps = 0, 0
    for prompt, tokens in texts:
        backbone = _cache_after(llm, prompt, tokens, llm.config.n_layers)
        rivers = torch.stack([_cache_after(llm, prompt, tokens, depth) for depth in exit_layers])
        total = total + F.cosine_similarity(rivers, backbone, dim=-1).mean(3).sum(3)
        steps += len(tokens) - 1
    return total / steps


def _cache_after(llm, prompt, tokens, exit_layer):
    """K and V of the decode steps that leave after `exit_layer`: float64 [L, 2, n_kv_heads, T, head_dim]."""
    _, decoder = _after_prompt(llm, prompt, tokens, llm.decoder(Settings(exit_layer=exit_layer), 1, 1).exit_rule)
    return decoder.cache.data[:, :, 0, :, len(prompt) : decoder.length].double()


def _after_prompt(llm, prompt, tokens, rule):
    """Run a text's decode steps at once by `rule`, the prompt on the backbone; returns (h [1, T, D], decoder)."""
    decoder = llm.decoder(BACKBONE, 1, len(prompt) + len(tokens))
    decoder.prefill([prompt])
    h, _ = decoder.forward(torch.tensor([tokens[:-1]], device=llm.model.device), rule)
    return h, decoder


class ValueProbe(Never):
    """Stays on the backbone, and asks at each depth 1 .. L-1 what V the river would give the last layer.

    The river's layers write the slots of this step's position, and the backbone's write them last.
    `similarities`: s_l, of each depth l. `values`: [n_kv_heads, head_dim] of each.
    """

    def begin(self, decoder, h, positions):
        self.decoder, self.positions = decoder, positions
        self.similarities, self.values = [], []

    def leaves(self, depth, h_in, h):
        if depth:
            self.similarities += similarity(h_in, h)
            self.decoder.kv.finish(h[None], depth, self.positions)
            self.values.append(self.last_value())
        return False

    def last_value(self):
        """V of the last layer at this step's position, as it stands in the cache."""
        return self.decoder.cache.data[-1, 1, 0, :, self.positions[-1].start].double()


def similarities_and_values(llm, texts):
    """What the paper correlates: (similarities, cosines), each float64 [T, L-1], a column for each depth l = 1 .. L-1.

    similarities: s_l of the token. cosines: between the V of the last layer that the token would write if it left
    after layer l, and the one that the backbone writes; the mean over kv heads. Only this one token leaves: the
    cache before it is the backbone's.
    """
    rows, cosines = [], []
    for prompt, tokens in texts:
        rule = ValueProbe()
        for number, _ in enumerate(_watched(llm, prompt, tokens, rule)):
            if number:  # the first is the prompt
                rows.append(rule.similarities)
                cosines.append(F.cosine_similarity(torch.stack(rule.values), rule.last_value(), dim=-1).mean(-1))
    return torch.tensor(rows, dtype=torch.float64), torch.stack(cosines)


def pearson(x, y):
    """Pearson's r of each column of x and y [T, columns]: [columns], NaN where one of them does not vary."""
    x, y = x - x.mean(0), y - y.mean(0)
    return (x * y).sum(0) / (x.square().sum(0) * y.square().sum(0)).sqrt()


class Bystander(Oracle):
    """The oracle, asked and not obeyed, so that the cache stays the backbone's: `found` is the depth it would take."""

    def begin(self, decoder, h, positions):
        super().begin(decoder, h, positions)
        self.found = None

    def leaves(self, depth, h_in, h):
        if self.found is None and super().leaves(depth, h_in, h):
            self.found = depth
        return False


def token_depths(llm, texts):
    """The least depth at which each token could leave and the river still give the backbone's next token: T integers.

    Only this one token leaves: the cache before it is the backbone's.
    """
    depths = []
    for prompt, tokens in texts:
        rule = Bystander()
        for number, _ in enumerate(_watched(llm, prompt, tokens, rule)):
            if number:
                depths.append(llm.config.n_layers if rule.found is None else rule.found)
    return depths


def sequence_depths(llm, texts):
    """The least common depth with which the whole text comes out as the backbone wrote it: an integer for each text.

    All its decode steps leave after that depth; so a text is as `generate(prompt, exit_layer=depth)` gives it.
    """
    L = llm.config.n_layers
    return [next((d for d in range(L) if _same_text(llm, *text, d)), L) for text in texts]


def _same_text(llm, prompt, tokens, exit_layer):
    decoder = llm.decoder(Settings(exit_layer=exit_layer, prefill="backbone"), 1, len(prompt) + len(tokens))
    steps = teacher_force(decoder, prompt, tokens)
    return all(int(logits.argmax()) == token for token, (logits, _) in zip(tokens, steps))


def lossless_against_plain(llm, prompt, tokens):
    """One text of the backbone's, written again by lossless decoding: a dict of counts and of the first difference.

    "differs_at": index of the first other token, or None; "lead": how far the backbone's best logit is ahead of the
    second there, or None: in a dtype that rounds much, a block rounds otherwise than single tokens.
    """
    run = Generation(llm, [prompt], Settings(lossless=True, max_new_tokens=len(tokens)))
    for _ in run:
        pass
    (again,), drafting = run.tokens, run.drafting
    at = next((i for i, (a, b) in enumerate(zip(tokens, again)) if a != b), None)
    result = {"tokens": len(tokens), "drafted": drafting.drafted, "accepted": drafting.accepted}
    result |= {"equal": again == tokens, "differs_at": at, "lead": None}
    if at is not None:
        *_, (logits, *_) = forced_steps(llm, BACKBONE, prompt, tokens[: at + 1])
        best, second = logits.topk(2).values.tolist()
        result["lead"] = best - second
    return result


def weight_error(model, quantizer, bits, group_size=64):
    """|Q - W| / |W| over the weights of all layers, with scales and zeros as they are stored.

    None for awq, which scales a weight's columns before, so that its error there is no smaller, but elsewhere.
    """
    if quantizer == "awq":
        return None
    squares = total = 0.0
    for layer in model.layers:
        for name in LINEARS:
            weight = torch.cat(getattr(layer, name).weights)
            layout = layout_for(weight.shape, group_size, weight.dtype, weight.device, bits)
            weight, quantized = weight.float(), quantize(weight, quantizer, group_size, bits, scale_dtype(layout))
            total += weight.square().sum().item()
            squares += (quantized.dequantize() - weight).square().sum().item()
    return (squares / total) ** 0.5


def _watched(llm, prompt, tokens, rule):
    """`teacher_force` on the backbone, with `rule` looking on."""
    decoder = llm.decoder(BACKBONE, 1, len(prompt) + len(tokens))
    decoder.exit_rule = rule
    return teacher_force(decoder, prompt, tokens)
