"""Momentum adapted to when an entry was delivered: torch's optimizers, entry by entry."""

import copy
import gc
import inspect
import math
from contextlib import nullcontext
from random import Random
from unittest import mock
from weakref import ref

import pytest
import torch
from groups import on_ranks
from lightning.pytorch.core.optimizer import LightningOptimizer
from ranks import alike, attach, attached, train, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

import lightning_topk
from lab.papers import agreement
from lightning_topk.config import TopKConfig
from lightning_topk.optim.momentum import AdaptedMomentum, adapt_momentum, kept, rule_of
from lightning_topk.optim.optimizers import check_optimizers, unwrapped

SIZE, STEPS = 64, 40


def adapted(kind, like: torch.Tensor | int = SIZE, adapts: bool = True, **options) -> tuple:
    """An optimizer and its parameter (ones, if a size is passed), adapted as long as the optimizer lives."""
    parameter = nn.Parameter(torch.ones(like) if isinstance(like, int) else like)
    optimizer = kind([parameter], **{"lr": 0.1, **options})
    optimizer.exchange = nn.Module()
    if adapts:
        adapt_momentum([optimizer], optimizer.exchange)
    return optimizer, parameter


def delivered(share: float = 0.2, steps: int = STEPS) -> list[torch.Tensor]:
    """Gradients whose entries are each present with probability ``share``."""
    generator = torch.Generator().manual_seed(0)
    drawn = [(torch.randn(SIZE, generator=generator), torch.rand(SIZE, generator=generator)) for _ in range(steps)]
    return [torch.where(chance < share, gradient, 0.0) for gradient, chance in drawn]


def literal(kind, gradients, lr, **options) -> torch.Tensor:
    """The rule alone: a delivered entry takes all steps since its last delivery, the others one with a zero gradient.

    Decay in the gradient: SGD's multiplies an entry by ``kept`` in each step, but is in the gradient, as in torch, if
    D is 1; Adam's comes with the gradient, that of all the steps. A gradient counts as D of its energy in Adam's
    second moment, and moves the entry further if signs agree.
    """
    weights, product, signs = torch.ones(SIZE, dtype=torch.float64), 1.0, torch.zeros(8, 2, dtype=torch.float64)
    b, q, largest, d = (torch.zeros(SIZE, dtype=torch.float64) for _ in range(4))
    m = options.get("momentum", 0.9) if kind is SGD else options["betas"][0]
    decay, sign = options.get("weight_decay", 0.01 if kind is AdamW else 0.0), -1 if options.get("maximize") else 1
    for t, gradient in enumerate(gradients, 1):
        here, g = gradient != 0, sign * gradient.double()
        if kind is SGD:
            a, nesterov = 1 - options.get("dampening", 0.0) * (t > 1), options.get("nesterov", False)
            own = here & (d == 0)  # torch's step
            g, gradient = torch.where(own, g + decay * weights, g), g + decay * weights
            shrunk = torch.where(own, weights, kept(lr, m, a, decay, nesterov) * weights)
            if t == 1:  # torch's step, whose momentum is forgotten where nothing was delivered
                shrunk, g = weights, gradient
        elif kind is AdamW:
            a, shrunk = 1 - m, weights * (1 - lr * decay)
        else:
            a, g, shrunk = 1 - m, torch.where(here, g + (d + 1) * decay * weights, 0.0), weights
        v = m * b + a * g
        moved = torch.where(here | ((t == 1) & (kind is SGD)), (1 - m ** (d + 1)) / (1 - m) * v, 0.0)
        if kind not in (SGD, Adamax):
            moved = further(moved, g, b, torch.where(here, d + 1, 1), signs, options.get("eps", 1e-8))
        b = torch.where(here, m**d * v, b)
        steps, d = d + 1, torch.where(here, 0, d + 1)
        if kind is SGD:
            weights = shrunk - lr * (g + m * moved if nesterov else moved)
            continue
        n = options["betas"][1]
        if kind is Adamax:
            q = torch.maximum(n * q, g.abs() + 1e-8)
            weights = shrunk - lr * moved / (1 - m**t) / q
            continue
        q = n * q + (1 - n**steps) / steps * g.square()
        if kind is NAdam:
            now, after = (m * (1 - 0.5 * 0.96 ** (0.004 * each)) for each in (t, t + 1))
            product *= now
            direct = (1 - now) / (1 - product) * g * ((1 - n**steps) / (steps * (1 - n))).sqrt()
            step = direct + after / (1 - product * after) * moved
            weights = shrunk - lr * step / ((q / (1 - n**t)).sqrt() + 1e-8)
            continue
        largest = torch.maximum(largest, q)
        root = (largest if options.get("amsgrad") else q) / (1 - n**t)
        weights = shrunk - lr * moved / (1 - m**t) / (root.sqrt() + options.get("eps", 1e-8))
    return weights


