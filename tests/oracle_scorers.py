"""The papers' scores, one triple at a time in float64 loops, independent of the package.

``score(scorer, head, relation, tail, side)`` reads a scorer's parameters and options and nothing
else of it.  Rows are lists of D numbers, the relation is an id among the scorer's rows.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

# Units that multiply to the third: e1 e2 = e3 and so on, cyclically; the other way round minus.
QUATERNIONS = [(1, 2, 3)]
OCTONIONS = [(1, 2, 3), (1, 4, 5), (1, 7, 6), (2, 4, 6), (2, 5, 7), (3, 4, 7), (3, 6, 5)]


def score(scorer, head, relation: int, tail, side: str = "tail") -> float:
    """The score of (head, relation, tail).  side: the one asked for, which only CoKE sees."""
    parameters = {
        name: value.detach().double().numpy()
        for name, value in [*scorer.named_parameters(), *scorer.named_buffers()]
    }
    head, tail = (normalized(scorer, parameters, row) for row in (head, tail))
    row = parameters["relations"][relation]
    if "relation_norm.weight" in parameters:
        row = layer_norm(row, parameters, "relation_norm")
    if scorer.name == "coke":
        return coke(scorer, parameters, head, row, tail, side)
    return FORMULAS[scorer.name](scorer, parameters, head, row, tail)


def normalized(scorer, parameters, row) -> np.ndarray:
    row = np.asarray(row, np.float64)
    vector, biases = np.split(row, [len(row) - 2 if scorer.name == "mure" else len(row)])
    if type(scorer.entity_norm).__name__ == "UnitNorm":
        vector = vector / math.sqrt(sum(x * x for x in vector))
    if "entity_norm.weight" in parameters:
        vector = layer_norm(vector, parameters, "entity_norm")
    if scorer.name == "pairre":
        vector = vector / math.sqrt(sum(x * x for x in vector))
    return np.concatenate([vector, biases])


# Translations and rotations


def transe(power):
    def formula(scorer, parameters, h, r, t):
        total = sum(abs(a + b - c) ** power for a, b, c in zip(h, r, t, strict=True))
        return -(total ** (1 / power))

    return formula


def transh(scorer, parameters, h, r, t):
    normal, shift = np.split(r, 2)
    normal = normal / np.linalg.norm(normal)
    h, shift, t = (x - normal * np.dot(normal, x) for x in (h, shift, t))
    return -sum((a + b - c) ** 2 for a, b, c in zip(h, shift, t, strict=True))


def rotate(scorer, parameters, h, r, t):
    pairs = zip(numbers(h), r, numbers(t), strict=True)
    return -sum(abs(x * complex(math.cos(p), math.sin(p)) - y) for x, p, y in pairs)


def mure(scorer, parameters, h, r, t):
    scale, shift = np.split(r, 2)
    distance = sum(
        (scale[i] * h[i] - (t[i] + shift[i])) ** 2 for i in range(len(h) - 2)
    )  # fmt: skip
    return -distance + h[-2] + t[-1]


def pairre(scorer, parameters, h, r, t):
    of_head, of_tail = np.split(r, 2)
    return -sum(abs(h[i] * of_head[i] - t[i] * of_tail[i]) for i in range(len(h)))


def house(scorer, parameters, h, r, t):
    """With matrices: I - 2 u u' for reflections, I - s u u' for projections."""
    k, n, m = (scorer.options[key] for key in ("block", "reflections", "projections"))
    n, dim = 2 * (k // 2) if n is None else n, len(h)
    count, total = dim // k, 0.0
    vectors = r[: (n + 2 * m) * dim].reshape(n + 2 * m, count, k)
    scales = r[(n + 2 * m) * dim :].reshape(2 * m, count)
    for i in range(count):
        units = [v / np.linalg.norm(v) for v in vectors[:, i]]
        turn = chained(k, [np.eye(k) - 2 * np.outer(u, u) for u in units[:n]])
        squeezes = [
            np.eye(k) - s * np.outer(u, u) for u, s in zip(units[n:], scales[:, i], strict=True)
        ]
        of_head, of_tail = chained(k, squeezes[:m]), chained(k, squeezes[m:])
        block = slice(i * k, i * k + k)
        total += np.linalg.norm(turn @ of_head @ h[block] - of_tail @ t[block])
    return -total


def chained(size, matrices):
    out = np.eye(size)
    for matrix in matrices:
        out = out @ matrix
    return out


def pyke(scorer, parameters, h, r, t):
    return -(math.dist(h, r) + math.dist(r, t)) / 2


# Products


def distmult(scorer, parameters, h, r, t):
    return sum(a * b * c for a, b, c in zip(h, r, t, strict=True))


def numbers(row):
    """(re, im, re, im, ...) as complex numbers."""
    return [complex(row[i], row[i + 1]) for i in range(0, len(row), 2)]


def complex_(scorer, parameters, h, r, t):
    triples = zip(*(numbers(x) for x in (h, r, t)), strict=True)
    return sum((x * y * z.conjugate()).real for x, y, z in triples)


def simple(scorer, parameters, h, r, t):
    (h_head, h_tail), (forth, back), (t_head, t_tail) = (np.split(x, 2) for x in (h, r, t))
    first = sum(h_head[i] * forth[i] * t_tail[i] for i in range(len(forth)))
    return (first + sum(t_head[i] * back[i] * h_tail[i] for i in range(len(back)))) / 2


def rescal(scorer, parameters, h, r, t):
    dim = len(h)
    return sum(h[i] * r[i * dim + j] * t[j] for i in range(dim) for j in range(dim))


def tucker(scorer, parameters, h, r, t):
    core = parameters["core"]
    places = itertools.product(range(len(r)), range(len(h)), range(len(t)))
    return sum(core[k, i, j] * r[k] * h[i] * t[j] for k, i, j in places)


def times(x, y, triples):
    """Product of two hypercomplex numbers of 1 + n units."""
    out = [x[0] * y[i] + x[i] * y[0] for i in range(len(x))]
    out[0] = x[0] * y[0] - sum(a * b for a, b in zip(x[1:], y[1:], strict=True))
    for triple in triples:
        for turn in range(3):
            i, j, k = (triple[(turn + step) % 3] for step in range(3))
            out[k] += x[i] * y[j] - x[j] * y[i]
    return np.array(out)


def hypercomplex(size, triples):
    def formula(scorer, parameters, h, r, t):
        return sum(np.dot(times(x, y, triples), z) for x, y, z in groups(size, h, r, t))

    return formula


def groups(size, *rows):
    """The numbers of size components of several rows, side by side."""
    return zip(*(row.reshape(-1, size) for row in rows), strict=True)


def quate(scorer, parameters, h, r, t):
    pairs = groups(4, h, r, t)
    return sum(np.dot(times(x, y / np.linalg.norm(y), QUATERNIONS), z) for x, y, z in pairs)


def duale(scorer, parameters, h, r, t):
    total = 0.0
    for x, y, z in groups(8, h, r, t):
        (a, b), (c, d) = np.split(x, 2), np.split(y, 2)
        d = d - c * np.dot(c, d) / np.dot(c, c)
        c = c / np.linalg.norm(c)
        first = times(a, c, QUATERNIONS)
        second = times(a, d, QUATERNIONS) + times(b, c, QUATERNIONS)
        total += np.dot(np.concatenate([first, second]), z)
    return total


def clifford(scorer, parameters, h, r, t):
    """By multiplying out: e_i e_i = square, e_k e_i = -e_i e_k; what t lacks counts as it is."""
    p, q, r_ = (scorer.options.get(key, 0) for key in "pqr")
    squares, n, total = [1] * p + [-1] * q + [0] * r_, p + q + r_, 0.0
    factors = np.ones(1 + n)
    if scorer.name == "keci" and n:
        factors[1:] = parameters["coefficients"]
    for x, y, z in groups(1 + n, h, r, t):
        x, y = x * factors, y * factors
        for i, j in itertools.product(range(1 + n), repeat=2):
            value = x[i] * y[j]
            if i == 0 or j == 0:
                total += value * z[i + j]
            elif i == j:
                total += squares[i - 1] * value * z[0]
            else:
                total += value if i < j else -value
    return total


def lfmult(scorer, parameters, h, r, t):
    """The integral over [0, 1] by Gauss and Legendre's rule, exact for these degrees."""
    size = scorer.options["degree"] + 1
    places, weights = np.polynomial.legendre.leggauss(2 * size)
    places, weights = (places + 1) / 2, weights / 2
    total = 0.0
    for polynomials in groups(size, h, r, t):
        values = [np.polynomial.polynomial.polyval(places, p) for p in polynomials]
        total += np.sum(weights * values[0] * values[1] * values[2])
    return total


