"""The papers' scores, one triple at a time in float64 loops, independent of the package.

``score(scorer, head, relation, tail, side)`` reads a scorer's parameters and options and nothing
else of it.  Rows are lists of D numbers, the relation is an id among the scorer's rows.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import oracle_networks
from oracle_algebra import OCTONIONS, QUATERNIONS, groups, numbers, times
from oracle_networks import layer_norm


def score(scorer, head, relation: int, tail, side: str = "tail") -> float:
    """The score of (head, relation, tail).  side: the side to predict; only CoKE uses it."""
    parameters = {
        name: value.detach().double().numpy() for name, value in scorer.named_parameters()
    }
    head, tail = (normalized(scorer, parameters, row) for row in (head, tail))
    row = parameters["relations"][relation]
    if "relation_norm.weight" in parameters:
        row = layer_norm(row, parameters, "relation_norm")
    if scorer.name == "coke":
        return oracle_networks.coke(scorer, parameters, head, row, tail, side)
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


def rotate_l2(scorer, parameters, h, r, t):
    return -math.sqrt(sum((a - b) ** 2 for a, b in zip(turned(h, r), t, strict=True)))


def rote(scorer, parameters, h, r, t):
    phases, shift = np.split(r, [len(h) // 2])
    return -sum((a + b - c) ** 2 for a, b, c in zip(turned(h, phases), shift, t, strict=True))


def turned(row, phases):
    """Rotate each pair of elements by its angle, with a matrix of rotations."""
    out = []
    for (x, y), angle in zip(np.reshape(row, (-1, 2)), phases, strict=True):
        out += [
            math.cos(angle) * x - math.sin(angle) * y,
            math.sin(angle) * x + math.cos(angle) * y,
        ]
    return np.array(out)


def roth(scorer, parameters, h, r, t):
    """Score in the Poincare ball, by the formulas of the paper.

    Near its boundary digits are lost, which is why this is in more of them.
    """
    phases, shift, curvature = np.split(r, [len(h) // 2, len(h) // 2 + len(h)])
    c = np.log1p(np.exp(np.longdouble(curvature[0])))
    rotated = turned(exponential(h, c), phases)
    x = moebius_sum(rotated, exponential(shift, c), c)
    between = np.sqrt(np.sum(moebius_sum(-x, exponential(t, c), c) ** 2))
    return float(-((2 / np.sqrt(c) * np.arctanh(np.sqrt(c) * between)) ** 2))


def exponential(tangent, c):
    tangent = np.asarray(tangent, np.longdouble)
    length = np.sqrt(c * np.sum(tangent**2))
    return np.tanh(length) * tangent / length


def moebius_sum(x, y, c):
    xy, xx, yy = np.sum(x * y), np.sum(x * x), np.sum(y * y)
    above = (1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y
    return above / (1 + 2 * c * xy + c * c * xx * yy)


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
    k, n, m = (getattr(scorer.options, key) for key in ("block", "reflections", "projections"))
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


def meim(scorer, parameters, h, r, t):
    count, core = scorer.options.partitions, parameters["core"]
    total = 0.0
    for k, (a, b, c) in enumerate(zip(*(np.split(x, count) for x in (h, r, t)), strict=True)):
        places = itertools.product(range(len(b)), range(len(a)), range(len(c)))
        total += sum(core[k, w, i, j] * b[w] * a[i] * c[j] for w, i, j in places)
    return total


def hypercomplex(size, triples):
    def formula(scorer, parameters, h, r, t):
        return sum(np.dot(times(x, y, triples), z) for x, y, z in groups(size, h, r, t))

    return formula


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
    p, q, r_ = (getattr(scorer.options, key, 0) for key in "pqr")
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
    size = scorer.options.degree + 1
    places, weights = np.polynomial.legendre.leggauss(2 * size)
    places, weights = (places + 1) / 2, weights / 2
    total = 0.0
    for polynomials in groups(size, h, r, t):
        values = [np.polynomial.polynomial.polyval(places, p) for p in polynomials]
        total += np.sum(weights * values[0] * values[1] * values[2])
    return total


def operator(scorer, parameters, h, r, t):
    options = scorer.options
    widths = {"identity": 0, "linear": len(h) ** 2}
    of_head, of_tail = np.split(r, [widths.get(options.head, len(h))])  # identity reads none
    h, t = operated(options.head, of_head, h), operated(options.tail, of_tail, t)
    product = sum(a * b for a, b in zip(h, t, strict=True))
    lengths = [math.sqrt(sum(x * x for x in row)) for row in (h, t)]
    value = {
        "dot": product,
        "cosine": product / (lengths[0] * lengths[1]),
        "l2": -math.dist(h, t),
    }[options.comparator]
    return value / options.temperature


def operated(name, r, x):
    """An operator with parameters r, applied to a row."""
    if name == "complex":
        products = [a * b for a, b in zip(numbers(x), numbers(r), strict=True)]
        return np.array([part for z in products for part in (z.real, z.imag)])
    return {
        "identity": lambda: x,
        "translation": lambda: x + r,
        "diagonal": lambda: x * r,
        "linear": lambda: x @ r.reshape(len(x), len(x)),
    }[name]()


FORMULAS = {
    "transe_l1": transe(1),
    "transe_l2": transe(2),
    "transh": transh,
    "distmult": distmult,
    "complex": complex_,
    "rotate": rotate,
    "rotate_l2": rotate_l2,
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
    "lfmult": lfmult,
    "rote": rote,
    "roth": roth,
    "meim": meim,
    "operator": operator,
    **oracle_networks.FORMULAS,
}
