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
from pathlib import Path

import torch

from .commands import DEFAULT_MODEL, MODEL_HELP, Parser, exit_status, find_model, log, warn_if_busy
from .errors import RiverError
from .llm import load
from .settings import Settings
from .shapes import SHAPES, random_llm
from .tables import print_table
from .timing import measure, memory_bandwidth, microseconds, transformers_peer


def main(argv=None):
    return exit_status("river.bench", run, parse_arguments(argv))


def parse_arguments(argv):
    parser = Parser(prog="python -m river.bench", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)
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
    args.model = args.shape or find_model(args.model)
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
    results, bandwidth = measure_in_turn(llm, settings, peer, prompt, args)
    table = summarise(results, bandwidth)
    for name in settings:
        table[name]["peak_mb"] = measure_peak(args, name)
    print_table(COLUMNS, [{"setting": name, "peak_mb": None} | row for name, row in table.items()])
    facts = [
        args.model,
        "compiled" if args.compile else "eager",
        "4-bit head" if args.quantize_head else "bfloat16 head",
        f"{torch.get_num_threads()} threads",
        llm.model.device,
        f"memory reads {bandwidth:.1f} GB/s",
        f"{args.rounds} rounds of {args.tokens} tokens",
    ]
    print(", ".join(map(str, facts)))
    times = microseconds(llm)
    print("microseconds: " + ", ".join(f"{name} {time:.0f}" for name, time in times.items()))
    print(
        json.dumps(
            {
                "model": str(args.model),
                "compile": args.compile,
                "quantize_head": args.quantize_head,
                "offload": args.offload,
                "microseconds": times,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "bandwidth_gb_s": bandwidth,
                "settings": table,
            }
        )
    )


def measure_in_turn(llm, settings, peer, prompt, args):
    """All settings, and `peer` (as of `transformers_peer`) unless it is None, one after the other in every round.

    Returns:
        (what `measure` gives for each round, by the setting's name; the median GB/s of the memory).
    """
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
    return results, statistics.median(bandwidths)


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


COLUMNS = {
    "setting": "{setting}", "tokens/s": "{tokens_per_s:.1f}", "slowest": "{slowest:.1f}", "fastest": "{fastest:.1f}",
    "x backbone": "{to_backbone:.2f}", "x full 4-bit": "{to_full_4_bit:.2f}", "layers": "{layers:.1f}",
    "first, ms": "{ttft_ms:.0f}", "GB/s": "{gb_per_s:.1f}", "of memory": "{of_bandwidth:.0%}",
    "peak MB": "{peak_mb:.0f}",
}  # fmt: skip


def measure_peak(args, name):
    """Peak resident megabytes of one setting after 256 tokens, in a process of its own."""
    command = [sys.executable, "-m", "river.bench", str(Path(args.model).absolute()), "--peak", name]
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
