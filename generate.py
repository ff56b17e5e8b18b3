"""Generate text with River-LLM: `python generate.py --prompt "What is the capital of France?"`.

Streams the text to standard output and everything else to standard error. Without --prompt, on a
terminal, it is a chat.
"""

import argparse
import dataclasses
import json
import sys

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """A wrong option gets one line, as every other mistake does."""
        self.exit(2, f"generate.py: {message} (see --help)\n")


def parse_arguments(argv=None):
    parser = Parser(
        usage="generate.py [--prompt TEXT] [options]",
        description="Generate text; each token may leave the backbone early. Without --prompt, a chat.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=110),
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what to generate").add_argument
    add("--prompt", action="append", metavar="TEXT", help="may repeat: a batch; '-' reads standard input")
    add("--raw", action="store_true", help="complete the text as it stands instead of answering it")
    add("--system", metavar="TEXT", help="system text of the chat")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="(default: 256)")
    add = parser.add_argument_group("the model").add_argument
    add("--model", default=DEFAULT_MODEL, metavar="MODEL", help="a folder, or ORG/NAME to download")
    add("--device", default="auto", metavar="NAME", help="cpu, cuda, ... (default: cuda if there is one)")
    add(
        "--dtype", default="bfloat16", metavar="NAME", help="bfloat16 (default); float16, float32: slow, no int4 kernel"
    )
    add("--compile", action="store_true", help="compile the layers for decoding, once; needs a C++ compiler")
    add("--offload", type=int, metavar="N", help="keep only the first N backbone layers in fast memory")
    add("--chat-format", metavar="NAME", help="instead of what the checkpoint's template tells")
    add = parser.add_argument_group("the river").add_argument
    add("--tau", type=tau, default=0.5, help="leave above this similarity (default: 0.5); 1 never leaves; or auto")
    add("--exit-layer", type=int, metavar="N", help="leave after N layers instead: 0 river, L backbone alone")
    add(
        "--exit-rule",
        default="similarity",
        metavar="NAME",
        help="similarity (default), confidence, margin, entropy, oracle",
    )
    add("--kv", default="share", metavar="NAME", help="share (the river), recompute, propagate, mask or monotonic")
    add("--lossless", action="store_true", help="the river drafts, the backbone verifies: its own text, faster")
    add("--draft", type=int, metavar="N", help="with --lossless: draft N tokens at a time (default: adapts)")
    add("--prefill", metavar="MODE", help="exit, backbone or river (default: backbone on a CPU, else exit)")
    add(
        "--quantizer",
        default="hqq",
        metavar="NAME",
        help="hqq (default), rtn, best or awq",
    )
    add(
        "--group-size",
        type=int,
        default=64,
        metavar="N",
        help="64 (default), 32, 128, 256 if it divides the widths; others: slow",
    )
    add("--bits", type=int, default=4, metavar="N", help="of a weight: 4 (default), 3 or 8; 8 has no groups")
    add("--quantize-head", action="store_true", help="the LM head in as few bits too (the paper leaves it as it is)")
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens that sum to P")
    add("--seed", type=int, metavar="N", help="make sampling repeatable")
    add = parser.add_argument_group("output").add_argument
    add("--show-exits", action="store_true", help="mark each token with the depth at which it left")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add("--trace", action="store_true", help="print the tensors of one token's way down instead, as a reading aid")
    return parser.parse_args(argv)


def tau(text):
    """A number, or "auto", which river.calibrate has found: settings.tau_value, without importing PyTorch."""
    return text if text == "auto" else float(text)


def main(argv=None):
    args = parse_arguments(argv)
    try:  # imported late, so that --help and a wrong option answer at once
        from river.commands import exit_status
    except ModuleNotFoundError as error:
        print(f"generate.py: {error.name} is not installed: pip install -r requirements.txt", file=sys.stderr)
        return 2
    return exit_status("generate.py", run, args)


