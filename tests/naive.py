"""A Llama in float64 without cache, batch or kernels: one sequence, one position at a time.

Written from the formulas, to be compared with: it shares no code with the river package.
"""

import math

import torch


def rms_norm(x, weight, eps):
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def rotate_at(x, position, theta):
    """Turn one head's vector x [head_dim] by its position, pair (i, i + half) by pair."""
    half = len(x) // 2
    turned = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return turned


def logits(tensors, config, ids):
    """Logits [len(ids), vocab], given the checkpoint's tensors by name and its config.json as a dict."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, eps = config["hidden_size"] // heads, config["rms_norm_eps"]
    hidden = [t["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(config["num_hidden_layers"]):
        w = {name.split(f"layers.{layer}.")[1]: x for name, x in t.items() if f"layers.{layer}." in name}
        keys, values, after = [], [], []
        for position, h in enumerate(hidden):
            x = rms_norm(h, w["input_layernorm.weight"], eps)
            q = (w["self_attn.q_proj.weight"] @ x).view(heads, head_dim)
            k = (w["self_attn.k_proj.weight"] @ x).view(kv_heads, head_dim)
            keys.append([rotate_at(k[i], position, config["rope_theta"]) for i in range(kv_heads)])
            values.append((w["self_attn.v_proj.weight"] @ x).view(kv_heads, head_dim))
            outputs = []
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                query = rotate_at(q[head], position, config["rope_theta"])
                scores = torch.stack([query @ key[kv_head] for key in keys]) / math.sqrt(head_dim)
                weights = scores.softmax(0)
                outputs.append(sum(p * value[kv_head] for p, value in zip(weights, values)))
            h = h + w["self_attn.o_proj.weight"] @ torch.cat(outputs)
            x = rms_norm(h, w["post_attention_layernorm.weight"], eps)
            gate, up = w["mlp.gate_proj.weight"] @ x, w["mlp.up_proj.weight"] @ x
            after.append(h + w["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up))
        hidden = after
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return torch.stack([head @ rms_norm(h, t["model.norm.weight"], eps) for h in hidden])