# Networks


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
    image = np.concatenate([h, r]).reshape(2 * scorer.height, scorer.width)
    image = layer_norm(image[None], parameters, "image_norm")[0]
    maps = convolve(image, parameters, "convolution", 0)
    flat = relu(layer_norm(maps, parameters, "map_norm")).reshape(-1)
    out = parameters["linear.weight"] @ flat + parameters["linear.bias"]
    return np.dot(relu(layer_norm(out, parameters, "query_norm")), t)


def convolved(parameters, size, h, r):
    """conv(h, r): components one below the other, those of h first."""
    image = np.concatenate([h.reshape(-1, size).T, r.reshape(-1, size).T])
    own = {k.removeprefix("convolution."): v for k, v in parameters.items()}
    padding = own["convolution.weight"].shape[-1] // 2
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


def shallom(scorer, parameters, h, r, t):
    hidden = parameters["hidden.weight"] @ np.concatenate([h, t]) + parameters["hidden.bias"]
    return np.dot(r[:-1], relu(hidden)) + r[-1]


def coke(scorer, parameters, h, r, t, side):
    mask = parameters["mask"][0]
    tokens, place = ([h, r, mask], 2) if side == "tail" else ([mask, r, t], 0)
    states = [
        layer_norm(token + position, parameters, "input_norm")
        for token, position in zip(tokens, parameters["positions"], strict=True)
    ]
    for number in range(scorer.options["layers"]):
        own = {
            k.removeprefix(f"encoder.layers.{number}."): v for k, v in parameters.items()
        }  # fmt: skip
        states = encoder_layer(states, own, scorer.options["heads"])
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
    "transe_l1": transe(1),
    "transe_l2": transe(2),
    "transh": transh,
    "distmult": distmult,
    "complex": complex_,
    "rotate": rotate,
    "simple": simple,
    "rescal": rescal,
    "tucker": tucker,
    "qmult": hypercomplex(4, QUATERNIONS),
    "quate": quate,
    "omult": hypercomplex(8, OCTONIONS),
    "duale": duale,
    "keci": clifford,
    "ckeci": clifford,
    "decal": clifford,
    "mure": mure,
    "pairre": pairre,
    "house": house,
    "pyke": pyke,
    "conve": conve,
    "conex": conex,
    "aconex": aconex,
    "convq": convolved_product(4, QUATERNIONS),
    "convo": convolved_product(8, OCTONIONS),
    "coke": coke,
    "shallom": shallom,
    "lfmult": lfmult,
}
