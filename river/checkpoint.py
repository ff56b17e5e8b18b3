"""Hugging Face safetensors into the decoder: memory-mapped, and strict.

A tensor stays where it is, in the mapped file, until a layer reads it: the loader slices and
renames, and copies only to change a dtype or a device. A tensor that is missing, misshapen or
unknown is an error that names it, since a weight left out gives fluent nonsense.
"""

from pathlib import Path

import torch

from .config import load_config
from .errors import RiverError
from .files import SafetensorsFile, read_json
from .linear import Linear
from .model import DecoderLayer, Llama, RMSNorm

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Buffers that old checkpoints carry (rope.py computes them), and a scale for 8-bit activations.
IGNORED = ("rotary_emb.inv_freq", ".activation_scale")
# The parts of a multimodal checkpoint that see.
NOT_TEXT = tuple(prefix + part for prefix in ("", "model.") for part in ("vision_tower.", "multi_modal_projector."))
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def load_model(folder, dtype=torch.bfloat16, device="cpu"):
    """Load the checkpoint in `folder` as a `Llama`.

    Args:
        folder: holds config.json and model.safetensors, or shards and their index.
        dtype: of weights and activations; on the CPU, tensors already of that dtype stay mapped.
        device: where the weights go.

    Raises:
        RiverError: a file or tensor is missing, damaged, of the wrong shape, or unknown.
    """
    folder = Path(folder)
    config = load_config(folder)
    tensors = CheckpointTensors(folder, dtype, device)
    D, q, kv, ff = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size

    def norm(name, size=D):
        return RMSNorm(tensors.take(f"{name}.weight", (size,)), config.rms_norm_eps)

    def linear(prefix, in_features, outputs, bias):
        weights = [tensors.take(f"{prefix}.{name}.weight", (out, in_features)) for name, out in outputs.items()]
        biases = [tensors.take(f"{prefix}.{name}.bias", (out,)) for name, out in outputs.items()] if bias else None
        return Linear(weights, torch.cat(biases) if bias else None)

    qkv_rows, gate_up_rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}, {"gate_proj": ff, "up_proj": ff}
    if config.fused_projections:
        qkv_rows, gate_up_rows = {"qkv_proj": q + 2 * kv}, {"gate_up_proj": 2 * ff}

    embed_tokens = tensors.take("model.embed_tokens.weight", (config.vocab_size, D))
    layers = []
    for index in range(config.n_layers):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        layers.append(
            DecoderLayer(
                index=index,
                n_heads=config.n_heads,
                n_kv_heads=config.n_kv_heads,
                head_dim=config.head_dim,
                input_layernorm=norm(f"{layer}.input_layernorm"),
                qkv_proj=linear(attention, D, qkv_rows, config.qkv_bias),
                o_proj=linear(attention, q, {"o_proj": D}, config.o_bias),
                post_attention_layernorm=norm(f"{layer}.post_attention_layernorm"),
                gate_up_proj=linear(mlp, D, gate_up_rows, config.mlp_bias),
                down_proj=linear(mlp, ff, {"down_proj": D}, config.mlp_bias),
                q_norm=norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
                k_norm=norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
                window=config.windows[index],
            )
        )
    final_norm = norm("model.norm")
    lm_head = Linear([_head_weight(tensors, config.tie_word_embeddings, embed_tokens)])
    tensors.finish()
    return Llama(config, embed_tokens, layers, final_norm, lm_head)


def _head_weight(tensors, tied, embed_tokens):
    """The LM head's weight [vocabulary, hidden size]: the embedding if `tied` (None: if there is no other)."""
    if tied is None:
        tied = "lm_head.weight" not in tensors.files
    if not tied:
        return tensors.take("lm_head.weight", embed_tokens.shape)
    tensors.skip("lm_head.weight")  # some tied checkpoints ship a redundant one
    return embed_tokens


