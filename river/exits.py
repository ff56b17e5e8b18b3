"""The exit river: a 4-bit twin of every backbone layer, built once and kept beside the checkpoint.

An exit layer is its backbone layer with other linears; norms, biases, rotary tables and the cache
are shared. The file holds the packed codes as the int4 kernel wants them, so that the next start
maps it into memory and is done.
"""

import dataclasses
import json
from pathlib import Path

import torch

from .checkpoint import checkpoint_files
from .errors import RiverError
from .files import SafetensorsFile, save_safetensors
from .linear import QuantLinear, layout_for, pack
from .quantize import check_settings, quantize

LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
FILE_VERSION = 1


def load_river(model, folder, quantizer="hqq", group_size=64, log=lambda line, done: None):
    """Return the exit river of `model`, a list of one exit layer for each of its layers.

    A river file that belongs to this checkpoint, quantiser, group size, dtype and kind of device is
    mapped into memory; otherwise the river is built and saved. A folder that cannot be written to
    costs a rebuild at the next start and nothing else.

    Args:
        model: the backbone, a `Llama` loaded from `folder`.
        folder: the checkpoint's folder.
        quantizer, group_size: see quantize.py.
        log: called with (line, done) while the river is being built.

    Raises:
        RiverError: the quantiser is unknown, or a weight cannot be quantised.
    """
    check_settings(quantizer, group_size)
    device = model.device.type
    dtype = str(model.dtype).removeprefix("torch.")
    path = Path(folder) / f"river-{quantizer}-g{group_size}-{device}-{dtype}.safetensors"
    identity = _identity(folder, quantizer, group_size, device, dtype)
    stored = _stored_tensors(path, identity)
    if stored:
        return [_exit_layer(layer, stored, group_size) for layer in model.layers]

    tensors, river = {}, []
    for layer in model.layers:
        log(f"building the exit river ({quantizer}, group {group_size}): layer {layer.index + 1}/{len(model.layers)}",
            False)
        tensors.update(_quantize_layer(layer, quantizer, group_size))
        river.append(_exit_layer(layer, tensors, group_size))
    try:
        save_safetensors(path, tensors, {"river": identity, "tensors": str(len(tensors))})
        log(f"built the exit river and saved it as {path}", True)
    except RiverError as error:
        log(f"built the exit river, but it will be built again next time: {error}", True)
    return river


def _quantize_layer(layer, quantizer, group_size):
    """The packed tensors of one layer's twin, by their names in the river file."""
    tensors = {}
    for name in LINEARS:
        # Row groups are independent, so q, k and v can be quantised as the one matrix they are used as.
        weight = torch.cat(getattr(layer, name).weights)
        layout = layout_for(weight.shape, group_size, weight.dtype, weight.device)
        try:
            packed = pack(quantize(weight, quantizer, group_size), layout, weight.device)
        except RiverError as error:
            raise RiverError(f"layer {layer.index}, {name}: {error}") from error
        tensors |= {f"layers.{layer.index}.{name}.{key}": tensor for key, tensor in packed.items()}
    return tensors


def _exit_layer(layer, tensors, group_size):
    """The backbone `layer` with its linears replaced by those that `tensors` holds."""
    exits = {}
    for name in LINEARS:
        linear = getattr(layer, name)
        shape = linear.shape
        dtype, device = linear.weights[0].dtype, linear.weights[0].device
        prefix = f"layers.{layer.index}.{name}."
        own = {key.removeprefix(prefix): t.to(device) for key, t in tensors.items() if key.startswith(prefix)}
        exits[name] = QuantLinear(own, layout_for(shape, group_size, dtype, device), shape, group_size, linear.bias)
    return dataclasses.replace(layer, **exits)


def _identity(folder, quantizer, group_size, device, dtype):
    """All that the contents of a river file depend on, as one string.

    Checkpoint files are told apart by size and time of change: hashing them would read every byte of
    the backbone at each start. A copy with other times costs one rebuild, never a wrong river.
    """
    stats = {path.name: path.stat() for path in checkpoint_files(folder)}
    return json.dumps(
        {
            "version": FILE_VERSION,
            "checkpoint": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in sorted(stats.items())},
            "quantizer": quantizer,
            "group_size": group_size,
            "dtype": dtype,
            # PyTorch may lay the codes out differently in each version and for each instruction set.
            "torch": torch.__version__,
            "device": torch.backends.cpu.get_cpu_capability() if device == "cpu" else device,
        }
    )


def _stored_tensors(path, identity):
    """The tensors of the river file, or None if there is none or it is not the one we need."""
    try:
        file = SafetensorsFile(path)
        if file.metadata.get("river") != identity or file.metadata.get("tensors") != str(len(file.names())):
            return None
        return {name: file.tensor(name) for name in file.names()}
    except RiverError:
        return None
