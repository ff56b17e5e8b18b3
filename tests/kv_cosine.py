"""K and V of the exit river against the backbone's, by layer: `python tests/kv_cosine.py [MODEL_FOLDER]`.

The paper reports a cosine above 0.97. Each river layer here gets what the river layers before it gave,
so the error of the whole way down is in it (exit depth 0, the worst case).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import river  # isort: skip  (before torch, for its warning filter)

import torch

from river.controller import FixedDepth
from river.decode import Decoder

TEXT = (
    "The river rises in the hills above the town and is at first no more than a ditch. After the mill it "
    "is joined by two streams, and from there on barges of twenty tons can use it. Its water was so clear "
    "that the dyers settled there in 1640; by 1900 it was black. Today you can swim in it again, and on "
    "a summer evening half the town does."
)


def kv_cosines(llm, text=TEXT, exit_layer=0):
    """Mean cosine over heads and positions, [n_layers, 2] (K, V), after leaving at `exit_layer`."""
    ids = llm.tokenizer.encode(text, bos=True)

    def cache(depth):
        decoder = Decoder(llm.model, llm.river, FixedDepth(depth), "exit", max_len=len(ids))
        decoder.prefill([ids])
        return decoder.cache.data.float()

    cosine = torch.nn.functional.cosine_similarity(cache(exit_layer), cache(llm.config.n_layers), dim=-1)
    return cosine.mean(dim=(2, 3, 4))


if __name__ == "__main__":
    default = ROOT / "weights" / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    cosines = kv_cosines(river.load(sys.argv[1] if len(sys.argv) > 1 else default))
    print("layer      K      V")
    for layer, (k, v) in enumerate(cosines.tolist(), 1):
        print(f"{layer:5d}  {k:.3f}  {v:.3f}")
    print(f" mean  {cosines[:, 0].mean():.3f}  {cosines[:, 1].mean():.3f}")