class CheckpointTensors:
    """The tensors of a checkpoint folder by their canonical names, each to be taken once."""

    def __init__(self, folder, dtype, device):
        self.folder, self.dtype, self.device = folder, dtype, device
        self.files = {}  # canonical name to (the open file that holds it, its name there)
        for path, names in checkpoint_files(folder).items():
            opened = SafetensorsFile(path)
            for name in sorted(opened.names() if names is None else names):
                if name not in opened.names():
                    raise RiverError(f"{path} lacks the tensor {name!r}, which {INDEX_FILE} says it holds")
                if not name.startswith(NOT_TEXT):
                    if canonical_name(name) in self.files:
                        raise RiverError(f"{path}: tensor {name!r} is there twice, under two names")
                    self.files[canonical_name(name)] = opened, name

    def take(self, name, shape):
        """Return the tensor `name`, checked to be of `shape`, in the loader's dtype and on its device."""
        tensor = self._get(name, "config.json asks for it")
        if tuple(tensor.shape) != tuple(shape):
            raise RiverError(
                f"{self.folder}: tensor {name!r} is {list(tensor.shape)}, but config.json asks for {list(shape)}"
            )
        if tensor.dtype in FP8:
            scale = self._get(f"{name}_scale_inv", f"{name!r} is stored in 8 bits, which need a scale")
            tensor = dequantize_fp8(tensor, scale, f"{self.folder}: tensor {name!r}")
        if not tensor.is_floating_point():
            raise RiverError(f"{self.folder}: tensor {name!r} is {tensor.dtype}, but should hold floats")
        return tensor.to(device=self.device, dtype=self.dtype)

    def _get(self, name, why):
        if name not in self.files:
            raise RiverError(f"{self.folder}: the checkpoint has no tensor {name!r}; {why}")
        opened, stored_name = self.files.pop(name)
        return opened.tensor(stored_name)

    def skip(self, name):
        """Pass over the tensor `name` if it is there."""
        self.files.pop(name, None)

    def finish(self):
        """Raise a RiverError if a tensor was left over: the model would not be the checkpoint's."""
        unknown = sorted(name for name in self.files if not name.endswith(IGNORED))
        if unknown:
            raise RiverError(
                f"{self.folder}: {len(unknown)} tensors have no place in the model that config.json "
                f"describes, the first is {unknown[0]!r}"
            )


def canonical_name(name):
    """The name that a tensor has in a text-only checkpoint: mistral3 wraps its text model two ways."""
    for wrapped, plain in (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ):
        if name.startswith(wrapped):
            return plain + name.removeprefix(wrapped)
    return name


def dequantize_fp8(weight, scale, what="the weight"):
    """float8 [N, K] times its scale: one number, or float [n, k] with one for each block of N/n rows and K/k columns.

    Raises:
        RiverError: the scale does not divide the weight into equal blocks.
    """
    if scale.numel() == 1:
        return weight.float() * scale.float().reshape(())
    if scale.ndim != 2 or any(rows % blocks for rows, blocks in zip(weight.shape, scale.shape)):
        raise RiverError(f"{what} is {list(weight.shape)}, which its scale {list(scale.shape)} does not divide")
    blocks = [rows // n for rows, n in zip(weight.shape, scale.shape)]
    for dim, size in enumerate(blocks):
        scale = scale.repeat_interleave(size, dim=dim)
    return weight.float() * scale.float()


def checkpoint_files(folder):
    """The safetensors files that make up the checkpoint: a dict of path to tensor names (None: all).

    Only files that the index names are listed; others beside them may be anything.
    """
    folder = Path(folder)
    if (folder / SINGLE_FILE).exists():
        return {folder / SINGLE_FILE: None}
    index = folder / INDEX_FILE
    if not index.exists():
        raise RiverError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RiverError(f"{index}: 'weight_map' should be an object that names the file of each tensor")
    files = {}
    for name, file in weight_map.items():
        plain = isinstance(file, str) and Path(file).name == file and file.isprintable() and "\\" not in file
        if not plain or file in ("", ".."):
            raise RiverError(f"{index}: {file!r}, given for {name!r}, is not the name of a file in this folder")
        files.setdefault(folder / file, set()).add(name)
    return files
