"""The exit river: a quantised twin of every backbone layer, built once and kept beside the checkpoint.

An exit layer is its backbone layer with other linears; norms, biases, rotary tables and the cache
are shared. The file holds the packed codes as the kernel wants them, so that the next start
maps it into memory and is done.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import torch

from . import awq
from .checkpoint import checkpoint_files
from .errors import RiverError
from .files import SafetensorsFile, digest_of_sources, save_safetensors
from .linear import QuantLinear, layout_for, pack, scale_dtype
from .quantize import check_settings, quantize

LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
# What decides the contents of a file; the last three by the inputs that awq takes from the backbone.
SOURCES = (
    "exits.py", "quantize.py", "awq.py", "linear.py", "config.py", "checkpoint.py", "model.py", "rope.py", "cache.py",
)  # fmt: skip


def load_river(model, folder, quantizer="hqq", group_size=64, bits=4, log=lambda line, done: None):
    """Return the exit river of `model`, a list of one exit layer for each of its layers.

    A river file that belongs to this checkpoint, quantiser, group size, bits, dtype and kind of device is
    mapped into memory; otherwise the river is built and saved. A folder that cannot be written to
    costs a rebuild at the next start and nothing else.

    Args:
        model: the backbone, a `Llama` loaded from `folder`.
        folder: the checkpoint's folder.
        quantizer, group_size, bits: see quantize.py.
        log: called with (line, done) while the river is being built.

    Raises:
        RiverError: the quantiser is unknown, or a weight cannot be quantised.
    """
    return _exit_layers(
        model, _load_quantized("river", _linears(model), model, folder, quantizer, group_size, bits, log)
    )


def build_river(model, folder, quantizer="hqq", group_size=64, bits=4, log=lambda line, done: None):
    """As `load_river`, but always built, and not saved: to compare quantisers."""
    check_settings(quantizer, group_size, bits)
    calibration = awq.calibration_ids(folder, model.config) if quantizer == "awq" else None
    linears = _linears(model)
    tensors = _build("river", linears, model, quantizer, group_size, bits, calibration, log)
    return _exit_layers(model, _twins(linears, tensors, group_size, bits))


def _linears(model):
    """The linears that an exit layer has quantised, by name."""
    return {f"layers.{layer.index}.{name}": getattr(layer, name) for layer in model.layers for name in LINEARS}


def _exit_layers(model, twins):
    """Each layer of the model with the twins of its linears."""
    return [
        dataclasses.replace(layer, **{name: twins[f"layers.{layer.index}.{name}"] for name in LINEARS})
        for layer in model.layers
    ]


def load_quantized_head(model, folder, quantizer="hqq", group_size=64, bits=4, log=lambda line, done: None):
    """Return the quantised LM head of `model`, kept beside the checkpoint as the river is.

    The paper leaves the head at full precision; where the vocabulary is large and the model small it is
    most of what a token reads.
    """
    head = {"lm_head": model.lm_head}
    return _load_quantized("head", head, model, folder, quantizer, group_size, bits, log)["lm_head"]


def quantized_path(what, model, folder, quantizer, group_size, bits):
    """Where the "river" or the "head" of these settings is kept."""
    width = "" if bits == 4 else f"-b{bits}"
    dtype = str(model.dtype).removeprefix("torch.")
    return Path(folder) / f"{what}-{quantizer}-g{group_size}{width}-{model.device.type}-{dtype}.safetensors"


def _load_quantized(what, linears, model, folder, quantizer, group_size, bits, log):
    """The quantised twins of `linears`, a dict of name to `Linear`: from their file, or built and saved."""
    check_settings(quantizer, group_size, bits)
    path = quantized_path(what, model, folder, quantizer, group_size, bits)
    calibration = awq.calibration_ids(folder, model.config) if quantizer == "awq" else None
    identity = _identity(folder, quantizer, group_size, bits, calibration, model.device.type, model.dtype)
    tensors = _stored_tensors(path, identity)
    if tensors:
        return _twins(linears, tensors, group_size, bits)

    tensors = _build(what, linears, model, quantizer, group_size, bits, calibration, log)
    try:
        save_safetensors(path, tensors, {"river": identity, "tensors": str(len(tensors))})
        log(f"built the {bits}-bit {what} and saved it as {path}", True)
    except RiverError as error:
        log(f"built the {bits}-bit {what}, but it will be built again next time: {error}", True)
    return _twins(linears, tensors, group_size, bits)


def _build(what, linears, model, quantizer, group_size, bits, calibration, log):
    """The packed tensors of the twins of `linears`, by their names in the file; `calibration` is for awq, else None."""
    tensors = {}
    inputs = awq.Inputs(model, calibration) if calibration else None
    for number, (name, linear) in enumerate(linears.items(), 1):
        log(f"building the {bits}-bit {what} ({quantizer}, group {group_size}): {name}, {number}/{len(linears)}", False)
        tensors.update(_quantize(name, linear, quantizer, group_size, bits, inputs))
    return tensors


def _quantize(name, linear, quantizer, group_size, bits, inputs):
    """The packed tensors of one linear's twin, by their names in the file; `inputs` are for awq, else None."""
    # Row groups are independent, so q, k and v can be quantised as the one matrix they are used as.
    weight = torch.cat(linear.weights)
    layout = layout_for(weight.shape, group_size, weight.dtype, weight.device, bits)
    how = quantizer, group_size, bits, scale_dtype(layout)
    try:
        extra = {} if inputs is None else {"input_scales": awq.search_input_scales(weight, inputs.of(name), *how)}
        scaled = weight / extra["input_scales"].float() if extra else weight
        packed = pack(quantize(scaled, *how), layout, weight.device) | extra
    except RiverError as error:
        raise RiverError(f"{name}: {error}") from error
    return {f"{name}.{key}": tensor for key, tensor in packed.items()}


