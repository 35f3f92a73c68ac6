"""The papers' claims and the experiment on saving, on a small scale."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from groups import on_ranks
from PIL import Image

from lab import data, problems, training
from lab.bench import steps
from lab.papers import at_size, deliveries, fine_tuning, lag, scripts, speedup
from lightning_topk.config import TopKConfig
from lightning_topk.optim.momentum import AdaptedMomentum, adapt_momentum
from lightning_topk.runtime import shares
from lightning_topk.simulate import Cluster
from lightning_topk.volume import volume


@pytest.fixture
def images(tmp_path):
    """A folder of ten classes, each with one training image and one held-out image."""
    for part in ("train", "test"):
        for number, name in enumerate("abcdefghij"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (32, 32), (25 * number, 120, 250 - 25 * number)).save(tmp_path / part / name / "0.png")
    return tmp_path


@pytest.fixture
def little_text(monkeypatch):
    """A twentieth of the text."""
    parts = [part[::20] for part in vars(data.documentation()).values() if isinstance(part, torch.Tensor)]
    monkeypatch.setattr(problems, "documentation", lambda: data.Data(*parts))


ADAMW = training.Optimizer(0.01, 0.9, kind="AdamW", cosine=True, clip_norm=1.0)
ADAM = training.Optimizer(0.003, 0.9, kind="Adam 0.999", clip_norm=0.5)


@pytest.mark.parametrize(
    ("model", "optimizer", "steps"),
    [
        ("mlp", training.Optimizer(0.3), 30),
        ("char lstm", ADAMW, 15),
        ("convnet", training.Optimizer(0.05), 30),
        ("diffusion", replace(ADAM, kind="Adam 0.99"), 15),
    ],
)
def test_simulated_training_learns_and_sends_what_is_predicted(little_text, images, model, optimizer, steps):
    folder = images if model in ("convnet", "diffusion") else None
    start = problems.PROBLEMS.get(model, problems.Problem)(model, 0, folder)
    before, *_ = start.evaluate(start.start)
    run = training.train(model, TopKConfig(ratio=0.1), 2, steps, optimizer, 0, 5, data=folder)
    assert run.loss < before
    assert len(run.union) == steps
    sent = volume(TopKConfig(ratio=0.1), [len(start.start)], world=2)
    assert (run.uplink_bytes, run.downlink_bytes) == (sent.uplink, sent.downlink)


def test_a_loss_of_small_weight_is_learned_better_with_lifts(monkeypatch):
    """Less than a fifth of its gap to dense training is left."""
    config, adam = TopKConfig(saving=50), replace(ADAM, lr=1e-3, clip_norm=None)

    def ended(exchanged):
        return training.train("two losses", exchanged, 2, 200, adam, 0, 32).held_loss

    dense, lifted = ended(partial(at_size.PowerSGD, 0)), ended(config)
    monkeypatch.setattr(shares, "LIFTED", 0.0)
    assert lifted - dense < 0.2 * (ended(config) - dense)


def test_held_out_noise_of_diffusion_is_always_the_same(images):
    first, second = (problems.Diffusion("diffusion", 0, images) for _ in range(2))
    second.gradients(second.start, torch.tensor([[0, 1]]), torch.Generator().manual_seed(1))
    assert first.held_out(first.start) == second.held_out(second.start)


def test_agents_learn_to_walk_to_the_goal(monkeypatch):
    monkeypatch.setattr(problems, "SIDE", 3)
    run = training.train("ppo", TopKConfig(ratio=0.1), 2, 80, ADAM, 0, 8, every=20)
    before, *_, after = (reward for _, _, reward in run.curve)
    assert -5 <= before < run.accuracy == after == -run.held_loss <= 95, "the reward of 100 steps, in the whole run"


def test_agents_of_two_workers_walk_apart_and_are_followed_for_four_steps():
    agents, batches = problems.Agents("ppo", 0), torch.zeros(2, 8, dtype=torch.long)
    steps = [agents.gradients(agents.start, batches, torch.Generator().manual_seed(0)) for _ in range(5)]
    assert not torch.equal(*steps[0])
    assert all(torch.equal(steps[0][0], step[0]) for step in steps[1:4])
    assert not torch.equal(steps[0][0], steps[4][0])


def test_a_convnet_is_fine_tuned_from_half_of_the_classes_to_all(images):
    tuned = fine_tuning.TUNED["convnet"]
    before, after = (tuned.data(images, before=before) for before in (True, False))
    assert [sorted(part.tolist()) for part in (before.labels, before.held_labels)] == [[*range(5)]] * 2
    assert torch.equal(before.examples, after.examples[after.labels < 5])
    assert after.labels.unique().tolist() == [*range(10)]
    with pytest.raises(ValueError, match="pass their folder by --data"):
        tuned.data(None, before=True)


def test_a_run_goes_on_from_the_weights_and_optimizer_states_that_an_earlier_one_kept(tmp_path):
    optimizer, file, dense = training.Optimizer(0.1, 0.9), tmp_path / "kept.pt", partial(at_size.PowerSGD, 0)
    first = training.train("mlp", dense, 2, 5, optimizer, 0, 5, keep=file)
    still = training.train("mlp", dense, 2, 1, replace(optimizer, lr=0.0), 0, 5, start=file)
    assert still.norm == first.norm
    fresh = training.train("mlp", dense, 2, 1, optimizer, 0, 5)
    on = training.train("mlp", dense, 2, 1, optimizer, 0, 5, start=file)
    assert on.norm > first.norm > fresh.norm, "momentum goes on"


@pytest.mark.parametrize("kind", training.OPTIMIZERS[2:])
def test_every_optimizer_of_the_lab_learns(little_text, kind):
    package = {"Lion": "lion_pytorch", "schedule-free": "schedulefree"}.get(kind)
    if package is not None:
        pytest.importorskip(package)
    before, _ = problems.Problem("gpt", 0).held_out(problems.Problem("gpt", 0).start)
    optimizer = replace(ADAMW, kind=kind)
    run = training.train("gpt", TopKConfig(saving=50), 2, 8, optimizer, 0, 4, every=4)
    assert run.curve[-1][1] < run.curve[0][1] < before


def test_diloco_through_ours_sends_what_is_predicted_and_delivers_as_in_full():
    optimizer, sizes = training.Optimizer(0.1), [p.numel() for p in problems.Problem("mlp", 0).parameters]
    full, every, some = (
        training.train("mlp", partial(training.DiLoCo, 2, 0.7, config), 2, 6, optimizer, 0, 10)
        for config in (None, TopKConfig(ratio=1, wire="fp32"), TopKConfig(ratio=0.1))
    )
    sent = volume(TopKConfig(ratio=0.1), [sizes], world=2)
    assert (some.uplink_bytes, some.downlink_bytes) == (sent.uplink / 2, sent.downlink / 2)
    # Pixels that are always 0 have no gradient, and adapted momentum waits for one.
    assert every.held_loss == pytest.approx(full.held_loss, rel=1e-3)
    assert some.held_loss != full.held_loss


def test_simulated_gradients_are_autograds():
    mlp = problems.Problem("mlp", seed=0)
    batches = torch.tensor([[0, 1, 2], [3, 4, 5]])
    for batch, gradient in zip(batches, mlp.gradients(mlp.start, batches, torch.Generator()), strict=True):
        mlp.net.zero_grad()
        scores = mlp.net(data.digits().examples[batch])
        torch.nn.functional.cross_entropy(scores, data.digits().labels[batch]).backward()
        expected = torch.cat([p.grad.flatten() for p in mlp.parameters])
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def timed(rank: int, world: int) -> dict[str, dict[str, float]]:
    options = {"work": {"params": 100_000}, "peers": [*speedup.SYSTEMS], "settings": {}, "seconds": 0}
    return speedup.timed(options, rank, world)


@pytest.mark.gloo
def test_an_exchange_of_every_system_is_timed_and_sends_what_is_predicted(groups):
    found = steps.worst(groups(2).run(timed))
    for name in speedup.SYSTEMS:
        assert found[name]["counted"] == found[name]["predicted"] > 0


@pytest.mark.gloo
@on_ranks(2, timeout=120)
def test_published_scripts_train_and_their_ranks_stay_alike(rank, world):
    some, options, wrong = torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(0)), {"seed": 0}, []
    images = data.Data(some, torch.arange(40) % 10, some, torch.arange(40) % 10, data.crop_and_flip)
    for name, script in scripts.SCRIPTS.items():
        theirs = data.documentation() if name == "GPT" else script.data() if script.data else images
        torch.manual_seed(0)
        net = script.net()
        start = torch.nn.utils.parameters_to_vector(net.parameters())
        scripts.fit(net, script, theirs, {"script": name, "system": "saving 50", "steps": 2, **options}, rank, world)
        end = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
        torch.distributed.broadcast(first := end.clone(), 0)
        wrong += [name] * (torch.equal(start, end) or not torch.equal(first, end))
    assert wrong == []


def test_yolos_biases_warm_up_from_above_and_all_others_from_zero():
    optimizer = scripts.SCRIPTS["YOLO"].optimizer(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)))
    schedule, rates = scripts.YoloSchedule(optimizer), []
    for _ in range(scripts.STEPS):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx([0.1, 0, 0])
    assert rates[50] == pytest.approx([0.05 + 0.005 * 0.835, *[0.005 * 0.835] * 2])
    assert rates[200] == pytest.approx([0.0034] * 3)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.937] * 3


def test_layer_decay_steps_the_first_layer_least_and_the_head_fully():
    net = scripts.ViTClassifier()
    rates = {p: group["lr"] for group in scripts.by_layer(net, 1.0, 0.05, 0.5) for p in group["params"]}
    chosen = net.encoder.position, net.encoder.blocks[0].norm1.bias, net.encoder.blocks[3].norm1.bias, net.head.weight
    assert [rates[p] for p in chosen] == [2**-5, 2**-4, 1 / 2, 1]
    assert {*rates} == {*net.parameters()}


def test_simulated_power_sgd_delivers_low_ranks_exactly_and_loses_nothing():
    shapes = [torch.Size([40, 5, 8]), torch.Size([7])]
    ranks = at_size.PowerSGD(2, 3, shapes)
    low = torch.randn(40, 2) @ torch.randn(2, 40)
    gradients = [torch.cat([scale * low.flatten(), torch.ones(7)]) for scale in (0.5, 1.0, 1.5)]
    torch.testing.assert_close(ranks.step(gradients)[2], gradients[1])
    assert ranks.sent_bytes == {link: [4 * (2 * (40 + 40) + 7) * 2 // 3] * 3 for link in ("uplink", "downlink")}
    total, delivered = torch.zeros(1607), torch.zeros(1607)
    for _ in range(5):
        gradients = [torch.randn(1607) for _ in range(3)]
        total += sum(gradients) / 3
        delivered += ranks.step(gradients)[0]
        torch.testing.assert_close(delivered + ranks.residual, total, atol=1e-4, rtol=0)


def test_deliveries_equal_dense_trainings_if_everything_is_delivered(monkeypatch):
    text = data.source_code(64)
    parts = [part[::500] for part in vars(text).values() if isinstance(part, torch.Tensor)]
    monkeypatch.setattr(problems, "source_code", lambda _: data.Data(*parts))
    monkeypatch.setattr(deliveries, "TopKConfig", lambda saving: TopKConfig(ratio=1, wire="fp32"))
    waits, layers = deliveries.measure("AdamW 0.95", 0.003, 10)
    assert [*waits[0].values()][1:] == pytest.approx([1, 1, 1], rel=1e-3)
    for row in layers[2:]:  # of embeddings, some entries have no gradient
        assert [row[head] for head in row if head.startswith("age")] == [1, 1, 1]
        assert [row[head] for head in row if head.startswith("movement")] == pytest.approx([1, 1, 1], rel=0.02), row


@pytest.mark.parametrize(("loss", "steps"), [(2.0, 200), (2.5, 141.42), (3.5, 70.71), (1.25, 565.69)])
def test_the_dense_steps_of_a_loss_are_interpolated_over_their_logarithm(loss, steps):
    assert lag.dense_steps(loss, {100: 3.0, 400: 1.5, 200: 2.0}) == pytest.approx(steps, rel=1e-4)


def test_the_best_rate_is_that_of_the_seeds_that_two_rates_share():
    lucky, both = {0: 1.0}, {0: 0.9, 1: 1.4}
    assert at_size.best_rate("gpt", {0.01: lucky, 0.03: both}) == 0.03, "though its mean is worse"
    assert at_size.best_rate("convnet", {0.01: lucky, 0.03: both}) == 0.01


def alone(jobs, title, note, *_):
    """Runs jobs in this process, where a test's patches apply."""
    for key, job in jobs.items():
        note(key, job())


