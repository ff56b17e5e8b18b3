"""From logits to a token: greedy, temperature, top-k, top-p."""

import torch

from .errors import RiverError


class Sampler:
    """Picks the next token of each row; its own random generator makes a seed repeatable.

    Args:
        temperature: 0 is greedy (the argmax, lowest id first among equals).
        top_k: keep the k most likely tokens, and all that tie with the k-th; None or 0 keeps all.
        top_p: then keep the fewest most likely tokens whose probabilities sum to at least top_p
            (at least one); None or 1 keeps all.
        seed: an int, or None for a fresh one.
        device: where the logits are.

    Raises:
        RiverError: a setting is out of its range.
    """

    def __init__(self, temperature=0.0, top_k=None, top_p=None, seed=None, device="cpu"):
        if not 0 <= temperature < float("inf"):
            raise RiverError(f"temperature is {temperature}, but should be 0 (greedy) or above")
        if top_k is not None and top_k < 0:
            raise RiverError(f"top-k is {top_k}, but should be 0 (off) or above")
        if top_p is not None and not 0 <= top_p <= 1:
            raise RiverError(f"top-p is {top_p}, but should be between 0 and 1")
        if seed is not None and not -(2**63) <= seed < 2**64:
            raise RiverError(f"seed is {seed}, but should fit into 64 bits")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = torch.Generator(device)
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def __call__(self, logits):
        """Float32 logits [B, vocab] to int64 tokens [B].

        Raises:
            RiverError: the logits are not numbers, of which any choice would be a wrong answer.
        """
        if not self.greedy:
            return self.draw(self.probabilities(logits))
        _check_finite(logits)
        return logits.max(dim=-1).indices

    @property
    def greedy(self):
        """Whether there is nothing random about the choice."""
        return self.temperature == 0

    def draw(self, weights):
        """One token of each row: int64 [B], with the chances that the weights [B, vocab] have to each other."""
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0]

    def uniform(self):
        """A random number in [0, 1)."""
        return torch.rand((), generator=self.generator, device=self.generator.device).item()

    def probabilities(self, logits):
        """The distribution that is sampled from, float32 [B, vocab] (temperature above 0); as for `__call__`."""
        _check_finite(logits)
        # The top logit goes to 0 first, so that a tiny temperature gives -inf below it and no NaN; and one that
        # float32 does not have is the least that it has, since 0 / 0 is NaN.
        temperature = max(self.temperature, torch.finfo(torch.float32).tiny)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        if self.top_k:
            kth = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < kth, float("-inf"))
        probabilities = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            dropped = before >= self.top_p
            dropped[:, 0] = False
            probabilities = probabilities.masked_fill(dropped.scatter(-1, order, dropped), 0.0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities


def _check_finite(logits):
    if not logits.amax(-1).isfinite().all():
        raise RiverError(
            "the model's logits are not finite numbers: its weights are damaged, or too large "
            "for this dtype (try --dtype float32)"
        )
