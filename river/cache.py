"""The key-value cache: one tensor that backbone and river share (the paper's KV share).

Slot (l, t) holds K and V of layer l at position t. The backbone layer l and the exit layer l write
the same slot, so a token that leaves early leaves no hole behind. The cache knows nothing of how
far the sequence has come: positions belong to the decode loop.
"""

import torch


class KVCache:
    """`data` is [n_layers, 2, batch, n_kv_heads, max_len, head_dim]; index 1 picks K (0) or V (1).

    The memory is not initialised: a slot may be read only after it has been written.
    """

    def __init__(self, config, batch, max_len, dtype, device):
        shape = config.n_layers, 2, batch, config.n_kv_heads, max_len, config.head_dim
        self._use(torch.empty(shape, dtype=dtype, device=device))

    def _use(self, data):
        self.data = data
        self._views = [(layer[0], layer[1]) for layer in data]  # made once, not in each layer of each step

    @property
    def max_len(self):
        """Positions that fit."""
        return self.data.shape[4]

    def layer(self, l):
        """Views of layer l: (K, V), each [batch, n_kv_heads, max_len, head_dim]."""
        return self._views[l]

    def grow(self, max_len):
        """Make room for `max_len` positions, keeping what is written."""
        if max_len > self.max_len:
            larger = self.data.new_empty((*self.data.shape[:4], max_len, self.data.shape[5]))
            larger[..., : self.max_len, :] = self.data
            self._use(larger)