def test_at_size_compares_systems_and_rates_and_repeats_no_run(little_text, monkeypatch, images, tmp_path):
    courses = {
        "gpt": at_size.Course(replace(ADAMW, warmup=2), 1, 2),
        "convnet": at_size.Course(training.Optimizer(0.05), 1, 2, images=True, quality=at_size.ACCURACY),
        "ppo": at_size.Course(ADAM, 2, 1, quality="reward of 100 steps"),
    }
    monkeypatch.setattr(at_size, "COURSES", courses)
    monkeypatch.setattr(training, "run_all", alone)
    measured = partial(at_size.run, images, steps=2, seeds=1, out=tmp_path)
    systems = ["dense", "saving 50 not adapted", "PowerSGD", "local 10", "DiLoCo 30 at 0.7 saving 50"]
    assert all([*panel.curves] == systems for panel in measured(models=[*courses], systems=systems).panels)
    result = measured(models=["gpt"], rates=["0.01", "1e-6"])
    assert result.panels[0].curves["dense"][0] == [1e-6, 0.01]
    monkeypatch.setattr(training, "run_all", lambda jobs, *_: {}[next(iter(jobs))] if jobs else {})
    assert measured(models=["gpt"], rates=["0.01", "1e-6"]).tables == result.tables


def test_a_preempted_run_loses_all_that_waits_and_how_long_it_has_waited():
    cluster, p = Cluster(TopKConfig(ratio=0.1), 2, 100), torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([p], 0.1, 0.9)
    adapt_momentum([optimizer], cluster)
    memories = [link.memory.residual for end in cluster.endpoints for link in end.links]
    for step in range(3):
        at_size.preempt(2, cluster, [])
        waits = [bool(each.any()) for each in memories] + [bool(AdaptedMomentum.of(optimizer).members)]
        assert waits == [step == 1] * len(waits)
        p.grad = cluster.step([torch.randn(100), torch.randn(100)])[0]
        optimizer.step()


def test_a_run_lags_only_where_dense_training_does_not_overfit():
    def ended(system: str, steps: int, held: float) -> dict:
        same = {"model": "gpt", "optimizer": "AdamW", "batch": 32, "workers": 8, "rate": 0.01, "seed": 0}
        return same | {"system": system, "steps": steps, "held": held}

    dense = {250: 2.0, 500: 1.5, 1000: 1.3, 2000: 1.4}
    several = [ended("dense", steps, loss) for steps, loss in dense.items()]
    several += [ended("saving 50", steps, 1.5) for steps in (1000, 2000)]
    panel = lag.empty_panel("gpt", 32)
    (row,) = lag.table(dict(enumerate(several)), "gpt", 32, 0.01, (1000, 2000), (50,), panel)
    assert row["1,000 steps"].startswith("+500")
    assert row["2,000 steps"] == ""
