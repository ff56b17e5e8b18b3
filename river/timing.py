"""What decoding takes: a run of a setting, the parts of a step, the memory's speed, and transformers beside it."""

import statistics
import time

import torch

from .controller import FixedDepth, Similarity
from .decode import Decoder
from .errors import RiverError
from .linear import QuantLinear


def measure(llm, settings, prompt, steps, given=None):
    """One round of one setting: a dict of seconds to the first token, seconds a step, depth and bytes.

    Args:
        llm: a `RiverLLM`.
        settings: a `Settings`; tokens are greedy, whatever it says.
        prompt: token ids.
        steps: decode steps.
        given: int64 [steps or more], tokens for them to run in place of those that the setting itself chooses.
    """
    decoder = llm.decoder(settings, batch=1, max_len=len(prompt) + steps + 1)
    started = time.perf_counter()
    token = decoder.prefill([prompt])[0].argmax(-1)
    token.item()
    first = time.perf_counter()
    depths = []
    for step in range(steps):
        logits, depth = decoder.decode_one_token(token if given is None else given[step : step + 1])
        token = logits.argmax(-1)
        token.item()
        depths.append(depth)
    seconds = (time.perf_counter() - first) / steps
    nbytes = statistics.mean(llm.step_nbytes(depth, decoder.kv, decoder.exit_rule) for depth in depths)
    return {"ttft_s": first - started, "step_s": seconds, "depth": statistics.mean(depths), "nbytes": nbytes}


@torch.inference_mode()
def microseconds(llm, rounds=9):
    """What a decode step consists of, medians: a layer of each kind, an exit layer's linears called one by one, the
    head, and one exit check."""
    model, river = llm.model, llm.river
    decoder = Decoder(model, river, FixedDepth(0), "backbone", max_len=128)
    decoder.prefill([[5] * 64])
    positions = decoder.positions(64, 65)
    h = model.embed(torch.tensor([[5]], device=model.device))
    linears = [part for layer in river for _, part in layer.parts() if isinstance(part, QuantLinear)]
    inputs = {part.shape[1]: h.new_ones(1, 1, part.shape[1]) for part in linears}
    parts = {
        "backbone layer": lambda: [decoder.run(layer, h, positions) for layer in model.layers],
        "exit layer": lambda: [decoder.run(layer, h, positions) for layer in river],
        "of it linears": lambda: [part(inputs[part.shape[1]]) for part in linears],
        "head": lambda: model.lm_head(h),
    }
    times = {name: [] for name in parts}
    for _ in range(rounds):
        for name, work in parts.items():
            started = time.perf_counter()
            work()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
    seconds = {name: statistics.median(ts) / (1 if name == "head" else len(river)) for name, ts in times.items()}
    decoder.exit_rule = rule = TimedSimilarity()
    for _ in range(40):
        decoder.decode_one_token(torch.tensor([5], device=model.device))
    seconds["exit check"] = statistics.median(rule.seconds)
    return {name: 1e6 * value for name, value in seconds.items()}


class TimedSimilarity(Similarity):
    """River's rule, which notes what each comparison took: in place, with the caches as a step leaves them."""

    def __init__(self):
        super().__init__(0.5)
        self.seconds = []

    def leaves(self, depth, h_in, h):
        started = time.perf_counter()
        answer = super().leaves(depth, h_in, h)
        if depth:
            self.seconds.append(time.perf_counter() - started)
        return answer


def transformers_peer(folder):
    """A function like `measure` over the same checkpoint in transformers' eager bfloat16."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise RiverError("transformers is not installed: pip install transformers, or leave out --peer") from error
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def measure_peer(prompt, tokens):
        started = time.perf_counter()
        out = model(torch.tensor([prompt]), use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        first = time.perf_counter()
        for _ in range(tokens):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        seconds = (time.perf_counter() - first) / tokens
        return {"ttft_s": first - started, "step_s": seconds, "depth": None, "nbytes": None}

    return measure_peer


def memory_bandwidth(device):
    """GB/s at which this machine reads a large tensor."""
    data = torch.ones(1 << 26, device=device)  # 256 MB
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        data.sum().item()
        best = min(best, time.perf_counter() - started)
    return data.nbytes / best / 1e9
