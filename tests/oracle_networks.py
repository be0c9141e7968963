"""The papers' scores of networks in float64 loops: convolutions and a transformer."""

from __future__ import annotations

import math

import numpy as np
from oracle_algebra import OCTONIONS, QUATERNIONS, groups, numbers, times


def relu(x):
    return np.maximum(x, 0)


def layer_norm(x, parameters, name):
    """Over all of x; scale and shift for its last axis, or for the first of feature maps."""
    scale, shift = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
    if x.ndim == 3:
        scale, shift = scale[:, None, None], shift[:, None, None]
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * scale + shift


def convolve(image, parameters, name, padding):
    """(height, width) -> (channels, height', width')"""
    image = np.pad(image, padding)
    weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
    channels, _, size, _ = weight.shape
    shape = (channels, image.shape[0] - size + 1, image.shape[1] - size + 1)
    out = np.empty(shape)
    for c, i, j in np.ndindex(*shape):
        out[c, i, j] = (image[i : i + size, j : j + size] * weight[c, 0]).sum() + bias[c]
    return out


def conve(scorer, parameters, h, r, t):
    image = np.concatenate([h, r]).reshape(scorer.shape)
    image = layer_norm(image[None], parameters, "image_norm")[0]
    return np.dot(convolved_image(parameters, image, 0), t)


def convolved(parameters, size, h, r):
    """conv(h, r): components one below the other, those of h first."""
    image = np.concatenate([h.reshape(-1, size).T, r.reshape(-1, size).T])
    return convolved_image(
        parameters, image, parameters["convolution.convolution.weight"].shape[-1] // 2
    )


def convolved_image(parameters, image, padding):
    own = {k.removeprefix("convolution."): v for k, v in parameters.items()}
    maps = relu(layer_norm(convolve(image, own, "convolution", padding), own, "map_norm"))
    out = own["linear.weight"] @ maps.reshape(-1) + own["linear.bias"]
    return relu(layer_norm(out, own, "output_norm"))


def conex(scorer, parameters, h, r, t):
    factors = zip(*(numbers(x) for x in (convolved(parameters, 2, h, r), h, r, t)), strict=True)
    return sum(
        c.real * x.real * y.real * z.real
        + c.real * x.real * y.imag * z.imag
        + c.imag * x.imag * y.real * z.imag
        - c.imag * x.imag * y.imag * z.real
        for c, x, y, z in factors
    )


def aconex(scorer, parameters, h, r, t):
    added = np.split(convolved(parameters, 2, h, r), 4)
    factors = zip(*added, *(numbers(x) for x in (h, r, t)), strict=True)
    return sum(
        (a + x.real * y.real) * z.real
        + (b + x.real * y.imag) * z.imag
        + (c + x.imag * y.real) * z.imag
        - (d + x.imag * y.imag) * z.real
        for a, b, c, d, x, y, z in factors
    )


def convolved_product(size, triples):
    def formula(scorer, parameters, h, r, t):
        parts = groups(size, convolved(parameters, size, h, r), h, r, t)
        return sum(np.dot(c * times(x, y, triples), z) for c, x, y, z in parts)

    return formula


def coke(scorer, parameters, h, r, t, side):
    mask = parameters["mask"][0]
    tokens, place = ([h, r, mask], 2) if side == "tail" else ([mask, r, t], 0)
    states = [
        layer_norm(token + position, parameters, "input_norm")
        for token, position in zip(tokens, parameters["positions"], strict=True)
    ]
    for number in range(scorer.options.layers):
        own = {
            k.removeprefix(f"encoder.layers.{number}."): v for k, v in parameters.items()
        }  # fmt: skip
        states = encoder_layer(states, own, scorer.options.heads)
    state = parameters["output.0.weight"] @ states[place] + parameters["output.0.bias"]
    out = layer_norm(gelu(state), parameters, "output.2")
    return np.dot(out, t if side == "tail" else h)


def encoder_layer(states, own, heads):
    """Attention, then a feed-forward network; each added to its input, then normalised."""
    dim = len(states[0])
    weight, bias = own["self_attn.in_proj_weight"], own["self_attn.in_proj_bias"]
    queries, keys, values = (
        [weight[i * dim : (i + 1) * dim] @ x + bias[i * dim : (i + 1) * dim] for x in states]
        for i in range(3)
    )
    out, size = [], dim // heads
    for query, state in zip(queries, states, strict=True):
        mixed = np.empty(dim)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            shares = np.exp([np.dot(query[part], key[part]) / math.sqrt(size) for key in keys])
            shares = shares / shares.sum()
            mixed[part] = sum(s * v[part] for s, v in zip(shares, values, strict=True))
        mixed = own["self_attn.out_proj.weight"] @ mixed + own["self_attn.out_proj.bias"]
        state = layer_norm(state + mixed, own, "norm1")
        hidden = gelu(own["linear1.weight"] @ state + own["linear1.bias"])
        hidden = own["linear2.weight"] @ hidden + own["linear2.bias"]
        out.append(layer_norm(state + hidden, own, "norm2"))
    return out


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


FORMULAS = {
    "conve": conve,
    "conex": conex,
    "aconex": aconex,
    "convq": convolved_product(4, QUATERNIONS),
    "convo": convolved_product(8, OCTONIONS),
}
