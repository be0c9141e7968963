"""Products of complex numbers, in the form that is fast and the one that can be compiled."""

from __future__ import annotations

import pytest
import torch
from scorer_cases import SCORERS, normal
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from kge_torchrec.kernels.operators import rotated, times
from kge_torchrec.kernels.side_rows import SideRows
from kge_torchrec.models.losses import SoftmaxLoss
from kge_torchrec.models.model import TripleObjective
from kge_torchrec.models.regularizers import Regularizers

FORMS = {
    "product": (times, 8),
    "conjugate": (lambda rows, factor: times(rows, factor, conjugate=True), 8),
    "rotation": (rotated, 4),
}


@pytest.mark.parametrize("name", FORMS)
def test_both_forms_compute_the_same_product(monkeypatch, name):
    product, width = FORMS[name]
    rows, factor = normal(3, 5, 8).requires_grad_(), normal(3, 5, width).requires_grad_()
    weight = normal(3, 5, 8)

    def value_and_gradients():
        out = product(rows, factor)
        return out, *torch.autograd.grad((out * weight).sum(), (rows, factor))

    expected = value_and_gradients()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "view_as_complex", None)
    for one, other in zip(value_and_gradients(), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture
def anew():
    """Nothing that others compiled counts here, nor the other way round."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_code_has_no_complex_numbers(anew, monkeypatch):
    """Checks forward and backward of loss and regularizers. Inductor does not fuse complex ops."""
    kinds = set()

    def look(graph, _):
        values = (node.meta.get("val") for node in graph.graph.nodes)
        kinds.update(value.dtype for value in values if isinstance(value, torch.Tensor))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled(f, backend=backend))
    model = SCORERS["rotate"](3, 8, reciprocal=False)
    nn.init.normal_(model.relations)
    objective = TripleObjective(
        model, SoftmaxLoss(), regularizers=Regularizers(n3=0.1), relation_weight=0.5
    )
    anchor, target, candidates = (torch.randn(1, n, 8).requires_grad_() for n in (4, 4, 6))
    relation, mask = torch.tensor([[0, 1, 2, 0]]), torch.ones(1, 4, 6, dtype=torch.bool)
    rows = SideRows(anchor, target, candidates)
    inputs = rows, relation, torch.ones(1, 4), mask
    losses = [objective._loss_of_side(side, *inputs) for side in ("head", "tail")]
    objective.compile_parts()
    for side, loss in zip(("head", "tail"), losses, strict=True):
        result = objective._loss_of_side(side, *inputs)
        torch.testing.assert_close(result, loss)
        leaves = anchor, target, candidates, model.relations
        for one, other in zip(torch.autograd.grad(result, leaves),
                              torch.autograd.grad(loss, leaves), strict=True):  # fmt: skip
            torch.testing.assert_close(one, other)
    assert torch.float32 in kinds and not [kind for kind in kinds if kind.is_complex]
