"""How fast and how large: `python -m river.bench [MODEL]`, or `--shape llama-3.2-1b` without any weights.

Backbone, full 4-bit and River decode the same prompt, one after the other in every round (A B C A B C
...), so that a machine that slows down slows all of them; each number is the median over the rounds.
The last line is one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from .commands import DEFAULT_MODEL, Parser, exit_status, log, warn_if_busy
from .controller import FixedDepth, Similarity
from .decode import Decoder
from .errors import RiverError
from .linear import QuantLinear
from .llm import load
from .settings import Settings
from .shapes import SHAPES, random_llm


def main(argv=None):
    return exit_status("river.bench", run, parse_arguments(argv))


def parse_arguments(argv):
    parser = Parser(prog="python -m river.bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="a checkpoint folder (default: the default model)"
    )
    parser.add_argument("--shape", choices=SHAPES, help="random weights of that shape instead; fixed depths only")
    parser.add_argument("--tau", type=float, action="append", help="may repeat (default: 0.5 and 0.9)")
    parser.add_argument("--exit-layer", type=int, action="append", default=[], metavar="N", help="may repeat")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="decode steps a round")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--prefill", help="exit, backbone or river")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quantize-head", action="store_true")
    parser.add_argument("--offload", type=int, metavar="N", help="keep only the first N backbone layers resident")
    parser.add_argument("--peer", choices=("transformers",), help="the same checkpoint in its bfloat16, if installed")
    parser.add_argument("--peak", metavar="SETTING", help=argparse.SUPPRESS)  # one setting, in a process of its own
    args = parser.parse_args(argv)
    if min(args.rounds, args.tokens, args.prompt_tokens) < 1:
        parser.error("--rounds, --tokens and --prompt-tokens should be 1 or above")
    if args.shape and (args.quantize_head or args.peer or args.tau or args.offload is not None):
        parser.error("--shape has random weights: no --tau, --quantize-head, --offload or --peer")
    return args


def load_model(args):
    if args.shape:
        return random_llm(SHAPES[args.shape], args.compile, args.device, log)
    return load(
        args.model,
        device=args.device,
        quantize_head=args.quantize_head,
        compile=args.compile,
        offload=args.offload,
        log=log,
    )


def settings_to_compare(args, llm):
    """The `Settings` to compare, by name; a RiverError, before anything is measured, if this model cannot have one."""
    depths = args.exit_layer or ([4] if args.shape else [])
    taus = [] if args.shape else args.tau or [0.5, 0.9]
    settings = {"backbone": Settings(exit_layer=llm.config.n_layers), "full 4-bit": Settings(exit_layer=0)}
    settings |= {f"River tau {tau}": Settings(tau=tau) for tau in taus}
    settings |= {f"River depth {depth}": Settings(exit_layer=depth) for depth in depths}
    for setting in settings.values():
        # Full quantisation has no backbone, for the prompt either.
        setting.prefill = "river" if setting.exit_layer == 0 else args.prefill
        llm.decoder(setting, batch=1, max_len=1)
    return settings


def run(args):
    """Measure, print the table, and print it again as JSON."""
    if args.peak:
        print(peak_resident(load_model(args), args.peak, args))
        return
    warn_if_busy()
    llm = load_model(args)
    settings = settings_to_compare(args, llm)
    highest = min(1000, llm.config.vocab_size)
    prompt = torch.randint(
        highest // 2, highest, (args.prompt_tokens,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    if args.prompt_tokens + args.tokens > llm.config.context:
        raise RiverError(f"--prompt-tokens and --tokens exceed the model's context, {llm.config.context}")
    peer = transformers_peer(args.model) if args.peer else None
    results = {name: [] for name in [*settings, *(["transformers"] if peer else [])]}
    bandwidths = []
    for number in range(args.rounds + 1):
        bandwidths.append(memory_bandwidth(llm.model.device))
        for name, setting in settings.items():
            results[name].append(measure(llm, setting, prompt, args.tokens))
        if peer:
            results["transformers"].append(peer(prompt, args.tokens))
        if number == 0:  # warm-up: pages are read and kernels chosen
            bandwidths.clear()
            for rounds in results.values():
                rounds.clear()
    table = summarise(results, statistics.median(bandwidths))
    for name in settings:
        table[name]["peak_mb"] = measure_peak(args, name)
    print_table(table)
    head = "4-bit head" if args.quantize_head else "bfloat16 head"
    facts = [
        args.shape or args.model,
        "compiled" if args.compile else "eager",
        head,
        f"{torch.get_num_threads()} threads",
        llm.model.device,
        f"memory reads {statistics.median(bandwidths):.1f} GB/s",
        f"{args.rounds} rounds of {args.tokens} tokens",
    ]
    print(", ".join(map(str, facts)))
    times = microseconds(llm)
    print("microseconds: " + ", ".join(f"{name} {time:.0f}" for name, time in times.items()))
    print(
        json.dumps(
            {
                "model": str(args.shape or args.model),
                "compile": args.compile,
                "quantize_head": args.quantize_head,
                "offload": args.offload,
                "microseconds": times,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "bandwidth_gb_s": statistics.median(bandwidths),
                "settings": table,
            }
        )
    )


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
    nbytes = statistics.mean(llm.step_nbytes(depth, decoder.kv) for depth in depths)
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
    inputs = {n: h.new_ones(1, 1, n) for layer in river for _, part in linears_of(layer) for n in part.shape[1:]}
    parts = {
        "backbone layer": lambda: [decoder.run(layer, h, positions) for layer in model.layers],
        "exit layer": lambda: [decoder.run(layer, h, positions) for layer in river],
        "of it linears": lambda: [part(inputs[part.shape[1]]) for layer in river for _, part in linears_of(layer)],
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
    per_call = {name: statistics.median(ts) / (1 if name == "head" else len(river)) for name, ts in times.items()}
    rule = TimedSimilarity()
    decoder.exit_rule = rule
    for _ in range(40):
        decoder.decode_one_token(torch.tensor([5], device=model.device))
    return {
        name: 1e6 * seconds for name, seconds in {**per_call, "exit check": statistics.median(rule.seconds)}.items()
    }


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


def linears_of(layer):
    """The linears of an exit layer: (name, linear)."""
    return [(name, part) for name, part in layer.parts() if isinstance(part, QuantLinear)]


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


def summarise(results, bandwidth):
    """Medians over the rounds, and ratios of medians: setting name to a dict of columns."""
    step = {name: statistics.median(r["step_s"] for r in rounds) for name, rounds in results.items()}
    table = {}
    for name, rounds in results.items():
        steps = sorted(r["step_s"] for r in rounds)
        nbytes = rounds[0]["nbytes"]
        table[name] = {
            "tokens_per_s": 1 / step[name],
            "slowest": 1 / steps[-1],
            "fastest": 1 / steps[0],
            "to_backbone": step["backbone"] / step[name],
            "to_full_4_bit": step["full 4-bit"] / step[name],
            "layers": rounds[0]["depth"],
            "ttft_ms": 1e3 * statistics.median(r["ttft_s"] for r in rounds),
            "gb_per_s": nbytes and nbytes / step[name] / 1e9,
            "of_bandwidth": nbytes and nbytes / step[name] / 1e9 / bandwidth,
        }
    return table


def print_table(table):
    columns = {
        "tokens_per_s": ("tokens/s", "{:.1f}"), "slowest": ("slowest", "{:.1f}"), "fastest": ("fastest", "{:.1f}"),
        "to_backbone": ("x backbone", "{:.2f}"), "to_full_4_bit": ("x full 4-bit", "{:.2f}"),
        "layers": ("layers", "{:.1f}"), "ttft_ms": ("first, ms", "{:.0f}"), "gb_per_s": ("GB/s", "{:.1f}"),
        "of_bandwidth": ("of memory", "{:.0%}"), "peak_mb": ("peak MB", "{:.0f}"),
    }  # fmt: skip
    print("| setting | " + " | ".join(title for title, _ in columns.values()) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for name, row in table.items():
        cells = ["" if row.get(key) is None else form.format(row[key]) for key, (_, form) in columns.items()]
        print(f"| {name} | " + " | ".join(cells) + " |")


def measure_peak(args, name):
    """Peak resident megabytes of one setting after 256 tokens, in a process of its own."""
    command = [sys.executable, "-m", "river.bench", str(Path(args.model).resolve()), "--peak", name]
    command += ["--device", args.device, "--prompt-tokens", str(args.prompt_tokens)]
    command += ["--shape", args.shape] if args.shape else []
    command += ["--prefill", args.prefill] if args.prefill else []
    command += ["--offload", str(args.offload)] if args.offload is not None else []
    command += [f"--{flag.replace('_', '-')}" for flag in ("compile", "quantize_head") if getattr(args, flag)]
    command += [word for tau in args.tau or [] for word in ("--tau", str(tau))]
    command += [word for depth in args.exit_layer for word in ("--exit-layer", str(depth))]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1])
    if result.returncode:
        print(f"no peak for {name}: {result.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return float(result.stdout.split()[-1])


def peak_resident(llm, name, args):
    """Decode 256 tokens with the setting of that name; returns this process's peak resident megabytes."""
    measure(llm, settings_to_compare(args, llm)[name], [5] * args.prompt_tokens, steps=256)
    status = Path("/proc/self/status").read_text()  # the peak of rusage would begin with the parent's
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    sys.exit(main())