def further(moved, g, b, steps, signs, eps) -> torch.Tensor:
    """Movements, larger where gradients of D ``steps`` have the sign of the momentum, by ``signs`` counted so far."""
    surplus, counted = (signs[:, 1] - signs[:, 0]) / (signs.sum(1) + 16), torch.zeros_like(signs)
    r = math.pi * surplus.clamp(0, 0.9999).atanh()
    further = moved.clone()
    for i in ((steps > 1) & (b != 0)).nonzero().flatten().tolist():
        steps_of, same = int(steps[i]), bool(g[i] * b[i] > 0)
        place = steps_of.bit_length() - 1
        counted[place, int(same)] += 1
        if same:
            root = math.sqrt((1 + r[place] / steps_of) / (1 + r[place]))
            size = abs(g[i]) / math.sqrt(steps_of)
            further[i] *= (size + eps) / (size * root + eps)
    kept = torch.where(counted.any(1, keepdim=True), 0.95, 1.0)
    signs.mul_(kept).add_(counted)
    return further


def stepped(optimizer, parameter, gradients, call="bare") -> torch.Tensor:
    """The parameter after the steps of a training loop."""
    for gradient in gradients:

        def closure(gradient=gradient):
            parameter.grad = gradient.clone().view_as(parameter)
            return gradient.sum()

        if call == "bare":
            closure()
            optimizer.step()
        else:
            loss = optimizer.step(closure) if call == "closure" else optimizer.step(closure=closure)
            assert loss == gradient.sum()
        own = optimizer.defaults["foreach"]  # with nesterov, torch itself changes the gradient
        assert own or torch.equal(parameter.grad.flatten(), gradient), "a step changed the gradient"
    return parameter.detach().flatten()


