"""Adam steps with another first beta, and says its own at all other times."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, NAdam

from lightning_topk import attach
from lightning_topk.runtime.beta1 import Beta1, override_beta1
from lightning_topk.runtime.residuals import Residuals

OWN = (0.9, 0.95)


class Lender:
    """Somebody who asks for a beta1."""


class Derived(AdamW):
    def step(self, *, closure=None):
        return super().step(closure)


class Twice(AdamW):
    """Evaluates its closure twice."""

    def step(self, closure=None):
        closure()
        return closure()


class Scaled(Adam):
    """Has a step that takes something else first."""

    def step(self, scale=None, closure=None):
        assert scale in (None, 2.0)
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["betas"][0] * parameter.grad
        return loss


def stepped(optimizer, parameter, gradients, way="bare"):
    """Steps as training loops do it; the groups must say their own in closures and afterwards."""
    for gradient in gradients:

        def closure(gradient=gradient):
            assert all(group["betas"] == OWN for group in optimizer.param_groups)
            parameter.grad = gradient.clone()
            return gradient.sum()

        if way in ("bare", "scaled"):
            closure()
            optimizer.step(*([2.0] if way == "scaled" else []))
        else:
            loss = optimizer.step(closure) if way == "closure" else optimizer.step(closure=closure)
            assert loss == gradient.sum()
        assert all(group["betas"] == OWN for group in optimizer.param_groups)
        assert all(group["betas"] == OWN for group in optimizer.state_dict()["param_groups"])
    return parameter.detach()


def gradients():
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


WAYS = {
    Adam: ("bare", "closure", "keyword"),
    AdamW: ("bare", "closure", "keyword"),
    Derived: ("bare", "keyword"),
    Scaled: ("bare", "keyword", "scaled"),
}


@pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind, ways in WAYS.items() for way in ways])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True, "foreach": True}])
def test_adam_steps_as_if_made_with_the_beta1_that_was_asked_for(kind, options, way):
    one, other, requester = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7)), Lender()
    optimizer = kind([one], lr=0.1, betas=OWN, **options)
    override_beta1([optimizer, SGD([other], lr=0.1)], 0.5, requester)
    wanted = kind([other], lr=0.1, betas=(0.5, OWN[1]), **options)
    for gradient in gradients():
        other.grad = gradient.clone()
        wanted.step()
    assert torch.equal(stepped(optimizer, one, gradients(), way), other.detach())


@pytest.mark.parametrize("end", [Beta1.withdraw, None])
def test_adam_steps_with_its_own_beta1_when_the_lender_takes_it_back_or_is_gone(end):
    one, other, requester = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7)), Lender()
    optimizer, alone = (AdamW([parameter], lr=0.1, betas=OWN) for parameter in (one, other))
    override_beta1([optimizer], 0.0, requester)
    if end is not None:
        end([optimizer], requester)
    del requester
    gc.collect()
    assert torch.equal(stepped(optimizer, one, gradients()), stepped(alone, other, gradients()))


def used(optimizer) -> list[float]:
    """The betas with which the groups step."""
    seen = []
    handle = optimizer.register_step_pre_hook(lambda o, *_: seen.extend(group["betas"][0] for group in o.param_groups))
    optimizer.step()  # hooks are called in order: what is lent is seen by this one
    handle.remove()
    return seen


def test_every_lender_lends_only_to_groups_with_compressed_parameters():
    parameters, requester, other = [nn.Parameter(torch.ones(3)) for _ in range(3)], Lender(), Lender()
    optimizer = AdamW([{"params": [p]} for p in parameters], betas=OWN)
    (words,) = override_beta1([optimizer], 0.0, requester, {parameters[0]})
    assert "AdamW steps with a beta1 of 0 instead of its own" in words
    assert override_beta1([optimizer], 0.9, other, {parameters[1]}) == []  # it has that already
    assert used(optimizer) == [0.0, 0.9, 0.9]
    override_beta1([optimizer], 0.3, other, {parameters[1]})
    assert used(optimizer) == [0.0, 0.3, 0.9]
    Beta1.withdraw([optimizer], requester)
    assert used(optimizer) == [0.9, 0.3, 0.9]


def test_optimizers_other_than_torchs_adam_are_unchanged_and_that_is_said():
    parameter, requester = nn.Parameter(torch.ones(3)), Lender()
    (words,) = override_beta1([NAdam([parameter])], 0.0, requester)
    assert "NAdam is unchanged" in words
    assert override_beta1([SGD([parameter], lr=0.1)], 0.0, requester) == []
    assert "SGD is unchanged" in override_beta1([SGD([parameter], lr=0.1)], 0.0, requester, asked=True)[0]
    assert override_beta1([AdamW([parameter])], 0.0, requester, asked=True) == []


def failed() -> tuple[Adam, Lender]:
    """An optimizer whose last update raised an error half-way."""
    parameter, requester = nn.Parameter(torch.ones(2, 2)), Lender()
    optimizer = Adam([parameter], betas=OWN)
    override_beta1([optimizer], 0.0, requester)
    parameter.grad = torch.eye(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    parameter.grad = torch.eye(2)
    return optimizer, requester


def test_an_update_that_failed_leaves_nothing_behind():
    optimizer, _lender = failed()
    assert optimizer.state_dict()["param_groups"][0]["betas"] == OWN
    assert used(optimizer) == [0.0]
    assert optimizer.param_groups[0]["betas"] == OWN

    optimizer, _lender = failed()
    loaded = optimizer.state_dict()
    loaded["param_groups"][0]["betas"] = (0.8, 0.98)
    optimizer.load_state_dict(loaded)
    assert used(optimizer) == [0.0]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.98)

    optimizer, requester = failed()
    Beta1.withdraw([optimizer], requester)
    assert used(optimizer) == [0.9]


def test_two_lenders_do_not_lend_on_top_of_each_other():
    parameter, lenders, seen = nn.Parameter(torch.ones(3)), [Lender(), Lender()], []
    for kind in (Derived, Twice):
        optimizer = kind([parameter], betas=OWN)
        AdamW([parameter])  # so that torch calls hooks in AdamW.step, and in that of Derived once more
        for requester, beta1 in zip(lenders, (0.0, 0.5), strict=True):
            override_beta1([optimizer], beta1, requester)
        for _ in range(2):
            parameter.grad = torch.ones(3)
            optimizer.step(closure=lambda groups=optimizer.param_groups: seen.append(groups[0]["betas"]))
            assert optimizer.param_groups[0]["betas"] == OWN
    assert set(seen) == {OWN}, "a closure saw what was lent"


def test_schedules_and_betas_as_tensors_are_kept():
    parameter, requester = nn.Parameter(torch.ones(3)), Lender()
    optimizer = AdamW([parameter], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    alone = torch.optim.lr_scheduler.OneCycleLR(AdamW([nn.Parameter(torch.ones(3))], lr=0.1), 0.1, total_steps=5)
    override_beta1([optimizer], 0.0, requester)
    for _ in range(4):
        parameter.grad = torch.ones(3)
        assert used(optimizer) == [0.0]
        alone.optimizer.step()
        assert optimizer.param_groups[0]["betas"] == alone.optimizer.param_groups[0]["betas"]
        schedule.step()
        alone.step()
    own = torch.tensor(0.9), torch.tensor(0.99)
    optimizer = Adam([parameter], betas=own, capturable=True, foreach=False)
    override_beta1([optimizer], 0.0, requester)
    group = optimizer.param_groups[0]
    Beta1.of(optimizer).prepare(optimizer)  # to step with these needs CUDA
    assert group["betas"][0] == 0
    assert isinstance(group["betas"][0], torch.Tensor)
    Beta1.of(optimizer).reset()
    assert group["betas"][0] is own[0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_changes_nothing_and_the_next_is_lent(fused):
    one, other, requester = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)), Lender()
    optimizer = AdamW([one], lr=0.1, betas=OWN, fused=fused)
    wanted = AdamW([other], lr=0.1, betas=(0.0, OWN[1]), fused=fused)
    override_beta1([optimizer], 0.0, requester)
    for steps in (optimizer, wanted):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        (parameter,) = steps.param_groups[0]["params"]
        for factor in (1.0, float("inf"), 2.0):
            steps.zero_grad()
            scaler.scale((parameter * factor).square().sum()).backward()
            scaler.step(steps)
            scaler.update()
    assert optimizer.param_groups[0]["betas"] == OWN
    assert one.isfinite().all()
    assert torch.equal(one, other)


def trained(rank: int, world: int, settings: dict, own: float) -> tuple[list[float], list[float], list[str]]:
    """The weights after six steps, the beta1 of each, and what was said of it; the model is wrapped anew half-way."""
    said: list[str] = []
    seen: list[float] = []
    torch.manual_seed(0)
    net = nn.Linear(40, 40)
    optimizer = AdamW(net.parameters(), lr=0.1, betas=(own, 0.99))
    residuals, state = Residuals(), None
    for _ in range(2):
        ddp, last = DistributedDataParallel(net), state
        common = {"residuals": residuals, "announce": said.append}
        state = attach(ddp, optimizer=optimizer, **common | (settings or {"saving": 20}))
        if last is not None:
            state.follow(last)
        for _ in range(3):
            generator = torch.Generator().manual_seed(10 * residuals.progress.steps + rank)
            optimizer.zero_grad()
            ddp(torch.randn(4, 40, generator=generator)).square().mean().backward()
            seen += used(optimizer)
            assert optimizer.param_groups[0]["betas"] == (own, 0.99)
        state.close()
    weights = net.weight.flatten().tolist()
    assert used(optimizer) == [own]
    return weights, seen, [line for line in said if "beta1" in line]


def test_a_saving_lends_adam_a_beta1_of_zero(groups):
    group = groups(2)
    found = {
        name: group.run(trained, settings, own)
        for name, (settings, own) in {
            "default": ({}, 0.9),
            "asked for": ({"saving": 20, "beta1": 0.0}, 0.9),
            "its own": ({}, 0.0),
            "kept": ({"saving": 20, "beta1": 0.9}, 0.9),
            "ratio": ({"ratio": 0.05}, 0.9),
            "ratio, its own": ({"ratio": 0.05, "beta1": 0.9}, 0.9),
            "ratio, asked for": ({"ratio": 0.05, "beta1": 0.0}, 0.9),
            "corrected": ({"momentum": 0.9, "beta1": 0}, 0.9),
            "automatic": ({"topology": "auto"}, 0.9),
            "automatic, its own": ({"topology": "auto", "beta1": 0.9}, 0.9),
        }.items()
    }
    for ranks in found.values():
        assert ranks[0][:2] == ranks[1][:2]
        assert ranks[1][2] == []
    weights, betas, said = ({name: ranks[0][part] for name, ranks in found.items()} for part in range(3))
    assert weights["default"] == weights["asked for"] == weights["its own"] != weights["kept"]
    for name in ("default", "asked for", "ratio, asked for", "corrected"):
        assert betas[name] == [0.0] * 6
    for name in ("kept", "ratio", "ratio, its own", "automatic", "automatic, its own"):
        assert betas[name] == [0.9] * 6
    assert all("instead of its own" in words for words in said.pop("default"))
    assert all("beta1=0 often learns better" in words for words in said.pop("ratio"))
    assert any("If gradients are compressed, error feedback averages" in words for words in said.pop("automatic"))
    assert not any(said.values())


def quiet(rank: int, world: int) -> list[str]:
    said: list[str] = []
    state = attach(DistributedDataParallel(nn.Linear(9, 9)), announce=said.append)
    state.close()
    state = attach(torch.compile(DistributedDataParallel(nn.Linear(9, 9))))  # as Accelerate's prepare may return it
    assert state.world == world
    state.close()
    with pytest.raises(ValueError, match="pass optimizer= to attach"):
        attach(DistributedDataParallel(nn.Linear(9, 9)), beta1=0.0)
    return said


def test_without_the_optimizer_a_saving_says_that_adam_keeps_its_beta1(groups):
    (said, other) = groups(2).run(quiet)
    assert any("attach was called without optimizer=" in words for words in said)
    assert other == []
