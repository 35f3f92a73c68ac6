"""Where an entry arrives, SGD's momentum of it ends; everywhere else it goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, RMSprop

from lightning_topk import TopKConfig, attach
from lightning_topk.lab.training import Optimizer, train
from lightning_topk.runtime.masking import Masking, mask_momentum


class Requester:
    """Somebody who exchanges gradients."""


GRADIENTS = torch.tensor([[1.0, 0, 2, 0], [0, 3, 2, 0], [0, 0, 2, -1], [4, 0, 0, 0]])


def literal(gradients, lr, momentum, nesterov=False, decay=0.0):
    """SGD whose momentum starts anew where something arrives, entry by entry."""
    weights, velocity = [1.0] * 4, [0.0] * 4
    for gradient in gradients.tolist():
        for n, arrived in enumerate(gradient):
            given = arrived + decay * weights[n]
            velocity[n] = given + (momentum * velocity[n] if arrived == 0 else 0.0)
            weights[n] -= lr * (given + momentum * velocity[n] if nesterov else velocity[n])
    return torch.tensor(weights)


@pytest.mark.parametrize("way", ["bare", "closure", "keyword"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"nesterov": True}, {"weight_decay": 0.1}])
def test_masked_sgd_is_the_literal_algorithm(options, way):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9, **options)
    requester = Requester()
    mask_momentum([optimizer], requester)
    for gradient in GRADIENTS:

        def closure(gradient=gradient):
            parameter.grad = gradient.clone()
            return gradient.sum()

        if way == "bare":
            closure()
            optimizer.step()
        else:
            assert (optimizer.step(closure) if way == "closure" else optimizer.step(closure=closure)) == gradient.sum()
    wanted = literal(GRADIENTS, 0.1, 0.9, "nesterov" in options, options.get("weight_decay", 0.0))
    torch.testing.assert_close(parameter.detach(), wanted)


def momenta(optimizer, parameters) -> list[list[float]]:
    return [optimizer.state[p]["momentum_buffer"].tolist() for p in parameters]


def test_each_requester_masks_the_parameters_that_it_exchanges():
    one, other, third, idle = parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizer = SGD([{"params": [one]}, {"params": [other, third, idle]}], lr=0.1, momentum=0.5)
    first, second = Requester(), Requester()
    assert mask_momentum([optimizer], first, {one, idle}) == mask_momentum([optimizer], second, {other}) == []
    for step in range(2):
        for parameter in parameters:
            parameter.grad = None if step and parameter is idle else torch.ones(2)
        optimizer.step()
    assert momenta(optimizer, parameters) == [[1, 1], [1, 1], [1.5, 1.5], [1, 1]]
    Masking.withdraw([optimizer], first)
    del second  # it is gone
    optimizer.step()
    assert momenta(optimizer, parameters) == [[1.5, 1.5], [1.5, 1.5], [1.75, 1.75], [1, 1]]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_leaves_momentum_as_it_was(fused):
    parameter, requester = nn.Parameter(torch.ones(4)), Requester()
    optimizer = SGD([parameter], lr=0.1, momentum=0.5, fused=fused)
    mask_momentum([optimizer], requester)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    for gradient in ([1.0, 0, 2, 0], [torch.inf, 1, 1, 0], [0, 0, 1, 0]):
        optimizer.zero_grad()
        scaler.scale((parameter * torch.tensor(gradient)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += momenta(optimizer, [parameter])
    assert seen == [[1, 0, 2, 0], [1, 0, 2, 0], [0.5, 0, 1, 0]]


def test_momentum_that_is_not_finite_ends_too():
    parameter, requester = nn.Parameter(torch.ones(2)), Requester()
    optimizer = SGD([parameter], lr=0.1, momentum=0.5)
    mask_momentum([optimizer], requester)
    for gradient in ([torch.inf, 1], [1.0, 0]):
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    assert momenta(optimizer, [parameter]) == [[1, 0.5]]


def test_a_sparse_gradient_is_refused_in_words():
    embedding, requester = nn.Embedding(4, 2, sparse=True), Requester()
    optimizer = SGD(embedding.parameters(), lr=0.1, momentum=0.9)
    mask_momentum([optimizer], requester)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="momentum_masking=True needs dense gradients"):
        optimizer.step()


def test_users_are_told_where_it_has_no_effect():
    parameter, requester = nn.Parameter(torch.ones(2)), Requester()
    for optimizer in (RMSprop([parameter], momentum=0.9), Adam([parameter])):
        (words,) = mask_momentum([optimizer], requester)
        assert f"applies to torch's SGD only; {type(optimizer).__name__} is unchanged" in words
    optimizer = SGD([parameter], lr=0.1)
    (words,) = mask_momentum([optimizer], requester)
    assert "no effect while the momentum of SGD is 0" in words
    optimizer.param_groups[0]["momentum"] = 0.5  # as a schedule may
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
    assert momenta(optimizer, [parameter]) == [[1, 1]]


def test_what_the_settings_mean():
    assert not TopKConfig().masks_momentum
    assert TopKConfig(momentum_masking=True).masks_momentum
    assert not TopKConfig(momentum_masking=True, momentum=0.9).masks_momentum  # that of the worker is masked
    assert not TopKConfig(momentum_masking=True).dense.masks_momentum
    for automatic in ({"topology": "auto"}, {"ratio": "auto"}):
        with pytest.raises(ValueError, match="momentum_masking=True zeroes the momentum of delivered entries"):
            TopKConfig(momentum_masking=True, **automatic)
    with pytest.raises(TypeError, match="momentum_masking="):
        TopKConfig(momentum_masking=1)


def test_simulated_workers_mask_too():
    def run(**settings):
        return train("mlp", TopKConfig(saving=20, **settings), 2, 20, Optimizer(0.1, 0.9), 0).loss

    assert run(momentum_masking=True) != run() == run(momentum_masking=False)
    with pytest.raises(ValueError, match="not simulated"):
        run(momentum_masking=True, dense_parameters="3.bias")


def trained(rank: int, world: int, settings: dict, momentum: float) -> tuple[list[float], list[float], list[str]]:
    """The weights after six steps, those of a plain optimizer that masks by itself, and what was said."""
    said: list[str] = []
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3))
    twins = [p.detach().clone().requires_grad_() for p in net.parameters()]
    optimizer, twin = (SGD(parameters, lr=0.1, momentum=momentum) for parameters in (net.parameters(), twins))
    ddp = DistributedDataParallel(net)
    state = attach(ddp, optimizer=optimizer, announce=said.append, saving=20, **settings)
    whole = net[1].bias if "dense_parameters" in settings else None
    for step in range(6):
        if step < 5:
            generator = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            ddp(torch.randn(4, 40, generator=generator)).square().mean().backward()
        else:
            state.close()  # momentum is the optimizer's own again; the last gradients are applied once more
        for parameter, other in zip(net.parameters(), twins, strict=True):
            other.grad = parameter.grad.clone()
            buffer = twin.state[other].get("momentum_buffer")
            if buffer is not None and step < 5 and parameter is not whole:
                buffer[other.grad != 0] = 0
        optimizer.step()
        twin.step()
    ours, wanted = ([v for p in parameters for v in p.flatten().tolist()] for parameters in (net.parameters(), twins))
    return ours, wanted, [line for line in said if "momentum" in line]


def test_momentum_ends_where_entries_are_delivered_until_the_state_is_closed(groups):
    group = groups(2)
    for settings in ({}, {"dense_parameters": "1.bias"}):
        ranks = group.run(trained, {"momentum_masking": True, **settings}, 0.9)
        for ours, wanted, said in ranks:
            assert ours == wanted
            assert said == []
        assert ranks[0][0] == ranks[1][0]
    ((_, _, said), (_, _, other)) = group.run(trained, {"momentum_masking": True}, 0.0)
    assert len(said) == 1
    assert "no effect while the momentum of SGD is 0" in said[0]
    assert other == []


def refused(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match="pass optimizer= to attach") as error:
        attach(DistributedDataParallel(nn.Linear(9, 9)), momentum_masking=True)
    return str(error.value)


def test_masking_needs_the_optimizer(groups):
    assert "masks the optimizer's momentum" in groups(2).run(refused)[0]


def advised(rank: int, world: int) -> list[list[str]]:
    words = []
    for settings, momentum, layer in (
        ({"saving": 20}, 0.9, nn.Conv2d(4, 4, 3)),
        ({"saving": 20}, 0.0, nn.Conv2d(4, 4, 3)),
        ({"saving": 20}, 0.9, nn.Linear(12, 12)),
        ({"saving": 20, "momentum_masking": False}, 0.9, nn.Conv2d(4, 4, 3)),
        ({"topology": "dense"}, 0.9, nn.Conv2d(4, 4, 3)),
        ({"saving": 20}, 0.5, nn.Linear(12, 12)),
        ({"saving": 20, "momentum_masking": False}, 0.9, nn.Linear(12, 12)),
        ({"saving": 20}, 0.5, nn.Conv2d(4, 4, 3)),
    ):
        said: list[str] = []
        optimizer = SGD(layer.parameters(), lr=0.1, momentum=momentum)
        attach(DistributedDataParallel(layer), optimizer=optimizer, announce=said.append, **settings).close()
        words.append([line for line in said if "momentum" in line])
    return words


def test_masking_is_advised_for_convolutions_and_less_momentum_for_others_where_sgd_has_much(groups):
    said, other = groups(2).run(advised)
    (convolves,), none, (heavy,), *rest = said
    assert "better on CIFAR-10 with momentum_masking=True in runs of up to ten epochs" in convolves
    assert "momentum of 0.5 at the same lr / (1 - momentum)" in heavy
    assert [none, *rest] == [[]] * 6
    assert other == [[]] * 8


def ignoring(rank: int, world: int) -> set[str]:
    net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.bias"])
    state = attach(DistributedDataParallel(net), saving=4)
    names = {state.names[p] for p in state.buckets.compressed}
    state.close()
    return names


def test_parameters_that_ddp_ignores_are_none_of_the_compressed_ones(groups):
    assert groups(2).run(ignoring)[0] == {"0.weight", "0.bias", "1.weight"}
