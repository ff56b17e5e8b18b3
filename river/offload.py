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
        RiverError: `resident` is below 0, or the weights of a layer on the CPU are not mapped from a file.
    """
    if resident < 0:
        raise RiverError(f"offload {resident} should be the number of layers to keep, 0 or above")
    kept, others = list(layers[:resident]), layers[resident:]
    if not others:
        return kept
    if others[0].tensor_list()[0].device.type == "cpu":
        mapped = _mapped_regions()
        return kept + [ReleasedLayer(layer, mapped) for layer in others]
    return kept + [HostLayer(layer) for layer in others]


class ReleasedLayer:
    """A layer on the CPU whose mapped pages are given back after each use."""

    def __init__(self, layer, mapped):
        self.layer = layer
        # To give back memory that is not a file's would be to lose the weights; biases are copies, and small.
        pages = [_whole_pages(tensor) for tensor in layer.tensor_list()]
        self.ranges = [
            (start, end)
            for start, end in pages
            if start < end and any(low <= start and end <= high for low, high in mapped)
        ]
        if sum(end - start for start, end in self.ranges) < layer.nbytes / 2:
            raise RiverError(
                "offloading on a CPU needs Linux, and weights that are mapped from the checkpoint as they are; these "
                "were converted while loading, from 8 bits or from another dtype than --dtype"
            )

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


def _whole_pages(tensor):
    """The address range of the pages that hold nothing but this tensor."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE


def _mapped_regions():
    """Address ranges that are mapped from files: a list of (first, after the last)."""
    try:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    addresses = [fields[0].split("-") for fields in lines if fields[4] != "0"]  # the file's inode
    return [(int(low, 16), int(high, 16)) for low, high in addresses]