def _twins(linears, tensors, group_size, bits):
    return {name: _twin(name, linear, tensors, group_size, bits) for name, linear in linears.items()}


def _twin(name, linear, tensors, group_size, bits):
    """The `QuantLinear` for a `Linear`, from the tensors of its file."""
    weight = linear.weights[0]
    own = {
        key.removeprefix(f"{name}."): t.to(weight.device) for key, t in tensors.items() if key.startswith(f"{name}.")
    }
    layout = layout_for(linear.shape, group_size, weight.dtype, weight.device, bits)
    return QuantLinear(own, layout, linear.shape, group_size, linear.bias)


def _identity(folder, quantizer, group_size, bits, calibration, device, dtype):
    """All that the contents of a quantised file depend on, as one string.

    Checkpoint files are told apart by size and time of change: hashing them would read every byte of
    the backbone at each start. A copy with other times costs one rebuild, never a wrong river.
    """
    stats = {path.name: path.stat() for path in checkpoint_files(folder)}
    return json.dumps(
        {
            "sources": digest_of_sources(SOURCES),
            "checkpoint": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in sorted(stats.items())},
            "quantizer": quantizer,
            "group_size": group_size,
            "bits": bits,
            # Text and tokenizer in one; None where no data are used.
            "calibration": calibration and hashlib.sha256(json.dumps(calibration).encode()).hexdigest(),
            "dtype": str(dtype),
            # PyTorch may lay the codes out differently in each version and for each instruction set.
            "torch": torch.__version__,
            "device": torch.backends.cpu.get_cpu_capability() if device == "cpu" else device,
        }
    )


def _stored_tensors(path, identity):
    """The tensors of a quantised file, or None if there is none or it is not the one we need."""
    try:
        file = SafetensorsFile(path)
        if file.metadata.get("river") != identity or file.metadata.get("tensors") != str(len(file.names())):
            return None
        return {name: file.tensor(name) for name in file.names()}
    except RiverError:
        return None
