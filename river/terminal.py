"""A run as a terminal shows it: text on standard output, all about it on standard error; and the loop of a chat."""

import math
import os
import sys
from collections import Counter

from .errors import RiverError


def stream(run, show_exits=False):
    """Print the text of a single prompt as it comes."""
    painter = ExitPainter(run.llm.config.n_layers) if show_exits else None
    for step in run:
        text = step.texts[0]
        print(painter.paint(text, step.exit_layer) if painter else text, end="", flush=True)
    print(flush=True)
    if painter:
        print(painter.legend(), file=sys.stderr)


def print_batch(run, prompts, show_exits=False):
    """Print the texts of a batch one after the other, when all are done."""
    painter = ExitPainter(run.llm.config.n_layers) if show_exits else None
    painted = [""] * len(prompts)
    for step in run:
        for row, text in enumerate(step.texts):
            painted[row] += painter.paint(text, step.exit_layer) if painter else text
    for row, (prompt, text) in enumerate(zip(prompts, painted)):
        print(f"--- {row + 1}: {prompt.strip().splitlines()[0][:80] if prompt.strip() else ''}", file=sys.stderr)
        print(text, flush=True)
    if painter:
        print(painter.legend(), file=sys.stderr)


def chat(session, show_exits=False):
    """Talk over a `Chat` until the end of the input."""
    print("An empty line does nothing; Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            print("> ", end="", file=sys.stderr, flush=True)
            text = input()
        except EOFError:
            print(file=sys.stderr)
            return
        if not text.strip():
            continue
        try:
            run = session.say(text)
        except RiverError as error:  # no room left for this turn; a shorter one may still fit
            print(error, file=sys.stderr)
            continue
        try:
            stream(run, show_exits)
        except KeyboardInterrupt:
            print(file=sys.stderr)
        print_statistics(run)


def print_statistics(run):
    """What the run took, on standard error."""
    L = run.llm.config.n_layers
    lines = [f"{sum(map(len, run.prompt_ids))} prompt tokens, {run.new_tokens} new tokens"]
    if run.ttft_s is not None:
        lines[0] += f", first after {run.ttft_s:.2f} s"
    if run.decode_tokens_per_s:
        lines[0] += f", then {run.decode_tokens_per_s:.1f} tokens/s"
    if run.decode_tokens_per_s and run.nbytes_per_step:
        gigabytes_per_s = run.nbytes_per_step * len(run.exit_layers) / run.decode_s / 1e9
        lines.append(f"weights read: {run.nbytes_per_step / 1e6:.1f} MB a step, {gigabytes_per_s:.1f} GB/s")
    if run.prefill_exit_layer is not None:
        lines.append(f"backbone layers run, of {L}: prompt {run.prefill_exit_layer}")
    if run.drafting:
        d = run.drafting
        share = f" ({d.acceptance:.0%})" if d.drafted else ""
        lines.append(
            f"lossless: {d.drafted} tokens drafted, {d.accepted} accepted{share}, {d.verifications} verifications"
        )
        if d.verifications:
            lines[-1] += f" of {len(run.exit_layers) / d.verifications:.1f} tokens each"
    elif run.exit_layers:
        lines[-1] += f", decode {run.mean_exit_layer:.1f} on average"
        depths = Counter(run.exit_layers)
        for depth in sorted(depths):
            bar = "#" * max(1, round(40 * depths[depth] / len(run.exit_layers)))
            lines.append(f"  {depth:3d}  {depths[depth]:5d}  {bar}")
    print("\n".join(lines), file=sys.stderr)


class ExitPainter:
    """Marks text with its exit depth: by colour on a terminal, by digits elsewhere or under NO_COLOR."""

    RAMP = (46, 82, 118, 154, 190, 226, 220, 214, 208, 202, 196)  # xterm colours, green (early) to red (late)

    def __init__(self, n_layers):
        self.n_layers = n_layers
        self.colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def _colour_of(self, exit_layer):
        # On a logarithmic scale, since most tokens leave early and 2 should not look like 3.
        share = math.log1p(exit_layer) / math.log1p(self.n_layers)
        return self.RAMP[round(share * (len(self.RAMP) - 1))]

    def paint(self, text, exit_layer):
        if not text:
            return ""
        if self.colour:
            return f"\033[38;5;{self._colour_of(exit_layer)}m{text}\033[0m"
        return f"{text}[{exit_layer}]"

    def legend(self):
        if not self.colour:
            return f"[n]: the token left the backbone after n of {self.n_layers} layers"
        steps = sorted({*range(min(5, self.n_layers)), *range(5, self.n_layers, 5), self.n_layers})
        shades = " ".join(f"\033[38;5;{self._colour_of(depth)}m{depth}\033[0m" for depth in steps)
        return f"backbone layers run: {shades} of {self.n_layers}"
