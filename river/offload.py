"""Backbone offloading: the deeper backbone layers, which few tokens reach, leave the fast memory.

On CUDA their weights stay in pinned host memory and are copied when a token goes deeper. On a CPU they are
pages of the mapped checkpoint: after a layer has run, the system is told that it may take them back, and
reads them again from the file (or its own cache of it) when they are needed. No output changes by a bit.
"""

import ctypes
import mmap
from pathlib import Path

from .errors import RiverError


def offload_layers(layers, resident):
    """Return `layers`, the first `resident` of them as they are and the others offloaded.

    Raises:
        RiverError: see `check_offload`.
    """
    check_offload(layers, resident)
    kept, others = list(layers[:resident]), layers[resident:]
    if others and _is_on_cpu(others[0]):
        mapped = _mapped_regions()
        return kept + [ReleasedLayer(layer, mapped) for layer in others]
    return kept + [HostLayer(layer) for layer in others]


def check_offload(layers, resident):
    """Raise a RiverError if `resident` is below 0, or weights on the CPU are not mapped from a file."""
    if resident < 0:
        raise RiverError(f"offload {resident} should be the number of layers to keep, 0 or above")
    mapped = _mapped_regions()
    for layer in layers[resident:]:
        if _is_on_cpu(layer) and sum(end - start for start, end in _mapped_pages(layer, mapped)) < layer.nbytes / 2:
            raise RiverError(
                "offloading on a CPU needs Linux, and weights that are mapped from the checkpoint as they are; these "
                "were converted while loading, from 8 bits or from another dtype than --dtype"
            )


class ReleasedLayer:
    """A layer on the CPU whose mapped pages are given back after each use."""

    def __init__(self, layer, mapped):
        self.layer = layer
        self.ranges = _mapped_pages(layer, mapped)

    def __call__(self, h, positions, cache):
        h = self.layer(h, positions, cache)
        for start, end in self.ranges:
            LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
        return h

    def __getattr__(self, name):
        return getattr(self.layer, name)


class HostLayer:
    """A layer whose weights wait in pinned host memory and are copied to the device for each use."""

    def __init__(self, layer):
        self.device = layer.tensor_list()[0].device
        self.layer = layer.with_tensors([tensor.cpu().pin_memory() for tensor in layer.tensor_list()])

    def __call__(self, h, positions, cache):
        tensors = [tensor.to(self.device, non_blocking=True) for tensor in self.layer.tensor_list()]
        return self.layer.with_tensors(tensors)(h, positions, cache)

    def __getattr__(self, name):
        return getattr(self.layer, name)


LIBC = ctypes.CDLL(None)


def _is_on_cpu(layer):
    return layer.tensor_list()[0].device.type == "cpu"


def _mapped_pages(layer, mapped):
    """Address ranges of the pages that hold nothing but one of the layer's tensors, and stand in a file.

    To give back memory that is not a file's would be to lose the weights. Biases are copies, and small.
    """
    ranges = []
    for tensor in layer.tensor_list():
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and any(low <= start and end <= high for low, high in mapped):
            ranges.append((start, end))
    return ranges


def _mapped_regions():
    """Address ranges that are mapped from files: a list of (first, after the last)."""
    try:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    addresses = [fields[0].split("-") for fields in lines if fields[4] != "0"]  # the file's inode
    return [(int(low, 16), int(high, 16)) for low, high in addresses]
