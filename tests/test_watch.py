"""Warnings of what trains badly without an error: each comes once, on rank 0, and only where its cause is."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from groups import on_ranks
from ranks import attach, attached, batch, four_layers, loss_of, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

Say = Callable[[str], None]


def sgd(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.1, momentum=0.9)


def bypassed(rank: int, say: Say, case: str) -> None:
    """The model was wrapped a second time for attach, or training calls the module inside of the wrapper."""
    net = four_layers()
    model, optimizer = DistributedDataParallel(net), sgd(net)
    exchanged, _ = attached(net, ratio=0.1, optimizer=optimizer, announce=say)
    optimizer.step()  # without gradients, as some users do before they make a scheduler
    for _ in range(2):
        net.zero_grad()
        get_state_dict(net, optimizer)  # steps with zeros if there is no momentum yet
        optimizer.state.clear()
    train({"wrapped twice": model, "inside": net, "attached": exchanged}[case], rank, (0, 1), optimizer)
    train(exchanged, rank, (2,), optimizer)


def left_out(rank: int, say: Say, case: str) -> None:
    """Some trained parameters are in no optimizer."""
    net = four_layers()
    net[0].requires_grad_(case != "frozen")
    optimizers = [sgd(net if case == "all" else net[1:])]
    options = {"dense_parameters": "0.*"} if case == "dense" else {}
    model, _ = attached(net, ratio=0.1, optimizer=lambda: optimizers, announce=say, **options)
    loss_of(model, rank, 0).backward()
    if case == "in another optimizer":
        optimizers.append(sgd(net[0]))
        loss_of(model, rank, 1).backward()


def of_other_ranks(rank: int, say: Say, case: str) -> None:
    """Each rank's inner optimizer steps the rank's own parameters. It may be passed as a function."""
    net = four_layers()
    sharded = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1, momentum=0.9)
    inner = {"passed": sharded.optim, "returned": lambda: [sharded.optim], "later on a rank": lambda: several}[case]
    several = [sharded.optim] * rank
    model, _ = attached(net, ratio=0.1, optimizer=inner, announce=say)
    several = [sharded.optim]
    train(model, rank, range(4), sharded)


def over_two_models(rank: int, say: Say, case: str) -> None:
    """An optimizer steps two attached models, of which one is trained later; or each has its own optimizer."""
    nets = [four_layers(), four_layers()]
    both = sgd(nn.ModuleList(nets)) if case == "one optimizer" else None
    mine = [both or sgd(net) for net in nets]
    models = [attached(net, ratio=0.1, optimizer=each, announce=say)[0] for net, each in zip(nets, mine, strict=True)]
    for step, model in enumerate((models[0], models[0], *models, *models)):
        train(model, rank, (step,), mine[model is models[1]])


def with_a_shared_trunk(rank: int, say: Say, case: str) -> None:
    """An optimizer steps two attached models that share a layer, and are trained in turn."""
    trunk = nn.Linear(20, 20)
    nets = [nn.Sequential(trunk, nn.Linear(20, width)) for width in (3, 5)]
    optimizer = SGD({p: None for net in nets for p in net.parameters()}, lr=0.1)
    models = [attached(net, ratio=0.1, optimizer=optimizer, announce=say)[0] for net in nets]
    for step in range(4):
        train(models[step % 2], rank, (step,), optimizer)


def replaced(rank: int, say: Say, case: str) -> None:
    """An optimizer that was not passed takes steps: another one from some step on, or all of them."""
    net = four_layers()
    used = [sgd(net)]
    passed = {"never passed": list, "returned": lambda: used}.get(case, used[0])
    model, _ = attached(net, ratio=0.1, optimizer=passed, adapt_momentum=case != "not adapted", announce=say)
    train(model, rank, range(2 * (case != "before")), used[0] if case != "never passed" else None)
    used[0] = Adam(net.parameters())
    if case == "wrapped":  # as ZeroRedundancyOptimizer steps its inner optimizer
        passed.register_step_pre_hook(lambda *_: used[0].step())
    train(model, rank, range(2, 7), passed if case == "wrapped" else used[0])


def sparse(rank: int, say: Say, case: str) -> None:
    net = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 1))
    model, _ = attached(net, {"bucket_cap_mb": 0.0001}, saving=5, adapt_momentum=False, announce=say)
    for _ in range(3):
        model(torch.tensor([rank, 7])).sum().backward()


def zeroed(rank: int, say: Say, case: str) -> None:
    """A GAN in one DDP model, whose first loss goes through both networks."""
    made, judged = nets = nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 1)])
    both = [SGD(net.parameters(), lr=0.1) for net in nets]
    model, state = attached(nets, {"find_unused_parameters": True}, ratio=0.2, optimizer=both, announce=say)
    for step, (net, optimizer) in itertools.product(range(3), zip(nets, both, strict=True)):
        judged.requires_grad_(net is judged or case in ("adding up", "throwing away"))
        nets.forward = (lambda x: judged(made(x))) if net is made else judged.forward
        loss = loss_of(model, rank, step)
        if case != "adding up":
            optimizer.zero_grad()
        loss.backward()
        if case != "skipping a step" or step != 1:
            optimizer.step()
    state.close()
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in nets.parameters())


def looked_at(rank: int, say: Say, case: str) -> None:
    """A user computes gradients for their own use, as GradNorm does, around the backward pass that is exchanged."""
    net = four_layers()
    optimizer = sgd(net)
    model, _ = attached(net, ratio=0.1, optimizer=optimizer, announce=say)
    for step in range(3):
        net.zero_grad()
        loss = loss_of(model, rank, step)
        if case == "before backward":
            torch.autograd.grad(loss, net[0].weight, retain_graph=True)
        loss.backward(retain_graph=True)
        if case == "before the step":
            torch.autograd.grad(loss, net[0].weight)
        optimizer.step()


def scaled(rank: int, say: Say, case: tuple[bool, bool, tuple[int, ...], dict[str, Any]]) -> None:
    """A scaler skips the first steps, a later one, or none while its scale grows."""
    passed, fused, infinite, settings = case
    net, scaler = four_layers(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
    model, _ = attached(net, optimizer=optimizer, scaler=scaler if passed else None, announce=say, **settings)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step) * (torch.inf if step in infinite and rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


def copied(rank: int, say: Say, case: str) -> None:
    """bf16 parameters, whose gradients a loop copies to fp32 parameters."""
    net = nn.Linear(20, 40).bfloat16()
    copies = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    optimizer = SGD(copies, lr=0.05, momentum=0.9)
    model, _ = attached(net, saving=20, optimizer=optimizer, announce=say)
    for step in range(3):
        model(batch(rank, step).bfloat16()).sum().backward()
        for own, p in zip(copies, net.parameters(), strict=True):
            own.grad = p.grad.float()
        net.zero_grad()
        optimizer.step()


def in_turn(rank: int, say: Say, shares: bool) -> None:
    """Two networks are used in turn, with a shared part or without."""
    torch.manual_seed(0)
    parts = [nn.Linear(20, 20) if shares else nn.Identity(), nn.Sequential(nn.Linear(20, 400), nn.Linear(400, 20))]
    net = nn.ModuleList([*parts, nn.Linear(20, 40)])
    net.forward = lambda x, second: net[1 + second](net[0](x))
    optimizers = [Adam([*net[0].parameters(), *head.parameters()], lr=1e-3) for head in net[1:]]
    model, _ = attached(net, {"find_unused_parameters": True}, saving=20, optimizer=optimizers, announce=say)
    for step in range(4):
        net.zero_grad()
        loss_of(model, rank, step, second=step % 2).backward()
        optimizers[step % 2].step()


def outside(rank: int, say: Say, case: str) -> None:
    """The model gets another layer after DDP has wrapped it, or a frozen one is trained."""
    net = four_layers()
    net[0].requires_grad_(case != "unfrozen")
    ignored = ["4.weight", "4.bias"] if case == "ignored" else []
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    model, optimizers = DistributedDataParallel(net), [sgd(net)]
    if case in ("before attach", "ignored", "frozen"):
        net.append(nn.Linear(20, 20).requires_grad_(case != "frozen"))
        optimizers[0].add_param_group({"params": net[4].parameters()})
    attach(model, ratio=0.1, optimizer=lambda: optimizers, announce=say)
    for step in range(4):
        if step == 2 and case == "after attach":
            net.append(nn.Linear(20, 20))
            optimizers[0] = sgd(net)
        net[0].requires_grad_(case != "unfrozen" or step > 1)
        train(model, rank, (step,), optimizers[0])


def synchronised_late(rank: int, say: Say, case: str) -> None:
    """Gradients are accumulated, and the exchange is switched on before the last backward pass, or its forward pass."""
    net = four_layers()
    optimizer = sgd(net)
    model, _ = attached(net, ratio=0.1, optimizer=optimizer, announce=say)
    for step in range(6):
        last = step % 2 == 1
        model.require_backward_grad_sync = last and (case == "in time" or step == 1)
        loss = loss_of(model, rank, step)
        model.require_backward_grad_sync = last
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def accumulated(rank: int, say: Say, case: str) -> None:
    """Two backward passes a step, of which one is exchanged."""
    net = four_layers()
    optimizer = sgd(net)
    model, _ = attached(net, ratio=0.1, optimizer=optimizer, announce=say)
    for step in range(2):
        optimizer.zero_grad()
        for number in (0, 1):
            with nullcontext() if number == (case == "exchanged last") else model.no_sync():
                loss_of(model, rank, 2 * step + number).backward()
        optimizer.step()


WARNINGS = {
    "outside": "DDP does not reduce ",
    "drift": "SGD took a step with gradients that were not exchanged",
    "bypassed": "SGD took a step, but no gradient was exchanged since attach",
    "left out": "2 of 8 trained parameters ('0.weight' for one) are in no optimizer that was passed to attach.",
    "copies": "2 of 2 trained parameters ('weight' for one) are in no optimizer, but optimizers have tensors",
    "other": "Adam takes steps, but was not passed as optimizer=",
    "sparse": "DDP would send only the rows that a batch touches",
    "zeroed": "was zeroed after its exchange and before its optimizer's step",
    "unequal": "the ranks' optimizers have different parameters",
    "shared": "SGD steps several attached models",
    "scaler": "a GradScaler scales the loss, but attach got no scaler=",
}
SOME, ALL = {"ratio": 0.1}, {"ratio": 1.0, "wire": "fp32"}
CASES = [
    *((bypassed, case, "bypassed") for case in ("wrapped twice", "inside")),
    (bypassed, "attached", None),
    *((left_out, case, "left out") for case in ("some", "in another optimizer")),
    *((left_out, case, None) for case in ("all", "frozen", "dense")),
    *((of_other_ranks, case, "unequal") for case in ("passed", "returned")),
    (of_other_ranks, "later on a rank", None),
    (over_two_models, "one optimizer", "shared"),
    (over_two_models, "two optimizers", None),
    (with_a_shared_trunk, "", "shared"),
    *((replaced, case, "other") for case in ("before", "after", "never passed")),
    *((replaced, case, None) for case in ("returned", "wrapped", "not adapted")),
    (sparse, "", "sparse"),
    *((zeroed, case, "zeroed") for case in ("throwing away", "skipping a step")),
    *((zeroed, case, None) for case in ("toggling", "adding up")),
    *((looked_at, case, None) for case in ("before backward", "before the step")),
    *((scaled, (False, *each, SOME), "scaler") for each in ((False, (0, 1)), (False, (3,)), (True, ()))),
    *((scaled, (True, fused, (3,), SOME), None) for fused in (False, True)),
    (scaled, (False, False, (3,), ALL), None),
    (scaled, (False, False, (3,), ALL | {"clip_norm": 1.0}), "scaler"),
    (copied, "", "copies"),
    *((in_turn, shares, None) for shares in (True, False)),
    *((outside, case, "outside") for case in ("before attach", "after attach", "unfrozen")),
    *((outside, case, None) for case in ("ignored", "frozen")),
    (synchronised_late, "too late", "drift"),
    (synchronised_late, "in time", None),
    (accumulated, "exchanged first", "drift"),
    (accumulated, "exchanged last", None),
]
"""A scenario, its case, and the one warning that it gives."""


@pytest.mark.parametrize(("scenario", "case", "warning"), CASES)
@on_ranks(2)
def test_a_warning_comes_once_on_one_rank_where_its_cause_is(rank, world, scenario, case, warning):
    said: list[str] = []
    scenario(rank, said.append, case)
    found = [name for line in said for name, words in WARNINGS.items() if words in line]
    assert found == [warning] * (warning is not None and rank == 0), said
