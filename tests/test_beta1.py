"""Adam steps with another first beta, and says its own at all other times."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, NAdam

from lightning_topk import attach
from lightning_topk.beta1 import lend_beta1, take_back_beta1
from lightning_topk.residuals import Residuals

OWN = (0.9, 0.95)


class Lender:
    """Somebody who lends."""


class Derived(AdamW):
    def step(self, closure=None):
        return super().step(closure)


def stepped(optimizer, parameter, gradients, way="bare"):
    """Steps as training loops do it; the groups must say their own in closures and afterwards."""
    for gradient in gradients:

        def closure(gradient=gradient):
            assert all(group["betas"] == OWN for group in optimizer.param_groups)
            parameter.grad = gradient.clone()
            return gradient.sum()

        if way == "bare":
            closure()
            optimizer.step()
        else:
            loss = optimizer.step(closure) if way == "closure" else optimizer.step(closure=closure)
            assert loss == gradient.sum()
        assert all(group["betas"] == OWN for group in optimizer.param_groups)
        assert all(group["betas"] == OWN for group in optimizer.state_dict()["param_groups"])
    return parameter.detach()


def gradients():
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("way", ["bare", "closure", "keyword"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(Adam, {}), (AdamW, {"fused": True}), (AdamW, {"amsgrad": True, "foreach": True}), (Derived, {})],
)
def test_it_steps_as_with_the_beta1_that_it_was_lent(kind, options, way):
    one, other, lender = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7)), Lender()
    optimizer = kind([one], lr=0.1, betas=OWN, **options)
    assert lend_beta1([optimizer, SGD([other], lr=0.1)], 0.5, lender) == [optimizer]
    wanted = kind([other], lr=0.1, betas=(0.5, OWN[1]), **options)
    for gradient in gradients():
        other.grad = gradient.clone()
        wanted.step()
    assert torch.equal(stepped(optimizer, one, gradients(), way), other.detach())


@pytest.mark.parametrize("end", [take_back_beta1, None])
def test_it_steps_with_its_own_when_the_lender_takes_it_back_or_is_gone(end):
    one, other, lender = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7)), Lender()
    optimizer, alone = (AdamW([parameter], lr=0.1, betas=OWN) for parameter in (one, other))
    lend_beta1([optimizer], 0.0, lender)
    if end is not None:
        end([optimizer], lender)
    del lender
    gc.collect()
    assert torch.equal(stepped(optimizer, one, gradients()), stepped(alone, other, gradients()))


def test_groups_of_spared_parameters_and_other_optimizers_keep_theirs():
    parameters, lender = [nn.Parameter(torch.ones(3)) for _ in range(3)], Lender()
    optimizer = AdamW([{"params": [p]} for p in parameters], betas=OWN)
    other = NAdam([parameters[0]])
    assert lend_beta1([optimizer, other], 0.0, lender, {parameters[1]}) == [optimizer]
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.extend(group["betas"][0] for group in o.param_groups))
    optimizer.step()
    assert seen == [0.0, 0.9, 0.0]
    assert lend_beta1([optimizer], 0.9, lender) == []  # it has that already


def test_a_checkpoint_of_an_update_that_failed_holds_its_own():
    parameter, lender = nn.Parameter(torch.ones(2, 2)), Lender()
    optimizer = Adam([parameter], betas=OWN)
    lend_beta1([optimizer], 0.0, lender)
    parameter.grad = torch.eye(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["betas"] == OWN
    parameter.grad = torch.eye(2)
    optimizer.step()
    assert optimizer.param_groups[0]["betas"] == OWN


def trained(rank: int, world: int, settings: dict) -> tuple[list[float], list[str], list[str]]:
    """The weights after six steps, what was said, and what a state that goes on says."""
    said: list[list[str]] = [[], []]
    torch.manual_seed(0)
    net = nn.Linear(40, 40)
    own = settings.pop("own", 0.9)
    optimizer = AdamW(net.parameters(), lr=0.1, betas=(own, 0.99))
    residuals = Residuals()
    for words in said:
        ddp = DistributedDataParallel(net)
        common = {"ratio": 0.01, "planned_steps": 6, "residuals": residuals, "announce": words.append}
        state = attach(ddp, optimizer=optimizer, **common | settings)
        for _ in range(3):
            generator = torch.Generator().manual_seed(10 * residuals.steps + rank)
            optimizer.zero_grad()
            ddp(torch.randn(4, 40, generator=generator)).square().mean().backward()
            optimizer.step()
            assert optimizer.param_groups[0]["betas"] == (own, 0.99)
        state.close()
    return net.weight.flatten().tolist(), *[[line for line in lines if "beta1" in line] for lines in said]


def test_the_default_recipe_lends_adam_a_beta1_of_zero_and_says_so_once(groups):
    group = groups(2)
    found = {
        name: group.run(trained, settings)
        for name, settings in {
            "default": {},
            "asked for": {"beta1": 0.0},
            "its own": {"own": 0.0},
            "kept": {"beta1": 0.9},
            "no plan": {"planned_steps": None, "wire": "int4"},
        }.items()
    }
    weights = {name: ranks[0][0] for name, ranks in found.items()}
    for ranks in found.values():
        assert ranks[0][0] == ranks[1][0]
    assert weights["default"] == weights["asked for"] == weights["its own"] != weights["kept"]
    (_, first, later), (_, other, _) = found["default"]
    assert len(first) == 1
    assert "AdamW steps with a beta1 of 0 instead of its own" in first[0]
    assert later == other == []
    for name in ("its own", "kept", "no plan"):
        assert found[name][0][1] == []
