"""Faults of batches that are made on a device, which tests must notice; see `check_mutations`."""

from __future__ import annotations

from faults import Fault

RESIDENT, NEGATIVES = "data/batches/resident.py", "data/negatives_on_device.py"
EQUAL = "tests/data/test_resident.py -k equal_those"
TRITON = "tests/kernels/test_triton.py -k shuffled or numbers"
STREAMS = "tests/kernels/test_random_streams.py"
FAULTS = [
    Fault(
        "padding that counts",
        RESIDENT,
        "weight = inside.float()",
        "weight = torch.ones_like(inside).float()",
        EQUAL,
    ),
    Fault(
        "weights of other triples on a device",
        RESIDENT,
        "weight *= self._shares[index]",
        "weight *= self._shares[index - 1]",
        EQUAL,
    ),
    Fault(
        "a chunk that is cut short and not repeated",
        RESIDENT,
        "device=self.device) % length",
        "device=self.device).clamp(max=width) % width",
        EQUAL,
    ),
    Fault(
        "known facts of a device forgotten",
        RESIDENT,
        "mask = facts if mask is None else mask | facts",
        "mask = facts if mask is None else mask",
        EQUAL,
    ),
    Fault(
        "triples on a device without regard to free memory",
        RESIDENT,
        "min(memory * _SHARE, free * _SHARE_OF_FREE)",
        "memory * _SHARE",
        "tests/data/test_resident.py -k has_the_memory",
    ),
    Fault(
        "heads and tails of known facts exchanged on a device",
        NEGATIVES,
        'if side == "tail":\n            wanted',
        'if side == "head":\n            wanted',
        EQUAL,
    ),
    Fault(
        "an entity without type that is of every type",
        NEGATIVES,
        "of_entity = np.full(len(counts), len(sizes))",
        "of_entity = np.full(len(counts), 0)",
        EQUAL,
    ),
    Fault(
        "entities of several types translated as if they had one",
        NEGATIVES,
        "max() > 1:",
        "max() > 9:",
        EQUAL,
    ),
    Fault(
        "answers of other relations as negatives on a device",
        NEGATIVES,
        "per_triple != triples[:, RELATION, None]",
        "per_triple == triples[:, RELATION, None]",
        EQUAL,
    ),
    Fault(
        "the only entity seen with a relation as its negative on a device",
        NEGATIVES,
        "torch.where(count > 1, entities",
        "torch.where(count > 0, entities",
        EQUAL,
    ),
    Fault(
        "sums of weights before an entity in place of those with it",
        "data/negatives.py",
        "return sums[1:]",
        "return sums[:-1]",
        EQUAL,
    ),
    Fault(
        "a sign that is shifted in",
        "kernels/random_formulas.py",
        "return (values >> count).bitwise_and_((1 << (64 - count)) - 1)",
        "return values >> count",
        STREAMS,
    ),
    Fault(
        "upper bits of a product without the carry",
        "kernels/random_formulas.py",
        "+ _shifted(middle, 32)",
        "+ 0 * middle",
        STREAMS,
    ),
    Fault(
        "a Triton kernel that walks once",
        "kernels/triton_streams.py",
        "while tl.max(outside.to(tl.int32), 0) > 0:",
        "if tl.max(outside.to(tl.int32), 0) > 0:",
        TRITON,
    ),
    Fault(
        "the first number of a chunk twice in a Triton kernel",
        "kernels/triton_streams.py",
        "tl.store(start + 1, (b >> 11)",
        "tl.store(start + 1, (a >> 11)",
        TRITON,
    ),
]