KINDS = [
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {"momentum": 0.9, "dampening": 0.5}),
    (SGD, {"momentum": 0.8, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "maximize": True}),
    (Adam, {"betas": (0.9, 0.99)}),
    (Adam, {"betas": (0.9, 0.99), "amsgrad": True, "maximize": True}),
    (Adam, {"betas": (0.5, 0.99), "weight_decay": 0.1, "eps": 0.1}),
    (AdamW, {"betas": (0.9, 0.99), "weight_decay": 0.1}),
]
OTHERS = [(kind, {"betas": (0.9, 0.99), "weight_decay": 0.1}) for kind in (NAdam, RAdam, Adamax)]
FORMS = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize(
    ("kind", "options", "form"),
    [
        *((*each, form) for each in KINDS for form in FORMS),
        *(
            (*each, form) for each in (OTHERS[0], OTHERS[-1]) for form in FORMS[:3]
        ),  # RAdam's own step is a long formula
    ],
)
def test_a_delivered_entry_takes_all_the_steps_that_it_waited(kind, options, form):
    found = stepped(*adapted(kind, **options, **form), delivered())
    torch.testing.assert_close(found, literal(kind, delivered(), 0.1, **options).float(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_parameters_of_other_dtypes_follow_the_same_rule(kind, dtype):
    options = {"momentum": 0.9} if kind is SGD else {"betas": (0.9, 0.99), "eps": 1e-4}
    optimizer, parameter = adapted(kind, torch.ones(SIZE, dtype=dtype), lr=0.01, **options)
    found = stepped(optimizer, parameter, [gradient.to(dtype) for gradient in delivered()])
    torch.testing.assert_close(found.double(), literal(kind, delivered(), 0.01, **options), rtol=0.02, atol=0.03)


@pytest.mark.parametrize(
    ("kind", "options", "call"),
    [
        *((*each, "bare") for each in (*KINDS, *OTHERS)),
        (*KINDS[0], "closure"),
        (*KINDS[-1], "keyword"),
        (SGD, {"momentum": 1.0, "lr": 0.01}, "bare"),
    ],
)
def test_with_everything_delivered_or_momentum_of_1_the_users_optimizer_is_unchanged(kind, options, call):
    ends, share = [], 0.2 if options.get("momentum") == 1 else 1.0
    for adapts in (True, False):
        optimizer, parameter = adapted(kind, adapts=adapts, **options)
        ends.append({"weights": stepped(optimizer, parameter, delivered(share), call), **optimizer.state[parameter]})
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Adam, NAdam, RAdam, Adamax])
def test_weight_decay_moves_no_entry_that_is_not_delivered(kind):
    """Adam would move it by the learning rate in each step, however small the decay."""
    optimizer, parameter = adapted(kind, weight_decay=1e-5)
    found = stepped(optimizer, parameter, [g.index_fill(0, torch.arange(SIZE // 2), 0) for g in delivered()])
    assert torch.equal(found[: SIZE // 2], torch.ones(SIZE // 2))
    assert found[SIZE // 2 :].ne(1).any()
    assert optimizer.param_groups[0]["weight_decay"] == 1e-5


@pytest.mark.parametrize("kind", [Adam, SGD])
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"fused": True}])
def test_other_parameters_in_the_group_step_as_without_adaptation(kind, options):
    """Also in fused steps under a scaler, which unscale gradients themselves."""
    options, found = {"weight_decay": 0.1, **options, **({"momentum": 0.9} if kind is SGD else {})}, []
    for adapts in (True, False):
        (compressed, uncompressed), exchange = (nn.Parameter(torch.ones(SIZE)) for _ in range(2)), nn.Module()
        optimizer = kind([compressed, uncompressed], lr=0.1, **options)
        if adapts:
            exchange.adapted = {compressed}
            adapt_momentum([optimizer], exchange)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="fused" in options)
        for gradient in delivered(0.5):
            compressed.grad, uncompressed.grad = (scaler.scale(gradient.clone()) for _ in range(2))
            scaler.step(optimizer)
            scaler.update()
        found.append(uncompressed.detach())
        (group,) = optimizer.param_groups
        assert (group["weight_decay"], [*map(id, group["params"])]) == (0.1, [id(compressed), id(uncompressed)])
    assert torch.equal(*found)


def test_every_gradient_moves_an_entry_as_far_as_in_dense_training():
    """The momentum buffer, times m / (1 - m), is the movement that remains."""
    optimizer, parameter = adapted(SGD, torch.zeros(SIZE), lr=1.0, momentum=0.9)
    found = stepped(optimizer, parameter, delivered())
    to_come = 9 * optimizer.state[parameter]["momentum_buffer"]
    torch.testing.assert_close(found - to_come, -10 * sum(delivered()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("squares", [0.9, 0.95, 0.99, 0.999])
def test_adam_moves_an_entry_by_noise_as_far_as_in_dense_training_however_long_it_waits(squares):
    """Gradients of pure noise, which each entry adds up until it is delivered, every so many steps."""
    every, generator = torch.tensor([1, 4, 16, 100]).repeat_interleave(1000), torch.Generator().manual_seed(0)
    ours, dense = (
        adapted(AdamW, torch.zeros(len(every)), adapts, lr=1.0, betas=(0.9, squares), weight_decay=0.0)
        for adapts in (True, False)
    )
    waiting = torch.zeros(len(every))
    for step in range(800):
        gradient = torch.randn(len(every), generator=generator)
        waiting, here = waiting + gradient, step % every == every - 1
        for (optimizer, parameter), found in ((ours, torch.where(here, waiting, 0.0)), (dense, gradient)):
            parameter.grad = found
            optimizer.step()
        waiting[here] = 0
    moved = [parameter.detach().view(4, -1).norm(dim=1) for _, parameter in (ours, dense)]
    torch.testing.assert_close(*moved, rtol=0.16, atol=0)


@pytest.mark.parametrize(
    ("kind", "signal", "least", "most"),
    [
        *(("Adam", signal, *range_) for signal, range_ in {0: (0.9, 1.05), 0.3: (0.95, 1.45), 1: (0.8, 1.3)}.items()),
        *((kind, math.inf, 0.55, 1.0) for kind in ("Adam", "AdamW", "RAdam")),
        ("SGD", 1, 0.95, 1.05),
    ],
)
def test_gradients_that_agree_move_an_entry_about_as_far_as_in_dense_training(monkeypatch, kind, signal, least, most):
    """As noise in the second moment they would move it .74, .35 and .25 times as far."""
    monkeypatch.setattr(agreement, "ENTRIES", 4_000)
    assert least < agreement.measure(kind, "saving=50", 0.99, signal, 200) < most


def test_the_default_dtype_changes_nothing():
    """Lightning changes it in training_step, where a module may step its optimizers."""
    found, default, gradients = [], torch.get_default_dtype(), 4 * delivered()
    for dtype in (torch.float32, torch.float16):
        optimizer, parameter = adapted(Adam, torch.ones(SIZE), lr=0.1, betas=(0.9, 0.99))
        torch.set_default_dtype(dtype)
        try:
            found.append(stepped(optimizer, parameter, gradients))
        finally:
            torch.set_default_dtype(default)
    assert torch.equal(*found)


def test_only_a_parameters_own_signs_move_it_further():
    ends = []
    for several in (1, 2):
        parameters = [nn.Parameter(torch.ones(SIZE)) for _ in range(2)]
        optimizer, exchange = Adam(parameters, lr=0.1, betas=(0.9, 0.99)), nn.Module()
        adapt_momentum([optimizer], exchange)
        for gradient in delivered():
            for parameter, its in zip(parameters[:several], (gradient, gradient.abs()), strict=False):
                parameter.grad = its.clone()
            optimizer.step()
        ends.append(parameters)
    (alone, _), (first, agreeing) = ends
    torch.testing.assert_close(alone, first)
    rule = literal(Adam, [each.abs() for each in delivered()], 0.1, betas=(0.9, 0.99))
    torch.testing.assert_close(agreeing.detach(), rule.float(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_plain_ddp_resumes_from_the_optimizers_own_state(kind, options):
    """Between steps the state is a plain optimizer's: it has no extra key, and its velocity is the true one."""
    optimizer, parameter = adapted(kind, **options)
    stepped(optimizer, parameter, delivered())
    saved, ends = optimizer.state_dict(), []
    for adapts in (True, False):
        other, resumed = adapted(kind, parameter.detach().clone(), adapts, **options)
        other.load_state_dict(copy.deepcopy(saved))
        ends.append(stepped(other, resumed, delivered(1.0, 5)))
    assert saved["state"][0].keys() == other.state[resumed].keys()
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_compiled_step_and_scalar_tensors_as_settings_change_nothing(kind):
    found = []
    for form, compiled in ((float, False), (torch.tensor, False), (float, True)):
        options = {"momentum": form(0.9)} if kind is SGD else {"betas": (form(0.9), form(0.99)), "lr": form(0.1)}
        optimizer, parameter = adapted(kind, **options)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        found.append(stepped(optimizer, parameter, delivered()))
        rule = rule_of(optimizer.param_groups[0])
        assert not any(isinstance(each, torch.Tensor) for each in rule), "it would be stepped parameter by parameter"
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=1e-5, atol=1e-5)


def test_the_first_step_counts_and_an_entry_may_wait_for_very_long():
    """A parameter that joins later waits from its first step on."""
    optimizer, parameter = adapted(SGD, torch.zeros(2), lr=1.0, momentum=0.5)
    found = stepped(optimizer, parameter, [torch.tensor([1.0, 0.0]), torch.ones(2)])
    assert found.tolist() == [-1 - 1.5, -1.5]
    optimizer.add_param_group({"params": [other := nn.Parameter(torch.zeros(2))]})
    found = stepped(optimizer, other, [torch.tensor([0.0, 1.0]), torch.zeros(2), torch.ones(2)])
    assert found[0] == -1.75
    found = stepped(optimizer, other, [*[torch.zeros(2)] * 400, torch.ones(2)])
    torch.testing.assert_close(found[0], torch.tensor(-1.75 - 2 * (1 + 0.125)), rtol=0, atol=1e-6)
    assert optimizer.state[other]["momentum_buffer"].abs().max() < 1e-6


@pytest.mark.parametrize(
    ("decay", "options"),
    [
        *((decay, {"momentum": 0.9}) for decay in (1e-5, 5e-4, 5e-3)),
        (5e-3, {"momentum": 0.9, "nesterov": True}),
        (5e-4, {"momentum": 0.9, "dampening": 0.5}),
        (5e-4, {"momentum": 0.5, "lr": torch.tensor(0.1)}),
        (5e-3, {"momentum": 0.0}),
    ],
)
def test_sgds_decay_arrives_as_with_ddp_however_rarely_an_entry_is_delivered(decay, options):
    """DDP's factor after 2,000 steps, of entries that are delivered every so many steps, by chance, or never."""
    steps, generator = 2000, torch.Generator().manual_seed(0)
    every, chance, ends = torch.tensor([steps + 1, 1, 2, 16, 1000]), torch.tensor([0.5, 0.01]).repeat_interleave(30), []
    for adapts in (True, False):
        optimizer, parameter = adapted(SGD, len(every) + len(chance), adapts, weight_decay=decay, **options)
        for step in range(1, steps + 1):
            here = torch.cat([step % every == 0, torch.rand(len(chance), generator=generator) < chance])
            parameter.grad = 1e-30 * (here if adapts else torch.ones(len(here)))
            optimizer.step()
        ends.append(parameter.detach().log())
    torch.testing.assert_close(*ends, rtol=0.02 if decay > 1e-3 else 0.005, atol=1e-3)


@pytest.mark.parametrize("decay", [5e-4, 0.05, 0.5])
def test_sgds_decay_never_overshoots(decay):
    """Decay alone, at rates where dense training oscillates."""
    every = torch.tensor([2, 200, 5000])
    optimizer, parameter = adapted(SGD, len(every), lr=0.5, momentum=0.99, weight_decay=decay)
    for step in range(1000):
        parameter.grad = 1e-30 * (step % every == every - 1).float()
        before = parameter.detach().clone()
        optimizer.step()
        assert ((parameter >= 0) & (parameter < before)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lr", [0.0, 1e-20, torch.tensor(0.0)])
def test_a_learning_rate_of_zero_moves_nothing(lr, dtype):
    optimizer, parameter = adapted(SGD, torch.ones(SIZE, dtype=dtype), lr=lr, momentum=0.9, weight_decay=1e-4)
    gradients = [gradient.to(dtype) for gradient in delivered()]
    assert torch.equal(stepped(optimizer, parameter, gradients), torch.ones(SIZE, dtype=dtype))


@pytest.mark.parametrize(("kind", "options"), KINDS[3:6])
def test_a_state_loaded_after_the_first_step_is_kept(kind, options):
    """Also momentum of entries that the first step did not deliver."""
    first = torch.arange(SIZE) % 2.0
    optimizer, parameter = adapted(kind, **options)
    stepped(optimizer, parameter, [first])
    name = "momentum_buffer" if kind is SGD else "exp_avg"
    assert torch.equal(optimizer.state_dict()["state"][0][name] == 0, first == 0), "decay is no velocity"
    other, _ = adapted(kind, **options)
    stepped(other, other.param_groups[0]["params"][0], delivered(1.0, 5))
    optimizer.load_state_dict(other.state_dict())
    loaded = optimizer.state[parameter][name].clone()
    stepped(optimizer, parameter, [torch.zeros(SIZE)])
    torch.testing.assert_close(optimizer.state[parameter][name], loaded)


def test_a_step_that_fails_leaves_the_optimizers_own_state():
    """Also a gradient that accumulates afterwards: it lies in the temporary memory of the failed step."""
    optimizer, parameter = adapted(Adam, weight_decay=0.1, foreach=False)
    stepped(optimizer, parameter, delivered(steps=2))
    own, parameter.grad = optimizer.state[parameter]["exp_avg"], torch.ones(SIZE)
    with mock.patch.object(inspect.getmodule(Adam), "adam", side_effect=MemoryError), pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.state[parameter]["exp_avg"] is not own
    assert optimizer.state_dict()["state"][0]["exp_avg"] is own
    optimizer.zero_grad(set_to_none=False)
    parameter.grad += 1
    optimizer.step()
    assert torch.equal(parameter.grad, torch.ones(SIZE))


class Changing:
    """A run in which everything may change between two steps; each change is a method that draws from ``random``."""

    def __init__(self, kind, options, seed: int) -> None:
        self.random, self.kind, self.options, self.generator = Random(seed), kind, options, torch.Generator()
        self.generator.manual_seed(seed)
        self.absent, self.sparse, self.fails, self.skips = set(), set(), False, False
        self.exchange, self.parameters = nn.Module(), [nn.Parameter(torch.ones(n, 4)) for n in (3, 8, 5, 2, 7)]
        self.exchange.adapted = frozenset(self.parameters)
        self.another_optimizer()

    def another_optimizer(self):
        AdaptedMomentum.release(self.exchange)
        own = {"momentum": 0.8} if self.kind is SGD else {"betas": (0.8, 0.99)}
        groups = [{"params": self.parameters[:2]}, {"params": self.parameters[2:], "lr": 0.05, **own}]
        self.optimizer = self.kind(groups, lr=0.1, **self.options)
        adapt_momentum([self.optimizer], self.exchange)

    def any_group(self):
        return self.random.choice(self.optimizer.param_groups)

    def any_parameter(self):
        return self.random.choice(self.parameters)

    def rate(self):
        self.any_group()["lr"] *= 0.5

    def rate_as_tensor(self):
        group = self.any_group()
        if isinstance(group["lr"], float) and not group.get("foreach"):
            group["lr"] = torch.tensor(group["lr"])
        else:
            group["lr"] = float(group["lr"])

    def momentum(self):
        group = self.any_group()
        m = self.random.choice([0.0, 0.5, 0.9])
        group.update({"momentum": m} if self.kind is SGD else {"betas": (m, self.random.choice([0.9, 0.999, 0.0]))})

    def decay(self):
        self.any_group()["weight_decay"] = self.random.choice([0.0, 0.1, 0.01])

    def eps(self):
        self.any_group()["eps"] = self.random.choice([1e-8, 0.1])

    def sign(self):
        self.any_group()["maximize"] = self.random.choice([False, True])

    def form(self):
        for group in self.optimizer.param_groups if "fused" not in self.options else ():
            group["foreach"] = self.random.choice([None, False, isinstance(group["lr"], float)])

    def move(self):
        one, other = (group["params"] for group in self.optimizer.param_groups[:2])
        if len(one) > 1:
            other.insert(0, one.pop())  # the parameters keep their order
        if self.random.random() < 0.5:
            self.optimizer.param_groups.reverse()

    def freeze(self):
        self.absent ^= {self.any_parameter()}

    def embed(self):
        self.sparse ^= {self.any_parameter()}

    def leave_uncompressed(self):
        self.exchange.adapted = frozenset(self.exchange.adapted) ^ {self.any_parameter()}

    def cast(self):
        p = self.any_parameter()
        p.grad, p.data = None, p.data.to(torch.float64 if p.dtype == torch.float32 else torch.float32)
        if self.kind is not SGD:  # Adam's own step needs a state of the same dtype
            self.load()

    def relocate(self):
        p = self.any_parameter()
        p.grad, p.data = None, p.data.clone()

    def transpose(self):
        p = self.any_parameter()
        p.grad, p.data = None, p.data.T.contiguous().T

    def load(self):
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def clear(self):
        self.optimizer.state.pop(self.any_parameter(), None)

    def offload(self):
        for name, x in self.optimizer.state[self.any_parameter()].items() if self.optimizer.state else ():
            if isinstance(x, torch.Tensor) and name != "step":
                x.data = x.data.clone()

    def grow(self):
        self.parameters.append(nn.Parameter(torch.ones(4, 2)))
        self.exchange.adapted = frozenset(self.exchange.adapted) | {self.parameters[-1]}
        self.optimizer.add_param_group({"params": [self.parameters[-1]]})

    def swap(self):
        group = self.any_group()
        number = self.random.randrange(len(group["params"]))
        old, new = group["params"][number], nn.Parameter(torch.ones(3, 3))
        self.parameters = [new if p is old else p for p in self.parameters]
        self.exchange.adapted = frozenset(self.exchange.adapted) | {new}
        group["params"][number] = new
        self.optimizer.state.pop(old, None)

    def fail(self):
        self.fails = True

    def skip(self):
        """As a GradScaler does; it does not call a step that is not fused."""
        self.skips = "fused" in self.options

    def accumulate(self):
        """Into gradients that lie in the same memory as before."""
        for p in self.parameters:
            if p.grad is not None and not p.grad.is_sparse:
                p.grad.zero_().add_(1)

    CHANGES = (
        another_optimizer, rate, rate_as_tensor, momentum, decay, eps, sign, form, move, freeze, embed,
        leave_uncompressed, cast, relocate, transpose, load, clear, offload, grow, swap, fail, skip, accumulate,
    )  # fmt: skip

    def step(self, anew: bool) -> list[torch.Tensor]:
        """Takes a step after a change, and after preparing ``anew``; returns all parameters and states."""
        change = self.random.choice(self.CHANGES)
        change(self)
        adapts = all(group.get("momentum", group.get("betas", [0])[0]) for group in self.optimizer.param_groups)
        for p in self.parameters:
            g = torch.randn(p.shape, generator=self.generator).to(p.dtype)
            g *= torch.rand(p.shape, generator=self.generator) < 0.4
            sparse = adapts and p in self.sparse and p in self.exchange.adapted  # torch's own steps refuse it
            if change is not Changing.accumulate or p.grad is None or p.grad.is_sparse:
                p.grad = None if p in self.absent else g.to_sparse(1) if sparse else g
        if anew:
            AdaptedMomentum.of(self.optimizer)._prepared = None
        function = "adam" if self.kind is AdamW else self.kind.__name__.lower()
        module = inspect.getmodule(inspect.unwrap(self.kind.step))
        fails = mock.patch.object(module, function, side_effect=MemoryError) if self.fails else nullcontext()
        scaler = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(float(self.skips))}
        scales = (
            mock.patch.multiple(self.optimizer, create=True, **scaler) if "fused" in self.options else nullcontext()
        )
        with scales, fails, pytest.raises(MemoryError) if self.fails else nullcontext():
            self.optimizer.step()
        self.fails = self.skips = False
        states = [x for p in self.parameters for x in self.optimizer.state.get(p, {}).values()]
        return [p.detach().clone() for p in self.parameters] + [torch.as_tensor(x).clone() for x in states]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
        (Adam, {"weight_decay": 0.1}),
        (AdamW, {}),
        (AdamW, {"fused": True}),
        (NAdam, {}),
    ],
)
def test_whatever_changes_between_two_steps_they_equal_to_the_bit_those_that_are_prepared_anew(kind, options, seed):
    once, anew = Changing(kind, options, seed), Changing(kind, options, seed)
    for _ in range(100):
        found, expected = once.step(False), anew.step(True)
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("kind", "options"), [KINDS[3], KINDS[8]])
def test_a_step_that_meets_the_same_tensors_prepares_nothing_even_if_gradients_are_new_and_rates_change(kind, options):
    optimizer, parameter = adapted(kind, **options)
    stepped(optimizer, parameter, delivered(steps=2))
    with mock.patch.object(AdaptedMomentum, "_prepare", side_effect=AssertionError):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        stepped(optimizer, parameter, delivered(steps=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_the_user_frees_after_a_step_are_free(dtype):
    """Else a model's gradients would take memory while the next ones are computed."""
    optimizer, parameter = adapted(AdamW, torch.ones(SIZE, dtype=dtype))
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        gradient = ref(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert gradient() is None


SQUARE = torch.ones(8, 8)


@pytest.mark.parametrize(
    ("options", "like", "fuses"),
    [
        *(({**options}, SQUARE, True) for options in ({}, {"amsgrad": True, "maximize": True})),
        *(({name: False}, SQUARE, False) for name in ("foreach", "fused")),
        *(({}, like, False) for like in (SQUARE.double(), SQUARE.T.clone()[:, ::2], SQUARE.view(2, 4, 8).mT)),
    ],
)
def test_a_step_on_a_cpu_is_fused_where_the_user_left_the_choice_and_torch_can(options, like, fuses):
    """Torch's fused step on a CPU checks neither strides nor shapes: it would write beyond a tensor."""
    optimizer, parameter = adapted(Adam, like, **options)
    own, seen, module = dict(optimizer.param_groups[0]), [], inspect.getmodule(Adam)
    optimizer.register_step_post_hook(lambda *_: seen.append(dict(optimizer.param_groups[0])))
    with mock.patch.object(module, "_fused_adam", wraps=module._fused_adam) as fused:
        parameter.grad = torch.ones_like(like)
        optimizer.step()
        optimizer.step()
        assert fused.called == fuses
        fused.reset_mock()
        optimizer.state[parameter].update(exp_avg=like.clone(), exp_avg_sq=torch.ones(3, dtype=like.dtype))
        with pytest.raises(RuntimeError, match="size"):
            optimizer.step()
        assert not fused.called
    assert seen == [own, own]


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_sparse_gradient_steps_like_its_dense_form(nesterov):
    found = []
    for sparse in (True, False):
        optimizer, parameter = adapted(SGD, torch.ones(8, 8), momentum=0.9, nesterov=nesterov)
        for gradient in delivered():
            parameter.grad = gradient.view(8, 8).to_sparse(1) if sparse else gradient.view(8, 8)
            optimizer.step()
        found.append(parameter.detach())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("kind", "fused"), [(SGD, False), (AdamW, True)])
def test_a_step_that_a_scaler_skips_changes_nothing(kind, fused):
    found = []
    for scaled in (True, False):
        optimizer, parameter = adapted(kind, fused=fused, **({"momentum": 0.9} if kind is SGD else {}))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000, enabled=scaled)
        for number, gradient in enumerate(delivered()):
            if number % 5 == 4 and scaled:
                parameter.grad = torch.full((SIZE,), torch.inf)
                scaler.scale(torch.ones(()))
                scaler.step(optimizer)
                scaler.update()
            parameter.grad = scaler.scale(gradient.clone())
            scaler.step(optimizer)
            scaler.update()
        found.append(parameter.detach())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


ODD = [(None, 0.999), (), "auto", ((0.9,), 0.99), (torch.ones(2), 0.9)]
"""What no optimizer of torch's has as its betas or momentum."""


@pytest.mark.parametrize("options", [{"betas": 0.9}, *({name: odd} for name in ("betas", "momentum") for odd in ODD)])
def test_an_optimizer_of_the_users_own_may_call_anything_betas_or_momentum(options):
    class Theirs(Optimizer):
        def step(self):
            return None

    optimizer = Theirs([nn.Parameter(torch.ones(3))], options)
    check_optimizers(TopKConfig(momentum=0.9, ratio=0.1), [optimizer])
    adapt_momentum([optimizer], nn.Module())


def test_each_exchange_adapts_its_own_parameters_as_long_as_it_lives():
    first, second, idle = parameters = [nn.Parameter(torch.ones(SIZE)) for _ in range(3)]
    optimizer = SGD([{"params": [first]}, {"params": [second, idle]}], lr=0.1, momentum=0.9)
    one, two = nn.Module(), nn.Module()
    one.adapted, two.adapted = {first}, {second}
    adapt_momentum([optimizer], one)
    adapt_momentum([optimizer], two)

    def step(gradients):
        for gradient in gradients:
            for parameter in parameters:
                parameter.grad = gradient.clone()
            optimizer.step()

    step(delivered())
    plain, other = adapted(SGD, adapts=False, momentum=0.9)
    assert torch.equal(idle, stepped(plain, other, delivered()))
    assert torch.equal(first, second)
    assert not torch.equal(first, idle)
    del two
    gc.collect()
    step(delivered(0.1, 1))
    assert not torch.equal(first, second)
    AdaptedMomentum.release(one)
    velocity = optimizer.state[first]["momentum_buffer"].clone()
    step(delivered(0.0, 1))
    assert torch.equal(optimizer.state[first]["momentum_buffer"], 0.9 * velocity)


class Own(AdamW):
    """An AdamW that overrides ``step``."""

    def step(self, closure=None):
        return super().step(closure)


def test_optimizers_with_a_step_of_their_own_keep_their_momentum():
    parameter, exchange = nn.Parameter(torch.ones(3)), nn.Module()
    for optimizer in (RMSprop([parameter], momentum=0.9), Own([parameter])):
        notes, (words,) = adapt_momentum([optimizer], exchange)
        assert notes == []
        assert f"{type(optimizer).__name__} keeps its own momentum, and training may end behind DDP's: only" in words
        assert ("pass the inner optimizer" in words) == isinstance(optimizer, Own), "torch's own wrap none"
    for optimizer in (SGD([parameter], lr=0.1), RMSprop([parameter]), AdamW([parameter], betas=(0.0, 0.9))):
        assert adapt_momentum([optimizer], exchange) == ([], []), "adapted an optimizer without momentum"


@pytest.mark.parametrize("first", ["hooks", "exchange"])
def test_hooks_of_the_user_act_as_without_adaptation(first):
    """A post-hook frees the gradients; pre-hooks clip them and save the state."""
    found = []
    for adapts in (False, True):
        (optimizer, parameter), seen = adapted(SGD, 4, adapts and first == "exchange", momentum=0.9), [0]

        def clip_and_save(optimizer, *_, parameter=parameter, seen=seen):
            nn.utils.clip_grad_norm_([parameter], 0.1)
            seen += [state["momentum_buffer"].clone() for state in optimizer.state_dict()["state"].values()]

        def free(optimizer, *_, parameter=parameter, seen=seen):
            seen.append(parameter.grad.clone())
            optimizer.zero_grad()

        optimizer.register_step_pre_hook(clip_and_save)
        optimizer.register_step_post_hook(free)
        if adapts:
            adapt_momentum([optimizer], optimizer.exchange)
        for _ in range(5):
            parameter.sum().backward()
            optimizer.step()
        found.append([parameter.detach(), *seen])
    torch.testing.assert_close(*found)


def test_the_state_of_the_optimizer_is_its_own_beside_one_byte_per_entry():
    """A parameter without gradients has no state; a cleared state starts over; a parameter's count goes with it."""
    used, unused = parameters = [nn.Parameter(torch.ones(SIZE)) for _ in range(2)]
    optimizer, exchange = SGD(parameters, lr=1.0, momentum=0.9), nn.Module()
    adapt_momentum([optimizer], exchange)
    stepped(optimizer, used, [torch.ones(SIZE), *[torch.zeros(SIZE)] * 30])
    assert list(optimizer.state_dict()["state"]) == [0]
    counts = [each.waited for each in AdaptedMomentum.of(optimizer).members.values()]
    assert [(each.dtype, each.nbytes) for each in counts] == [(torch.uint8, SIZE)]
    optimizer.state.clear()
    torch.testing.assert_close(stepped(optimizer, used, [torch.ones(SIZE)] * 2), torch.full((SIZE,), -2.9))
    stepped(optimizer, unused, [torch.ones(SIZE)])
    optimizer.param_groups[0]["params"].pop(0)
    optimizer.step()
    (member,) = AdaptedMomentum.of(optimizer).members
    assert member is unused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_parameter_may_change_its_dtype_between_two_steps(dtype):
    """As by ``Module.to``. Its momentum stays float32."""
    moved = []
    for adapts in (False, True):
        parameter = nn.Parameter(torch.ones(SIZE))
        optimizer, exchange = SGD([parameter], lr=0.125, momentum=0.5), nn.Module()
        if adapts:
            adapt_momentum([optimizer], exchange)
        stepped(optimizer, parameter, [torch.ones(SIZE)] * 2)
        parameter.data = parameter.data.to(dtype)
        moved.append(stepped(optimizer, parameter, [torch.ones(SIZE, dtype=dtype)] * 2))
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize("kind", [SGD, AdamW])
@on_ranks(2)
def test_ranks_agree_on_weights_and_steps_that_send_everything_equal_ddps_to_the_bit(rank, world, kind):
    """Zero gradients too. Also if a rank reloads its optimizer, to free memory for an evaluation, say."""
    options = {"momentum": 0.9, "weight_decay": 1e-3} if kind is SGD else {"fused": True}
    ends, said = {}, []
    for name, settings in {
        "plain": None,
        "adapted": {"saving": 20},
        "not adapted": {"saving": 20, "adapt_momentum": False},
        "dense": {"topology": "dense"},
        "all sent": {"ratio": 1.0, "wire": "fp32"},
    }.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 40), nn.Threshold(1.0, 0.0))  # most steps use some rows only
        optimizer, ddp = kind(net.parameters(), lr=0.05, **options), DistributedDataParallel(net)
        if settings is not None:
            attach(ddp, optimizer=optimizer, announce=lambda words, name=name: said.append((name, words)), **settings)
        train(ddp, rank, range(3), optimizer)
        if (name, rank) == ("adapted", 0):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(ddp, rank, range(3, 12), optimizer)
        ends[name] = weights(net)
    assert alike(torch.stack([*ends.values()]))
    assert torch.equal(ends["dense"], ends["plain"])
    assert torch.equal(ends["all sent"], ends["plain"])
    assert not torch.allclose(ends["adapted"], ends["not adapted"], rtol=1e-3, atol=1e-4)
    told = [name for name, words in said if f"the momentum of {kind.__name__} is adapted" in words]
    assert told == ["adapted", "all sent"] * (rank == 0)


@on_ranks(2)
def test_nothing_outlives_a_training_loop_that_forgets_to_close_its_state(rank, world):
    net = nn.Linear(20, 40)
    optimizer, model = SGD(net.parameters(), lr=0.05, momentum=0.9), DistributedDataParallel(net)
    state = lightning_topk.attach(model, saving=20, optimizer=optimizer)
    batch = nn.Module()  # something that the loop holds
    train(model, rank, range(3), optimizer)
    living = [*map(ref, (batch, net.weight, state, optimizer))]
    del batch
    assert living[0]() is None, "a frame's variables are kept"
    del net, optimizer, model, state
    gc.unfreeze()  # cycles may lead through what was imported
    for _ in range(5):  # each frees what only torch's C++ objects still held
        gc.collect()
    assert [each() for each in living] == [None] * 4


class NoOptimizer:
    """Acts as an optimizer, as schedule-free's wrapper does."""

    def __init__(self, base):
        self.base, self.param_groups, self.step = base, base.param_groups, base.step


@on_ranks(2)
def test_what_only_acts_as_an_optimizer_is_unwrapped_or_warned_about(rank, world):
    net = nn.Linear(20, 40)
    said, optimizer = [], SGD(net.parameters(), lr=0.05, momentum=0.9)
    assert [unwrapped(each) for each in (NoOptimizer(optimizer), LightningOptimizer(optimizer))] == [optimizer] * 2
    acts = NoOptimizer(mock.Mock(param_groups=optimizer.param_groups, spec=["param_groups", "step"]))
    attached(nn.Linear(3, 3), saving=20, optimizer=acts, announce=said.append)
    assert not any("keeps its own momentum" in line for line in said), "none of the model's parameters is its own"
    attached(net, saving=20, optimizer=acts, announce=said.append)
    assert any("keeps its own momentum" in line for line in said) == (rank == 0)


def test_the_remedy_for_a_subclass_is_not_given_for_an_optimizer_of_torch():
    (said,) = adapt_momentum([torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])], object())[1]
    assert "Muon keeps its own momentum" in said
    assert "overrides" not in said
