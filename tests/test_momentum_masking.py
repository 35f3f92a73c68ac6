"""Where an entry arrives, SGD's momentum of it ends; everywhere else it goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from lightning_topk import TopKConfig, attach
from lightning_topk.lab.training import Optimizer, train
from lightning_topk.runtime.updates import before_update, has_momentum, mask_momentum

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
    handle = before_update(optimizer, mask_momentum)
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

    handle.remove()
    parameter.grad, before = torch.ones(4), optimizer.state[parameter]["momentum_buffer"].clone()
    optimizer.step()
    assert (optimizer.state[parameter]["momentum_buffer"] - before * 0.9).abs().min() > 0.5  # 1 came on top of it


def test_only_compressed_parameters_lose_momentum():
    compressed, other, idle = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = SGD([{"params": [compressed]}, {"params": [other, idle]}], lr=0.1, momentum=0.9)
    for parameter in (compressed, other, idle):
        parameter.grad = torch.ones(2)
    optimizer.step()
    idle.grad = None
    mask_momentum(optimizer, {compressed, idle})
    assert [optimizer.state[p]["momentum_buffer"].tolist() for p in (compressed, other, idle)] == [
        [0, 0],
        [1, 1],
        [1, 1],
    ]


def test_a_sparse_gradient_is_refused_in_words():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(embedding.parameters(), lr=0.1, momentum=0.9)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="momentum_masking=True needs dense gradients"):
        mask_momentum(optimizer)


def test_it_is_sgds_momentum_that_is_masked():
    parameter = nn.Parameter(torch.ones(2))
    assert has_momentum(SGD([parameter], lr=0.1, momentum=0.9))
    assert not has_momentum(SGD([parameter], lr=0.1))
    assert not has_momentum(Adam([parameter]))


def test_what_the_settings_mean():
    assert not TopKConfig().masks_momentum
    assert TopKConfig(momentum_masking=True).masks_momentum
    assert not TopKConfig(momentum_masking=True, momentum=0.9).masks_momentum  # that of the worker is masked
    assert not TopKConfig(momentum_masking=True).dense.masks_momentum
    for automatic in ({"topology": "auto"}, {"ratio": "auto"}):
        with pytest.raises(ValueError, match="momentum_masking=True ends the momentum of what is delivered"):
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
    assert "SGD has none" in said[0]
    assert other == []


def refused(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match="pass optimizer= to attach") as error:
        attach(DistributedDataParallel(nn.Linear(9, 9)), momentum_masking=True)
    return str(error.value)


def test_masking_needs_the_optimizer(groups):
    assert "masks the optimizer's momentum" in groups(2).run(refused)[0]