def run(args):
    import river
    from river import commands, terminal
    from river.trace import trace

    settings = {f.name: getattr(args, f.name) for f in dataclasses.fields(river.Settings)}
    river.Settings(**settings)  # a bad value should not wait for a download
    prompts = read_prompts(args)
    folder = commands.find_model(args.model)
    llm = river.load(
        folder,
        device=args.device,
        dtype=args.dtype,
        quantizer=args.quantizer,
        group_size=args.group_size,
        bits=args.bits,
        chat_format=args.chat_format,
        quantize_head=args.quantize_head,
        compile=args.compile,
        offload=args.offload,
        log=log,
    )
    if args.tau == "auto" and args.exit_layer is None and not args.lossless:
        g = llm.guarantee
        sure = f"{g['target']} with {g['confidence']:.0%} confidence on {g['text']} ({g['texts']} pieces)"
        print(f"tau auto: {g['tau']}, which keeps {sure}", file=sys.stderr)
    if args.trace:
        trace(llm, (prompts or ["Hello"])[0], settings, print, args.raw, args.system)
    elif prompts is None:
        terminal.chat(llm.chat(args.system, **settings), args.show_exits)
    else:
        run_prompts(llm, prompts, args, settings)


def read_prompts(args):
    """The prompts to run, or None for a chat."""
    from river import RiverError

    if args.trace and (len(args.prompt or []) > 1 or args.json or args.show_exits or args.lossless):
        raise RiverError("--trace follows one prompt, and goes without --json, --show-exits and --lossless")
    if args.raw and args.system is not None:
        raise RiverError("--system is part of a chat, which --raw leaves out")
    if args.prompt:
        prompts = [read_stdin() if prompt == "-" else prompt for prompt in args.prompt]
        if not all(prompts):
            raise RiverError("the prompt is empty")
        return prompts
    if not sys.stdin.isatty():
        raise RiverError("there is no --prompt; `--prompt -` reads it from standard input")
    if args.json or args.raw:
        raise RiverError("--json and --raw need a --prompt")
    return None


def read_stdin():
    """Standard input as UTF-8, whatever the terminal's encoding; bytes that are not become U+FFFD."""
    stream = getattr(sys.stdin, "buffer", None)
    return stream.read().decode("utf-8", "replace") if stream else sys.stdin.read()


def log(line, done):
    """Progress of slow work: one line on a terminal that is overwritten until it is done."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="\n" if done else "", file=sys.stderr, flush=True)
    elif done:
        print(line, file=sys.stderr, flush=True)


def run_prompts(llm, prompts, args, settings):
    from river import terminal

    if not args.raw and not llm.tokenizer.chat_format:
        has = "a chat template of unknown kind" if llm.tokenizer.has_chat_template else "no chat template"
        print(f"the checkpoint has {has}: completing the text as with --raw (or see --chat-format)", file=sys.stderr)
    run = llm.generate(prompts, raw=args.raw, system=args.system, **settings)
    if args.json:
        for _ in run:
            pass
        reports = [report(run, row, prompt, args.model) for row, prompt in enumerate(prompts)]
        print(json.dumps(reports if len(reports) > 1 else reports[0]))
        return
    if len(prompts) == 1:
        terminal.stream(run, args.show_exits)
    else:
        terminal.print_batch(run, prompts, args.show_exits)
    terminal.print_statistics(run)


def report(run, row, prompt, model):
    """The JSON object of one prompt."""
    decode_steps = max(0, len(run.tokens[row]) - 1)
    exit_layers = run.exit_layers[:decode_steps]
    counts = {name: getattr(run.drafting, name) for name in ("drafted", "accepted", "verifications") if run.drafting}
    return {
        "model": model,
        "n_layers": run.llm.config.n_layers,
        "tau": getattr(run.decoder.exit_rule, "tau", None),
        "prefill": run.decoder.prefill_mode,
        "prompt": prompt,
        "prompt_tokens": len(run.prompt_ids[row]),
        "text": run.texts[row],
        "tokens": run.tokens[row],
        "new_tokens": len(run.tokens[row]),
        "exit_layers": exit_layers,
        "prefill_exit_layer": run.prefill_exit_layer,
        "mean_exit_layer": sum(exit_layers) / decode_steps if decode_steps else run.prefill_exit_layer,
        "ttft_s": run.ttft_s,
        "decode_tokens_per_s": run.decode_tokens_per_s,
        "stop_reason": run.stop_reasons[row] or "length",
        **counts,
    }


if __name__ == "__main__":
    sys.exit(main())
